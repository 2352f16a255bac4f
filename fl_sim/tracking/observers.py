"""Observers of a run: trackers such as MLflow, and the user's own objects.

The user names these objects by import paths in a command. Trackers receive the numbers of the run's files, under the
column names of ``rounds.csv``. A background thread sends these numbers, so a slow tracker never delays a round, and a
failing tracker never aborts a run.
"""

import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, TypeAlias

import numpy as np
from pydantic import TypeAdapter, ValidationError

from fl_sim.errors import RunError, UserError, in_a_line
from fl_sim.experiment.experiment import Experiment
from fl_sim.own_code import in_one_line, load_object, with_place
from fl_sim.report.measures import flat_settings, measures, of_round
from fl_sim.settings import read_table
from fl_sim.simulation.run_log import Observer, Silent
from fl_sim.store.files import read_whole, write_whole
from fl_sim.store.run_directory import CONFIG, RoundRecord, read_result, read_rounds
from fl_sim.tracking.trackers import TRACKERS, Session, TrackedRun, TrackerState, chosen_trackers
from fl_sim.training.own_metrics import OwnMetrics

Say: TypeAlias = Callable[[str], None]
"""A function that shows a line of text to the user."""

SECONDS_TOGETHER: Final = 5.0
"""The number of seconds for which finished rounds are collected and then sent in one request, to save requests."""

LONGEST_SECONDS: Final = 60.0
"""The number of seconds for which a run waits at its end until all data are sent to the trackers."""

METRICS: Final = "metrics"
"""The name of an optional method of a user's observer.

The method computes user-defined metrics of the model after a round.
"""

EVENTS: Final = (*(name for name in vars(Observer) if not name.startswith("_")), METRICS)
"""The names of all methods of an observer. A user's observer needs at least one of these methods."""

TRACKING: Final = "tracking.json"
_LONGEST: Final = 2**16
_STATES: Final = TypeAdapter(dict[str, TrackerState])


@dataclass(frozen=True)
class Tracking:
    """The trackers and the user's observers that receive the events of each run of a command.

    ``trackers``: the names of trackers, such as mlflow. ``observers``: import paths of functions or classes that create
    an observer from the run directory.
    """

    trackers: tuple[str, ...] = ()
    observers: tuple[str, ...] = ()

    def of(self, directory: Path, first: Observer, say: Say | None = None, given: object = None) -> "ObserverList":
        """Create the observers of the run in ``directory``, and return one observer that calls all of them.

        ``first``: an observer that is called before all others. ``say``: a function that shows the failure of a tracker
        to the user; None prints the failure on standard error. ``given``: a user's observer that is already an object.
        Raises UserError if an observer cannot be created, or if it has none of the methods of an observer.
        """
        own: list[tuple[str, object]] = []
        for path in self.observers:
            factory: Callable[[Path], object] = load_object(path, "observer")
            try:
                own.append((path, factory(directory)))
            except Exception as error:
                raise UserError(
                    f"observer {path!r} cannot be created: called with the run directory, it failed with "
                    f"{in_one_line(error)}"
                ) from error
        if given is not None:
            own.append((type(given).__name__, given))
        live = [LiveTracker(directory, self.trackers, say or _to_standard_error)] if self.trackers else []
        return ObserverList([first, *live], own)

    def catch_up(self, directory: Path, say: Say) -> None:
        """Send the rounds and results of the finished run in ``directory`` to the trackers.

        A tracker receives only the rounds and results that it does not have yet.
        """
        if self.trackers:
            send_whole(directory, self.trackers, say)


NO_TRACKING: Final = Tracking()


def tracking_of(track: str | Iterable[str]) -> Tracking:
    """Parse the option ``--track``: names of trackers and import paths of observers, as a list or with commas.

    Raises UserError for a tracker that is unknown or not installed, and for an import path that does not exist.
    """
    names = chosen_trackers(track)
    paths = tuple(name for name in names if ":" in name)
    for path in paths:
        load_object(path, "observer")
    return Tracking(tuple(name for name in names if ":" not in name), paths)


