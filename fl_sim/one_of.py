"""Settings fields with several variants (kinds), such as ``algorithm``. Users can add variants.

A field is declared once, ``algorithm: Annotated[Algorithm, OneOf("algorithm", group="fl_sim.algorithm")]``. The field
accepts a name (``scaffold``), or a name with its first parameter (``dirichlet:0.05``, ``label-2``). It also accepts an
import path (``my_pkg.fed:FedDyn``), a table whose ``kind`` is a name or an import path, and a Python object. Installed
packages may define further names by entry points. Only the chosen class is imported. Names and import paths are read
from the metadata of the installed packages. The names of fl-sim come from its pyproject.toml.
"""

import importlib.metadata
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from pydantic import GetCoreSchemaHandler, PydanticUndefinedAnnotation, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from fl_sim import kinds as kinds_module
from fl_sim.errors import UserError
from fl_sim.kinds import field_defaults, is_numbered, is_settings, kind_of, kinds
from fl_sim.mistakes import explain, guess, shortened
from fl_sim.other_words import privacy_settings
from fl_sim.own_code import IMPORT_PATH, load_object

Json: TypeAlias = dict[str, Any]

OURS: Final = "fl-sim"
"""The name of fl-sim's own package in the metadata of entry points."""

PROTOCOLS: Final = "fl_sim.protocol"
"""The entry-point group with one Protocol for each setting: a user's own class must satisfy it."""

SHORT_NAMES: Final = "fl_sim.kinds"
"""The entry-point group in which a package may define short names of its own classes, for any setting."""

_SHORT_IMPORT_PATH: Final = re.compile(rf"({IMPORT_PATH.pattern})(?::(.+))?")
_PYPROJECT: Final = Path(__file__).parents[1] / "pyproject.toml"
_PREFIX: Final = "fl_sim."
_REINSTALL: Final = "run 'pip install' again in the folder of fl-sim's code, for example 'pip install -e .'"


