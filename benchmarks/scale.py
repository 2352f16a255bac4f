"""Start-up, seconds a round and memory as the population, the cohort and the model grow: one process.

Every row is a run of its own in a process of its own: `fl-sim run`'s own path, with the sampler fixed-size:COHORT,
batch 64, one local epoch, checkpoints after every round and no evaluation in the rounds that count. ``start`` is from
the beginning of the process to its first round, imports included; ``memory`` is the largest resident set, then that
before the first round, after the first that counts and after the last; ``states`` is what clients keep on disk at the
end (SCAFFOLD).

    python benchmarks/scale.py [--json] [--plot scale.png] [--quick]    MNIST's 60,000 records, the NIID-Bench CNN
    python benchmarks/scale.py --million [--rounds 20]      1,000,000 clients: 2,000,000 made-up records of 20 numbers,
                                                            a perceptron of 46,410 parameters, cohorts of 1,000; with
                                                            --rounds 1000 name --algorithm fedavg, as SCAFFOLD would
                                                            keep 120 GB on disk for 630,000 clients that it met
    python benchmarks/scale.py --large-model [--rounds 3]   100 clients with a model of 105 MB, cohorts of 10 and of
                                                            100, MNIST (about 12 GB of memory)

Real images are read from $FL_SIM_DATA; without it they are random bytes of the same shape, which costs the same.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

RECORDS = 60_000
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Setting:
    """One run. ``rounds`` are those that count; one more comes before them and one, with evaluation, after them.

    ``data``: "mnist", or "numbers", made-up records of 20 numbers, each client's own kept together by a client column.
    """

    population: int
    cohort: int
    algorithm: str = "fedavg"
    partition: str = "iid"
    rounds: int = 5
    data: str = "mnist"
    model: str = "niid-cnn"


@dataclass(frozen=True)
class Row:
    """The measured costs of a run. Seconds of a round are medians."""

    setting: Setting
    start_seconds: float
    start_cpu_seconds: float
    round_seconds: float
    round_cpu_seconds: float
    slowest_round_seconds: float
    memory_mb: float
    memory_at_start_mb: float
    memory_first_mb: float
    memory_last_mb: float
    states_mb: float


SETTINGS = [
    *(Setting(population, cohort) for population in (100, 1_000, 10_000) for cohort in (10, 100, 1_000)
      if cohort <= population),
    Setting(10_000, 100, partition="dirichlet:0.5"),
    Setting(10_000, 1_000, partition="dirichlet:0.5"),
    Setting(10_000, 100, algorithm="scaffold"),
    Setting(10_000, 1_000, algorithm="scaffold", rounds=20),
]  # fmt: skip

MILLION = [
    Setting(1_000_000, 1_000, algorithm, partition, 20, "numbers", "2nn")
    for algorithm in ("fedavg", "scaffold") for partition in ("natural", "dirichlet:0.5")
]  # fmt: skip
LARGE_MODEL = [Setting(100, cohort, rounds=3, model="large_model:large") for cohort in (10, 100)]
QUICK = [Setting(100, 10, rounds=3), Setting(10_000, 100, rounds=3), Setting(10_000, 100, "scaffold", rounds=3)]


def numbers_of(folder: Path, clients: int) -> str:
    """Return the name of made-up records of 20 numbers and ten classes: two a client on average, and at least one."""
    import numpy as np

    path = folder / f"numbers-{clients}.npz"
    if not path.exists():
        generator = np.random.default_rng(0)
        owners = generator.permutation(np.concatenate([np.arange(clients), generator.integers(0, clients, clients)]))
        arrays: dict[str, Any] = {"client_train": owners}
        for part, count in (("train", len(owners)), ("test", 1_000)):
            labels = generator.integers(0, 10, count)
            inputs = generator.standard_normal((count, 20), dtype=np.float32)
            inputs[np.arange(count), labels] += 2
            arrays |= {f"x_{part}": inputs, f"y_{part}": labels}
        np.savez(path, allow_pickle=False, **arrays)
    return f"npz:{path}"


def data_of(folder: Path, records: int = RECORDS) -> str:
    """Return the name of the data: MNIST where it is, else random bytes of its shape in ``folder``."""
    if os.environ.get("FL_SIM_DATA"):
        return "mnist"
    import numpy as np

    generator = np.random.default_rng(0)
    path = folder / f"random-{records}.npz"
    if not path.exists():
        inputs, labels = (generator.integers(0, top, shape, dtype=kind) for top, shape, kind in (
            (256, (records, 28, 28, 1), np.uint8), (10, records, np.int64)
        ))  # fmt: skip
        np.savez(path, x_train=inputs, y_train=labels, x_test=inputs[:10_000], y_test=labels[:10_000])
    return f"npz:{path}"


def run_one(setting: Setting, data: str, folder: Path, start: float) -> Row:
    """Do a run in this process, which began at ``start`` (time.time)."""
    import torch

    from fl_sim.experiment.experiment import experiment_from
    from fl_sim.simulation.run import Silent, run
    from fl_sim.store import run_directory
    from fl_sim.store.run_directory import RoundRecord

    torch.set_num_threads(1)

    class Watch(Silent):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.memory: list[float] = []  # after each round
            self.cpu: list[float] = []  # at the start, and after each round
            self.states = 0.0

        def started(self, *_: object) -> None:
            self.started_at, self.at_start = time.time(), memory_mb()
            self.cpu.append(cpu_seconds())

        def finished_round(self, record: RoundRecord) -> None:
            self.seconds.append(record.seconds)
            self.cpu.append(cpu_seconds())
            self.memory.append(resident_mb())
            self.states = space_mb(folder / "run" / run_directory.STATE)

    table = {
        "data": data, "partition": setting.partition, "clients": setting.population, "model": setting.model,
        "algorithm": setting.algorithm, "sampler": f"fixed-size:{setting.cohort}", "rounds": setting.rounds + 2,
        "evaluate_every": setting.rounds + 2, "engine": "inprocess",
    }  # fmt: skip
    watch = Watch()
    run(experiment_from(table), folder / "run", None, watch)
    seconds = watch.seconds[1:-1]
    cpu = [after - before for before, after in pairwise(watch.cpu)][1:-1]
    return Row(
        setting, watch.started_at - start, watch.cpu[0], statistics.median(seconds), statistics.median(cpu),
        max(seconds), memory_mb(), watch.at_start, watch.memory[1], watch.memory[-2], watch.states,
    )  # fmt: skip


def memory_mb() -> float:
    """Return the largest resident set of this process so far."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def resident_mb() -> float:
    """Return the resident set of this process now."""
    import psutil

    return float(psutil.Process().memory_info().rss) / 1e6


