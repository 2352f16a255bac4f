"""Seconds per round of our engines against a plain PyTorch loop and a minimal Flower app, side by side in one run.

Each contestant is paired with the plain one-thread loop: both run as processes of their own, a round of one, a round of
the other, and so on. Reported: medians, and the median of the ratios of neighbouring rounds. Wall is the clock around a
round; CPU is what all processes of a contestant used for it. A busy machine blurs wall ratios first.

    python benchmarks/speed.py            all rows (about 15 minutes on 2 cores)
    python benchmarks/speed.py --quick    fewer rounds and works (under 2 minutes on two idle cores)
    python benchmarks/speed.py --json     one JSON object
    python benchmarks/speed.py --in-a-row 5    five rounds of one, five of the other: few rounds begin after a pause
    python benchmarks/speed.py --peers DIR    peer frameworks too, installed by benchmarks/peers/install.py

Where there is a GPU, one more work is done on it, beside the plain loop on the same GPU; where there is none, the table
says that this was skipped.

The floor of a work is its counted arithmetic over the measured rate of a large matrix product on one core; less than
that is possible only where arithmetic is left out, as behind pooling. Real images are read from $FL_SIM_DATA; without
it they are random bytes of the same shape, which costs the same.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import psutil
from peers.entrants import Entrant, entrants, fits
from peers.install import PEERS
from speed_work import GPU_WORK, WORKS, Work, product_rate, training_operations

EVERYONE_ON = 2
"""On how many of the works every contestant runs; on the others only our engine in one process does."""

HERE = Path(__file__).resolve().parent
BASE = "plain-1"
WHAT = {
    "plain-1": "plain loop, 1 thread",
    "plain-2": "plain loop, 2 threads",
    "inprocess-1": "fl-sim, engine inprocess, 1 worker",
    "inprocess": "fl-sim, engine inprocess, a worker a core",
    "bfloat16": "the same with local.precision=bfloat16",
    "ray": "fl-sim, engine ray, 2 actors",
    "flower": "minimal Flower app, flwr simulation",
}
GPU_BASE = "plain-gpu"
ON_GPU = {
    "plain-gpu": "plain loop on the GPU, client after client",
    "gpu": "fl-sim on the GPU, 100 clients as one computation",
    "gpu-launches": "the same, without CUDA graphs",
    "gpu-tf32": "the same, with them, in tf32",
    "gpu-bfloat16": "the same, with them, in bfloat16",
}


@dataclass(frozen=True)
class Row:
    """One line of the table; ratios are to the plain one-thread loop measured in turn with it."""

    work: str
    what: str
    wall_seconds: float
    cpu_seconds: float
    wall_ratio: float
    cpu_ratio: float
    start_seconds: float
    rounds: int


class Contestant:
    """A process that executes one round on request."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        start = time.perf_counter()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process is)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self._await("ready")
        self.start_seconds = time.perf_counter() - start

    def round(self, in_a_row: int = 1) -> tuple[float, float]:
        """Do rounds without a pause between them; return the (wall, CPU) seconds of one, the mean of them."""
        before = self._cpu()
        assert self._process.stdin is not None
        self._process.stdin.write(in_a_row * "go\n")
        self._process.stdin.flush()
        wall = sum(float(self._await("")) for _ in range(in_a_row))
        return wall / in_a_row, (self._cpu() - before) / in_a_row

    def __enter__(self) -> Self:
        """Return this contestant, for a with statement."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process and all its child processes."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for child in children:
            if child.is_running():
                child.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def _await(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.strip()
            if text == word or (not word and text.replace(".", "", 1).replace("e-", "", 1).isdigit()):
                return text
        self._errors.seek(0)
        raise SystemExit(f"{self._process.args} ended:\n{''.join(self._errors.readlines()[-20:])}")

    def _cpu(self) -> float:
        total = 0.0
        for process in [(me := psutil.Process(self._process.pid)), *me.children(recursive=True)]:
            try:
                times = process.cpu_times()
                total += times.user + times.system
            except psutil.NoSuchProcess:
                continue
        return total


def contestant(what: str, work: Work, peers: dict[str, Entrant]) -> Contestant:
    """Start a contestant, ours or one of ``peers``."""
    if what in peers:
        return Contestant(peers[what].command(work), peers[what].environment())
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "2" if what == "plain-2" else "1",
    }
    return Contestant([sys.executable, str(HERE / "contestants.py"), what, work.title], environment)


def measure(work: Work, what: str, rounds: int, peers: dict[str, Entrant], in_a_row: int = 1) -> list[Row]:
    """Pair ``what`` with the plain one-thread loop, or with the GPU's, and return both rows.

    ``rounds``: how many turns each has that count; ``in_a_row``: how many rounds it does in one.
    """
    base_name = GPU_BASE if work == GPU_WORK else BASE
    with contestant(base_name, work, peers) as base, contestant(what, work, peers) as other:
        pairs = [(base.round(in_a_row), other.round(in_a_row)) for _ in range(rounds + 1)][1:]
        starts = base.start_seconds, other.start_seconds
    rows = []
    for index, name in enumerate((base_name, what)):
        wall, cpu = (statistics.median(pair[index][unit] for pair in pairs) for unit in (0, 1))
        ratios = [statistics.median(pair[index][unit] / pair[0][unit] for pair in pairs) for unit in (0, 1)]
        label = peers[name].label if name in peers else {**WHAT, **ON_GPU}[name]
        rows.append(Row(work.title, label, wall, cpu, *ratios, starts[index], rounds))
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| work | what | wall s | CPU s | wall ratio | CPU ratio | start s | rounds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.work} | {r.what} | {r.wall_seconds:.3f} | {r.cpu_seconds:.3f} | {r.wall_ratio:.2f} | {r.cpu_ratio:.2f} "
        f"| {r.start_seconds:.1f} | {r.rounds} |"
        for r in rows
    ]
    return "\n".join(lines)


def floors(rate: float) -> dict[str, dict[str, float]]:
    """Return each work's operations and the seconds they take one core at ``rate`` operations a second."""
    return {
        title: {"operations": training_operations(work), "seconds": training_operations(work) / rate}
        for title, work in WORKS.items()
    }


