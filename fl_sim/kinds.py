"""Kinds: what a settings class is called, what it is made of, and how it is written."""

from dataclasses import fields, is_dataclass
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel

_OURS: Final = frozenset({"fl_sim", "strategies", "clients", "partitions"})


def kinds(union: Any) -> dict[str, type]:
    """Return {kind: class} of a union of settings classes (or of one class)."""
    members = get_args(union) if get_origin(union) is not None else (union,)
    return {field_defaults(member)["kind"]: member for member in members}


def field_defaults(settings: type) -> dict[str, Any]:
    """Return {field: default} of a settings class, in order; works for pydantic models and dataclasses."""
    if issubclass(settings, BaseModel):
        return {name: field.default for name, field in settings.model_fields.items()}
    assert is_dataclass(settings)
    return {field.name: field.default for field in fields(settings)}


def is_settings(settings: type) -> bool:
    """Say whether values of a class are frozen and made of fields that can be written down."""
    if issubclass(settings, BaseModel):
        return bool(settings.model_config.get("frozen"))
    return is_dataclass(settings) and bool(settings.__dataclass_params__.frozen)  # type: ignore[attr-defined]  # typeshed has no such name


def kind_of(value: Any) -> str:
    """Return the kind of a settings value: the name of one of ours, the import path of one of the user's own.

    A class that inherits from one of ours is the user's own, whatever kind it inherits.
    """
    settings = type(value)
    if settings.__module__.partition(".")[0] in _OURS:
        return str(value.kind)
    return f"{settings.__module__}:{settings.__qualname__}"


def title_of(value: Any) -> str:
    """Return how a kind is written for people: its ``title``, else the name of its class."""
    return str(value.title) if "title" in vars(type(value)) else type(value).__name__


def short_form(value: Any) -> str:
    """Return the short form of a settings value, such as ``label-1`` or ``dirichlet:0.05``."""
    kind = kind_of(value)
    parameter = next((name for name in field_defaults(type(value)) if name != "kind"), None)
    if parameter is None:
        return kind
    given = getattr(value, parameter)
    return f"{kind.removesuffix('-k')}-{given}" if kind.endswith("-k") else f"{kind}:{given}"
