"""Runs side by side in worker processes that import torch once and are used again; a dying worker costs one run."""

import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeAlias

from fl_sim.experiment.experiment import Experiment, InProcess
from fl_sim.simulation.engine_choice import cores
from fl_sim.simulation.run import run
from fl_sim.store import run_directory
from fl_sim.store.locks import sole_run
from fl_sim.store.run_directory import RoundRecord
from fl_sim.types import RunError, UserError

_SECONDS_TO_STOP = 5.0


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


Event: TypeAlias = Started | Preparing | RoundDone | Finished | Failed

_UP = "up"  # what a worker says first, once it has imported what it needs


def finished_result(directory: Path) -> dict[str, Any] | None:
    """Return the result of a run that is done, else None."""
    result = run_directory.read_result(directory)
    return result if result is not None and result.get("status") == "finished" else None


def run_all(
    runs: Mapping[str, Experiment], out: Path, jobs: int, data_root: Path | None
) -> Generator[Event, None, None]:
    """Run every experiment in ``out / name``, at most ``jobs`` at once, and tell what happens as it happens.

    A finished run is only reported; an unfinished one goes on at its checkpoint. Closing the generator, or an exception
    inside it, stops the workers at once; what they finished stays. Raises RunError while another process is at it, and
    where a worker cannot start, which is the fault of no run.
    """
    out.mkdir(parents=True, exist_ok=True)
    with sole_run(out):
        waiting: deque[tuple[str, Experiment]] = deque()
        for name, experiment in runs.items():
            if (result := finished_result(out / name)) is not None:
                yield Finished(name, result)
            else:
                waiting.append((name, _with_share_of_cores(experiment, jobs)))
        workers: list[_Worker] = []
        try:
            for _ in range(min(jobs, len(waiting))):
                workers.append(_Worker(out, data_root))
                workers[-1].take(*waiting.popleft())
            while workers:
                ready = wait([worker.connection for worker in workers])
                for worker in [worker for worker in workers if worker.connection in ready]:
                    event = worker.next_event()
                    if isinstance(event, Finished | Failed):
                        _go_on(worker, workers, waiting)
                    if event is not None:
                        yield event
        finally:
            _stop(workers)


def _with_share_of_cores(experiment: Experiment, jobs: int) -> Experiment:
    """Return ``experiment`` with as many clients at a time as leave the other jobs their cores."""
    engine = experiment.engine
    if not isinstance(engine, InProcess) or engine.workers:
        return experiment
    share = InProcess.model_validate({**dict(engine), "workers": max(1, cores() // jobs)})
    return Experiment.model_validate({**dict(experiment), "engine": share})


class _Worker:
    """A process that runs one experiment at a time."""

    def __init__(self, out: Path, data_root: Path | None) -> None:
        self._out, self._data_root = out, data_root
        self.name, self._is_up = "", False
        self.process, self.connection = _spawn(out, data_root)

    def take(self, name: str, experiment: Experiment) -> None:
        """Start a run, in a new process where the old one died. A death just now is noticed at the next event."""
        self.name = name
        if self.connection.closed:
            self.process, self.connection = _spawn(self._out, self._data_root)
            self._is_up = False
        with suppress(ConnectionError):
            self.connection.send((name, experiment.model_dump_json()))

    def next_event(self) -> Event | None:
        """Return what the worker says, or that it died; None where it is up. Raises RunError where it cannot start."""
        try:
            said: Event | str = self.connection.recv()
        except (EOFError, OSError):  # OSError: it was killed in the middle of a word
            self.process.join(_SECONDS_TO_STOP)
            self.connection.close()
            if not self._is_up:
                raise RunError(_why_none_starts(self.process.exitcode)) from None
            return Failed(self.name, _why_it_died(self.process.exitcode))
        if isinstance(said, str):
            self._is_up = said == _UP
            return None
        return said


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
        'that cannot be imported, mend that; a script that fills a table needs if __name__ == "__main__" around its '
        f"calls. {stays}"
    )


def _go_on(worker: _Worker, workers: list[_Worker], waiting: deque[tuple[str, Experiment]]) -> None:
    if waiting:
        worker.take(*waiting.popleft())
    else:
        workers.remove(worker)
        _stop([worker])


def _spawn(out: Path, data_root: Path | None) -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    # Ctrl-C reaches every process of the terminal; only the parent answers it, and workers inherit the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, out, data_root), daemon=True)
        process.start()
    except OSError as error:
        raise RunError(f"a worker process could not be started: {error}; fewer --jobs need fewer of them") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    theirs.close()
    return process, ours


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.process.join(_SECONDS_TO_STOP)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()


class _Told:
    """Passes what a run says on to the parent."""

    def __init__(self, name: str, connection: Connection) -> None:
        self._name, self._connection = name, connection

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Tell where the run begins."""
        del experiment, engine
        self._connection.send(Started(self._name, first_round))

    def preparing(self, what: str) -> None:
        """Tell what happens before the first round."""
        self._connection.send(Preparing(self._name, what))

    def replied(self, replies: int) -> None:
        """Tell nothing: rounds are news enough."""

    def finished_round(self, record: RoundRecord) -> None:
        """Tell of a round."""
        self._connection.send(RoundDone(self._name, record))


def _work(connection: Connection, out: Path, data_root: Path | None) -> None:
    """Run what the parent sends until it stops sending."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    connection.send(_UP)
    with suppress(EOFError):
        while True:
            name, settings = connection.recv()
            connection.send(_attempt(name, Experiment.model_validate_json(settings), out / name, data_root, connection))


def _attempt(
    name: str, experiment: Experiment, directory: Path, data_root: Path | None, connection: Connection
) -> Event:
    if directory.exists() and not (directory / run_directory.CONFIG).exists():
        shutil.rmtree(directory)  # killed before its first file was whole
    try:
        return Finished(name, run(experiment, directory, data_root, _Told(name, connection)))
    except (RunError, UserError) as error:
        return Failed(name, str(error))
    except Exception as error:  # noqa: BLE001 (one cell's surprise must not end the others; it is reported)
        return Failed(name, f"{type(error).__name__}: {error}")


def _die_with_parent() -> None:
    """End this process when the parent is gone, however it went: a resumed table must find nobody writing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