def contestants_of(
    index: int, options: argparse.Namespace, peers: dict[str, Entrant], missing: frozenset[str] = frozenset()
) -> list[str]:
    """Return the contestants for the work at ``index``. ``missing``: the contestants that this machine lacks."""
    everyone = [name for name in [*WHAT, *peers] if name != BASE]
    if index >= EVERYONE_ON or (options.quick and index):
        everyone = ["inprocess-1", "inprocess", "bfloat16"]
    return [name for name in everyone if (not options.only or name in options.only) and name not in missing]


def works_of(options: argparse.Namespace) -> list[Work]:
    """Return the works to measure."""
    works = [work for work in WORKS.values() if not options.work or work.title in options.work]
    return works[:2] if options.quick else works


def gpu_contestants(options: argparse.Namespace) -> list[str]:
    """Return the contestants on the GPU."""
    if options.work and GPU_WORK.title not in options.work:
        return []
    return [name for name in ON_GPU if name != GPU_BASE and (not options.only or name in options.only)]


def has_bfloat16() -> bool:
    """Return True if the compiled trainer supports bfloat16 products on this machine."""
    from fl_sim.native.kernel import load_kernel

    kernel, _ = load_kernel()
    return kernel is not None and kernel.has_bfloat16


def has_gpu() -> bool:
    """Return True if there is a GPU."""
    import torch

    return torch.cuda.is_available()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds a pair instead of 15, the first two works alone")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, help="turns of each in a pair, of which medians are taken")
    parser.add_argument("--in-a-row", type=int, default=1, metavar="N", help="rounds in a turn; seconds are of one")
    parser.add_argument("--work", choices=[*WORKS, GPU_WORK.title], action="append", help="only these works")
    names = [name for name in [*WHAT, *ON_GPU, *PEERS] if name not in (BASE, GPU_BASE)]
    parser.add_argument("--only", choices=names, action="append", help="only these rows")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where benchmarks/peers/install.py put them")
    options = parser.parse_args()
    peers = entrants(options.peers, [name for name in PEERS if name in (options.only or [])])
    rounds = options.rounds or (3 if options.quick else 15)
    rows: list[Row] = []
    missing = frozenset() if has_bfloat16() else frozenset({"bfloat16"})
    for index, work in enumerate(works_of(options)):
        for what in contestants_of(index, options, peers if fits(work) else {}, missing):
            rows += measure(work, what, rounds, peers, options.in_a_row)[
                1 if rows and rows[-1].work == work.title else 0 :
            ]
            print(f"measured {work.title}: {what}", file=sys.stderr)
    asked, skipped = gpu_contestants(options), [f"{WHAT[name]}: no avx512_bf16" for name in missing]
    if asked and not has_gpu():
        skipped += [f"{GPU_WORK.title}: {ON_GPU[name]}: no CUDA device" for name in asked]
        asked = []
    for what in asked:
        rows += measure(GPU_WORK, what, rounds, {}, options.in_a_row)[
            1 if rows and rows[-1].work == GPU_WORK.title else 0 :
        ]
        print(f"measured {GPU_WORK.title}: {what}", file=sys.stderr)
    images = "real images" if os.environ.get("FL_SIM_DATA") else "synthetic stand-in data: random bytes"
    rate = product_rate()
    floor = {"operations_per_second": rate, "works": floors(rate)}
    if options.json:
        print(
            json.dumps(
                {
                    "rows": [asdict(row) for row in rows],
                    "skipped": skipped,
                    "floor": floor,
                    "images": images,
                    "load": os.getloadavg(),
                }
            )
        )
        return
    print("\n".join([table(rows), *(f"skipped: {row}" for row in skipped)]))
    print(f"\nFloor on one core at {rate / 1e9:.0f} GFLOP/s, the best matrix product:")
    for title, needed in floors(rate).items():
        print(f"  {title}: {needed['operations'] / 1e9:.1f} GFLOP, {needed['seconds']:.3f} s")
    print(f"\n{images}; load average {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