def cpu_seconds() -> float:
    """Return the CPU seconds of this process so far, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def space_mb(folder: Path) -> float:
    """Return the disk space of the files below ``folder``. A sparse file takes less than its size."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()) / 1e6


def measured(setting: Setting, data: str) -> Row:
    """Execute a run in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(HERE.parent), str(HERE)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "scale.py"), "--one", json.dumps(asdict(setting)), data, folder]
        command.append(repr(time.time()))
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{setting} failed:\n{done.stderr[-2000:]}")
    return read_row(json.loads(done.stdout.splitlines()[-1]))


def read_row(values: dict[str, Any]) -> Row:
    """Return a row from its JSON."""
    return Row(Setting(**values.pop("setting")), **values)


def table(rows: Iterable[Row]) -> str:
    """Return the rows as Markdown."""
    titles = (
        "population, cohort, algorithm, split, start s, CPU, s a round, slowest, CPU, memory MB, at start, "
        "first round, last round, states MB"
    )
    lines = [f"| {titles.replace(', ', ' | ')} |", "|---" * 14 + "|"]
    for row in rows:
        one = row.setting
        cells = [f"{one.population:,}", f"{one.cohort:,}", one.algorithm, one.partition]
        cells += [f"{seconds:.1f}" for seconds in (row.start_seconds, row.start_cpu_seconds)]
        cells += [f"{x:.3f}" for x in (row.round_seconds, row.slowest_round_seconds, row.round_cpu_seconds)]
        memory = (row.memory_mb, row.memory_at_start_mb, row.memory_first_mb, row.memory_last_mb)
        cells += [f"{megabytes:.0f}" for megabytes in (*memory, row.states_mb)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Draw seconds a round over the cohort and over the population: the clock's above, the processors' below.

    Those of the clock mean little where other programs run at the same time.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    measures = (("round_seconds", "seconds a round"), ("round_cpu_seconds", "CPU seconds a round, all threads"))
    for (left, right), (measure, title) in zip(panels, measures, strict=True):
        _lines(left, rows, measure, along="cohort", each="population")
        _lines(right, rows, measure, along="population", each="cohort")
        _others(left, rows, measure)
        left.set_ylabel(title)
    for axes in panels[1]:
        axes.legend(fontsize=8)
    figure.suptitle(f"{RECORDS:,} records over the population, one local epoch, niid-cnn", fontsize=11)
    figure.savefig(path, dpi=150)


def _lines(axes: Any, rows: list[Row], measure: str, *, along: str, each: str) -> None:
    plain = [row for row in rows if (row.setting.algorithm, row.setting.partition) == ("fedavg", "iid")]
    for value in sorted({getattr(row.setting, each) for row in plain}):
        chosen = [row for row in plain if getattr(row.setting, each) == value]
        points = sorted((getattr(row.setting, along), getattr(row, measure)) for row in chosen)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{each} {value:,}")
    axes.set(xscale="log", yscale="log", xlabel=f"clients in the {along}")
    axes.grid(which="major", alpha=0.3)


def _others(axes: Any, rows: list[Row], measure: str) -> None:
    for algorithm, partition, marker in (("fedavg", "dirichlet:0.5", "s"), ("scaffold", "iid", "^")):
        chosen = [row for row in rows if (row.setting.algorithm, row.setting.partition) == (algorithm, partition)]
        if chosen:
            points = sorted((row.setting.cohort, getattr(row, measure)) for row in chosen)
            what = f"{algorithm}, {partition}, population {chosen[0].setting.population:,}"
            axes.plot(*zip(*points, strict=True), marker=marker, linestyle="--", label=what)


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """Return the runs that the command line selects."""
    chosen = MILLION if options.million else LARGE_MODEL if options.large_model else SETTINGS
    chosen = [
        one for one in (QUICK if options.quick else chosen)
        if options.algorithm in {None, one.algorithm} and options.partition in {None, one.partition}
    ]  # fmt: skip
    if not chosen:
        told = f"--algorithm {options.algorithm} and --partition {options.partition}"
        raise SystemExit(f"no run has {told}: leave one out")
    return [replace(one, rounds=options.rounds or one.rounds) for one in chosen]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--quick", action="store_true", help="three small runs")
    kinds.add_argument("--million", action="store_true", help="a million clients")
    kinds.add_argument("--large-model", action="store_true", help="a model of 105 MB")
    parser.add_argument("--rounds", type=int, help="rounds that count")
    parser.add_argument("--algorithm", choices=("fedavg", "scaffold"), help="only the runs of this one")
    parser.add_argument("--partition", choices=("iid", "natural", "dirichlet:0.5"), help="only the runs of this split")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--plot", type=Path, help="write the plot to this PNG")
    parser.add_argument("--one", nargs=4, metavar=("SETTING", "DATA", "FOLDER", "START"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        setting, data, folder, start = options.one
        print(json.dumps(asdict(run_one(Setting(**json.loads(setting)), data, Path(folder), float(start)))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings_of(options):
            numbers = setting.data == "numbers"
            data = numbers_of(Path(folder), setting.population) if numbers else data_of(Path(folder))
            rows.append(measured(setting, data))
            print(f"measured {setting}", file=sys.stderr)
    if options.plot:
        plot(rows, options.plot)
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "data": data, "load": os.getloadavg()}))
        return
    print(table(rows))
    print(f"\ndata {data}; load average {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
