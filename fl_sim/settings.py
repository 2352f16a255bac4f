"""The base class of settings, functions for its fields, names of models, and the reading of TOML files."""

import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Self, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from fl_sim.errors import UserError
from fl_sim.kinds import is_none
from fl_sim.mistakes import guess, shortened
from fl_sim.one_of import Json, OurKinds, entry_points_of_ours, load_entry_point
from fl_sim.one_of import OneOf as OneOf  # noqa: PLC0414 (exported)

CHECKS: Final = "fl_sim.check"
"""The entry-point group of functions that check whether one setting is compatible with all others."""


@dataclass(frozen=True)
class InOneLine:
    """Marks a setting that is stored as one text, but can also be given as a table of options.

    With the table, users can change a single option: ``data.label=outcome`` changes the option ``label`` in the text of
    the setting ``data``. fl-sim writes the text into settings files. ``to_table``: converts the text to a table.
    ``to_text``: converts the table to a text.
    """

    to_table: Callable[[str], Json]
    to_text: Callable[[Mapping[str, Any]], str]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the field's pydantic schema, which converts a table to text before the validation."""

        def joined(value: Any) -> Any:
            return self.to_text(value) if isinstance(value, Mapping) else value

        return core_schema.no_info_before_validator_function(joined, handler(source))


@dataclass(frozen=True)
class Short:
    """Marks a group of settings that has a short form: a single text. The text becomes the value of ``field``.

    For example, ``model=resnet`` means ``model.name=resnet``. The setting ``model.weights=PATH`` has no short form.
    """

    field: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the field's pydantic schema, which converts a text to a table before the validation."""
        return core_schema.no_info_before_validator_function(self.to_table, handler(source))

    def to_table(self, value: Any) -> Any:
        """Return ``value`` as a table if it is a text; return any other value unchanged."""
        return {self.field: value} if isinstance(value, str) else value


class Settings(BaseModel):
    """The frozen base class of settings. It refuses unknown keys, NaN, infinity, and integers over 64 bits."""

    model_config = ConfigDict(
        defer_build=True,  # with this option, pydantic builds validators only for the classes that the user chose
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        ser_json_inf_nan="strings",
    )

    @model_validator(mode="before")
    @classmethod
    def _completed_table(cls, table: Any) -> Any:
        """Return the settings ``table`` with missing kinds filled in, and with lists in place of comma-separated texts.

        A kind is the name of a settings class, such as "fedavg". A group of settings without a kind gets the default
        kind. So ``generator.batch_size=64`` sets the batch size of the default generator. The text
        ``classifiers=discriminant,mlp`` becomes a list of two names.
        """
        if not isinstance(table, dict):
            return table
        filled = dict(table)
        for name, field in cls.model_fields.items():
            given = filled.get(name)
            if _one_of(field) is not None and isinstance(given, dict) and "kind" not in given:
                filled[name] = {"kind": _default_kind(field), **given}
            elif isinstance(given, str) and get_origin(field.annotation) is tuple:
                filled[name] = given.split(",")
        return filled

    @model_validator(mode="after")
    def _whole_numbers_have_64_bits(self) -> Self:
        for name in type(self).model_fields:
            if isinstance(value := getattr(self, name), int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"{name} is a whole number of {len(str(abs(value)))} digits: it must fit into 64 bits")
        return self


def group_in(settings: type[BaseModel] | None, table: Json, name: str) -> tuple[Json, type[BaseModel] | None]:
    """Return (the group of settings ``name`` as a table, the settings class of this group).

    ``table``: the settings that contain the group. ``settings``: the settings class of ``table``. A group in short form
    (``algorithm=fedprox``) becomes a table. The returned class is None for an unknown name, which validation reports
    later. Raises UserError if the entry ``name`` is a single value, such as a number, and not a group.
    """
    field = settings.model_fields.get(name) if settings is not None else None
    marks = field.metadata if field is not None else []
    one_of = next((mark for mark in marks if isinstance(mark, OneOf)), None)
    inner = table.get(name, {})
    if isinstance(inner, BaseModel) or is_dataclass(inner):
        raise UserError(f"{name} is a Python object: set its parameters where you create the object")
    if isinstance(inner, str) and field is not None and one_of is not None:
        inner = one_of.expand(inner, field.annotation)
    in_one_line = next((mark for mark in marks if isinstance(mark, InOneLine)), None)
    if isinstance(inner, str) and in_one_line is not None:
        return in_one_line.to_table(inner), None
    inner = spelt_out(field, inner)
    if not isinstance(inner, dict):
        raise UserError(f"{shortened(name)} is a single value: it has no further settings")
    if field is None:
        return inner, None
    default = {"kind": _default_kind(field)} if one_of is not None else {}
    own = one_of.class_of(default | inner, field.annotation) if one_of is not None else field.annotation
    return inner, own if isinstance(own, type) and issubclass(own, BaseModel) else None


