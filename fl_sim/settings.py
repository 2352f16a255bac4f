"""Settings as frozen values, and fields that take any kind: ours, one by import path, or an object.

A field is declared once, ``algorithm: Annotated[AnyAlgorithm, OneOf("algorithm", Algorithm)] = FedAvg()``, and takes
``scaffold``, ``dirichlet:0.05`` (sets the first parameter), ``label-2``, a table with a ``kind``,
``my_pkg.fed:FedDyn``, a table with that as its kind, a short name from the entry-point group ``fl_sim.kinds``, and an
object from Python.
"""

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Annotated, Any, Final, Self, TypeAlias, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PydanticUndefinedAnnotation,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from fl_sim import kinds as kinds_module
from fl_sim.errors import UserError
from fl_sim.import_path import IMPORT_PATH, load_object
from fl_sim.kinds import field_defaults, is_numbered, is_settings, kind_of, kinds
from fl_sim.mistakes import explain, guess, shortened

Json: TypeAlias = dict[str, Any]

ENTRY_POINTS: Final = "fl_sim.kinds"
"""The entry-point group in which a package gives its kinds short names."""

_SHORT_IMPORT_PATH: Final = re.compile(rf"({IMPORT_PATH.pattern})(?::(.+))?")


@dataclass(frozen=True)
class OneOf:
    """Makes a field of a union of settings classes, told apart by ``kind``, take all forms of a kind.

    ``what``: the field's name in messages. ``wants``: a Protocol; a class that has its members may be the user's own.
    None: the union's members alone.
    """

    what: str
    wants: type | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the union's schema with the other forms in front of it."""
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
            return in_union(value) if type(value) in members else as_table(value, info.mode)

        shown = core_schema.wrap_serializer_function_ser_schema(serialize, info_arg=True, schema=union)
        return core_schema.no_info_wrap_validator_function(validate, union, serialization=shown)

    def expand(self, text: str, union: Any) -> Json:
        """Turn a short form or an import path into a table.

        Raises UserError for a kind that is not in ``union``; the message lists the valid ones and guesses.
        """
        known = kinds(union)
        name, colon, value = text.partition(":")
        head, dash, number = name.rpartition("-")
        numbered = f"{head}-k"
        has_number = dash and number.isdigit() and numbered in known and is_numbered(numbered, known[numbered])
        if name not in known and has_number:
            name, colon, value = numbered, ":", number
        names_class = self.wants is not None and value[:1].isupper()  # of a file that is called like a kind of ours
        if name in known and not names_class:
            return {"kind": name, **self._first_parameter(name, known[name], value if colon else None)}
        if self.wants is not None and (path := _entry_point(name)):
            return {"kind": path, **self._first_parameter(name, self._load(path), value if colon else None)}
        if self.wants is not None and (found := _SHORT_IMPORT_PATH.fullmatch(text)):
            return {"kind": found[1], **self._first_parameter(found[1], self._load(found[1], known), found[2])}
        own = "" if self.wants is None else ", or your own as package.module:Class"
        several = f"; several are tried by 'fl-sim sweep {self.what}={shortened(text)}'" if "," in text else ""
        raise UserError(
            f"unknown {self.what} {shortened(text)!r}{guess(name, known)}; valid: {', '.join(known)}{own}{several}"
        )

    def class_of(self, table: Mapping[str, Any], union: Any) -> Any:
        """Return the settings class that ``table`` speaks of, None where its kind is unknown."""
        kind = str(table.get("kind"))
        if self.wants is not None and IMPORT_PATH.fullmatch(kind):
            return self._load(kind)
        return kinds(union).get(kind)

    def _first_parameter(self, name: str, settings: type, value: str | None) -> Json:
        if value is None:
            return {}
        fields = [field for field in field_defaults(settings) if field != "kind"]
        if not fields:
            raise UserError(f"{self.what} {name!r} takes no parameter, got {shortened(f'{name}:{value}')!r}")
        return {fields[0]: value}

    def _from_table(self, table: Mapping[str, Any], in_union: Callable[[Any], Any]) -> Any:
        kind = table.get("kind")
        if self.wants is None or not isinstance(kind, str) or not IMPORT_PATH.fullmatch(kind):
            return in_union(table)
        return _made(self._load(kind), table)

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
        if self.wants is None or not is_settings(type(value)):
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
        if missing := [name for name in _members(self.wants) if name not in own and not hasattr(settings, name)]:
            raise UserError(f"{self.what} {path!r} lacks {', '.join(missing)}{self._wanted()}")
        if taken := [name for name in own if name in _methods_beside(self.wants)]:
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
        if self.wants is None:
            return ""
        article = "an" if self.what[0] in "aeiou" else "a"
        return (
            f"; {article} {self.what} of your own is a frozen class of settings (derive from fl_sim.settings.Settings, "
            f"or a frozen dataclass) with {', '.join(_members(self.wants))}"
        )


