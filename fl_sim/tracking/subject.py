"""What a tracker is told of a run: nothing but what the run's own files say, under the names of ``rounds.csv``."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

from pydantic import Field, TypeAdapter, ValidationError

from fl_sim.errors import UserError
from fl_sim.report.measures import Value, flat_settings, measures
from fl_sim.settings_file import read_table
from fl_sim.store.files import read_whole, write_whole
from fl_sim.store.run_directory import CONFIG

MARKS: Final = "tracking.json"
_LONGEST: Final = 2**16


@dataclass(frozen=True)
class Mark:
    """What ``tracking.json`` says of one tracker: the run's ``identity`` there, and what was sent.

    ``sent``: the last round; ``ended``: the ending, as ``ending_of`` has it, empty before the end.
    """

    identity: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    sent: Annotated[int, Field(ge=0)] = 0
    ended: str = ""


_MARKS: Final = TypeAdapter(dict[str, Mark])


@dataclass(frozen=True)
class Subject:
    """The run in ``directory`` as a tracker knows it. ``settings``: all of ``config.toml``, by dotted names."""

    name: str
    directory: Path
    settings: Mapping[str, Value]
    mark: Mark


class Session(Protocol):
    """A tracker that is told of one run. Any exception of its library may leave its methods."""

    @property
    def last_round(self) -> int:
        """Return the last round that the tracker holds, 0 where there is none."""
        ...

    @property
    def place(self) -> str:
        """Return where a user finds the run, in words."""
        ...

    def send(self, rounds: Mapping[int, Mapping[str, float]]) -> None:
        """Show the numbers of further rounds, by round and name."""
        ...

    def end(self, status: str, results: Mapping[str, float], last_round: int) -> None:
        """Show what the run came to, after ``last_round``; ``status``: finished, failed or interrupted."""
        ...


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
