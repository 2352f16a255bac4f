"""Every setting with what it takes, its default and its meaning, read from the settings classes and their docstrings.

A class tells the meaning of its field in its docstring, in sentences that name it: "``mu``: the paper tries 0.001".
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

_SENTENCE: Final = re.compile(r"(?<=[.)])\s+(?=[A-Z`\"])")
_NAME: Final = re.compile(r"``(\w+)``")
_BOUNDS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_WORDS: Final = {int: "whole number", float: "number", str: "text", bool: "true or false", NoneType: "nothing"}


@dataclass(frozen=True)
class Setting:
    """A setting: its dotted ``name``, what it ``takes``, its ``default`` and its ``meaning``, all in words."""

    name: str
    takes: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Group:
    """Settings that exist together: an experiment's own, those of a table in it, or those of one kind.

    ``name``: the setting that holds them, empty for the experiment. ``kind``: what has to be chosen there, such as
    ``fedprox``; empty where nothing is. ``within``: the choice that ``name`` itself exists with, such as
    ``algorithm=pate``; empty where it always does. ``about``: the first paragraph of the class's docstring.
    """

    name: str
    kind: str
    within: str
    about: str
    settings: tuple[Setting, ...]


def groups() -> tuple[Group, ...]:
    """Return the experiment's own settings, and then every group in the order in which they come in it."""
    first, *others = _groups(Experiment, "", "", "", {})
    return (first, *_groups_of_own_data(), *others)


def _groups_of_own_data() -> Iterator[Group]:
    """Yield what is set of the user's own records, which are a line of text in an experiment."""
    for kind, keys in OPTIONS.items():
        settings = tuple(Setting(f"data.{key}", SETTINGS[key][0], "left out", SETTINGS[key][1]) for key in keys)
        yield Group("data", kind, "", ABOUT[kind], settings)


def _groups(settings: type, name: str, kind: str, within: str, defaults: Mapping[str, Any]) -> Iterator[Group]:
    """Yield the group of a class, whose fields have these ``defaults`` where they differ from its own."""
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
            inside += [(own, f"{prefix}{field}", choice, {}) for choice, own in choices.items()]
        elif tables := [part for part in (annotation, *get_args(annotation)) if _is_table(part)]:
            takes = " or ".join(["a table", *(_WORDS[part] for part in get_args(annotation) if part in _WORDS)])
            inside += [(table, f"{prefix}{field}", "", vars(default) if default else {}) for table in tables]
        else:
            takes = _takes(annotation, extras)
        shown = _chosen(default) if choices else _as_written(default)
        here.append(Setting(f"{prefix}{field}", takes, shown, meaning(documentation, field, known)))
    about = documentation.partition("\n\n")[0]
    yield Group(name, kind, within, _in_line(about), tuple(here))
    for own, inner, choice, chosen in inside:
        yield from _groups(own, inner, choice, f"{name}={kind}" if kind else within, chosen)


def _fields(settings: type) -> Iterator[tuple[str, Any, tuple[Any, ...], Any]]:
    """Yield (name, type, what narrows it, default) of each field but ``kind``."""
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
    """Return the docstring of a class, and below it those of the classes that it takes fields over from."""
    own = [
        base for base in settings.__mro__ if base is settings or (_has_fields(base) and "__annotations__" in vars(base))
    ]
    return "\n\n".join(inspect.cleandoc(vars(base).get("__doc__") or "") for base in own)


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _has_fields(base: type) -> bool:
    return (issubclass(base, BaseModel) and bool(base.model_fields)) or is_dataclass(base)


def meaning(documentation: str, field: str, known: set[str]) -> str:
    """Return the sentences of a docstring on ``field``, empty if there are none.

    It is the sentence that begins with the field and those after it, up to one that names another of the ``known``
    fields, or to the end of the paragraph; where no sentence begins with it, those that name it.
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
    return text[:1].upper() + text[1:]


def either(names: Sequence[Any]) -> str:
    """Return "a, b or c"."""
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
    """Return the type and what narrows it of an ``Annotated`` inside of another type."""
    if not hasattr(annotation, "__metadata__"):
        return annotation, ()
    extras = [inner for extra in annotation.__metadata__ for inner in getattr(extra, "metadata", [extra])]
    return annotation.__origin__, tuple(extras)


def _bounds(extras: tuple[Any, ...]) -> str:
    found = [(extra, name) for extra in extras for name in _BOUNDS if hasattr(extra, name)]
    return "".join(f", {_BOUNDS[name]} {_number(getattr(extra, name))}" for extra, name in found)


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _chosen(default: Any) -> str:
    kind = kind_of(default)
    return short_form(default) if is_numbered(kind, type(default)) or default != type(default)() else kind


def _as_written(default: Any) -> str:
    if isinstance(default, BaseModel):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if default is PydanticUndefined or default is MISSING:
        return "none, it must be given"
    if default is None or default in ("", ()):
        return "left out"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _in_line(text: str) -> str:
    return " ".join(text.split())
