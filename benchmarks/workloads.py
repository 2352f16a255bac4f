"""Published workloads: ours, a plain loop, Flower's simulation and the peers at hand, in turn, round by round.

    python benchmarks/workloads.py                              ours, the plain one-thread loop and Flower, a few rounds
    python benchmarks/workloads.py --peers DIR                  the other peers, too (benchmarks/peers/install.py)
    python benchmarks/workloads.py --only lr-mnist --rounds 99  one workload, this many rounds that count
    python benchmarks/workloads.py --json                       one JSON object

Ours is a whole run, with its files, checkpoints and log, on all cores; the others train and average, and write nothing.
Nobody evaluates in the rounds that count. A first round comes before them. Reported are medians: CPU seconds of all of
a contestant's processes, wall seconds, the median ratio of its CPU seconds to ours in the same turn, and what its
median means for the rounds that were published. A busy machine blurs the wall's seconds first.

What is not as published is said in ``note``. Real images are read from $FL_SIM_DATA; without it they are random bytes
of the same shape, which costs the same.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Workload:
    """What was published: ``rounds`` of ``cohort`` of ``clients``, and how many of them are done here by default.

    ``network``: of peers.networks. ``kept``: how many clients the plain loop and the peers have in memory, 0 for all.
    ``at_a_time``: rounds in a turn, of which the clock of CPU seconds needs some.
    """

    title: str
    data: str
    network: str
    clients: int
    cohort: int
    rounds: int
    measured: int
    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    partition: str = "iid"
    kept: int = 0
    at_a_time: int = 1
    note: str = ""


WORKLOADS = {
    "lr-mnist": Workload(
        "FLUTE's LR_MNIST", "mnist", "logistic", 1_000, 10, 100, 50, 1, 10, 0.03, 0.0, at_a_time=10,
        note="60 records each, where the published split is LEAF's, of 69 on average",
    ),
    "pfl-cifar10": Workload(
        "pfl's CIFAR-10", "cifar10", "dropout_cnn", 1_000, 50, 1_500, 3, 1, 10, 0.1, 0.0,
        note="1.63 million parameters, dropout",
    ),
    "blazefl-cifar10": Workload(
        "BlazeFL's CIFAR-10", "cifar10", "niid_cnn", 100, 100, 5, 1, 5, 50, 0.1, 0.0,
        note="NIID-Bench's CNN in the place of BlazeFL's",
    ),
    "niid-cell": Workload(
        "NIID-Bench's cell, MNIST", "mnist", "niid_cnn", 10, 10, 50, 1, 10, 64, 0.01, 0.9, "dirichlet:0.5",
        note="without its weight decay of 1e-5",
    ),
    "femnist": Workload(
        "LEAF-shaped FEMNIST", "femnist", "dropout_cnn", 3_500, 10, 1_500, 5, 1, 20, 0.1, 0.0, "natural", 350,
        note="made-up records, 800,000 of 3,500 writers; the others hold the first 350 writers alone",
    ),
}  # fmt: skip
BASE = "ours"


@dataclass(frozen=True)
class Row:
    """One contestant in one workload: medians over ``rounds``; ``cpu_over_ours``: of the ratios in the same turns."""

    workload: str
    what: str
    cpu_seconds: float
    wall_seconds: float
    cpu_over_ours: float
    wall_over_ours: float
    rounds: int
    published_minutes: float


def femnist(path: Path) -> None:
    """Write made-up records of FEMNIST's shape: sizes lognormal, a bright stripe for each of 62 classes."""
    import numpy as np
    from natural_split import made_up

    labels, writers = made_up()
    generator = np.random.default_rng(1)
    arrays: dict[str, Any] = {"client_train": writers}
    for part, classes in (("train", labels), ("test", np.arange(620) % 62)):
        images = generator.integers(0, 128, (len(classes), 28, 28, 1), dtype=np.uint8)
        images.reshape(len(classes), -1)[np.arange(len(classes)), 12 * classes] += 127
        arrays |= {f"x_{part}": images, f"y_{part}": classes}
    np.savez(path, allow_pickle=False, **arrays)


