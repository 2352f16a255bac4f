"""Fields that take any kind: ours, one by import path, by a name that a package gives it, or an object.

A field is declared once, ``algorithm: Annotated[Algorithm, OneOf("algorithm", group="fl_sim.algorithm")]``, and takes
``scaffold``, ``dirichlet:0.05`` (sets the first parameter), ``label-2``, a table with a ``kind``,
``my_pkg.fed:FedDyn``, a table with that as its kind, a name that an installed package gives its own kind, and an object
from Python. A kind is imported where it is chosen, and no other.
"""

import importlib.metadata
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, get_origin

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    PydanticUndefinedAnnotation,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from fl_sim import kinds as kinds_module
from fl_sim.errors import UserError
from fl_sim.kinds import field_defaults, is_numbered, is_settings, kind_of, kinds
from fl_sim.mistakes import explain, guess, shortened
from fl_sim.own_code import IMPORT_PATH, load_object

Json: TypeAlias = dict[str, Any]

PROTOCOLS: Final = "fl_sim.protocol"
"""The entry-point group of what a kind of the user's own must have, by setting."""

_SHORT_IMPORT_PATH: Final = re.compile(rf"({IMPORT_PATH.pattern})(?::(.+))?")


@dataclass(frozen=True)
class OneOf:
    """Makes a field take all forms of a kind, told apart by ``kind``.

    ``what``: the field's name in messages. ``wants``: a Protocol; a class that has its members may be the user's own.
    None: no other kinds than ours. ``group``: the entry-point group that names our kinds, and those of other packages,
    with the Protocol in the group PROTOCOLS; left out: our kinds are the union of settings classes that annotates the
    field.
    """

    what: str
    wants: type | None = None
    group: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the union's schema with the other forms in front of it."""
        if self.group:
            return self._schema_of_group(source)
        many = get_origin(source) is not None
        union = handler.generate_schema(Annotated[source, Field(discriminator="kind")]) if many else handler(source)
        members = tuple(kinds(source).values())

        def validate(value: Any, in_union: Callable[[Any], Any]) -> Any:
            if isinstance(value, str):
                value = self.expand(value, source)
            if isinstance(value, Mapping):
                return self._from_table(value, in_union)
            return in_union(value) if type(value) in members else self._checked(value)

        def serialize(value: Any, in_union: Callable[[Any], Any], info: Any) -> Any:
            if type(value) in members:
                return in_union(value)
            return as_table(value, info.mode, exclude_none=info.exclude_none)

        shown = core_schema.wrap_serializer_function_ser_schema(serialize, info_arg=True, schema=union)
        return core_schema.no_info_wrap_validator_function(validate, union, serialization=shown)

    def _schema_of_group(self, source: Any) -> CoreSchema:
        """Return a schema that imports a kind when it is chosen."""
        known = self.known(source)

        def is_ours(value: Any) -> bool:
            kind = getattr(value, "kind", None)
            return isinstance(kind, str) and kind in known and known[kind] is type(value)

        def in_group(table: Mapping[str, Any]) -> Any:
            kind = table.get("kind")
            if not isinstance(kind, str) or kind not in known:
                tags = {"discriminator": "'kind'", "tag": str(kind), "expected_tags": ", ".join(known)}
                raise PydanticKnownError("union_tag_invalid", tags)
            return (
                _plain(self.group, kind) if len(table) == 1 else _alone(known[kind], kind).validate_python(dict(table))
            )

        def validate(value: Any) -> Any:
            if isinstance(value, str):
                value = self.expand(value, source)
            if isinstance(value, Mapping):
                return self._from_table(value, in_group)
            return value if is_ours(value) else self._checked(value)

        def serialize(value: Any, info: Any) -> Any:
            if not is_ours(value):
                return as_table(value, info.mode, exclude_none=info.exclude_none)
            ours = _alone(known[value.kind], value.kind)
            return ours.dump_python(value, mode=info.mode, exclude_none=info.exclude_none)

        shown = core_schema.plain_serializer_function_ser_schema(serialize, info_arg=True)
        return core_schema.no_info_plain_validator_function(validate, serialization=shown)

    def known(self, annotation: Any) -> Mapping[str, type]:
        """Return {kind: class} of our kinds for a field with this ``annotation``; those of a group load when read."""
        return OurKinds(self.group) if self.group else kinds(annotation)

    def names(self, annotation: Any) -> list[str]:
        """Return the names that a user may choose from: of our kinds, and of other packages' where these may be."""
        return names_in(self.group) if self.group and self._is_open else list(self.known(annotation))

    def expand(self, text: str, union: Any) -> Json:
        """Turn a short form or an import path into a table.

        Raises UserError for a kind that is not in ``union``; the message lists the valid ones and guesses.
        """
        known = self.known(union)
        name, colon, value = text.partition(":")
        head, dash, number = name.rpartition("-")
        numbered = f"{head}-k"
        has_number = dash and number.isdigit() and numbered in known and is_numbered(numbered, known[numbered])
        if name not in known and has_number:
            name, colon, value = numbered, ":", number
        names_class = self._is_open and value[:1].isupper()  # of a file that is called like a kind of ours
        path = self._path_of(name)
        if name in known and not names_class:
            return {"kind": name, **self._first_parameter(name, known[name], value if colon else None)}
        if path:
            return {"kind": path, **self._first_parameter(name, self._load(path), value if colon else None)}
        if self._is_open and (found := _SHORT_IMPORT_PATH.fullmatch(text)):
            return {"kind": found[1], **self._first_parameter(found[1], self._load(found[1], known), found[2])}
        own, valid = ", or your own as package.module:Class" if self._is_open else "", self.names(union)
        several = f"; several are tried by 'fl-sim sweep {self.what}={shortened(text)}'" if "," in text else ""
        raise UserError(
            f"unknown {self.what} {shortened(text)!r}{guess(name, valid)}; valid: {', '.join(valid)}{own}{several}"
        )

    def class_of(self, table: Mapping[str, Any], union: Any) -> Any:
        """Return the settings class that ``table`` speaks of, None where its kind is unknown."""
        kind = str(table.get("kind"))
        if self._is_open and IMPORT_PATH.fullmatch(kind):
            return self._load(kind)
        if path := self._path_of(kind):
            return self._load(path)
        return self.known(union).get(kind)

    def _first_parameter(self, name: str, settings: type, value: str | None) -> Json:
        if value is None:
            return {}
        fields = [field for field in field_defaults(settings) if field != "kind"]
        if not fields:
            raise UserError(f"{self.what} {name!r} takes no parameter, got {shortened(f'{name}:{value}')!r}")
        return {fields[0]: value}

    def _from_table(self, table: Mapping[str, Any], ours: Callable[[Any], Any]) -> Any:
        kind = table.get("kind")
        if not isinstance(kind, str):
            return ours(table)
        path = kind if self._is_open and IMPORT_PATH.fullmatch(kind) else self._path_of(kind)
        return _made(self._load(path), table) if path else ours(table)

    def _path_of(self, name: str) -> str:
        """Return the import path that another package gives ``name`` to; empty where none does, or one of ours has it.

        Raises UserError where two packages give it.
        """
        if not self._is_open and not self.group:
            return ""
        named = find_entry_point(self.group, name)
        return "" if named is None or named.package == OURS or not self._is_open else named.path

    def _load(self, path: str, instead: Iterable[str] = ()) -> Any:
        """Return the class at ``path``. Raises UserError, with a guess among ``instead``, unless it is one to take."""
        try:
            loaded = load_object(path, self.what)
        except UserError as error:
            raise UserError(f"{error}{guess(path.partition(':')[0], instead)}") from error
        if not isinstance(loaded, type):
            raise UserError(f"{self.what} {path!r} is {shortened(repr(loaded))}, not a class{self._wanted()}")
        self._check(loaded, path)
        return loaded

    def _checked(self, value: Any) -> Any:
        """Return an object as it is. Raises UserError unless it is what this field wants."""
        if isinstance(value, type):
            raise UserError(f"{self.what} is the class {value.__name__}: give an object, {value.__name__}()")
        if not self._is_open or not is_settings(type(value)):
            raise UserError(f"{self.what} is {shortened(repr(value))}, of type {type(value).__name__}{self._wanted()}")
        self._check(type(value), kind_of(value))
        if "<locals>" in type(value).__qualname__:
            raise UserError(
                f"{self.what} {type(value).__name__} is defined inside a function, where no other process finds it: "
                "define it at the top level of a module"
            )
        return value

    def _check(self, settings: type, path: str) -> None:
        if not is_settings(settings):
            raise UserError(f"{self.what} {path!r} is no frozen settings class{self._wanted()}")
        own = field_defaults(settings)
        if missing := [name for name in _members(self._protocol()) if name not in own and not hasattr(settings, name)]:
            raise UserError(f"{self.what} {path!r} lacks {', '.join(missing)}{self._wanted()}")
        if taken := [name for name in own if name in _methods_beside(self._protocol())]:
            raise UserError(
                f"{self.what} {path!r} has a field {taken[0]!r}, which is the name of an optional method: "
                "call the field otherwise"
            )
        try:
            TypeAdapter[Any](settings).rebuild(raise_errors=True)
        except (PydanticUserError, PydanticUndefinedAnnotation) as error:
            raise UserError(
                f"{self.what} {path!r} has a field whose type no settings can have: {error.message.partition('. ')[0]}"
            ) from error

    def _wanted(self) -> str:
        if not self._is_open:
            return ""
        article = "an" if self.what[0] in "aeiou" else "a"
        return (
            f"; {article} {self.what} of your own is a frozen class of settings (derive from fl_sim.settings.Settings, "
            f"or a frozen dataclass) with {', '.join(_members(self._protocol()))}"
        )

    @property
    def _is_open(self) -> bool:
        """Say whether kinds may be the user's own."""
        return self.wants is not None or (bool(self.group) and self.what in ours_in(PROTOCOLS))

    def _protocol(self) -> type | None:
        if self.wants is not None or not self._is_open:
            return self.wants
        protocol: type = load_entry_point(ours_in(PROTOCOLS)[self.what])
        return protocol


