"""Who else is told of a run, trackers and observers that users name by their import path, and what trackers are told.

That is nothing but what the run's own files say, under the names of ``rounds.csv``, sent from a background thread: a
slow tracker delays no round, and a failing one aborts no run.
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

from pydantic import TypeAdapter, ValidationError

from fl_sim.errors import RunError, UserError, in_a_line
from fl_sim.experiment.experiment import Experiment
from fl_sim.own_code import in_one_line, load_object
from fl_sim.report.measures import flat_settings, measures, of_round
from fl_sim.settings import read_table
from fl_sim.simulation.run_log import Observer, Silent
from fl_sim.store.files import read_whole, write_whole
from fl_sim.store.run_directory import CONFIG, RoundRecord, read_result, read_rounds
from fl_sim.tracking.trackers import TRACKERS, Mark, Session, Subject, chosen_trackers

Say: TypeAlias = Callable[[str], None]

SECONDS_TOGETHER: Final = 5.0
"""Rounds of so many seconds are sent at once, which is what keeps the cost of short rounds down."""

LONGEST_SECONDS: Final = 60.0
"""How long the end of a run waits for trackers."""

HEARD: Final = tuple(name for name in vars(Observer) if not name.startswith("_"))
"""What an observer may be told of; it has those of these methods that it wants."""

MARKS: Final = "tracking.json"
_LONGEST: Final = 2**16
_MARKS: Final = TypeAdapter(dict[str, Mark])


@dataclass(frozen=True)
class Following:
    """Who is told of each run. ``observers``: import paths of what is called with a run's directory to make one."""

    trackers: tuple[str, ...] = ()
    observers: tuple[str, ...] = ()

    def of(self, directory: Path, first: Observer, say: Say | None = None, given: object = None) -> "Several":
        """Return an observer that tells ``first`` and all others of the run in ``directory``.

        ``say``: where a tracker's trouble is told (default: standard error); ``given``: an observer from Python.
        Raises UserError for an import path that leads to no observer.
        """
        say = say or _to_standard_error
        own = [_own(path, load_object(path, "observer"), directory) for path in self.observers]
        if given is not None:
            own.append(_Own(type(given).__name__, _with_methods(type(given).__name__, given)))
        live = [Live(directory, self.trackers, say)] if self.trackers else []
        return Several([first, *live, *own])

    def catch_up(self, directory: Path, say: Say | None = None) -> None:
        """Send a run that was finished before to the trackers that do not have it."""
        if self.trackers:
            send_whole(directory, self.trackers, say or _to_standard_error)


NOBODY: Final = Following()


def following_of(track: str | Iterable[str]) -> Following:
    """Return who is told: the trackers and, by their import paths, the observers in ``track``.

    Raises UserError for a tracker that is unknown or not installed, and a path that leads to nothing.
    """
    names = chosen_trackers(track)
    paths = tuple(name for name in names if ":" in name)
    for path in paths:
        load_object(path, "observer")
    return Following(tuple(name for name in names if ":" not in name), paths)


