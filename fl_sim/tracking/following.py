"""Who else is told of a run: trackers, and observers that users name by their import path."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.import_path import in_one_line, load_object
from fl_sim.printable import in_a_line
from fl_sim.simulation.run_log import Observer
from fl_sim.store.run_directory import RoundRecord
from fl_sim.tracking.names import chosen_trackers
from fl_sim.tracking.sending import Live, Say, send_whole

HEARD: Final = tuple(name for name in vars(Observer) if not name.startswith("_"))
"""What an observer may be told of; it has those of these methods that it wants."""


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
