"""The reference of all settings (name, valid values, default, meaning), made from settings classes and docstrings.

A docstring explains a field in sentences that contain the field's name, such as "``mu``: the paper tries 0.001".
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from fl_sim.data.naming import ABOUT, OPTIONS, SETTINGS
from fl_sim.experiment.experiment import Experiment
from fl_sim.kinds import field_defaults, is_numbered, kind_of, short_form
from fl_sim.settings import OneOf, default_of
from partitions import Scheme

_SENTENCE: Final = re.compile(r"(?<=[.)])\s+(?=[A-Z`\"])")
_SYMBOL: Final = re.compile(r"[b-z]\b")
"""A formula's symbol, such as x, at the beginning of a text. It is not changed to a capital letter."""
_NAME: Final = re.compile(r"``(\w+)``")
_LONG: Final = 1e15  # numbers of at least this size are written in scientific notation, such as 1e+30
_BOUNDS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_WORDS: Final = {
    int: "whole number", float: "number", str: "text", bool: "true or false", NoneType: "nothing",
    Scheme: "a partition, as for the setting partition",
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One setting in the reference of all settings; all fields are texts for users.

    ``name``: the name with dots, such as ``local.epochs``. ``takes``: the valid values in words.
    """

    name: str
    takes: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Group:
    """The settings of one class: the experiment itself, a table in the experiment, or one kind of a setting.

    ``name``: the setting that holds this group, empty for the experiment. ``kind``: the kind, such as ``fedprox``,
    empty for a table. ``within``: the choice that this group requires, such as ``algorithm=pate`` for a table of
    settings of PATE; empty if the group always exists. ``about``: the first paragraph of the class's docstring.
    """

    name: str
    kind: str
    within: str
    about: str
    settings: tuple[Setting, ...]


def groups() -> tuple[Group, ...]:
    """Return all groups: first the experiment's own settings, then the other groups in the order of the settings."""
    first, *others = _groups(Experiment, "", "", "", {})
    # the options of a data set such as csv:PATH; a user writes these options into the text of the setting ``data``
    own_data = []
    for kind, keys in OPTIONS.items():
        settings = tuple(Setting(f"data.{key}", SETTINGS[key][0], "left out", SETTINGS[key][1]) for key in keys)
        own_data.append(Group("data", kind, "", ABOUT[kind], settings))
    return (first, *own_data, *others)


def _groups(settings: type, name: str, kind: str, within: str, defaults: Mapping[str, Any]) -> Iterator[Group]:
    """Yield the ``Group`` of a settings class, then all groups nested in this class.

    ``defaults``: values by field name that replace the default values of the class.
    """
    prefix = f"{name}." if name else ""
    documentation, known = _documentation(settings), {field for field, *_ in _fields(settings)}
    here: list[Setting] = []
    inside: list[tuple[type, str, str, Mapping[str, Any]]] = []
    for field, annotation, extras, own_default in _fields(settings):
        default = defaults.get(field, own_default)
        one_of = next((extra for extra in extras if isinstance(extra, OneOf)), None)
        choices = one_of.known(annotation) if one_of is not None else {}
        if choices:
            takes = either(
                [choice.replace("-k", "-K") if is_numbered(choice, choices[choice]) else choice for choice in choices]
            )
            # an aggregator may contain an inner aggregator; the groups of the aggregators are listed only once
            if settings not in choices.values():
                inside += [(own, f"{prefix}{field}", choice, {}) for choice, own in choices.items()]
        elif tables := [
            part
            for part in (annotation, *get_args(annotation))
            if isinstance(part, type) and issubclass(part, BaseModel)
        ]:
            takes = " or ".join(["a table", *(_WORDS[part] for part in get_args(annotation) if part in _WORDS)])
            inside += [(table, f"{prefix}{field}", "", vars(default) if default else {}) for table in tables]
        else:
            takes = _takes(annotation, extras)
        if choices and (is_numbered(kind_of(default), type(default)) or default != type(default)()):
            shown = short_form(default)
        else:
            shown = kind_of(default) if choices else _as_written(default)
        here.append(Setting(f"{prefix}{field}", takes, shown, meaning(documentation, field, known)))
    about = documentation.partition("\n\n")[0]
    yield Group(name, kind, within, _in_line(about), tuple(here))
    for own, inner, choice, chosen in inside:
        yield from _groups(own, inner, choice, f"{name}={kind}" if kind else within, chosen)


def _fields(settings: type) -> Iterator[tuple[str, Any, tuple[Any, ...], Any]]:
    """Yield (name, type, metadata, default) of each field of a settings class except the field ``kind``."""
    if issubclass(settings, BaseModel):
        found = {name: (field.annotation, tuple(field.metadata)) for name, field in settings.model_fields.items()}
    else:
        assert is_dataclass(settings)
        hints = get_type_hints(settings)
        found = {field.name: (hints[field.name], ()) for field in fields(settings)}
    defaults = field_defaults(settings)
    for name, (annotation, extras) in found.items():
        if name != "kind":
            default = default_of(settings, name) if issubclass(settings, BaseModel) else defaults[name]
            yield name, annotation, extras, default


def _documentation(settings: type) -> str:
    """Return one text: the docstrings of a class, and of the base classes from which it inherits fields."""
    own = [settings]
    for base in settings.__mro__[1:]:
        has_fields = is_dataclass(base) or (issubclass(base, BaseModel) and bool(base.model_fields))
        own += [base] if has_fields and "__annotations__" in vars(base) else []
    return "\n\n".join(inspect.cleandoc(vars(base).get("__doc__") or "") for base in own)


def meaning(documentation: str, field: str, known: set[str]) -> str:
    """Return the sentences of a docstring that explain ``field``; empty if there are none.

    The explanation begins with the sentence that starts with the field's name. It ends at the end of the paragraph, or
    before the next sentence that names any field of the class (``known``). If no sentence starts with the field's name,
    all sentences that contain the name are returned.
    """
    defining: list[str] = []
    naming: list[str] = []
    for paragraph in documentation.split("\n\n"):
        goes_on = False
        for sentence in _SENTENCE.split(_in_line(paragraph)):
            named = known & set(_NAME.findall(sentence))
            goes_on = sentence.startswith(f"``{field}``") or (goes_on and not named)
            (defining if goes_on else naming if field in named else []).append(sentence)
    text = " ".join(defining or naming).removeprefix(f"``{field}``: ")
    return text if _SYMBOL.match(text) else text[:1].upper() + text[1:]


def either(names: Sequence[Any]) -> str:
    """Return the names as an enumeration: "a, b or c"."""
    *first, last = map(str, names)
    return f"{', '.join(first)} or {last}" if first else last


def _takes(annotation: Any, extras: tuple[Any, ...]) -> str:
    """Return the valid values of a field in words, such as "whole number, at least 1"."""
    parts, origin = get_args(annotation), get_origin(annotation)
    if origin is Literal:
        return either(parts)
    if origin is tuple:
        return f"list of: {_takes(*_narrowed(parts[0]))}"
    if parts:
        return " or ".join(_takes(*_narrowed(part)) for part in parts if part is not NoneType) + _bounds(extras)
    return _WORDS[annotation] + _bounds(extras)


def _narrowed(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return (type, metadata) of ``Annotated[type, ...]``. Any other annotation is returned with the metadata ()."""
    if not hasattr(annotation, "__metadata__"):
        return annotation, ()
    extras = [inner for extra in annotation.__metadata__ for inner in getattr(extra, "metadata", [extra])]
    return annotation.__origin__, tuple(extras)


def _bounds(extras: tuple[Any, ...]) -> str:
    bounds = [
        (words, getattr(extra, name)) for extra in extras for name, words in _BOUNDS.items() if hasattr(extra, name)
    ]
    return "".join(
        f", {words} {value:,.0f}" if value == int(value) and value < _LONG else f", {words} {value:g}"
        for words, value in bounds
    )


def _as_written(default: Any) -> str:
    if isinstance(default, BaseModel):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if default is PydanticUndefined or default is MISSING:
        return "none, it must be given"
    if is_dataclass(default):
        return short_form(default)
    if default is None or default in ("", ()):
        return "left out"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _in_line(text: str) -> str:
    return " ".join(text.split())