def as_table(value: Any, mode: str = "python", *, exclude_none: bool = False) -> Json:
    """Return the table with a ``kind`` that stands for a settings object; the other arguments are pydantic's."""
    content: Json = TypeAdapter[Any](type(value)).dump_python(
        value, mode="json" if mode == "json" else "python", exclude_none=exclude_none
    )
    return {"kind": kind_of(value), **{name: part for name, part in content.items() if name != "kind"}}


def _made(settings: type, table: Mapping[str, Any]) -> Any:
    """Return the ``settings`` that ``table``, whose kind is theirs, stands for."""
    try:
        return TypeAdapter[Any](settings).validate_python(
            {name: part for name, part in table.items() if name != "kind"}
        )
    except ValidationError as error:
        raise UserError(explain(error, settings, "")) from error


class OurKinds(Mapping[str, type]):
    """The kinds of a group that come with fl-sim, each imported when it is read."""

    def __init__(self, group: str) -> None:
        self._group = group

    def __getitem__(self, kind: str) -> type:
        return _loaded(self._group, kind)

    def __contains__(self, kind: object) -> bool:
        return isinstance(kind, str) and kind in ours_in(self._group)

    def __iter__(self) -> Iterator[str]:
        return iter(ours_in(self._group))

    def __len__(self) -> int:
        return len(ours_in(self._group))