def spelt_out(field: FieldInfo | None, value: Any) -> Any:
    """Expand the short form of a group of settings to a table. Return any other ``value`` unchanged."""
    short = next((mark for mark in field.metadata if isinstance(mark, Short)), None) if field is not None else None
    return value if short is None else short.to_table(value)


def chosen_class(settings: type[BaseModel], table: Mapping[str, Any], name: str) -> type | None:
    """Return the settings class that ``table`` chooses for the field ``name`` of ``settings``, such as FedProx.

    The entry ``name`` of ``table`` is the name of a class, a table of settings or an object. If the entry is missing,
    the field's default value is used. The result is None for an unknown class, which validation reports later.
    """
    field = settings.model_fields[name]
    given, one_of = table.get(name, field.default), _one_of(field)
    assert one_of is not None, "a field without several classes"
    try:
        if isinstance(given, str):
            given = one_of.expand(given, field.annotation)
        if isinstance(given, Mapping):
            found: type | None = one_of.class_of({"kind": _default_kind(field), **given}, field.annotation)
            return found
    except UserError:
        return None
    return type(given)


def by_default(text: str) -> Any:
    """Return a pydantic field with a default in short form, such as ``fedavg``. Its class is imported when needed."""
    return Field(text, validate_default=True)


@cache
def default_of(settings: type[BaseModel], name: str) -> Any:
    """Return the default value of the field ``name`` of ``settings``; a default in short form becomes an object."""
    field = settings.model_fields[name]
    one_of = _one_of(field)
    if one_of is None or not isinstance(field.default, str):
        return field.default
    marked: Any = Annotated[field.annotation, one_of]
    return TypeAdapter(marked).validate_python(field.default)


def kinds_of(field: str) -> dict[str, type]:
    """Import and return all of fl-sim's settings classes for a field, such as all algorithms, as {name: class}."""
    return dict(OurKinds(f"fl_sim.{field}"))


def choices_in(settings: type[BaseModel]) -> list[str]:
    """Return the names of the fields of ``settings`` for which the user chooses a class, such as ``algorithm``."""
    return [name for name, field in settings.model_fields.items() if _one_of(field) is not None]


def check_choices(experiment: BaseModel) -> None:
    """Raise ValueError if two settings of ``experiment`` are incompatible (see the entry points in CHECKS)."""
    checks = entry_points_of_ours(CHECKS)
    for field in choices_in(type(experiment)):
        if field in checks and not is_none(getattr(experiment, field)):
            load_entry_point(checks[field])(experiment)


def _one_of(field: FieldInfo) -> OneOf | None:
    return next((extra for extra in field.metadata if isinstance(extra, OneOf)), None)


def _default_kind(field: FieldInfo) -> str:
    """Return the name of the settings class of a field's default value."""
    if not isinstance(field.default, str):
        return str(field.default.kind)
    one_of = _one_of(field)
    assert one_of is not None, "a field without several classes"
    return str(one_of.expand(field.default, field.annotation)["kind"])


MODEL_NAMES: Final = ("niid-cnn", "niid-mlp", "dafl-cnn", "mlp", "2nn", "logistic", "resnet", "random-features")
"""The keys of ``fl_sim.models.MODELS``."""

GRU: Final = "gru"
"""The default model for sequences of tokens (fl_sim.token_models.GatedRecurrent)."""

