"""Parallel execution of a table's runs in worker processes. Each worker imports torch once, and executes many runs."""

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
from collections.abc import Generator, Mapping
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
from fl_sim.simulation.run_log import Silent
from fl_sim.store import run_directory
from fl_sim.store.files import run_lock
from fl_sim.store.run_directory import RoundRecord
from fl_sim.tables.earlier_runs import begin_with_shorter, finished_result
from fl_sim.tracking.observers import NO_TRACKING, Tracking

_SECONDS_TO_STOP = 5.0

UP: Final = "up"
"""The first message of a worker process, after its imports."""

_START: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from fl_sim.importing import importing
with importing():
    from fl_sim.tables.workers import work
work(int(sys.argv[2]))
"""
"""The program of a worker process.

The module ``multiprocessing`` is not used, because its workers import the user's script. The script would then run
twice. The process pool of ``concurrent.futures`` is not used either: if one of its processes dies, all runs fail
without a reason, and if the parent process is killed, its workers continue.
"""

_STANDARD_INPUT = 0


@dataclass(frozen=True)
class Budget:
    """The time budget of a table.

    ``deadline``: the time at which the budget ends, by the clock ``time.monotonic``. ``seconds``: {run: estimated
    seconds until the run is finished}. ``begun``: names of the runs that already have finished rounds. Such a run
    resumes if the deadline has not passed, and stops after the last round that is expected to end before the deadline.
    Any other run starts only if it is expected to finish before the deadline.
    """

    deadline: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    begun: frozenset[str] = frozenset()

    @property
    def left(self) -> float:
        """Return the seconds until the deadline; a negative number after the deadline."""
        return self.deadline - time.monotonic()

    def fits(self, name: str) -> bool:
        """Return True if there is enough time to start or resume the run ``name`` now."""
        return self.left > (0.0 if name in self.begun else self.seconds.get(name, 0.0))


@dataclass(frozen=True)
class Started:
    """Event: a worker started or resumed the run ``name``. ``first_round``: the round that comes next."""

    name: str
    first_round: int


@dataclass(frozen=True)
class Preparing:
    """Event: the run ``name`` began a preparation before its first round. ``what``: the name of the preparation."""

    name: str
    what: str


@dataclass(frozen=True)
class RoundDone:
    """Event: the run ``name`` finished a round. ``record``: the measures of the round."""

    name: str
    record: RoundRecord


@dataclass(frozen=True)
class Finished:
    """Event: the run ``name`` finished. ``result``: the content of its ``result.json``."""

    name: str
    result: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """Event: the run ``name`` failed, or its worker process died. ``error``: the error message."""

    name: str
    error: str


@dataclass(frozen=True)
class Stopped:
    """Event: the run ``name`` stopped at the deadline, after round ``last_round``. The run can be resumed."""

    name: str
    last_round: int


@dataclass(frozen=True)
class Postponed:
    """Event: the run ``name`` was not started, because the remaining time is too short."""

    name: str


Event: TypeAlias = Started | Preparing | RoundDone | Finished | Failed | Stopped | Postponed


def run_all(
    runs: Mapping[str, Experiment],
    out: Path,
    jobs: int,
    data_root: Path | None,
    budget: Budget | None = None,
    tracking: Tracking = NO_TRACKING,
) -> Generator[Event, None, None]:
    """Execute ``runs``, {name: experiment}, in worker processes, and yield their events as they happen.

    The directory of a run is ``out / name``. ``jobs``: the maximum number of parallel runs. ``budget``: the time
    budget. A run that would exceed the time budget is not started, or stops after a round. ``tracking``: the trackers
    of the runs. A run that is already finished yields only the event ``Finished``. An unfinished run resumes from its
    checkpoint. Closing the generator, or an exception in it, stops the workers at once. Finished rounds are kept.

    Raises UserError for a class that workers cannot import. Raises RunError if another process uses ``out``, or if a
    worker process cannot start.
    """
    if name := next(filter(None, map(defined_in_script, runs.values())), ""):
        raise UserError(
            f"{name} is defined in the script or notebook itself, and the worker processes of a table cannot import "
            f"from there: put {name} in a module beside the script, such as mine.py: 'from mine import {name}'"
        )
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
                workers.append(_Worker(out, data_root, tracking))
                workers[-1].take(*run, budget)
            while workers:
                ready = wait([worker.connection for worker in workers])
                for worker in [worker for worker in workers if worker.connection in ready]:
                    event = worker.next_event()
                    if isinstance(event, Finished | Failed | Stopped):
                        if (run := _next(waiting, budget)) is not None:
                            worker.take(*run, budget)
                        else:
                            workers.remove(worker)
                            _stop([worker])
                    if event is not None:
                        yield event
            yield from (Postponed(name) for name, _ in waiting)
        finally:
            _stop(workers)


def with_share_of_cores(experiment: Experiment, jobs: int) -> Experiment:
    """Return ``experiment`` with a number of threads for its clients: an equal share of the CPU cores.

    ``jobs``: the number of parallel runs, among which the cores are divided. An experiment on another engine, or with a
    number of threads that the user chose, is returned unchanged.
    """
    engine = experiment.engine
    if not isinstance(engine, InProcess) or engine.workers:
        return experiment
    share = InProcess.model_validate({**dict(engine), "workers": max(1, cores() // jobs)})
    return Experiment.model_validate({**dict(experiment), "engine": share})


def work(descriptor: int) -> None:
    """Execute the runs that the parent process sends, until the parent process closes the pipe or ends.

    This is the main function of a worker process. ``descriptor``: the file descriptor of the pipe to the parent.
    """
    threading.Thread(target=_die_with_parent, daemon=True).start()
    connection = Connection(descriptor)
    connection.send(UP)
    with suppress(EOFError):
        while True:
            name, settings, directory, data_root, seconds, tracking = connection.recv()
            observer = _Reporter(name, connection, seconds)
            experiment = Experiment.model_validate_json(settings)
            connection.send(_attempt(observer, experiment, directory, data_root, tracking))


class _Worker:
    """The parent process's handle of a worker process, which executes one experiment at a time."""

    def __init__(self, out: Path, data_root: Path | None, tracking: Tracking) -> None:
        self._out, self._data_root, self._tracking = out, data_root, tracking
        self.name, self._is_up = "", False
        self.process, self.connection = _spawn()

    def take(self, name: str, experiment: Experiment, budget: Budget | None) -> None:
        """Send a run to the worker process. If the process died earlier, start a new one first.

        If the worker process dies before it receives the run, ``next_event`` reports the failure.
        """
        seconds = None if budget is None else budget.left
        self.name = name
        if self.connection.closed:
            self.process, self.connection = _spawn()
            self._is_up = False
        with suppress(ConnectionError):
            settings = experiment.model_dump_json()
            self.connection.send((name, settings, self._out / name, self._data_root, seconds, self._tracking))

    def next_event(self) -> Event | None:
        """Return the next event that the worker process sends, such as ``RoundDone``.

        The result is ``Failed`` if the process died during a run. The result is None for the first message, ``UP``,
        which says that the process has started. Raises RunError if the process ended before its first message.
        """
        try:
            event: Event | str = self.connection.recv()
        except (EOFError, OSError):  # OSError: the process was killed while it sent a message
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_SECONDS_TO_STOP)
            self.close()
            if not self._is_up:
                raise RunError(_why_none_starts(self.process.returncode)) from None
            return Failed(self.name, _why_it_died(self.process.returncode))
        if isinstance(event, str):
            self._is_up = event == UP
            return None
        return event

    def close(self) -> None:
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