def data_of(work: Workload, folder: Path) -> str:
    """Return the name of the data: real ones where they are, else made-up ones in ``folder``."""
    if work.data == "femnist":
        if not (path := folder / "femnist.npz").exists():
            femnist(path)
        return f"npz:{path}"
    if os.environ.get("FL_SIM_DATA"):
        return work.data
    import numpy as np
    from contestants import images

    if not (path := folder / f"{work.data}.npz").exists():
        inputs, labels = images(work.data, 60_000 if work.data == "mnist" else 50_000)
        np.savez(path, allow_pickle=False, x_train=inputs, y_train=labels, x_test=inputs[:99], y_test=labels[:99])
    return f"npz:{path}"


def settings_of(work: Workload, data: str) -> dict[str, Any]:
    """Return the run's settings."""
    return {
        "data": data, "partition": work.partition, "clients": work.clients, "rounds": 10**6, "evaluate_every": 10**6,
        "sampler": f"fixed-size:{work.cohort}", "model": f"peers.networks:{work.network}", "engine": "inprocess",
        "local": {
            "epochs": work.epochs, "batch_size": work.batch_size, "learning_rate": work.learning_rate,
            "momentum": work.momentum, "weight_decay": 0.0,
        },
    }  # fmt: skip


def ours(work: Workload, data: str) -> None:
    """Run as a contestant: print ``ready`` after the first round, then execute one round for each input line."""
    from fl_sim.experiment.experiment import experiment_from
    from fl_sim.simulation.run import Silent, run
    from fl_sim.store.run_directory import RoundRecord

    class Turns(Silent):
        start = 0.0

        def finished_round(self, record: RoundRecord) -> None:
            print("ready" if record.round == 1 else time.perf_counter() - self.start, flush=True)
            if not sys.stdin.readline():
                raise KeyboardInterrupt
            self.start = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        try:
            run(experiment_from(settings_of(work, data)), Path(folder) / "run", None, Turns())
        except KeyboardInterrupt:
            return


def plain(job_file: str) -> None:
    """Run as a contestant: a plain PyTorch loop over the clients of each round."""
    sys.path.insert(0, str(HERE / "peers"))
    sys.argv = ["plain", job_file]
    import torch
    from job import Turns, given, pipes
    from torch.nn import functional

    requests, answers = pipes()
    job = given()
    network, way = job.network(), job.way
    turns = Turns(job, lambda: network, requests, answers)
    while True:
        start = {name: value.clone() for name, value in network.state_dict().items()}
        cohort = torch.randperm(job.clients)[: job.cohort].tolist()
        records = sum(len(job.shards[client][1]) for client in cohort)
        mean = {name: torch.zeros_like(value) for name, value in start.items()}
        for client in cohort:
            inputs, labels = job.shards[client]
            network.load_state_dict(start)
            optimizer = torch.optim.SGD(network.parameters(), lr=way.learning_rate, momentum=way.momentum)
            for _ in range(way.epochs):
                for batch in torch.randperm(len(labels)).split(way.batch_size):
                    optimizer.zero_grad()
                    functional.cross_entropy(network(inputs[batch]), labels[batch]).backward()
                    optimizer.step()
            for name, value in network.state_dict().items():
                mean[name] += value * (len(labels) / records)
        network.load_state_dict(mean)
        turns.end_of_round()


def job_file(work: Workload, data: str, folder: Path) -> Path:
    """Write the job file for the plain loop and the peers, and return its path."""
    sys.path.insert(0, str(HERE / "peers"))
    import job

    from fl_sim.experiment.experiment import experiment_from
    from fl_sim.experiment.job import job_of
    from fl_sim.training.loop import to_tensors

    made = job_of(experiment_from(settings_of(work, data)))
    shards = [
        to_tensors(made.dataset.train.take(shard), made.dataset) for shard in made.shards[: work.kept or work.clients]
    ]
    path = folder / f"{work.network}-{work.clients}.npz"
    way = job.Way(
        work.network, made.dataset.num_classes, work.cohort, work.epochs, work.learning_rate, work.momentum,
        work.batch_size,
    )  # fmt: skip
    job.write(path, shards, made.model().state_dict(), way)
    return path


