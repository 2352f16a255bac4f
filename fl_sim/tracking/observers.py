"""Observers of a run: trackers, and objects that users name by their import path.

Trackers get the content of the run's own files, under the names of ``rounds.csv``, from a background thread: a slow
tracker delays no round, and a failing one aborts no run.
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
from fl_sim.simulation.measuring import OwnMetrics
from fl_sim.simulation.run_log import Observer, Silent
from fl_sim.store.files import read_whole, write_whole
from fl_sim.store.run_directory import CONFIG, RoundRecord, read_result, read_rounds
from fl_sim.tracking.trackers import TRACKERS, Session, TrackedRun, TrackerState, chosen_trackers

Say: TypeAlias = Callable[[str], None]

SECONDS_TOGETHER: Final = 5.0
"""Rounds of so many seconds are sent at once, which keeps the cost of short rounds down."""

LONGEST_SECONDS: Final = 60.0
"""The timeout for trackers at the end of a run."""

METRICS: Final = "metrics"
"""The method of a user's observer that measures the model of a round."""

EVENTS: Final = (*(name for name in vars(Observer) if not name.startswith("_")), METRICS)
"""The methods of an observer; a user's observer has some of them."""

TRACKING: Final = "tracking.json"
_LONGEST: Final = 2**16
_STATES: Final = TypeAdapter(dict[str, TrackerState])


@dataclass(frozen=True)
class Tracking:
    """The trackers and observers of each run. ``observers``: import paths of callables that take a run's directory."""

    trackers: tuple[str, ...] = ()
    observers: tuple[str, ...] = ()

    def of(self, directory: Path, first: Observer, say: Say | None = None, given: object = None) -> "ObserverList":
        """Return an observer that calls ``first`` and all others for the run in ``directory``.

        ``say``: shows a tracker's failure (default: on standard error); ``given``: an observer from Python.
        Raises UserError for an import path without an observer.
        """
        own: list[tuple[str, object]] = []
        for path in self.observers:
            factory: Callable[[Path], object] = load_object(path, "observer")
            try:
                own.append((path, factory(directory)))
            except Exception as error:
                raise UserError(
                    f"observer {path!r} cannot be made: called with the run's directory it failed with "
                    f"{in_one_line(error)}"
                ) from error
        if given is not None:
            own.append((type(given).__name__, given))
        live = [LiveTracker(directory, self.trackers, say or _to_standard_error)] if self.trackers else []
        return ObserverList([first, *live], own)

    def catch_up(self, directory: Path, say: Say) -> None:
        """Send an earlier finished run to the trackers that do not have it."""
        if self.trackers:
            send_whole(directory, self.trackers, say)


NO_TRACKING: Final = Tracking()


def tracking_of(track: str | Iterable[str]) -> Tracking:
    """Return the trackers and the observers, by their import paths, in ``track``.

    Raises UserError for a tracker that is unknown or not installed, and for a path without an object.
    """
    names = chosen_trackers(track)
    paths = tuple(name for name in names if ":" in name)
    for path in paths:
        load_object(path, "observer")
    return Tracking(tuple(name for name in names if ":" not in name), paths)


@dataclass
class Sender:
    """Sends one run to ``trackers``. A failure is shown once, and nothing more is sent to that tracker."""

    directory: Path
    trackers: Sequence[str]
    say: Say
    failed: list[str] = field(default_factory=list)
    sessions: dict[str, Session] = field(default_factory=dict)

    def open(self, first_round: int) -> None:
        """Open all trackers for a run that continues with ``first_round``; send missing earlier rounds."""
        earlier = read_rounds(self.directory)[: first_round - 1]
        for tracker in self.trackers:
            with self._going_on(tracker):
                self.sessions[tracker] = _opened(tracker, self.directory, first_round)
        self.send(earlier)

    def send(self, records: Sequence[RoundRecord]) -> None:
        """Send the rounds that a tracker does not have."""
        for tracker, session in list(self.sessions.items()):
            if new := [record for record in records if record.round > session.last_round]:
                with self._going_on(tracker):
                    session.send({record.round: of_round(record) for record in new})
                    states = _read(self.directory)
                    states[tracker] = replace(states[tracker], sent=new[-1].round)
                    _write(self.directory, states)

    def end(self, facts: Mapping[str, Any]) -> None:
        """Send the numbers of ``result.json``, named as in ``table.csv`` with the prefix ``result.``."""
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
                f"{tracker} gets no more of this run: {in_one_line(error)}; the run itself is not affected, and "
                f"'fl-sim export {self.directory} --to {tracker}' sends what is missing"
            )


