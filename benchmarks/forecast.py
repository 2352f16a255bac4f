"""Compare the forecast of ``fl-sim plan`` with the processor time of two short runs.

    PYTHONPATH=. python benchmarks/forecast.py [--json] [--most 1.33]

Start-up is in neither. Exits with 1 where a forecast is wrong by more than a factor of ``--most``.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.simulation.run import run
from fl_sim.simulation.timing import Stopwatch
from fl_sim.tables.forecast import forecast

ONE: dict[str, Any] = {"kind": "inprocess", "workers": 1}
CASES: dict[str, dict[str, Any]] = {
    "FedAvg, digits": {"rounds": 100, "engine": ONE},
    "DA-FL's GAN, digits": {
        "rounds": 30, "engine": ONE,
        "preprocess": {"kind": "da-fl", "noise": "seeded", "generator": {"kind": "dp-cgan", "resolution": 8}},
    },
}  # fmt: skip


FIRST: dict[str, Any] = {
    "rounds": 1, "preprocess": {"kind": "da-fl", "noise": "seeded", "generator": "mean-embedding"},
}  # fmt: skip


def processor_seconds(experiment: Experiment, folder: Path) -> float:
    """Return the processor seconds of a run."""
    start = time.process_time()
    run(experiment, folder / "run")
    return time.process_time() - start


def main() -> None:
    """Plan and run each case."""
    parser = argparse.ArgumentParser(description="What is foretold of two cheap runs beside what they take.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--most", type=float, default=1.33, help="factor by which a forecast may be wrong")
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for name, settings in CASES.items():
        experiment = experiment_from(settings)
        with tempfile.TemporaryDirectory() as folder:
            os.environ |= {name: f"{folder}/{name}" for name in ("FL_SIM_POOLS", "FL_SIM_LEDGERS")}  # nothing is made
            run(experiment_from({**settings, **FIRST}), Path(folder) / "first")  # which loads what is needed
            [foretold] = forecast({"run": experiment}, Path(folder), None, Stopwatch())
            took = processor_seconds(experiment, Path(folder))
            found[name] = {"foretold": foretold.seconds_left or 0.0, "took": took}
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, one in found.items():
            print(f"{name}: foretold {one['foretold']:.2f} s, took {one['took']:.2f} s")
    is_right = all(1 / arguments.most <= one["foretold"] / one["took"] <= arguments.most for one in found.values())
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
