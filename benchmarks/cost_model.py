"""A cost model of rounds, start and memory: fitted on small runs, tested on larger runs, and extrapolated.

    python benchmarks/cost_model.py [--json]           two cores, one process (about five minutes)
    python benchmarks/cost_model.py --cluster          Ray nodes of one core, one and two, simulated on this machine

Every run is a process of its own: FedAvg, the made-up records of benchmarks/scale.py (20 numbers each, two a client on
average, split by client), cohorts of fixed size, one epoch. CPU seconds are fitted, as the clock's depend on who else
computes; a round's are told apart into those of clients, which other cores and nodes can take, and the server's own.
Coefficients are the least squares of relative errors, none below zero. Printed are they, the relative error on each
held-out run, and what the model says of sizes that nobody has run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
ROUNDS = 6
PARAMETERS = {"logistic": 210, "2nn": 46_410, "mlp": 73_710}


@dataclass(frozen=True)
class Size:
    """One run; ``nodes``: of a simulated Ray cluster, 0 for one process."""

    population: int
    cohort: int
    model: str
    nodes: int = 0

    @property
    def parameters(self) -> int:
        """Return the number of parameters that a client sends."""
        return PARAMETERS[self.model]


@dataclass(frozen=True)
class Measured:
    """CPU seconds a round of clients and of the server, seconds a round, CPU seconds before the first, bytes of memory.

    On a cluster ``clients`` are the driver's seconds in the exchange, and ``wall`` is what counts.
    """

    size: Size
    clients: float
    server: float
    wall: float
    start: float
    memory: float


FITTED = [
    Size(1_000, 10, "logistic"), Size(1_000, 300, "logistic"), Size(1_000, 100, "mlp"), Size(10_000, 300, "2nn"),
    Size(30_000, 30, "mlp"), Size(100_000, 10, "2nn"), Size(100_000, 100, "2nn"), Size(100_000, 300, "mlp"),
    Size(300_000, 100, "logistic"), Size(300_000, 300, "2nn"),
]  # fmt: skip
HELD_OUT = [
    Size(1_000_000, 1_000, "2nn"), Size(1_000_000, 100, "mlp"), Size(30_000, 1_000, "mlp"),
    Size(300_000, 1_000, "logistic"), Size(3_000, 30, "2nn"),
]  # fmt: skip
CLUSTER = [Size(1_000, cohort, "2nn", nodes) for nodes in (1, 2) for cohort in (10, 100, 300)]

Features = Callable[[Size], Sequence[float]]
TERMS: dict[str, tuple[tuple[str, ...], Features]] = {
    "clients": (("a round", "a client", "a client and parameter"), lambda s: (1, s.cohort, s.cohort * s.parameters)),
    "server": (
        ("a round", "a client of the population", "a client", "a client and parameter"),
        lambda s: (1, s.population, s.cohort, s.cohort * s.parameters),
    ),
    "start": (("a run", "a client of the population"), lambda s: (1, s.population)),
    "memory": (
        ("a run", "a client of the population", "a client and parameter"),
        lambda s: (1, s.population, s.cohort * s.parameters),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """The fitted coefficients of one measure of a run, for each term."""

    measure: str
    coefficients: tuple[float, ...]

    @classmethod
    def of(cls, measure: str, runs: Sequence[Measured]) -> "Fit":
        """Fit ``measure`` of ``runs``: relative errors are as small as may be, and no term is negative."""
        import numpy as np
        from scipy.optimize import nnls

        wanted = np.array([getattr(run, measure) for run in runs])
        features = np.array([TERMS[measure][1](run.size) for run in runs], dtype=np.float64)
        scaled = features / wanted[:, None]
        units = scaled.max(axis=0)
        found, _ = nnls(scaled / units, np.ones(len(runs)))
        return cls(measure, tuple((found / units).tolist()))

    def predicted(self, size: Size) -> float:
        """Return the predicted cost of a run of ``size``."""
        return sum(one * feature for one, feature in zip(self.coefficients, TERMS[self.measure][1](size), strict=True))


def error(fit: Fit, run: Measured) -> float:
    """Return the prediction's relative error."""
    return float(fit.predicted(run.size) / getattr(run, fit.measure) - 1)