def contestants(work: Workload, data: str, folder: Path, peers: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Start one contestant after another."""
    from speed import Contestant

    own = {
        **os.environ, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
    }  # fmt: skip
    me = [sys.executable, str(HERE / "workloads.py"), "--play"]
    yield "ours", Contestant([*me, "ours", json.dumps(asdict(work)), data], own)
    path = job_file(work, data, folder)
    yield "plain loop, 1 thread", Contestant([*me, "plain", "{}", str(path)], own)
    flower = [sys.executable, str(HERE / "peers" / "with_flower.py"), str(path)]
    yield f"Flower {version('flwr')}", Contestant(flower, {**own, "PYTHONPATH": str(HERE / "peers")})
    for peer in peers.values():
        yield peer.label, Contestant([str(peer.python), str(peer.script), str(path)], peer.environment())


def measure(work: Workload, rounds: int, peers: dict[str, Any], folder: Path) -> list[Row]:
    """Execute ``rounds`` rounds of each contestant, in turn."""
    data, started = data_of(work, folder), {}
    with ExitStack() as stack:
        for name, contestant in contestants(work, data, folder, peers):
            started[name] = stack.enter_context(contestant)
        num_turns = -(-rounds // work.at_a_time)
        turns = [{name: _turn(one, work.at_a_time) for name, one in started.items()} for _ in range(num_turns)]
    rows = []
    for name in started:
        wall, cpu = (statistics.median(turn[name][unit] for turn in turns) for unit in (0, 1))
        ratios = [statistics.median(turn[name][unit] / turn[BASE][unit] for turn in turns) for unit in (1, 0)]
        rows.append(Row(work.title, name, cpu, wall, *ratios, num_turns * work.at_a_time, wall * work.rounds / 60))
    return rows


def _turn(contestant: Any, rounds: int) -> tuple[float, float]:
    """Return (wall, CPU) seconds a round; the clock of CPU seconds has steps of a hundredth."""
    done = [contestant.round() for _ in range(rounds)]
    wall, cpu = (sum(one[unit] for one in done) for unit in (0, 1))
    return wall / rounds, max(cpu, 0.01) / rounds


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| workload | what | CPU s a round | wall s | CPU / ours | wall / ours | rounds | minutes as published |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.workload} | {r.what} | {r.cpu_seconds:.4g} | {r.wall_seconds:.4g} | {r.cpu_over_ours:.1f} "
        f"| {r.wall_over_ours:.1f} | {r.rounds} | {r.published_minutes:.3g} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print, or run as one contestant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="only these workloads")
    parser.add_argument("--rounds", type=int, help="rounds that count")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where benchmarks/peers/install.py put them")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--play", nargs=3, metavar=("WHAT", "WORKLOAD", "DATA"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        what, work_json, data = options.play
        if what == "ours":
            ours(Workload(**json.loads(work_json)), data)
        else:
            plain(data)
        return
    from peers.entrants import entrants

    peers, rows = entrants(options.peers), []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or WORKLOADS:
            work = WORKLOADS[name]
            rounds = options.rounds or work.measured
            print(f"{work.title}: {rounds} of {work.rounds} rounds ({work.note})", file=sys.stderr)
            rows += measure(work, rounds, peers, Path(folder))
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "load": os.getloadavg()}))
        return
    print(table(rows))
    for name in options.only or WORKLOADS:
        work = WORKLOADS[name]
        done = options.rounds or work.measured
        print(f"{work.title}: {done} of the {work.rounds} published rounds were done here; {work.note}.")
    images = "real images" if os.environ.get("FL_SIM_DATA") else "random bytes in the place of images"
    print(f"{images}; load average {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