@dataclass
class Sender:
    """Sends the measures of one run to ``trackers``. After its first failure, a tracker receives nothing more.

    ``directory``: the run directory. ``say``: a function that shows a failure to the user, once per tracker.
    ``failed``: the trackers that have failed. ``sessions``: {tracker: its open session}.
    """

    directory: Path
    trackers: Sequence[str]
    say: Say
    failed: list[str] = field(default_factory=list)
    sessions: dict[str, Session] = field(default_factory=dict)

    def open(self, first_round: int) -> None:
        """Connect to each tracker, and send it the missing earlier rounds. ``first_round``: the run's next round."""
        earlier = read_rounds(self.directory)[: first_round - 1]
        for tracker in self.trackers:
            with self._going_on(tracker):
                self.sessions[tracker] = _opened(tracker, self.directory, first_round)
        self.send(earlier)

    def send(self, records: Sequence[RoundRecord]) -> None:
        """Send the measures of rounds in ``records`` to each tracker, except for rounds that it already has."""
        for tracker, session in list(self.sessions.items()):
            if new := [record for record in records if record.round > session.last_round]:
                with self._going_on(tracker):
                    session.send({record.round: of_round(record) for record in new})
                    states = _read(self.directory)
                    states[tracker] = replace(states[tracker], sent=new[-1].round)
                    _write(self.directory, states)

    def end(self, facts: Mapping[str, Any]) -> None:
        """Send the numbers in ``facts``, the content of ``result.json``, and close all sessions.

        The names are the column names of ``table.csv`` with a prefix, such as ``result.accuracy``.
        """
        results = {f"result.{name}": value for name, value in measures(facts).items()}
        for tracker, session in list(self.sessions.items()):
            with self._going_on(tracker):
                session.end(str(facts["status"]), results, int(facts["rounds"]))
                states = _read(self.directory)
                states[tracker] = replace(states[tracker], ended=ending_of(facts))
                _write(self.directory, states)

    @contextmanager
    def _going_on(self, tracker: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 (no failure of a tracker stops a run)
            self.sessions.pop(tracker, None)
            self.failed.append(tracker)
            self.say(
                f"{tracker} receives no further data of this run: {in_one_line(error)}; the run itself is not "
                f"affected, and 'fl-sim export {self.directory} --to {tracker}' sends the missing data"
            )


def send_whole(directory: Path, trackers: Sequence[str], say: Say) -> Sender:
    """Send the rounds and results in the run directory to each tracker, except for rounds and results that it has.

    Returns the sender, whose attribute ``failed`` lists the trackers that failed.
    """
    rounds, facts = read_rounds(directory), read_result(directory)
    states = _read(directory)
    missing = []
    for tracker in trackers:
        state = states.get(tracker)
        is_sent = state is not None and state.sent == len(rounds) and (not facts or state.ended == ending_of(facts))
        if not is_sent:
            missing.append(tracker)
    sender = Sender(directory, missing, say)
    sender.open(len(rounds) + 1)
    if facts is not None:
        sender.end(facts)
    return sender


class LiveTracker(Silent):
    """An observer that sends a run to trackers after every round; a private run is sent only at its end.

    A private run is a run with a privacy guarantee. A tracker stores the time at which a round was sent. In a private
    run, this time would reveal the duration of local training, and so the number of records. So all rounds of a private
    run are sent together after the last round.
    """

    def __init__(self, directory: Path, trackers: Sequence[str], say: Say) -> None:
        self._sender = Sender(directory, trackers, say)
        self._queue: SimpleQueue[RoundRecord | Mapping[str, Any]] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_private = False

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Start the background thread, which connects to the trackers.

        In a private run, the thread starts at the end of the run instead.
        """
        del engine
        self._is_private = experiment.is_private
        if not self._is_private:
            self._start(self._send_all, first_round)

    def finished_round(self, record: RoundRecord) -> None:
        """Pass the round to the background thread. The rounds of a private run are sent at the end of the run."""
        if not self._is_private:
            self._queue.put(record)

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Pass the results to the background thread, and wait at most 60 seconds until they are sent."""
        if self._is_private:
            self._start(send_whole, self._sender.directory, self._sender.trackers, self._sender.say)
        self._queue.put(facts)
        if self._thread is not None:
            self._thread.join(LONGEST_SECONDS)
            if self._thread.is_alive():
                self._sender.say(
                    f"after {LONGEST_SECONDS:g} seconds, trackers had not received all data, and the run ends: 'fl-sim "
                    f"export {self._sender.directory} --to {','.join(self._sender.trackers)}' sends the missing data"
                )

    def _start(self, target: Callable[..., object], *arguments: object) -> None:
        self._thread = Thread(target=target, args=arguments, daemon=True, name="fl-sim-trackers")
        self._thread.start()

    def _send_all(self, first_round: int) -> None:
        self._sender.open(first_round)
        facts: Mapping[str, Any] | None = None
        while facts is None:
            records, facts = self._waited()
            self._sender.send(records)
        self._sender.end(facts)

    def _waited(self) -> tuple[list[RoundRecord], Mapping[str, Any] | None]:
        """Collect rounds from the queue for ``SECONDS_TOGETHER`` seconds, or until the run ends.

        Return (rounds, results of the run); the results are None if the run has not ended.
        """
        said, records = self._queue.get(), []
        until = time.monotonic() + SECONDS_TOGETHER
        while isinstance(said, RoundRecord):
            records.append(said)
            try:
                said = self._queue.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                return records, None
        return records, said


def ending_of(facts: Mapping[str, Any]) -> str:
    """Return an identifier of the run's results. ``facts``: the content of ``result.json``.

    The identifier changes if the run gets new results, for example after more rounds.
    """
    return f"{facts['status']} {facts.get('chain', '')}"


class ObserverList:
    """Calls several observers as if they were one: first ``observers`` (of fl-sim), then ``own`` (of the user).

    ``own``: pairs (name, object). A user's observer need not have all methods. An exception in a user's observer stops
    the run with an error message of one line. Raises UserError for a user's observer that has none of the methods of an
    observer.
    """

    def __init__(self, observers: Sequence[Observer], own: Sequence[tuple[str, object]]) -> None:
        for name, observer in own:
            if not any(callable(getattr(observer, event, None)) for event in EVENTS):
                raise UserError(
                    f"observer {name!r} is a {type(observer).__name__} with none of the methods {', '.join(EVENTS)}; "
                    "define at least one of them"
                )
        self._observers, self._own = observers, own
        self.own_metrics: Mapping[str, OwnMetrics] = {
            name: getattr(observer, METRICS) for name, observer in own if callable(getattr(observer, METRICS, None))
        }
        self.has_started = False

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Report to all observers that the run starts, or resumes with ``first_round``."""
        self.has_started = True
        self._call("started", experiment, engine, first_round)

    def preparing(self, what: str) -> None:
        """Report to all observers that a preparation before the first round starts; ``what`` describes it."""
        self._call("preparing", what)

    def replied(self, replies: int) -> None:
        """Report to all observers how many clients of the current round have replied."""
        self._call("replied", replies)

    def finished_round(self, record: RoundRecord) -> str | None:
        """Report the measures of a finished round to all observers.

        If a user's observer returns True, the run ends after this round, and this method returns the reason as text.
        Otherwise it returns None.
        """
        reasons = []
        for name, returned in self._call("finished_round", record):
            if not (returned is None or isinstance(returned, bool | np.bool_)):
                raise RunError(
                    f"observer {name} returned {in_one_line(repr(returned))} from finished_round: return True to end "
                    "the run after this round, None or False to continue; correct it, and the same command resumes"
                )
            if returned:
                reasons.append(f"observer {name} ended the run after round {record.round}")
        return "; ".join(reasons) or None

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Report to all observers that the run has ended. ``facts``: the content of ``result.json``."""
        self._call("ended", facts)

    def _call(self, event: str, *arguments: object) -> list[tuple[str, object]]:
        """Call the method ``event`` of all observers; return (name, returned value) of the user's observers."""
        returned = []
        for observer in self._observers:
            getattr(observer, event)(*arguments)
        for name, own in self._own:
            method: Callable[..., object] | None = getattr(own, event, None)
            if method is not None:
                try:
                    returned.append((name, method(*arguments)))
                except Exception as error:
                    raise RunError(
                        f"observer {name} failed in {event}: {with_place(error)}; correct it, and the same command "
                        "resumes the run"
                    ) from error
        return returned


def _to_standard_error(line: str) -> None:
    sys.stderr.write(f"{in_a_line(line)}\n")


def _opened(tracker: str, directory: Path, first_round: int) -> Session:
    """Open a session of ``tracker`` for a run whose next round is ``first_round``.

    The tracker may already have a round with this number, from an earlier run in the same directory. In this case the
    run gets a new identifier, so that the tracker does not mix the rounds of both runs.
    """
    run = _tracked_run(directory, tracker)
    if run.state.sent >= first_round:
        run = _tracked_run(directory, tracker, anew=True)
    opened = TRACKERS[tracker](run)
    return opened if opened.last_round < first_round else TRACKERS[tracker](_tracked_run(directory, tracker, anew=True))


def _tracked_run(directory: Path, tracker: str, *, anew: bool = False) -> TrackedRun:
    """Return the name and the settings of the run in ``directory``, and the state of ``tracker`` for this run.

    If ``anew`` is True, or if the run has no identifier in the tracker yet, the run gets a new random identifier.
    Raises UserError for a damaged ``tracking.json`` or ``config.toml``.
    """
    states = _read(directory)
    if anew or tracker not in states:
        states[tracker] = TrackerState(secrets.token_hex(8))
        _write(directory, states)
    settings = flat_settings(read_table(directory / CONFIG))
    return TrackedRun(directory.resolve().name, directory, settings, states[tracker])


def _read(directory: Path) -> dict[str, TrackerState]:
    path = directory / TRACKING
    if not path.exists():
        return {}
    try:
        return _STATES.validate_json(read_whole(path, _LONGEST))
    except ValidationError as error:
        raise UserError(f"{path} is damaged: delete it, and trackers will receive the run as a new run") from error


def _write(directory: Path, states: Mapping[str, TrackerState]) -> None:
    write_whole(directory / TRACKING, _STATES.dump_json(dict(states), indent=2) + b"\n")