def run_one(size: Size, data: str, folder: Path) -> Measured:
    """Execute a run in this process."""
    import resource

    import torch

    from fl_sim.engines.grid import InProcessGrid
    from fl_sim.experiment.experiment import experiment_from
    from fl_sim.simulation.run import Silent, run

    torch.set_num_threads(1)
    inside: list[float] = []
    rounds: list[tuple[float, float]] = []  # (CPU seconds, seconds) since the start of the process
    exchange = InProcessGrid._exchange  # noqa: SLF001 (what is timed)

    def timed(grid: Any, *arguments: Any) -> Any:
        before = time.process_time()
        try:
            return exchange(grid, *arguments)
        finally:
            inside.append(time.process_time() - before)

    class Watch(Silent):
        def started(self, *_: object) -> None:
            rounds.append((time.process_time(), time.perf_counter()))

        def finished_round(self, _: object) -> None:
            rounds.append((time.process_time(), time.perf_counter()))

    table = {
        "data": data, "partition": "natural", "clients": size.population, "sampler": f"fixed-size:{size.cohort}",
        "model": size.model, "rounds": ROUNDS + 2, "evaluate_every": ROUNDS + 2,
        "engine": {"kind": "ray", "address": os.environ["NODES"]} if size.nodes else "inprocess",
    }  # fmt: skip
    with patch.object(InProcessGrid, "_exchange", timed):
        run(experiment_from(table), folder / "run", None, Watch())
    between = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(rounds)]
    cpu, wall = ([one[unit] for one in between[1:-1]] for unit in (0, 1))
    trained = inside[1:-1] if inside else [0.0] * ROUNDS
    return Measured(
        size, statistics.median(trained), statistics.median(map(float.__sub__, cpu, trained)), statistics.median(wall),
        rounds[0][0], 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )  # fmt: skip


def measured(size: Size, folder: Path) -> Measured:
    """Execute a run in a new process."""
    from scale import numbers_of

    data = numbers_of(folder, size.population)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as own:
        command = [sys.executable, str(HERE / "cost_model.py"), "--one", json.dumps(asdict(size)), data, own]
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{size} failed:\n{done.stderr[-2000:]}")
    values = json.loads(done.stdout.splitlines()[-1])
    print(f"measured {size}", file=sys.stderr)
    return Measured(Size(**values.pop("size")), **values)


def on_a_cluster(folder: Path) -> list[Measured]:
    """Execute the runs of ``CLUSTER`` on Ray nodes of one core each, all on this machine."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    from ray.cluster_utils import Cluster

    runs = []
    for nodes in sorted({size.nodes for size in CLUSTER}):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(nodes):
                cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
            os.environ["NODES"] = cluster.address
            runs += [measured(size, folder) for size in CLUSTER if size.nodes == nodes]
        finally:
            cluster.shutdown()
    return runs


def far(fits: dict[str, Fit]) -> list[str]:
    """Return the prediction for 10,000,000 clients, in words."""
    lines = []
    for cohort, model in ((1_000, "2nn"), (10_000, "2nn"), (10_000, "mlp")):
        size = Size(10_000_000, cohort, model)
        clients, server = fits["clients"].predicted(size), fits["server"].predicted(size)
        sent = 2 * 4 * size.parameters * cohort
        lines.append(
            f"10,000,000 clients, {cohort:,} a round, {size.parameters:,} parameters: {clients:.2f} CPU s of clients "
            f"and {server:.2f} of the server a round; {server + clients / 64:.2f} s on 64 cores if clients could use "
            f"them all; {sent / 1e9:.2f} GB to and from clients a round; start "
            f"{fits['start'].predicted(size):.0f} CPU s; {fits['memory'].predicted(size) / 1e9:.1f} GB of memory"
        )
    return lines


def report(fits: dict[str, Fit], held_out: Sequence[Measured]) -> list[str]:
    """Return coefficients and errors as Markdown."""
    lines = ["| measure | term | coefficient |", "|---|---|---|"]
    for measure, fit in fits.items():
        lines += [
            f"| {measure} | {term} | {value:.3g} |"
            for term, value in zip(TERMS[measure][0], fit.coefficients, strict=True)
        ]
    lines += ["", f"| held out | {' | '.join(fits)} |", "|---" * (1 + len(fits)) + "|"]
    for run in held_out:
        errors = (f"{100 * error(fit, run):+.0f} %" for fit in fits.values())
        lines.append(f"| {run.size.population:,} / {run.size.cohort:,} / {run.size.model} | {' | '.join(errors)} |")
    middle = (statistics.median(abs(error(fit, run)) for run in held_out) for fit in fits.values())
    lines.append(f"| median of their sizes | {' | '.join(f'{100 * one:.0f} %' for one in middle)} |")
    return lines


def main() -> None:
    """Fit the model, compare it with larger runs, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", action="store_true", help="measure simulated Ray nodes")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--one", nargs=3, metavar=("SIZE", "DATA", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        size, data, folder = options.one
        print(json.dumps(asdict(run_one(Size(**json.loads(size)), data, Path(folder)))))
        return
    with tempfile.TemporaryDirectory() as shared:
        if options.cluster:
            runs = on_a_cluster(Path(shared))
            lines = ["| nodes | cohort | s a round | the driver's CPU s |", "|---|---|---|---|"]
            lines += [f"| {r.size.nodes} | {r.size.cohort} | {r.wall:.3f} | {r.server:.3f} |" for r in runs]
            held_out: list[Measured] = []
        else:
            runs, held_out = ([measured(size, Path(shared)) for size in sizes] for sizes in (FITTED, HELD_OUT))
            fits = {measure: Fit.of(measure, runs) for measure in TERMS}
            lines = [*report(fits, held_out), "", *far(fits)]
    if options.json:
        print(json.dumps({"fitted": [*map(asdict, runs)], "held_out": [*map(asdict, held_out)]}))
        return
    print("\n".join(lines))
    print(f"\nload average {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