@dataclass(frozen=True)
class OneOf:
    """The marker of a settings field that accepts several settings classes (kinds), such as all algorithms.

    ``what``: the field's name in messages. ``wants``: a Protocol, or None. A user's own class is accepted if it has all
    members of the Protocol. ``group``: the entry-point group with the names of fl-sim's classes and of other packages'
    classes. If ``group`` is given, the Protocol is read from the entry point with the name ``what`` in the group
    PROTOCOLS. Without ``group``, the annotation of the field is a union of fl-sim's classes, and a user's own class is
    refused if ``wants`` is None.
    """

    what: str
    wants: type | None = None
    group: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the field's schema for pydantic's validation.

        To load fast, the schema imports a settings class only if the user chooses it.
        """
        del handler

        def validate(value: Any) -> Any:
            known = self.known(source)
            if isinstance(value, str):
                value = self.expand(value, source)
            if isinstance(value, Mapping):
                return self._from_table(value, known)
            kind = getattr(value, "kind", None)
            is_ours = isinstance(kind, str) and known.get(kind) is type(value)
            return value if is_ours else self._checked(value)

        def serialize(value: Any, info: Any) -> Any:
            return as_table(value, info.mode, exclude_none=info.exclude_none)

        shown = core_schema.plain_serializer_function_ser_schema(serialize, info_arg=True)
        return core_schema.no_info_plain_validator_function(validate, serialization=shown)

    def known(self, annotation: Any) -> Mapping[str, type]:
        """Return {name: settings class} for fl-sim's own variants of a field. ``annotation``: the field's annotation.

        If the field has an entry-point group, a class is imported only when it is looked up.
        """
        return OurKinds(self.group) if self.group else kinds(annotation)

    def names(self, annotation: Any) -> list[str]:
        """Return the names that a user may choose for this field: the names of fl-sim's own variants.

        If the field has a ``group``, the names that other packages define are included.
        """
        return names_in(self.group) if self.group else list(self.known(annotation))

    def expand(self, text: str, union: Any) -> Json:
        """Convert a setting in short form to a table of settings: "dirichlet:0.05" to kind "dirichlet", alpha "0.05".

        ``union``: the field's annotation. Raises UserError for an unknown name; the message lists the valid names and
        suggests a similar one.
        """
        known = self.known(union)
        name, colon, value = text.partition(":")
        head, dash, number = name.rpartition("-")
        numbered = f"{head}-k"
        has_number = dash and number.isdigit() and numbered in known and is_numbered(numbered, known[numbered])
        if name not in known and has_number:
            name, colon, value = numbered, ":", number
        # A capital letter after the colon means a class: fedavg:Mine is class Mine in the user's fedavg.py.
        names_class = self._accepts_own and value[:1].isupper()
        path = self._path_of(name)
        if name in known and not names_class:
            return {"kind": name, **self._first_parameter(name, known[name], value if colon else None)}
        if path:
            return {"kind": path, **self._first_parameter(name, self._load(path), value if colon else None)}
        if self._accepts_own and (found := _SHORT_IMPORT_PATH.fullmatch(text)):
            return {"kind": found[1], **self._first_parameter(found[1], self._load(found[1], known), found[2])}
        own, valid = ", or your own as package.module:Class" if self._accepts_own else "", self.names(union)
        if settings_here := privacy_settings(name):
            raise UserError(f"unknown {self.what} {shortened(text)!r}: {settings_here}")
        several = f"; to try several values, use 'fl-sim sweep {self.what}={shortened(text)}'" if "," in text else ""
        raise UserError(
            f"unknown {self.what} {shortened(text)!r}{guess(name, valid)}; valid: {', '.join(valid)}{own}{several}"
        )

    def class_of(self, table: Mapping[str, Any], union: Any) -> Any:
        """Return the settings class that the table of settings ``table`` chooses by its key ``kind``.

        The result is None for an unknown name. ``union``: the field's annotation.
        """
        kind = str(table.get("kind"))
        path = self._path_of(kind)
        return self._load(path) if path else self.known(union).get(kind)

    def _first_parameter(self, name: str, settings: type, value: str | None) -> Json:
        if value is None:
            return {}
        fields = [field for field in field_defaults(settings) if field != "kind"]
        if not fields:
            raise UserError(f"{self.what} {name!r} takes no parameter, got {shortened(f'{name}:{value}')!r}")
        return {fields[0]: value}

    def _from_table(self, table: Mapping[str, Any], known: Mapping[str, type]) -> Any:
        kind = table.get("kind")
        if isinstance(kind, str) and (path := self._path_of(kind)):
            settings = self._load(path)
            own = {name: part for name, part in table.items() if name != "kind"}
            try:
                return _adapter(settings).validate_python(own)
            except ValidationError as error:
                raise UserError(explain(error, settings, "")) from error
        if not isinstance(kind, str) or kind not in known:
            tags = {"discriminator": "'kind'", "tag": str(kind), "expected_tags": ", ".join(known)}
            raise PydanticKnownError("union_tag_invalid", tags)
        return _plain(known[kind], kind) if len(table) == 1 else _tagged(known[kind], kind).validate_python(dict(table))

    def _path_of(self, name: str) -> str:
        """Return the import path of a class from outside fl-sim; empty for fl-sim's own names and for unknown names.

        ``name``: an import path, or a short name that an installed package defines. Raises UserError if two packages
        define the same name.
        """
        if not self._accepts_own:
            return ""
        if IMPORT_PATH.fullmatch(name):
            return name
        point = find_entry_point(self.group, name)
        return "" if point is None or point.package == OURS else point.path

    def _load(self, path: str, instead: Iterable[str] = ()) -> Any:
        """Return the settings class at the import path ``path``. Raises UserError unless this field accepts the class.

        ``instead``: valid names. If the module is missing, the error message suggests a similar name from ``instead``.
        """
        try:
            loaded = load_object(path, self.what)
        except UserError as error:
            raise UserError(f"{error}{guess(path.partition(':')[0], instead)}") from error
        if not isinstance(loaded, type):
            raise UserError(f"{self.what} {path!r} is {shortened(repr(loaded))}, not a class{self._wanted()}")
        self._check(loaded, path)
        return loaded

    def _checked(self, value: Any) -> Any:
        """Return the settings object ``value`` unchanged. Raises UserError unless this field accepts its class."""
        if isinstance(value, type):
            raise UserError(f"{self.what} is the class {value.__name__}: give an object, {value.__name__}()")
        if not self._accepts_own or not is_settings(type(value)):
            raise UserError(f"{self.what} is {shortened(repr(value))}, of type {type(value).__name__}{self._wanted()}")
        self._check(type(value), kind_of(value))
        if "<locals>" in type(value).__qualname__:
            raise UserError(
                f"{self.what} {type(value).__name__} is defined inside a function, where other processes cannot import "
                "it: define it at the top level of a module"
            )
        return value

    def _check(self, settings: type, path: str) -> None:
        if not is_settings(settings):
            raise UserError(f"{self.what} {path!r} is no frozen settings class{self._wanted()}")
        own, protocol = field_defaults(settings), self._protocol()
        if missing := [name for name in _members(protocol) if name not in own and not hasattr(settings, name)]:
            raise UserError(f"{self.what} {path!r} lacks {', '.join(missing)}{self._wanted()}")
        beside = [*vars(kinds_module).values(), *vars(sys.modules[protocol.__module__]).values()]
        optional = [vars(one) for one in beside if getattr(one, "_is_protocol", False)]
        methods = {name for one in optional for name, member in one.items() if callable(member) and name[0] != "_"}
        if taken := [name for name in own if name in methods]:
            raise UserError(
                f"{self.what} {path!r} has a field {taken[0]!r}, which is the name of an optional method: "
                "rename the field"
            )
        try:
            _adapter(settings).rebuild(raise_errors=True)
        except (PydanticUserError, PydanticUndefinedAnnotation) as error:
            raise UserError(
                f"{self.what} {path!r} has a field whose type is not supported in settings: "
                f"{error.message.partition('. ')[0]}"
            ) from error

    def _wanted(self) -> str:
        if not self._accepts_own:
            return ""
        article = "an" if self.what[0] in "aeiou" else "a"
        return (
            f"; {article} {self.what} of your own is a frozen class of settings (derive from fl_sim.settings.Settings, "
            f"or a frozen dataclass) with {', '.join(_members(self._protocol()))}"
        )

    @property
    def _accepts_own(self) -> bool:
        return self.wants is not None or bool(self.group)

    def _protocol(self) -> type:
        protocol: type = self.wants or load_entry_point(entry_points_of_ours(PROTOCOLS)[self.what])
        return protocol


def as_table(value: Any, mode: str = "python", *, exclude_none: bool = False) -> Json:
    """Return the settings object ``value`` as a dict with its ``kind``, as it is written to a TOML or JSON file.

    ``mode``, ``exclude_none``: the arguments of pydantic's ``dump_python``.
    """
    settings: Any = type(value)
    content: Json = _adapter(settings).dump_python(
        value, mode="json" if mode == "json" else "python", exclude_none=exclude_none
    )
    kind = kind_of(value)
    if content.get("kind") == kind:
        return content
    return {"kind": kind, **{name: part for name, part in content.items() if name != "kind"}}


class OurKinds(Mapping[str, type]):
    """A mapping {name: settings class} of fl-sim's classes in an entry-point group.

    A class is imported at its first use.
    """

    def __init__(self, group: str) -> None:
        self._points = entry_points_of_ours(group)

    def __getitem__(self, kind: str) -> type:
        return _loaded_kind(self._points[kind])

    def __contains__(self, kind: object) -> bool:
        return kind in self._points

    def __iter__(self) -> Iterator[str]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)


@cache
def _plain(settings: type, kind: str) -> Any:
    """Return an object of the settings class ``settings`` with default values.

    The object is immutable, and every call with the same arguments returns the same object. ``kind``: the name of the
    class.
    """
    return _tagged(settings, kind).validate_python({"kind": kind})


@cache
def _tagged(settings: Any, kind: str) -> TypeAdapter[Any]:
    """Return the pydantic adapter that converts a table of settings to an object of the class ``settings``.

    ``kind``: the name of the class, which error messages contain.
    """
    tagged: Any = Annotated[settings, _Tagged(kind)]
    return TypeAdapter(tagged)


@cache
def _adapter(settings: Any) -> TypeAdapter[Any]:
    return TypeAdapter(settings)


@dataclass(frozen=True)
class _Tagged:
    kind: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.tagged_union_schema({self.kind: handler(source)}, discriminator="kind")


def _members(protocol: type) -> list[str]:
    """Return the names of the public attributes and methods that a class must have for the Protocol ``protocol``.

    The members of base protocols are included.
    """
    declared: dict[str, None] = {}
    for base in reversed(protocol.__mro__):
        if getattr(base, "_is_protocol", False) and base.__module__ != "typing":
            names = [*vars(base).get("__annotations__", {}), *vars(base)]
            declared |= dict.fromkeys(name for name in names if not name.startswith("_"))
    return list(declared)


@dataclass(frozen=True)
class EntryPoint:
    """A Python entry point: ``package`` defines ``name``, in ``group``, for the object at the import path ``path``."""

    group: str
    name: str
    path: str
    package: str

    def __str__(self) -> str:
        return f"entry point {self.name!r} of the package {self.package} in the group {self.group}"


def names_in(group: str) -> list[str]:
    """Return the names in an entry-point group: names of fl-sim, then of other packages, each in alphabetical order.

    Raises UserError if fl-sim's installed metadata is older than its code.
    """
    ours = entry_points_of_ours(group)
    return [*ours, *sorted(_installed().get(group, {}).keys() - ours.keys())]


@cache
def entry_points_of_ours(group: str) -> Mapping[str, EntryPoint]:
    """Return fl-sim's own entry points in ``group``, {name: entry point}, in alphabetical order.

    Raises UserError if fl-sim's installed metadata is older than its code.
    """
    named = _installed().get(group, {})
    own = {name: point for name, points in named.items() for point in points if point.package == OURS}
    if not own:
        raise UserError(
            f"fl-sim's installation is missing, or older than its code: it lacks the group {group}; {_REINSTALL}"
        )
    return dict(sorted(own.items()))


def find_entry_point(group: str, name: str) -> EntryPoint | None:
    """Return the entry point ``name`` in ``group`` or in the group SHORT_NAMES, from all installed packages.

    Return None if no package defines the name.

    Raises UserError if two packages define the name, so that no package silently overrides another.
    """
    installed = _installed()
    points = (*installed.get(SHORT_NAMES, {}).get(name, ()), *installed.get(group, {}).get(name, ()))
    found = {point.package: point for point in points}
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise UserError(
            f"{name!r} is the name of two kinds: {first.path} by the package {first.package}, and {second.path} by the "
            f"package {second.package}; uninstall one of the two packages, or write the import path instead of the name"
        )
    return next(iter(found.values()), None)


@cache
def load_entry_point(point: EntryPoint) -> Any:
    """Return the object of an entry point of fl-sim. Raises UserError if the object cannot be imported."""
    try:
        return load_object(point.path, "entry point")
    except UserError as error:
        raise UserError(f"{point}: {error}; or {_REINSTALL}") from error


@cache
def _loaded_kind(point: EntryPoint) -> type:
    """Return the settings class of an entry point of fl-sim. Raises UserError if its object is not a settings class."""
    loaded = load_entry_point(point)
    if not (isinstance(loaded, type) and is_settings(loaded) and field_defaults(loaded).get("kind") == point.name):
        raise UserError(f"{point}: {point.path} is no settings class of the kind {point.name!r}; {_REINSTALL}")
    return loaded


@cache
def _installed() -> Mapping[str, Mapping[str, tuple[EntryPoint, ...]]]:
    """Return {group: {name: entry points}} of all installed packages and of fl-sim.

    The entry points of fl-sim are included even if it is not installed.
    """
    found: dict[str, dict[str, tuple[EntryPoint, ...]]] = defaultdict(dict)
    in_checkout = _in_checkout()
    for point in (*in_checkout, *_in_metadata({OURS} if in_checkout else set())):
        found[point.group][point.name] = (*found[point.group].get(point.name, ()), point)
    return found


def _in_checkout() -> list[EntryPoint]:
    """Return fl-sim's entry points from the pyproject.toml next to the code; empty if there is no such file.

    A git checkout has this file. Flower's copy of the code, which Flower makes for its processes, has it, too. There,
    fl-sim may not be installed, or another version may be installed.
    """
    if not _PYPROJECT.exists():
        return []
    project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
    groups = project.get("entry-points", {}) if project.get("name") == OURS else {}
    return [EntryPoint(group, name, path, OURS) for group, names in groups.items() for name, path in names.items()]


def _in_metadata(seen: set[str]) -> Iterator[EntryPoint]:
    """Yield the entry points of all installed packages. Packages with names in ``seen`` are left out.

    If a package is installed twice, only the first installation is used.
    """
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
                yield EntryPoint(point.group, point.name, point.value, package)
