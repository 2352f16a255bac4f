"""Runs side by side in worker processes, which import torch once and are used again: the parent's end and theirs."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, TypeAlias

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, defined_in_script
from fl_sim.experiment.groups import InProcess
from fl_sim.experiment.job import resolved
from fl_sim.own_code import with_place
from fl_sim.simulation.client_runtime import cores
from fl_sim.simulation.run import run
from fl_sim.store import run_directory
from fl_sim.store.files import run_lock
from fl_sim.store.run_directory import RoundRecord
from fl_sim.tables.earlier_runs import begin_with_shorter, finished_result
from fl_sim.tracking.following import NOBODY, Following

_SECONDS_TO_STOP = 5.0

UP: Final = "up"  # what a worker says first, once it has imported what it needs

_START: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from fl_sim.importing import importing
with importing():
    from fl_sim.tables.workers import work
work(int(sys.argv[2]))
"""
"""A worker's program. multiprocessing's would import the caller's main module again: a script would run twice.

Nor is concurrent.futures' pool of processes one for tables: where one process dies all runs fail, nobody learns of what
it died, and where the parent is killed its processes stay.
"""

_STANDARD_INPUT = 0


@dataclass(frozen=True)
class Budget:
    """Until ``deadline``, by ``time.monotonic``. ``seconds``: what is left of each run takes.

    ``begun``: runs that have rounds already. They go on, and stop after a round where the time is up; another begins
    only where it can be finished.
    """

    deadline: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    begun: frozenset[str] = frozenset()

    @property
    def left(self) -> float:
        """Return how many seconds there are, 0 or less where the time is up."""
        return self.deadline - time.monotonic()

    def fits(self, name: str) -> bool:
        """Say whether a run may begin now."""
        return self.left > (0.0 if name in self.begun else self.seconds.get(name, 0.0))


@dataclass(frozen=True)
class Started:
    """A worker took up a run, at ``first_round``."""

    name: str
    first_round: int


@dataclass(frozen=True)
class Preparing:
    """Something happens before a run's first round: ``what`` it is, in words."""

    name: str
    what: str


@dataclass(frozen=True)
class RoundDone:
    """A run finished a round."""

    name: str
    record: RoundRecord


@dataclass(frozen=True)
class Finished:
    """A run is done; ``result`` is what its ``result.json`` says."""

    name: str
    result: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """A run could not go on, or its worker died."""

    name: str
    error: str


@dataclass(frozen=True)
class Stopped:
    """The time is up: a run was stopped after round ``last_round``, from which it can go on."""

    name: str
    last_round: int


@dataclass(frozen=True)
class Postponed:
    """A run was not begun: the time that is left is too short for it."""

    name: str


Event: TypeAlias = Started | Preparing | RoundDone | Finished | Failed | Stopped | Postponed


def run_all(
    runs: Mapping[str, Experiment],
    out: Path,
    jobs: int,
    data_root: Path | None,
    budget: Budget | None = None,
    following: Following = NOBODY,
) -> Generator[Event, None, None]:
    """Run every experiment in ``out / name``, at most ``jobs`` at once, and tell what happens as it happens.

    A finished run is only reported; an unfinished one goes on at its checkpoint. What the ``budget`` has no time for is
    not begun, or stopped after a round. ``following``: who else is told of them. Closing the generator, or an exception
    inside it, stops the workers at once; what they finished stays. Raises UserError for a class that workers cannot
    import, RunError while another process is at it, and where a worker cannot start, which is the fault of no run.
    """
    _check_importable(runs.values())
    out.mkdir(parents=True, exist_ok=True)
    with run_lock(out):
        waiting: deque[tuple[str, Experiment]] = deque()
        for name, experiment in runs.items():
            if (result := finished_result(out / name, experiment, data_root)) is not None:
                yield Finished(name, result)
            else:
                waiting.append((name, with_share_of_cores(experiment, jobs)))
        workers: list[_Worker] = []
        try:
            while len(workers) < jobs and (run := _next(waiting, budget)) is not None:
                workers.append(_Worker(out, data_root, following))
                workers[-1].take(*run, budget)
            while workers:
                ready = wait([worker.connection for worker in workers])
                for worker in [worker for worker in workers if worker.connection in ready]:
                    event = worker.next_event()
                    if isinstance(event, Finished | Failed | Stopped):
                        _go_on(worker, workers, waiting, budget)
                    if event is not None:
                        yield event
            yield from (Postponed(name) for name, _ in waiting)
        finally:
            _stop(workers)


