"""What a round of each method with a model of the client's own costs, as a multiple of FedAvg's round.

    PYTHONPATH=. python benchmarks/personal/costs.py [--models niid-mlp mlp niid-cnn] [--repeats 5] [--records 320]
        [--batch-size 32] [--methods ditto apfl] [--json]

Ten clients hold random 28x28 records and train for one epoch, in one process and one thread, without evaluation. For
each repeat and method, a run of FedAvg goes before a run of the method, so that a busy machine slows both; a factor is
the median of those of neighbours. A run has six rounds, and its time is the median processor time of the last three:
FedALA trains its weights to convergence in the second. "Steps" are gradients of a batch, counted in another run, as a
multiple of FedAvg's; a prediction on a batch, as in IFCA's choice, counts as a third. "Trainer" says which trainer
computed them.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent
from fl_sim.store.run_directory import RoundRecord
from fl_sim.training.evaluation import Scores
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import Trained

CLIENTS, ROUNDS, TIMED = 10, 6, 3

METHODS: dict[str, Any] = {
    "local-only": "local-only", "fedper": "fedper", "lg-fedavg": "lg-fedavg", "fedbabu": "fedbabu",
    "fedrep, 1 epoch of the head": {"kind": "fedrep", "head_epochs": 1}, "ditto": "ditto", "mr-mtl": "mr-mtl",
    "fedrod": "fedrod", "apfl": "apfl", "pfedme, 5 steps": "pfedme", "per-fedavg": "per-fedavg",
    "per-fedavg, exact": {"kind": "per-fedavg", "variant": "exact"}, "fedala": "fedala",
    "fedproto-local": "fedproto-local", "knn-per": "knn-per", "ifca, 2 models": "ifca",
    "cfl, 8 clusters": {"kind": "cfl", "eps_1": 1e9, "eps_2": 0.0, "split_after": 0, "min_cluster_size": 2},
}  # fmt: skip
"""{name in the table: the setting ``algorithm``}."""


def write_records(path: Path, records: int) -> str:
    """Write random images for all clients to ``path``, and return the setting ``data``."""
    draw, count = np.random.default_rng(0), CLIENTS * records
    images = draw.integers(0, 256, (count, 28, 28, 1), dtype=np.uint8)
    labels = np.arange(count) % 10
    np.savez(path, x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20])
    return f"npz:{path}"


def experiment_of(algorithm: Any, model: str, data: str, batch_size: int) -> Experiment:
    """Return the experiment of six rounds with ``algorithm``."""
    return experiment_from({
        "algorithm": algorithm, "model": model, "data": data, "clients": CLIENTS, "partition": "iid", "rounds": ROUNDS,
        "local": {"batch_size": batch_size, "learning_rate": 0.01, "momentum": 0.0}, "evaluate": {"test": "last"},
        "engine": {"kind": "inprocess", "workers": 1, "threads": 1},
    })  # fmt: skip


class Laps(Silent):
    """Notes the processor time at the end of each round."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def finished_round(self, record: RoundRecord) -> None:
        """Note the time."""
        del record
        self.ends.append(time.process_time())

    @property
    def seconds(self) -> float:
        """Return the median processor time of the last rounds."""
        return statistics.median(np.diff(self.ends)[-TIMED:].tolist())


def seconds_of(experiment: Experiment) -> float:
    """Return the processor time of one of the last rounds of a run."""
    laps = Laps()
    with tempfile.TemporaryDirectory() as folder:
        run(experiment, Path(folder) / "run", observer=laps)
    gc.collect()  # frees the tensors of the run
    return laps.seconds


class LastRound(Silent):
    """Counts steps by trainer, and records that are predicted. The counts are those of the last round."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def finished_round(self, record: RoundRecord) -> None:
        """Forget all rounds before the last one."""
        if record.round < ROUNDS:
            self.counts.clear()

    def note(self, trainer: Trainer, jobs: Sequence[LocalJob]) -> None:
        """Count the steps of ``jobs`` by the trainer that computes them."""
        for job in jobs:
            native = trainer.is_native(job.records.input_shape, job.plan, job.task.settings)
            self.counts["compiled" if native else "PyTorch"] += job.num_steps


def counted(experiment: Experiment) -> tuple[float, str]:
    """Return the number of steps of the last round, and which trainer computed them."""
    last, train_usual, prepare_usual, evaluate_usual = LastRound(), Trainer.train, Trainer.prepare, Trainer.evaluate

    def prepare(trainer: Trainer, jobs: Sequence[LocalJob]) -> Any:
        last.note(trainer, jobs)
        return prepare_usual(trainer, jobs)

    def train(trainer: Trainer, job: LocalJob) -> Trained:
        """Count a job that the method hands to the trainer by itself; ``prepare`` has counted all others."""
        if sys._getframe(1).f_code.co_filename != train_usual.__code__.co_filename:  # noqa: SLF001
            last.note(trainer, [job])
        with patch.object(Trainer, "prepare", prepare_usual):
            return train_usual(trainer, job)

    def evaluate(trainer: Trainer, params: Any, inputs: Any, *rest: Any, **named: Any) -> Scores:
        last.counts["predicted"] += len(inputs)
        return evaluate_usual(trainer, params, inputs, *rest, **named)

    with tempfile.TemporaryDirectory() as folder, patch.multiple(
        Trainer, train=train, prepare=prepare, evaluate=evaluate
    ):  # fmt: skip
        run(experiment, Path(folder) / "run", observer=last)
    found = last.counts
    by = [name for name in ("compiled", "PyTorch") if found[name]]
    shares = [f"{name} {found[name] / sum(found[one] for one in by):.0%}" if len(by) > 1 else name for name in by]
    predicted = found["predicted"] / experiment.local.batch_size
    return found["compiled"] + found["PyTorch"] + predicted / 3, ", ".join(shares)


def measured(asked: argparse.Namespace) -> dict[str, Any]:
    """Return {model: {method: {"factor", "steps", "trainer", "milliseconds"}}}."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = write_records(Path(folder) / "records.npz", asked.records)
        for model in asked.models:
            plain = experiment_of("fedavg", model, data, asked.batch_size)
            base, trainer = counted(plain)
            rows: dict[str, Any] = {"fedavg": {"factor": 1.0, "steps": 1.0, "trainer": trainer}}
            everything = list[float]()
            for method in asked.methods:
                own = experiment_of(METHODS[method], model, data, asked.batch_size)
                pairs = [(seconds_of(plain), seconds_of(own)) for _ in range(asked.repeats)]
                everything += [before for before, _ in pairs]
                steps, trainer = counted(own)
                rows[method] = {
                    "factor": statistics.median(after / before for before, after in pairs),
                    "steps": steps / base,
                    "trainer": trainer,
                    "milliseconds": 1e3 * statistics.median(after for _, after in pairs),
                }
            rows["fedavg"]["milliseconds"] = 1e3 * statistics.median(everything)
            found[model] = rows
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--records", type=int, default=320)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--models", nargs="+", default=["niid-mlp", "mlp", "niid-cnn"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    asked = parser.parse_args()
    found = measured(asked)
    if asked.json:
        print(json.dumps(found))
        return
    print("| method |" + "|".join(f" {model}: ms, factor, steps, trainer " for model in found))
    print("|---|" + "---|" * len(found))
    for method in ("fedavg", *asked.methods):
        cells = [
            f"{row['milliseconds']:.1f}, {row['factor']:.2f}, {row['steps']:.2f}, {row['trainer']}"
            for row in (rows[method] for rows in found.values())
        ]
        print(f"| {method} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