@dataclass(frozen=True)
class InOneLine:
    """Makes a field of text take a table, too: ``to_table`` takes its text apart, ``to_text`` puts a table together.

    So ``data.label=outcome`` speaks of a part of ``data``, which stays one line wherever it is kept.
    """

    to_table: Callable[[str], Json]
    to_text: Callable[[Mapping[str, Any]], str]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of text with the other form in front of it."""

        def joined(value: Any) -> Any:
            return self.to_text(value) if isinstance(value, Mapping) else value

        return core_schema.no_info_before_validator_function(joined, handler(source))


class Settings(BaseModel):
    """A frozen group of settings that refuses unknown keys, NaN, infinity, and whole numbers beyond 64 bits."""

    model_config = ConfigDict(
        defer_build=True,  # a mistake is told without building what checks the kinds that nobody chose
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        ser_json_inf_nan="strings",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_default_kinds(cls, table: Any) -> Any:
        """Let ``generator.batch_size=64`` speak of the default generator: a table without a kind has the default's."""
        if not isinstance(table, dict):
            return table
        filled = dict(table)
        for name, field in cls.model_fields.items():
            given = filled.get(name)
            if _one_of(field) is not None and isinstance(given, dict) and "kind" not in given:
                filled[name] = {"kind": field.default.kind, **given}
        return filled

    @model_validator(mode="before")
    @classmethod
    def _take_lists_apart(cls, table: Any) -> Any:
        """Let a list be typed as ``classifiers=discriminant,mlp``."""
        if not isinstance(table, dict):
            return table
        lists = {name for name, field in cls.model_fields.items() if get_origin(field.annotation) is tuple}
        return {
            name: value.split(",") if name in lists and isinstance(value, str) else value
            for name, value in table.items()
        }

    @model_validator(mode="after")
    def _whole_numbers_have_64_bits(self) -> Self:
        for name in type(self).model_fields:
            if isinstance(value := getattr(self, name), int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"{name} is a whole number of {len(str(abs(value)))} digits: it must have 64 bits")
        return self


def group_in(settings: type[BaseModel] | None, table: Json, name: str) -> tuple[Json, type[BaseModel] | None]:
    """Return the group ``name`` of ``table``, which holds fields of ``settings``, as a table, and its own class.

    A short form (``algorithm=fedprox``) grows into a table. The class is None where ``name`` is no group that is known:
    validation says so later. Raises UserError where ``name`` is a single value.
    """
    field = settings.model_fields.get(name) if settings is not None else None
    one_of = _one_of(field) if field is not None else None
    inner = table.get(name, {})
    if isinstance(inner, BaseModel) or is_dataclass(inner):
        raise UserError(f"{name} is an object: set its parameters where you make it")
    if isinstance(inner, str) and field is not None and one_of is not None:
        inner = one_of.expand(inner, field.annotation)
    in_one_line = next((extra for extra in field.metadata if isinstance(extra, InOneLine)), None) if field else None
    if isinstance(inner, str) and in_one_line is not None:
        return in_one_line.to_table(inner), None
    if not isinstance(inner, dict):
        raise UserError(f"{shortened(name)} is a single value, it has no settings inside")
    if field is None:
        return inner, None
    default = {"kind": field.default.kind} if one_of is not None else {}
    own = one_of.class_of(default | inner, field.annotation) if one_of is not None else field.annotation
    return inner, own if isinstance(own, type) and issubclass(own, BaseModel) else None


def chosen_class(settings: type[BaseModel], table: Mapping[str, Any], name: str) -> type | None:
    """Return the class of the kind that ``table`` chooses for the field ``name`` of ``settings``, in whatever form.

    None where it is unknown: validation says so later.
    """
    field = settings.model_fields[name]
    given, one_of = table.get(name, field.default), _one_of(field)
    assert one_of is not None, "a field of one kind alone"
    try:
        if isinstance(given, str):
            given = one_of.expand(given, field.annotation)
        if isinstance(given, Mapping):
            found: type | None = one_of.class_of({"kind": field.default.kind, **given}, field.annotation)
            return found
    except UserError:
        return None
    return type(given)


def as_table(value: Any, mode: str = "python") -> Json:
    """Return the table with a ``kind`` that stands for a settings object; ``mode`` is pydantic's."""
    content: Json = TypeAdapter[Any](type(value)).dump_python(value, mode="json" if mode == "json" else "python")
    return {"kind": kind_of(value), **{name: part for name, part in content.items() if name != "kind"}}


def _made(settings: type, table: Mapping[str, Any]) -> Any:
    """Return the ``settings`` that ``table``, whose kind is theirs, stands for."""
    try:
        return TypeAdapter[Any](settings).validate_python(
            {name: part for name, part in table.items() if name != "kind"}
        )
    except ValidationError as error:
        raise UserError(explain(error, settings, "")) from error


def _one_of(field: FieldInfo) -> OneOf | None:
    return next((extra for extra in field.metadata if isinstance(extra, OneOf)), None)


@cache
def _entry_point(name: str) -> str:
    """Return the import path that an installed package gives ``name`` to, empty where none does."""
    found = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
    return next(iter(found)).value if found else ""


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
