"""What measuring a run whole costs: every second round of one run is measured for accuracy and loss alone.

    python benchmarks/measuring_cost.py rounds=100 data=adult partition=dirichlet:0.5

Prints the median processor time of a round of either kind. Rounds take turns, so that a busy machine slows both.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.simulation.measuring import Measured
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent
from fl_sim.store.run_directory import RoundRecord
from fl_sim.training.evaluation import Scores
from fl_sim.types import Traffic
from strategies.flower import FederatedStrategy


def _plain(test: Scores | None, *_: object, **__: object) -> Measured:
    return Measured(test, None, None, None, None)


def _noted_in(measured: Measured, record: RoundRecord) -> RoundRecord:
    assert measured.test is not None
    return replace(record, test_accuracy=measured.test.accuracy, test_loss=measured.test.loss)


class TakingTurns(Silent):
    """Has even rounds measured plainly, and odd ones whole; ``seconds`` has those of either kind, without the first."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"plain": [], "whole": []}
        self._patches = [
            mock.patch.object(Measured, "of", _plain),
            mock.patch.object(Measured, "noted_in", _noted_in),
            mock.patch.object(FederatedStrategy, "traffic_with", return_value=Traffic(0, 0)),
        ]
        self._last: float | None = None

    def finished_round(self, record: RoundRecord) -> None:
        """Note how long the round took, and change what the next one does."""
        now, is_plain = time.process_time(), record.round % 2 == 0
        if self._last is not None:
            self.seconds["plain" if is_plain else "whole"].append(now - self._last)
        for patch in self._patches:
            if is_plain:
                patch.stop()
            else:
                patch.start()
        self._last = time.process_time()


def main(settings: list[str]) -> None:
    """Run the experiment of ``settings`` (key=value) and print both medians."""
    turns = TakingTurns()
    experiment = experiment_from(with_overrides({}, ["engine=inprocess", "engine.workers=1", *settings]))
    with tempfile.TemporaryDirectory() as folder:
        run(experiment, Path(folder) / "run", observer=turns)
    mock.patch.stopall()
    plain, whole = (statistics.median(turns.seconds[kind]) for kind in ("plain", "whole"))
    print(f"{1e3 * plain:.2f} ms a round plainly, {1e3 * whole:.2f} ms whole: {100 * (whole / plain - 1):+.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