TOKEN_NAMES: Final = (GRU, "lstm", "transformer", "decoder")
"""The keys of ``fl_sim.token_models.TOKEN_MODELS``."""

ALL_NAMES: Final = (*MODEL_NAMES, *TOKEN_NAMES)


TRAINABLE: Final = ("all", "head", "bias", "norm", "last:K", "lora")
"""The words of the setting ``model.trainable``; K is a number of layers."""


def model_line(written: Mapping[str, Any]) -> str:
    """Return a model's settings as one line of text: the names of architectures, then the other settings.

    ``written``: the settings in the group ``model``. The line leaves out the digest of the weights file.
    """
    options = [f"{name}={value}" for name, value in written.items() if name not in {"name", "others", "digest"}]
    return ", ".join([" + ".join([str(written.get("name", "")), *written.get("others", ())]), *options])


def known_model(name: str) -> str:
    """Return ``name`` unchanged if it is a valid model name; raise UserError if it is not.

    Valid names are the empty name (for the data set's default model), the names of fl-sim's models, and import paths.
    """
    if name and ":" not in name and name not in ALL_NAMES:
        raise UserError(
            f"unknown model {shortened(name)!r}{guess(name, ALL_NAMES)}; choose one of {', '.join(ALL_NAMES)}, or "
            "your own function as package.module:factory"
        )
    return name


MOST_BYTES: Final = 2**20
"""The maximum size of a settings file in bytes. A real settings file with 10,000 numbers has a tenth of this size."""

MOST_LEVELS: Final = 16
"""The maximum depth of nested tables. This limit protects the recursive parser. Real settings need fewer levels."""

_DEEP_KEY: Final = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MOST_LEVELS}}}""")
_INT64: Final = range(-(2**63), 2**63)


def read_table(path: Path) -> dict[str, Any]:
    """Return the table in a TOML file. Raises UserError if the file is missing, not regular, too long, or not TOML."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is no regular file: give the path of a TOML file, or settings as key=value")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise UserError(f"no such file: {path} (settings are given as key=value, for example rounds=50)") from error
    except (OSError, ValueError) as error:  # a path with a forbidden character raises ValueError
        raise UserError(f"{str(path)!r} cannot be read ({error}): give a TOML file, or key=value") from error
    if len(content) > MOST_BYTES:
        raise UserError(f"{path} has more than {MOST_BYTES:,} bytes: give a TOML file of settings")
    try:
        return parse_table(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a TOML file: {error}") from error


def flat(
    table: Mapping[str, Any],
    is_value: Callable[[Any], bool] = lambda value: not isinstance(value, Mapping),
    prefix: str = "",
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested tables.

    ``is_value``: a function that is called with each entry. If it returns False, the entry is an inner table, and the
    entries of this inner table are yielded instead.

    >>> dict(flat({"rounds": 3, "local": {"epochs": 1}}))
    {'rounds': 3, 'local.epochs': 1}
    """
    for key, value in table.items():
        if is_value(value):
            yield prefix + key, value
        else:
            yield from flat(value, is_value, f"{prefix}{key}.")


def parse_table(text: str, where: str) -> dict[str, Any]:
    """Return the content of a TOML ``text`` as a dict. ``where``: the text's file, for messages.

    Raises UserError if the text is not TOML, or if its tables are nested too deeply.
    """
    deep = UserError(f"{where} is nested more than {MOST_LEVELS} levels deep: no setting has so many levels")
    if _DEEP_KEY.search(text):
        raise deep
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise deep from None
    except ValueError as error:  # TOMLDecodeError, and the error for too many digits, are ValueErrors
        raise UserError(f"{where} is not a TOML file: {error}") from error
    _check(table, where, MOST_LEVELS, deep)
    return table


def _check(value: Any, where: str, levels: int, deep: UserError) -> None:
    if isinstance(value, int) and value not in _INT64:
        raise UserError(f"{where} contains a whole number of {len(str(abs(value)))} digits: it must fit into 64 bits")
    if isinstance(value, dict | list):
        if not levels:
            raise deep
        for inner in value.values() if isinstance(value, dict) else value:
            _check(inner, where, levels - 1, deep)
