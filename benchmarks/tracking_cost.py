"""What do trackers cost a run? The same run with and without, in turn, in processes of their own; medians of ratios.

    python benchmarks/tracking_cost.py [--trackers tensorboard mlflow wandb trackio]
        [--pairs 5] [--rounds 200] [--parts]

Prints, for each tracker, the wall time and the processor time (of all processes) of a run with it, as a multiple of the
run without it just before, and what it costs in seconds. MLflow writes to an SQLite database that is there already,
Weights & Biases offline, Trackio to its local database. The run is FedAvg on the embedded digits: its rounds are short,
so that the costs are large beside it. With ``--parts`` one finished run is sent to each tracker instead, and the
processor time of this process is told: of importing and opening, of each round (20 sent together), and of the end.
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
from collections.abc import Sequence
from pathlib import Path

SETTINGS = ("clients=10", "partition=iid", "model=dafl-cnn", "engine=inprocess", "seed=0")
TRACKERS = ("tensorboard", "mlflow", "wandb", "trackio")


def seconds(rounds: int, tracker: str, folder: Path, number: int) -> tuple[float, float]:
    """Run once; return seconds on the clock, and of processors."""
    name = f"{tracker or 'plain'}-{number}"
    command = [sys.executable, "-m", "fl_sim", "run", *SETTINGS, f"rounds={rounds}", "--out", name]
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_MODE": "offline", "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }  # fmt: skip
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [*command, *(["--track", tracker] if tracker else [])], cwd=folder, env=environment, check=True, timeout=600,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(tracker: str, pairs: int, rounds: int, folder: Path) -> dict[str, float]:
    """Return medians over pairs of runs, each without the tracker and then with it, or the other way round."""
    seconds(1, tracker, folder, -1)  # the first makes databases and compiles Python files
    found: dict[str, list[float]] = {"plain": [], "wall": [], "cpu": [], "wall added": [], "cpu added": []}
    for number in range(pairs):
        taken = {}
        for name in ("", tracker) if number % 2 else (tracker, ""):
            taken[name] = seconds(rounds, name, folder, len(TRACKERS) * number + TRACKERS.index(tracker))
        (plain, plain_cpu), (wall, cpu) = taken[""], taken[tracker]
        found["plain"].append(plain)
        found["wall"].append(wall / plain)
        found["cpu"].append(cpu / plain_cpu)
        found["wall added"].append(wall - plain)
        found["cpu added"].append(cpu - plain_cpu)
    return {name: statistics.median(values) for name, values in found.items()}


def parts(tracker: str, run: Path) -> dict[str, float]:
    """Return this process's processor seconds of opening, of a round and of the end."""
    from fl_sim.store.run_directory import read_result, read_rounds
    from fl_sim.tracking.observers import Sender

    records, facts = read_rounds(run), read_result(run)
    assert facts is not None
    if tracker == "mlflow":  # makes the database, once for all runs
        make = "from mlflow.tracking import MlflowClient; MlflowClient().search_experiments()"
        subprocess.run([sys.executable, "-c", make], check=True, timeout=600)
    laps = [time.process_time()]
    sender = Sender(run, [tracker], print)
    sender.open(1)
    laps.append(time.process_time())
    for first in range(0, len(records), 20):
        sender.send(records[first : first + 20])
    laps.append(time.process_time())
    sender.end(facts)
    laps.append(time.process_time())
    assert not sender.failed
    return {"open": laps[1] - laps[0], "round": (laps[2] - laps[1]) / len(records), "end": laps[3] - laps[2]}


def print_parts(trackers: Sequence[str], rounds: int, folder: Path) -> None:
    """Send one run to each tracker, and print the processor time."""
    import fl_sim

    os.environ |= {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_MODE": "offline",
    }  # fmt: skip
    fl_sim.run({"rounds": rounds, "model": "logistic", "partition": "iid"}, out=folder / "run", progress=False)
    print("| tracker | import and open, CPU s | a round, CPU ms | end, CPU s |\n|---|---|---|---|")
    for name in trackers:
        taken = parts(name, folder / "run")
        print(f"| {name} | {taken['open']:.2f} | {1e3 * taken['round']:.2f} | {taken['end']:.2f} |", flush=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trackers", nargs="+", choices=TRACKERS, default=list(TRACKERS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--parts", action="store_true", help="processor time by part, in one process")
    asked = parser.parse_args()
    if asked.parts:
        with tempfile.TemporaryDirectory() as folder:
            print_parts(asked.trackers, asked.rounds, Path(folder))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = {name: measure(name, asked.pairs, asked.rounds, Path(folder)) for name in asked.trackers}
    if asked.json:
        print(json.dumps(found))
        return 0
    print(f"{asked.rounds} rounds, medians of {asked.pairs} pairs")
    print("| tracker | run without, s | wall time | CPU time | added, s | added CPU, s |\n|---|---|---|---|---|---|")
    for name, row in found.items():
        print(
            f"| {name} | {row['plain']:.1f} | {row['wall']:.3f} | {row['cpu']:.3f} | {row['wall added']:.2f} "
            f"| {row['cpu added']:.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
