"""How the user's own records are named: ``KIND:PLACE``, and settings of how they are read behind it.

``csv:patients.csv:label=outcome:client=hospital`` in one line, or in a file of settings the table ``{kind = "csv",
place = "patients.csv", label = "outcome", client = "hospital"}``, which is kept as that line: so the name alone says
what a data set is, wherever it stands.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import unquote

from fl_sim.data.known import NAMES
from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened

OwnKind: TypeAlias = Literal["csv", "parquet", "npz", "folder", "leaf", "medmnist", "hf"]

_TEST: Final = ("test", "test_seed")
_TABLE: Final = (
    "label", "classes", "client", "split", *_TEST, "test_file", "drop", "text", "range", "category", "scale", "missing",
)  # fmt: skip

OPTIONS: Final[Mapping[OwnKind, tuple[str, ...]]] = {
    "csv": (*_TABLE, "delimiter", "decimal", "thousands"),
    "parquet": _TABLE,
    "npz": ("classes",),
    "folder": ("classes", "size", "values"),
    "leaf": ("classes", "alphabet"),
    "medmnist": ("classes", "val"),
    "hf": (
        *(key for key in _TABLE if key != "test_file"),
        "image",
        "size",
        "values",
        "config",
        "train_part",
        "test_part",
    ),
}
"""{kind: what may be set of it}"""

PLACES: Final[Mapping[OwnKind, str]] = {"folder": "folder", "leaf": "folder", "hf": "data set"}
"""{kind: what its place is}, where that is not a file"""

OWN: Final = ", ".join(f"{kind}:PATH" for kind in OPTIONS)
"""The forms of such names, for messages."""

_LISTS: Final = frozenset({"classes", "drop", "text"})
_TABLES: Final[Mapping[str, str]] = {"range": "..", "category": "+"}
"""{a setting that each column has one of: what stands between its values}"""

_NEXT: Final = re.compile(r":(?=[A-Za-z_]+(?:\.[^=:]*)?=)")


@dataclass(frozen=True)
class OwnName:
    """A name, taken apart. ``options``: what is set once; ``columns``: {setting: {column: its values}}."""

    kind: OwnKind
    place: str
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    def option(self, key: str) -> str:
        """Return the one value of a setting, nothing where it is not set."""
        return self.options[key][0] if key in self.options else ""

    def of_columns(self, key: str) -> Mapping[str, tuple[str, ...]]:
        """Return {column: its values} of ``key``."""
        return self.columns.get(key, {})


def own_name(name: str) -> OwnName | None:
    """Take ``name`` apart; None for all that is no name of the user's own files.

    Raises UserError for a setting that its kind does not have, or that is given twice.
    """
    head, _, rest = name.partition(":")
    kind = _kind(head)
    if not rest or kind is None:
        return None
    place, *settings = _NEXT.split(rest)
    options: dict[str, tuple[str, ...]] = {}
    columns: dict[str, dict[str, tuple[str, ...]]] = {}
    for setting in settings:
        written, _, value = setting.partition("=")
        key, dot, column = written.partition(".")
        _check_key(kind, key, is_of_column=bool(dot))
        group = columns.setdefault(key, {}) if dot else options
        if (where := unquote(column) if dot else key) in group:
            raise UserError(f"data {shortened(name)}: {written} is set twice; leave one of them out")
        group[where] = _values(key, value)
    return OwnName(kind, place, options, columns)


def is_own(name: str) -> bool:
    """Say whether a data set is the user's own, not a public one."""
    return name not in NAMES


def as_table(name: str) -> dict[str, Any]:
    """Return ``name`` as a table. Raises UserError for a data set that has nothing to set."""
    own = own_name(name)
    if own is None or not OPTIONS[own.kind]:
        having = ", ".join(f"{kind}:" for kind, options in OPTIONS.items() if options)
        raise UserError(f"data={shortened(name)} has no settings inside; the user's own data have some: {having}")
    options = {key: list(values) if key in _LISTS else values[0] for key, values in own.options.items()}
    columns = {key: {column: list(values) for column, values in of.items()} for key, of in own.columns.items()}
    return {"kind": own.kind, "place": own.place, **options, **columns}


def from_table(table: Mapping[str, Any]) -> str:
    """Return the line that a table stands for. Raises UserError for one that is no name of the user's own files."""
    given, place = table.get("kind"), table.get("place")
    kind = _kind(given)
    if kind is None:
        raise UserError(
            f"data as a table is for the user's own files: kind is one of {', '.join(OPTIONS)}, got {given!r}"
            f"{guess(str(given), OPTIONS)}; or name a data set, for example data=digits"
        )
    if not isinstance(place, str) or not place:
        raise UserError(f'data of kind {kind} needs place, where its records lie, for example place = "my.{kind}"')
    parts = [f"{kind}:{place}"]
    for key, value in table.items():
        if key in {"kind", "place"}:
            continue
        _check_key(kind, key, is_of_column=isinstance(value, Mapping))
        if isinstance(value, Mapping):
            parts += [f"{key}.{_quoted(str(column))}={_text(key, values)}" for column, values in value.items()]
        else:
            parts.append(f"{key}={_text(key, value)}")
    return ":".join(parts)


def without_settings(name: str) -> str:
    """Return ``name`` without what is set behind its place."""
    own = own_name(name)
    return name if own is None else f"{own.kind}:{own.place}"


def short_label(name: str) -> str:
    """Return ``name`` for the head of a table: a few letters, other ones for other settings, stand for the settings."""
    place = without_settings(name)
    return name if place == name else f"{place} [{hashlib.sha256(name.encode()).hexdigest()[:4]}]"


def _kind(text: object) -> OwnKind | None:
    return next((kind for kind in OPTIONS if kind == text), None)


def _check_key(kind: OwnKind, key: str, *, is_of_column: bool) -> None:
    known = OPTIONS[kind]
    if key not in known:
        valid = f"valid: {', '.join(known)}" if known else f"{kind} data have none"
        raise UserError(f"unknown setting data.{shortened(key)} of {kind} data{guess(key, known)}; {valid}")
    if is_of_column != (key in _TABLES):
        example = {"range": "age=0..100", "category": "sex=female+male"}.get(key, "")
        raise UserError(
            f"data.{key} is set for each column, for example data.{key}.{example}"
            if example
            else f"data.{key} is a single value, it has no settings inside"
        )


def _values(key: str, text: str) -> tuple[str, ...]:
    between = _TABLES.get(key, "+" if key in _LISTS else "")
    return tuple(unquote(part) for part in text.split(between)) if between else (unquote(text),)


def _text(key: str, value: Any) -> str:
    between = _TABLES.get(key, "+" if key in _LISTS else "")
    if isinstance(value, list | tuple):
        if not between:
            raise UserError(f"data.{key} is {value!r}: it takes one value (several labels a record are not supported)")
        return between.join(_quoted(str(part), between) for part in value)
    return str(value).replace(":", "%3A") if between else _quoted(str(value))


def _quoted(text: str, between: str = "") -> str:
    """Return ``text`` with what has a meaning in a name in the form %XX."""
    special = "%:=" + between.strip(".")
    return "".join(f"%{ord(letter):02X}" if letter in special or letter < " " else letter for letter in text)