@dataclass
class Sender:
    """Sends one run to ``trackers``. One that fails is said to, once, and is sent nothing more."""

    directory: Path
    trackers: Sequence[str]
    say: Say
    failed: list[str] = field(default_factory=list)
    sessions: dict[str, Session] = field(default_factory=dict)

    def open(self, first_round: int) -> None:
        """Open all trackers for a run that goes on with ``first_round``; send what they lack of the rounds before."""
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
                    note_sent(self.directory, tracker, new[-1].round)

    def end(self, facts: Mapping[str, Any]) -> None:
        """Send what ``result.json`` says, unless a tracker has it."""
        for tracker, session in list(self.sessions.items()):
            with self._going_on(tracker):
                session.end(str(facts["status"]), results_of(facts), int(facts["rounds"]))
                note_ended(self.directory, tracker, facts)

    @contextmanager
    def _going_on(self, tracker: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 (whatever a tracker raises, the run goes on; it is said)
            self.sessions.pop(tracker, None)
            self.failed.append(tracker)
            self.say(
                f"{tracker} is told no more of this run: {in_one_line(error)}; the run itself is not affected, and "
                f"'fl-sim export {self.directory} --to {tracker}' sends what is missing"
            )


def send_whole(directory: Path, trackers: Sequence[str], say: Say) -> Sender:
    """Send what the files of a run say, as far as trackers do not have it, and return how that went."""
    rounds, facts = read_rounds(directory), read_result(directory)
    missing = [tracker for tracker in trackers if not is_sent(directory, tracker, len(rounds), facts)]
    sender = Sender(directory, missing, say)
    sender.open(len(rounds) + 1)
    if facts is not None:
        sender.end(facts)
    return sender


class Live(Silent):
    """Tells trackers of a run while it goes on; of a private one when it is over.

    When a private round ends tells how long clients took, and so how many records they hold: its rounds are sent all at
    once, behind the last of them.
    """

    def __init__(self, directory: Path, trackers: Sequence[str], say: Say) -> None:
        self._sender = Sender(directory, trackers, say)
        self._queue: SimpleQueue[RoundRecord | Mapping[str, Any]] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_private = False

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Open the trackers, meanwhile."""
        del engine
        self._is_private = experiment.is_private
        if not self._is_private:
            self._start(self._send_all, first_round)

    def finished_round(self, record: RoundRecord) -> None:
        """Note a round to send."""
        if not self._is_private:
            self._queue.put(record)

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Send what is left, and wait for it."""
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
        """Return the rounds of the next seconds, and the run's results where it has ended."""
        said, records = self._queue.get(), []
        until = time.monotonic() + SECONDS_TOGETHER
        while isinstance(said, RoundRecord):
            records.append(said)
            try:
                said = self._queue.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                return records, None
        return records, said


def subject_of(directory: Path, tracker: str, *, anew: bool = False) -> Subject:
    """Return the run in ``directory`` for ``tracker``; ``anew``: as one that the tracker has never heard of.

    Raises UserError where ``tracking.json`` is damaged, or the settings are.
    """
    marks = _read(directory)
    if anew or tracker not in marks:
        marks[tracker] = Mark(secrets.token_hex(8))
        _write(directory, marks)
    name = directory.resolve().name
    return Subject(name, directory, flat_settings(read_table(directory / CONFIG)), marks[tracker])


def note_sent(directory: Path, tracker: str, last_round: int) -> None:
    """Note that ``tracker`` has rounds up to ``last_round``."""
    marks = _read(directory)
    _write(directory, {**marks, tracker: replace(marks[tracker], sent=last_round)})


def note_ended(directory: Path, tracker: str, facts: Mapping[str, Any]) -> None:
    """Note that ``tracker`` has the results."""
    marks = _read(directory)
    _write(directory, {**marks, tracker: replace(marks[tracker], ended=ending_of(facts))})


def is_sent(directory: Path, tracker: str, num_rounds: int, facts: Mapping[str, Any] | None) -> bool:
    """Say whether ``tracker`` has so many rounds and, where there are ``facts``, the results."""
    mark = _read(directory).get(tracker)
    return mark is not None and mark.sent == num_rounds and (facts is None or mark.ended == ending_of(facts))


def ending_of(facts: Mapping[str, Any]) -> str:
    """Return what tells a ``result.json`` from the other ones that a run which goes on may have had before."""
    return f"{facts['status']} {facts.get('chain', '')}"


def results_of(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a ``result.json``, each under its name in ``table.csv`` behind ``result.``."""
    return {f"result.{name}": value for name, value in measures(facts).items()}


class _Passing:
    """Hears everything, and passes it on under the name that it was told by."""

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Tell where the run begins."""
        self._tell("started", experiment, engine, first_round)

    def preparing(self, what: str) -> None:
        """Tell what happens before the first round."""
        self._tell("preparing", what)

    def replied(self, replies: int) -> None:
        """Tell how many clients have answered."""
        self._tell("replied", replies)

    def finished_round(self, record: RoundRecord) -> None:
        """Tell of a round."""
        self._tell("finished_round", record)

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Tell what the run came to."""
        self._tell("ended", facts)

    def _tell(self, what: str, *news: object) -> None:
        raise NotImplementedError


class Several(_Passing):
    """Tells all of ``observers``, one after another."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self.has_started = False

    def _tell(self, what: str, *news: object) -> None:
        self.has_started |= what == "started"
        for observer in self._observers:
            getattr(observer, what)(*news)


class _Own(_Passing):
    """A user's observer, which has the methods that it wants; what it raises stops the run, in one line."""

    def __init__(self, name: str, observer: object) -> None:
        self._name, self._observer = name, observer

    def _tell(self, what: str, *news: object) -> None:
        hear: Callable[..., object] | None = getattr(self._observer, what, None)
        if hear is None:
            return
        try:
            hear(*news)
        except Exception as error:
            raise RunError(
                f"observer {self._name} failed in {what}: {in_one_line(error)}; mend it, and the same command goes on"
            ) from error


def _own(path: str, factory: Any, directory: Path) -> _Own:
    try:
        made = factory(directory)
    except Exception as error:
        raise UserError(
            f"observer {path!r} cannot be made: called with the run's directory it failed with {in_one_line(error)}"
        ) from error
    return _Own(path, _with_methods(path, made))


def _with_methods(name: str, observer: object) -> object:
    if not any(callable(getattr(observer, method, None)) for method in HEARD):
        raise UserError(f"observer {name!r} is a {type(observer).__name__} with none of the methods {', '.join(HEARD)}")
    return observer


def _to_standard_error(line: str) -> None:
    sys.stderr.write(f"{in_a_line(line)}\n")


def _opened(tracker: str, directory: Path, first_round: int) -> Session:
    """Return a session whose rounds are this run's: where they are more than it had, those are of an earlier run."""
    subject = subject_of(directory, tracker)
    if subject.mark.sent >= first_round:
        subject = subject_of(directory, tracker, anew=True)
    opened = TRACKERS[tracker](subject)
    return opened if opened.last_round < first_round else TRACKERS[tracker](subject_of(directory, tracker, anew=True))


def _read(directory: Path) -> dict[str, Mark]:
    path = directory / MARKS
    if not path.exists():
        return {}
    try:
        return _MARKS.validate_json(read_whole(path, _LONGEST))
    except ValidationError as error:
        raise UserError(f"{path} is damaged: delete it, and trackers take the run for a new one") from error


def _write(directory: Path, marks: Mapping[str, Mark]) -> None:
    write_whole(directory / MARKS, _MARKS.dump_json(dict(marks), indent=2) + b"\n")