def with_share_of_cores(experiment: Experiment, jobs: int) -> Experiment:
    """Return ``experiment`` with as many clients at a time as leave the other jobs their cores."""
    engine = experiment.engine
    if not isinstance(engine, InProcess) or engine.workers:
        return experiment
    share = InProcess.model_validate({**dict(engine), "workers": max(1, cores() // jobs)})
    return Experiment.model_validate({**dict(experiment), "engine": share})


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


def _check_importable(experiments: Iterable[Experiment]) -> None:
    """Raise UserError where a class is the caller's main module's, which no other process can import."""
    for experiment in experiments:
        if name := defined_in_script(experiment):
            raise UserError(
                f"{name} is defined in the script or notebook itself, from which a table's worker processes cannot "
                f"import it: put it in a module beside it, for example mine.py, and write 'from mine import {name}'"
            )


class _Worker:
    """A process that runs one experiment at a time."""

    def __init__(self, out: Path, data_root: Path | None, following: Following) -> None:
        self._out, self._data_root, self._following = out, data_root, following
        self.name, self._is_up = "", False
        self.process, self.connection = _spawn()

    def take(self, name: str, experiment: Experiment, budget: Budget | None) -> None:
        """Start a run, in a new process where the old one died. A death just now is noticed at the next event."""
        seconds = None if budget is None else budget.left
        self.name = name
        if self.connection.closed:
            self.process, self.connection = _spawn()
            self._is_up = False
        with suppress(ConnectionError):
            settings = experiment.model_dump_json()
            self.connection.send((name, settings, self._out / name, self._data_root, seconds, self._following))

    def next_event(self) -> Event | None:
        """Return what the worker says, or that it died; None where it is up. Raises RunError where it cannot start."""
        try:
            said: Event | str = self.connection.recv()
        except (EOFError, OSError):  # OSError: it was killed in the middle of a word
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_SECONDS_TO_STOP)
            self.close()
            if not self._is_up:
                raise RunError(_why_none_starts(self.process.returncode)) from None
            return Failed(self.name, _why_it_died(self.process.returncode))
        if isinstance(said, str):
            self._is_up = said == UP
            return None
        return said

    def close(self) -> None:
        """Close both pipes to a process that has ended."""
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


def _why_it_died(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its worker process died (exit code {code}): something that it ran, such as the model, ended it"
    how = f"its worker process died (killed by signal {-code})"
    if code == -signal.SIGKILL:
        return f"{how}, as the system does where memory runs out: take fewer --jobs"
    if -code in {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
        return f"{how}: somebody ended it; the same command goes on"
    return f"{how}, in compiled code of the model or of a library: fl-sim run with its config.toml shows it alone"


def _why_none_starts(code: int | None) -> str:
    """Return why a worker ended before it could take up a run, and what to do: what a run needs is not to blame."""
    stays = "What is finished stays, and the same command goes on from there"
    if code == -signal.SIGKILL:
        return f"a worker process was killed (signal 9) while it started: out of memory? Take fewer --jobs. {stays}"
    how = f"exit code {code}" if code is None or code >= 0 else f"killed by signal {-code}"
    return (
        f"a worker process could not start ({how}): it prints the reason itself, above this line. Where it is a module "
        f"that cannot be imported, mend that. {stays}"
    )


def _next(waiting: deque[tuple[str, Experiment]], budget: Budget | None) -> tuple[str, Experiment] | None:
    """Take the first run for which there is time."""
    found = next((run for run in waiting if budget is None or budget.fits(run[0])), None)
    if found is not None:
        waiting.remove(found)
    return found


def _go_on(
    worker: _Worker, workers: list[_Worker], waiting: deque[tuple[str, Experiment]], budget: Budget | None
) -> None:
    if (run := _next(waiting, budget)) is not None:
        worker.take(*run, budget)
    else:
        workers.remove(worker)
        _stop([worker])


def _spawn() -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a worker. It lives no longer than its standard input, whose other end is this process's alone."""
    ours, theirs = Pipe()
    command = [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno())]
    # Ctrl-C reaches every process of the terminal; only the parent answers it, and workers inherit the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()])  # noqa: S603 (our own)
    except OSError as error:
        ours.close()
        raise RunError(f"a worker process could not be started: {error}; fewer --jobs need fewer of them") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
    return process, ours


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        try:
            worker.process.wait(_SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        worker.close()


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
    if directory.exists() and not (directory / run_directory.CONFIG).exists():
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
