"""Names that installed packages give to kinds: fl-sim's own, and those of any other package, by entry points.

A package's metadata tell the names of a group and where each kind is defined, without importing any of it; ours are in
pyproject.toml.
"""

import importlib.metadata
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from fl_sim.errors import UserError
from fl_sim.kinds import field_defaults, is_settings
from fl_sim.own_code import load_object

OURS: Final = "fl-sim"
"""The package whose names are the kinds that come with fl-sim."""

SHORT_NAMES: Final = "fl_sim.kinds"
"""The group of short names for kinds of any setting."""

_PYPROJECT: Final = Path(__file__).parents[1] / "pyproject.toml"
_PREFIX: Final = "fl_sim."
_AGAIN: Final = "run 'pip install' again where its code is, for example 'pip install -e .'"


@dataclass(frozen=True)
class Named:
    """A ``name`` that a ``package`` gives, in a ``group``, to what is at an import ``path``."""

    group: str
    name: str
    path: str
    package: str

    def __str__(self) -> str:
        """Return what a message calls it."""
        return f"entry point {self.name!r} of the package {self.package} in the group {self.group}"


def names_in(group: str) -> list[str]:
    """Return the names of a group: ours first, each part in alphabetical order, as metadata has them.

    Raises UserError where fl-sim's own metadata are older than its code.
    """
    return [*ours_in(group), *sorted(_group(group).keys() - ours_in(group).keys())]


@cache
def ours_in(group: str) -> Mapping[str, Named]:
    """Return {name: entry point} of the kinds that come with fl-sim. Raises UserError as ``names_in`` does."""
    own = {name: named for name, all_named in _group(group).items() for named in all_named if named.package == OURS}
    if not own:
        raise UserError(
            f"fl-sim's installation is older than its code, or there is none: it names no kinds in the group {group}; "
            f"{_AGAIN}"
        )
    return dict(sorted(own.items()))


def find(group: str, name: str) -> Named | None:
    """Return who gives ``name`` to a kind: in ``group``, or as a short name of any setting; None where nobody does.

    Raises UserError where two packages do: none takes another's place in silence.
    """
    found = {named.package: named for named in (*_group(SHORT_NAMES).get(name, ()), *_group(group).get(name, ()))}
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise UserError(
            f"{name!r} is the name of two kinds: {first.path} by the package {first.package}, and {second.path} by the "
            f"package {second.package}; uninstall one of the two, or name a kind by its import path"
        )
    return next(iter(found.values()), None)


@cache
def load(named: Named) -> Any:
    """Return what an entry point of ours stands for. Raises UserError, which says what to do, where it is not there."""
    try:
        return load_object(named.path, "entry point")
    except UserError as error:
        raise UserError(f"{named}: {error}; or {_AGAIN}") from error


def load_kind(named: Named) -> type[Any]:
    """Return the settings class of a kind of ours. Raises UserError, which says what to do, unless it is one."""
    loaded = load(named)
    if not (isinstance(loaded, type) and is_settings(loaded) and field_defaults(loaded).get("kind") == named.name):
        raise UserError(f"{named}: {named.path} is no settings class of the kind {named.name!r}; {_AGAIN}")
    return loaded


def _group(group: str) -> Mapping[str, tuple[Named, ...]]:
    return _installed().get(group, {})


@cache
def _installed() -> Mapping[str, Mapping[str, tuple[Named, ...]]]:
    """Return {group: {name: entry points}} of all installed packages, and of ours, be it installed or not."""
    found: dict[str, dict[str, tuple[Named, ...]]] = defaultdict(dict)
    beside = _beside()
    for named in (*beside, *_of_metadata({OURS} if beside else set())):
        found[named.group][named.name] = (*found[named.group].get(named.name, ()), named)
    return found


def _beside() -> list[Named]:
    """Return our entry points by the pyproject.toml beside the code: in a checkout, and in Flower's copy of it.

    There the code runs without an installation, or with one of another version.
    """
    if not _PYPROJECT.exists():
        return []
    project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
    groups = project.get("entry-points", {}) if project.get("name") == OURS else {}
    return [Named(group, name, path, OURS) for group, names in groups.items() for name, path in names.items()]


def _of_metadata(seen: set[str]) -> Iterator[Named]:
    """Yield the entry points of installed packages but those ``seen``; of one that is there twice the first."""
    for distribution in importlib.metadata.distributions():
        if f"[{_PREFIX}" not in (text := distribution.read_text("entry_points.txt") or ""):
            continue
        package = distribution.metadata["Name"]
        first = importlib.metadata.distribution(package).read_text("entry_points.txt")
        if package in seen or first != text:
            continue
        seen.add(package)
        for point in distribution.entry_points:
            if point.group.startswith(_PREFIX):
                yield Named(point.group, point.name, point.value, package)