def send_whole(directory: Path, trackers: Sequence[str], say: Say) -> Sender:
    """Send the content of a run's files that trackers do not have, and return the sender with its failures."""
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
    """Sends a run to trackers round by round; a private run at its end.

    The end time of a private round would reveal the duration of local training, and so the number of records: all its
    rounds are sent together after the last one.
    """

    def __init__(self, directory: Path, trackers: Sequence[str], say: Say) -> None:
        self._sender = Sender(directory, trackers, say)
        self._queue: SimpleQueue[RoundRecord | Mapping[str, Any]] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_private = False

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Open the trackers in the background."""
        del engine
        self._is_private = experiment.is_private
        if not self._is_private:
            self._start(self._send_all, first_round)

    def finished_round(self, record: RoundRecord) -> None:
        """Add a round to the queue."""
        if not self._is_private:
            self._queue.put(record)

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Send the rest, and wait."""
        if self._is_private:
            self._start(send_whole, self._sender.directory, self._sender.trackers, self._sender.say)
        self._queue.put(facts)
        if self._thread is not None:
            self._thread.join(LONGEST_SECONDS)
            if self._thread.is_alive():
                self._sender.say(
                    f"trackers were not done after {LONGEST_SECONDS:g} seconds and are left: 'fl-sim export "
                    f"{self._sender.directory} --to {','.join(self._sender.trackers)}' sends what is missing"
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
        """Return the rounds of the next seconds, and the run's results once it has ended."""
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
    """Return the identity of a ``result.json``, which changes when the run continues."""
    return f"{facts['status']} {facts.get('chain', '')}"


class ObserverList:
    """Calls all of ``observers``, then the users' ``own`` (name, observer), which may lack methods.

    An exception of a user's observer stops the run, in one line. Raises UserError for one without any method.
    """

    def __init__(self, observers: Sequence[Observer], own: Sequence[tuple[str, object]]) -> None:
        for name, observer in own:
            if not any(callable(getattr(observer, event, None)) for event in EVENTS):
                raise UserError(
                    f"observer {name!r} is a {type(observer).__name__} with none of the methods {', '.join(EVENTS)}"
                )
        self._observers, self._own = observers, own
        self.own_metrics: dict[str, OwnMetrics] = {
            name: getattr(observer, METRICS) for name, observer in own if callable(getattr(observer, METRICS, None))
        }
        self.has_started = False

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Report the start of the run."""
        self.has_started = True
        self._call("started", experiment, engine, first_round)

    def preparing(self, what: str) -> None:
        """Report the preparation before the first round."""
        self._call("preparing", what)

    def replied(self, replies: int) -> None:
        """Report the number of replies in the round."""
        self._call("replied", replies)

    def finished_round(self, record: RoundRecord) -> str | None:
        """Report a round; return the reason where one of the users' observers ends the run by returning True."""
        reasons = []
        for name, returned in self._call("finished_round", record):
            if not (returned is None or isinstance(returned, bool | np.bool_)):
                raise RunError(
                    f"observer {name} returned {in_one_line(repr(returned))} from finished_round: return True to end "
                    "the run after this round, None or False to go on; mend it, and the same command goes on"
                )
            if returned:
                reasons.append(f"observer {name} ended the run after round {record.round}")
        return "; ".join(reasons) or None

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Report the result of the run."""
        self._call("ended", facts)

    def _call(self, event: str, *arguments: object) -> list[tuple[str, object]]:
        """Call a method of all; return what those of the users return, by name."""
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
                        f"observer {name} failed in {event}: {with_place(error)}; mend it, and the same command goes on"
                    ) from error
        return returned


def _to_standard_error(line: str) -> None:
    sys.stderr.write(f"{in_a_line(line)}\n")


def _opened(tracker: str, directory: Path, first_round: int) -> Session:
    """Return a session with rounds of this run alone: more rounds than the run had are those of an earlier run."""
    run = _tracked_run(directory, tracker)
    if run.state.sent >= first_round:
        run = _tracked_run(directory, tracker, anew=True)
    opened = TRACKERS[tracker](run)
    return opened if opened.last_round < first_round else TRACKERS[tracker](_tracked_run(directory, tracker, anew=True))


def _tracked_run(directory: Path, tracker: str, *, anew: bool = False) -> TrackedRun:
    """Return the run in ``directory`` for ``tracker``, with a new identity if it has none or ``anew``.

    Raises UserError for a damaged ``tracking.json`` or damaged settings.
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
        raise UserError(f"{path} is damaged: delete it, and trackers take the run for a new one") from error


def _write(directory: Path, states: Mapping[str, TrackerState]) -> None:
    write_whole(directory / TRACKING, _STATES.dump_json(dict(states), indent=2) + b"\n")