def _why_it_died(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its worker process died (exit code {code}): code of the run, such as the model, ended the process"
    how = f"its worker process died (killed by signal {-code})"
    if code == -signal.SIGKILL:
        return f"{how}: the operating system does this if memory runs out: take fewer --jobs"
    if -code in {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
        return f"{how}: another process ended it; the same command resumes the run"
    return (
        f"{how}: compiled code of the model or of a library crashed; to see the crash alone, give the config.toml of "
        "the run to fl-sim run"
    )


def _why_none_starts(code: int | None) -> str:
    kept = "Finished runs are kept, and the same command continues with the others"
    if code == -signal.SIGKILL:
        return f"a worker process was killed (signal 9) while it started: out of memory? Take fewer --jobs. {kept}"
    how = f"exit code {code}" if code is None or code >= 0 else f"killed by signal {-code}"
    return (
        f"a worker process could not start ({how}). Its own message above this line has the reason. If a module cannot "
        f"be imported, correct the import. {kept}"
    )


def _next(waiting: deque[tuple[str, Experiment]], budget: Budget | None) -> tuple[str, Experiment] | None:
    """Remove and return the first waiting run for which there is enough time; None if there is no such run."""
    found = next((run for run in waiting if budget is None or budget.fits(run[0])), None)
    if found is not None:
        waiting.remove(found)
    return found


def _spawn() -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a worker process, and return the process and the connection to it.

    The worker never outlives this process. Its standard input is a pipe from this process, and the worker ends when the
    pipe closes.
    """
    ours, theirs = Pipe()
    command = [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno())]
    # Ctrl-C sends SIGINT to all processes of the terminal. Workers inherit a mask that blocks this signal, so that
    # only the parent reacts.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()])  # noqa: S603 (our own)
    except OSError as error:
        ours.close()
        raise RunError(f"a worker process could not be started: {error}; use fewer --jobs") from error
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
    """The exception that stops a run at the deadline, between two rounds.

    It is a subclass of KeyboardInterrupt, so the run stops as after Ctrl-C and keeps its finished rounds.
    """


class _Reporter(Silent):
    """An observer in a worker process that sends the events of a run to the parent process.

    ``seconds``: the time limit, counted from the creation of the observer; None: no limit. The observer stops the run
    before a round that is expected to end after this limit. A round is expected to take as long as the previous one.
    """

    def __init__(self, name: str, connection: Connection, seconds: float | None) -> None:
        self.name, self._connection = name, connection
        self._last_time, self.last_round, self._rounds = time.monotonic(), 0, 0
        self._deadline = math.inf if seconds is None else self._last_time + seconds

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Send the event ``Started``."""
        del engine
        self._last_time, self.last_round, self._rounds = time.monotonic(), first_round - 1, experiment.rounds
        self._connection.send(Started(self.name, first_round))

    def preparing(self, what: str) -> None:
        """Send the event ``Preparing``."""
        self._connection.send(Preparing(self.name, what))

    def replied(self, replies: int) -> None:
        """Send nothing: the parent process shows no progress within a round."""

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Send nothing: ``_attempt`` returns the event for the end of the run."""

    def finished_round(self, record: RoundRecord) -> None:
        """Send the event ``RoundDone``. Raise ``_TimeIsUp`` if the next round would end after the deadline."""
        self._connection.send(RoundDone(self.name, record))
        before, self._last_time, self.last_round = self._last_time, time.monotonic(), record.round
        if record.round < self._rounds and self._last_time + (self._last_time - before) > self._deadline:
            raise _TimeIsUp


def _attempt(
    observer: _Reporter, experiment: Experiment, directory: Path, data_root: Path | None, tracking: Tracking
) -> Event:
    if directory.exists() and not (directory / run_directory.CONFIG).exists():
        shutil.rmtree(directory)  # the run's process was killed before it wrote the configuration
    try:
        begin_with_shorter(resolved(experiment, data_root), directory, data_root)
        return Finished(observer.name, run(experiment, directory, data_root, tracking.of(directory, observer)))
    except _TimeIsUp:
        return Stopped(observer.name, observer.last_round)
    except (RunError, UserError) as error:
        return Failed(observer.name, str(error))
    except Exception as error:  # noqa: BLE001 (an error in the user's code must not stop the other runs)
        return Failed(observer.name, with_place(error))


def _die_with_parent() -> None:
    """Wait until the parent process ends for any reason, then end this process.

    A worker that outlived its parent could write the same files as the workers of a resumed table.
    """
    while os.read(_STANDARD_INPUT, 1):
        pass
    os._exit(1)
