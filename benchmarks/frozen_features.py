"""How long a round of a trained head takes on stored features, beside training through the frozen body.

    python benchmarks/frozen_features.py [--model resnet] [--clients 10] [--records 500] [--turns 5]

Both ways alternate in one process. A round trains all clients on images of 3x32x32 for an epoch, and measures the model
on 500 test records. Printed are medians of the turns after the first, and the floor: the share of the operations.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fl_sim.experiment import job as jobs
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import Job, job_of
from fl_sim.local_plan import LocalPlan
from fl_sim.native.layers import describe, products_of
from fl_sim.params import detached, trainable
from fl_sim.seeding import rng
from fl_sim.simulation.client_runtime import local_settings
from fl_sim.simulation.measuring import Measuring
from fl_sim.simulation.rounds import procedure_of
from fl_sim.training.trainer import LocalJob
from fl_sim.types import LocalTask


def round_of(job: Job) -> Callable[[], None]:
    """Return a function that trains all clients of ``job`` for an epoch and measures the model."""
    runtime, measuring, settings = procedure_of(job).runtime(), Measuring.of(job), local_settings(job, 0.1)
    params = detached(trainable(job.model()).items())

    def turn() -> None:
        todo = []
        for client in range(job.experiment.clients):
            records = runtime.records(client, "")
            task = LocalTask(client, 0, 1, len(records), settings, params)
            todo.append(LocalJob(task, LocalPlan(), records, rng(0, "turn", client)))
        last = job.trainer.train_all(todo)[-1]
        measuring.measured(last.params, "in a turn", is_last=True, server_round=1)

    return turn


def main() -> None:
    """Run both ways in turn, and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="resnet")
    for name, value in (("clients", 10), ("records", 500), ("turns", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    generator, count = np.random.default_rng(0), given.clients * given.records
    images = generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    labels = generator.integers(0, 10, count)
    labels[:10] = np.arange(10)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/i.npz", x_train=images, y_train=labels, x_test=images[:500], y_test=labels[:500])
        experiment = experiment_from({
            "data": f"npz:{folder}/i.npz", "model": {"name": given.model, "trainable": "head"}, "partition": "iid",
            "clients": given.clients, "engine": "inprocess", "local": {"batch_size": 64, "momentum": 0.0},
        })  # fmt: skip
        once, through = job_of(experiment, Path(folder)), job_of(experiment, Path(folder))
        whole = describe(once.whole_model(), once.dataset.input_shape)
        begin = time.perf_counter()
        turns = {"features": round_of(once)}
        print(f"features of all records, once: {time.perf_counter() - begin:.2f} s")
        jobs.body_of = lambda *_: ""  # type: ignore[assignment]
        turns["through the body"] = round_of(through)
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(given.turns + 1):
            for name, turn in turns.items():
                begin = time.perf_counter()
                turn()
                seconds[name].append(time.perf_counter() - begin)
    for name, found in seconds.items():
        print(f"{name:17} {statistics.median(found[1:]):8.4f} s a round")
    pairs = zip(seconds["features"][1:], seconds["through the body"][1:], strict=True)
    print(f"ratio {statistics.median(one / other for one, other in pairs):.4f}")
    if whole is not None:
        *body, head = products_of(whole)
        print(f"floor {3 * head / (sum(body) + 3 * head):.6f}: products of the head, forward and back, and of the body")


if __name__ == "__main__":
    main()
