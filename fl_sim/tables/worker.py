"""The other end of ``fl_sim.tables.workers``: a process that runs one experiment after another."""

import math
import os
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import resolved
from fl_sim.own_code import with_place
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import CONFIG, RoundRecord
from fl_sim.tables.earlier_runs import begin_with_shorter
from fl_sim.tables.workers import UP, Event, Failed, Finished, Preparing, RoundDone, Started, Stopped
from fl_sim.tracking.following import Following

_STANDARD_INPUT = 0


def work(descriptor: int) -> None:
    """Run what the parent sends through the pipe ``descriptor``, until it stops sending or is gone."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    connection = Connection(descriptor)
    connection.send(UP)
    with suppress(EOFError):
        while True:
            name, settings, directory, data_root, seconds, following = connection.recv()
            told = _Told(name, connection, seconds)
            connection.send(_attempt(told, Experiment.model_validate_json(settings), directory, data_root, following))


class _TimeIsUp(KeyboardInterrupt):
    """Ends a run after a round, as Ctrl-C would."""


class _Told:
    """Passes what a run says on to the parent, and ends it before a round that would not be finished in ``seconds``."""

    def __init__(self, name: str, connection: Connection, seconds: float | None) -> None:
        self.name, self._connection = name, connection
        self._last_time, self.last_round, self._rounds = time.monotonic(), 0, 0
        self._deadline = math.inf if seconds is None else self._last_time + seconds

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Tell where the run begins."""
        del engine
        self._last_time, self.last_round, self._rounds = time.monotonic(), first_round - 1, experiment.rounds
        self._connection.send(Started(self.name, first_round))

    def preparing(self, what: str) -> None:
        """Tell what happens before the first round."""
        self._connection.send(Preparing(self.name, what))

    def replied(self, replies: int) -> None:
        """Tell nothing: rounds are news enough."""

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Tell nothing: what came of the run is what ``_attempt`` returns."""

    def finished_round(self, record: RoundRecord) -> None:
        """Tell of a round."""
        self._connection.send(RoundDone(self.name, record))
        before, self._last_time, self.last_round = self._last_time, time.monotonic(), record.round
        if record.round < self._rounds and self._last_time + (self._last_time - before) > self._deadline:
            raise _TimeIsUp


def _attempt(
    told: _Told, experiment: Experiment, directory: Path, data_root: Path | None, following: Following
) -> Event:
    name = told.name
    if directory.exists() and not (directory / CONFIG).exists():
        shutil.rmtree(directory)  # killed before its first file was whole
    try:
        begin_with_shorter(resolved(experiment, data_root), directory, data_root)
        return Finished(name, run(experiment, directory, data_root, following.of(directory, told)))
    except _TimeIsUp:
        return Stopped(name, told.last_round)
    except (RunError, UserError) as error:
        return Failed(name, str(error))
    except Exception as error:  # noqa: BLE001 (one cell's surprise must not end the others; it is reported)
        return Failed(name, with_place(error))


def _die_with_parent() -> None:
    """End this process when the parent is gone, however it went: a resumed table must find nobody writing."""
    while os.read(_STANDARD_INPUT, 1):
        pass
    os._exit(1)
