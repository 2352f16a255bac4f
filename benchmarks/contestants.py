"""What benchmarks/speed.py measures, a process each: ``python benchmarks/contestants.py WHAT WORK``.

Every contestant trains the work's model for one local epoch on every client (SGD, learning rate 0.01, momentum 0.9,
batch 64, no evaluation). It prints ``ready`` after a first round, then does one round for every line on standard input
and prints its seconds.
"""

import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from speed_work import GPU_WORK, SHAPES, WORKS, Work
from torch.nn import functional

from fl_sim.data import load
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.params import detached
from fl_sim.simulation.client_runtime import fixed_threads
from fl_sim.simulation.engine_choice import open_engine
from fl_sim.simulation.run_log import RunLog, Silent
from fl_sim.simulation.stage import prepared_strategy
from fl_sim.training.loop import to_tensors
from strategies.flower import run_round

Round = Callable[[int], None]


ENGINES: dict[str, str | dict[str, object]] = {
    "inprocess": "inprocess",
    "inprocess-1": {"kind": "inprocess", "workers": 1},
    "bfloat16": "inprocess",
    "ray": "ray:2",
    "nodes": {"kind": "ray", "address": os.environ.get("FL_SIM_NODES", "")},
    "gpu": "inprocess",
    "gpu-launches": {"kind": "inprocess", "graphs": False},
    "gpu-tf32": "inprocess",
    "gpu-bfloat16": "inprocess",
}


def experiment_of(work: Work, what: str) -> Experiment:
    """Return the experiment of the contestant ``what``, on real images or on noise of the same shape."""
    wanted = work.clients * work.records
    path = Path(tempfile.gettempdir()) / f"fl-sim-speed-{work.data}-{wanted}.npz"
    if not path.exists():
        inputs, labels = images(work.data, wanted)
        np.savez(path, x_train=inputs, y_train=labels, x_test=inputs[:64], y_test=labels[:64])
    settings = {
        "data": f"npz:{path}",
        "clients": work.clients,
        "partition": work.partition,
        "model": work.model,
        "engine": ENGINES.get(what, "auto"),
        "device": "cuda" if work == GPU_WORK else "cpu",
    }
    precision = what.removeprefix("gpu-") if what in ("bfloat16", "gpu-tf32", "gpu-bfloat16") else "float32"
    return experiment_from({**settings, "local": {"weight_decay": 0.0, "precision": precision}})


def images(data: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``count`` images (NHWC) of ``data`` where there is a data root, else random bytes of the same shape."""
    if os.environ.get("FL_SIM_DATA"):
        train = load(data).train
        return np.moveaxis(np.array(train.inputs[:count]), 1, -1), np.array(train.labels[:count])
    generator = np.random.default_rng(0)
    channels, height, width = SHAPES[data]
    return generator.integers(0, 256, (count, height, width, channels), dtype=np.uint8), generator.integers(
        0, 10, count
    )


def ours(experiment: Experiment) -> Iterator[Round]:
    """Yield a round of one of our engines, with as many torch threads at the server as a run has."""
    job = job_of(experiment)
    log = RunLog(experiment.algorithm.init(detached(job.model().named_parameters())))
    threads = fixed_threads(experiment.engine.threads)
    with threads, tempfile.TemporaryDirectory() as out, open_engine(job, lambda _: None) as (grid, _):
        strategy = prepared_strategy(job, experiment.algorithm, (), grid, Path(out), log, Silent())
        yield lambda server_round: void(run_round(strategy, grid, server_round, 0.01, 600))


def plain(experiment: Experiment) -> Iterator[Round]:
    """Yield a round of the plain loop: load the global weights, torch.optim.SGD, add up the weighted models."""
    job = job_of(experiment)
    device = job.device
    inputs, labels = to_tensors(job.dataset.train, job.dataset)
    shards = [(inputs[shard].to(device), labels[shard].to(device)) for shard in map(torch.from_numpy, job.shards)]
    model = job.model().to(device)
    state = {"weights": {name: weight.detach().clone() for name, weight in model.named_parameters()}}

    def one_round(_: int) -> None:
        mean = {name: torch.zeros_like(value) for name, value in state["weights"].items()}
        for own_inputs, own_labels in shards:
            model.load_state_dict(state["weights"])
            train_plainly(model, own_inputs, own_labels)
            for name, value in model.state_dict().items():
                mean[name] += value * (len(own_labels) / len(labels))
        state["weights"] = mean
        if device.type == "cuda":
            torch.cuda.synchronize()

    yield one_round


def train_plainly(model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Train one epoch by the usual PyTorch loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for batch in torch.split(torch.randperm(len(labels), device=labels.device), 64) if len(labels) else ():
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()


def flower(experiment: Experiment, first: Callable[[Round], None]) -> None:
    """Run a minimal Flower app on Flower's own Ray simulation: its FedAvg, its messages, the plain loop in its clients.

    ``first`` is called with a round once all nodes are there; the app ends when it returns.
    """
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0", "PYTHONPATH": str(Path.cwd())}
    from flwr.app import ArrayRecord, ConfigRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        while len(list(grid.get_node_ids())) < experiment.clients:
            time.sleep(0.05)
        strategy = FedAvg(fraction_evaluate=0.0)
        state = {"arrays": ArrayRecord(job_of(experiment).model().state_dict())}

        def one_round(server_round: int) -> None:
            messages = strategy.configure_train(server_round, state["arrays"], ConfigRecord(), grid)
            arrays, _ = strategy.aggregate_train(server_round, grid.send_and_receive(messages, timeout=600))
            assert arrays is not None
            state["arrays"] = arrays

        first(one_round)

    run_simulation(
        server_app=server,
        client_app=minimal_client_app(experiment.model_dump_json()),
        num_supernodes=experiment.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


def minimal_client_app(experiment_json: str):
    """Return the minimal ClientApp: plain training on the node's shard."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()
    made: dict[str, object] = {}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if not made:
            torch.set_num_threads(1)
            job = job_of(Experiment.model_validate_json(experiment_json))
            made.update(model=job.model(), dataset=job.dataset, shards=job.shards)
        model, dataset = made["model"], made["dataset"]
        shard = made["shards"][int(context.node_config["partition-id"])]
        inputs, labels = to_tensors(dataset.train.take(shard), dataset)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train_plainly(model, inputs, labels)
        metrics = MetricRecord({"num-examples": len(labels)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    return app


def serve(one_round: Round) -> None:
    """Execute a first round, print ``ready``, then execute one round for each input line."""
    one_round(1)
    print("ready", flush=True)
    for server_round, _ in enumerate(sys.stdin, start=2):
        start = time.perf_counter()
        one_round(server_round)
        print(time.perf_counter() - start, flush=True)


def void(_: object) -> None:
    """Drop a value."""


def main() -> None:
    """Run the contestant that the command line names."""
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", "no CUDA graph")  # a row of the table assumes CUDA graphs
    what, work = sys.argv[1], {**WORKS, GPU_WORK.title: GPU_WORK}[sys.argv[2]]
    torch.set_num_threads(2 if what == "plain-2" else 1)
    experiment = experiment_of(work, what)
    if what == "flower":
        flower(experiment, serve)
        return
    for one_round in ours(experiment) if what in ENGINES else plain(experiment):
        serve(one_round)


if __name__ == "__main__":
    main()