@cache
def _loaded(group: str, kind: str) -> type:
    return load_kind(ours_in(group)[kind])


@cache
def _plain(group: str, kind: str) -> Any:
    """Return the value of a kind that is told by its name alone, always the same one, as it is frozen."""
    return _alone(_loaded(group, kind), kind).validate_python({"kind": kind})


@cache
def _alone(settings: Any, kind: str) -> TypeAdapter[Any]:
    """Return what validates tables of one kind, whose mistakes have the kind in their place as those of a union do."""
    tagged: Any = Annotated[settings, _Tagged(kind)]
    return TypeAdapter(tagged)


@dataclass(frozen=True)
class _Tagged:
    kind: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.tagged_union_schema({self.kind: handler(source)}, discriminator="kind")


def _methods_beside(protocol: type | None) -> set[str]:
    """Return the methods of the protocols that a class of ``protocol`` may be of, too: of its module, and of kinds."""
    modules = (kinds_module, sys.modules[protocol.__module__]) if protocol else ()
    beside = [one for module in modules for one in vars(module).values() if getattr(one, "_is_protocol", False)]
    return {name for one in beside for name, member in vars(one).items() if callable(member) and name[0] != "_"}


def _members(protocol: type | None) -> list[str]:
    """Return what a class must have to be of ``protocol``: what it and the protocols that it extends declare."""
    declared: dict[str, None] = {}
    for base in reversed(protocol.__mro__ if protocol else ()):
        if getattr(base, "_is_protocol", False) and base.__module__ != "typing":
            names = [*vars(base).get("__annotations__", {}), *vars(base)]
            declared |= dict.fromkeys(name for name in names if not name.startswith("_"))
    return list(declared)


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


def find_entry_point(group: str, name: str) -> Named | None:
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
def load_entry_point(named: Named) -> Any:
    """Return what an entry point of ours stands for. Raises UserError, which says what to do, where it is not there."""
    try:
        return load_object(named.path, "entry point")
    except UserError as error:
        raise UserError(f"{named}: {error}; or {_AGAIN}") from error


def load_kind(named: Named) -> type[Any]:
    """Return the settings class of a kind of ours. Raises UserError, which says what to do, unless it is one."""
    loaded = load_entry_point(named)
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
