"""Settings as frozen values: their base, short forms such as ``dirichlet:0.05``, and messages that help."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any, Self, TypeAlias, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError, model_validator

from fl_sim.types import UserError
from partitions import Scheme

Json: TypeAlias = dict[str, Any]

MOST_MISTAKES, MOST_CHARACTERS = 5, 600
"""What one message tells: so many mistakes, each in so many characters."""


class Settings(BaseModel):
    """A frozen group of settings that refuses unknown keys, NaN, infinity, and whole numbers beyond 64 bits."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="strings")

    @model_validator(mode="after")
    def _whole_numbers_have_64_bits(self) -> Self:
        for name in type(self).model_fields:
            if isinstance(value := getattr(self, name), int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"{name} is a whole number of {len(str(abs(value)))} digits: it must have 64 bits")
        return self


def kinds(union: Any) -> dict[str, type]:
    """Return {kind: class} of a union of settings classes (or of one class)."""
    members = get_args(union) if get_origin(union) is not None else (union,)
    return {field_defaults(member)["kind"]: member for member in members}


def field_defaults(settings: type) -> dict[str, Any]:
    """Return {field: default} of a settings class, in order; works for pydantic models and dataclasses."""
    if issubclass(settings, BaseModel):
        return {name: field.default for name, field in settings.model_fields.items()}
    return {name: field.default for name, field in settings.__dataclass_fields__.items()}  # type: ignore[attr-defined]


def expand(text: str, union: Any, what: str) -> Json:
    """Turn a short form into a table: ``scaffold``, ``dirichlet:0.05`` (sets the first parameter), ``label-2``.

    Raises UserError for a kind that is not in ``union``; the message lists the valid ones and guesses.
    """
    known = kinds(union)
    name, colon, value = text.partition(":")
    head, dash, number = name.rpartition("-")
    if name not in known and dash and number.isdigit() and f"{head}-k" in known:
        name, colon, value = f"{head}-k", ":", number
    if name not in known:
        raise UserError(f"unknown {what} {shortened(text)!r}{guess(name, known)}; valid: {', '.join(known)}")
    if not colon:
        return {"kind": name}
    fields = [field for field in field_defaults(known[name]) if field != "kind"]
    if not fields:
        raise UserError(f"{what} {name!r} takes no parameter, got {shortened(text)!r}")
    return {"kind": name, fields[0]: value}


def with_default_kinds(settings: type[BaseModel], table: Json, groups: Iterable[str]) -> Json:
    """Return ``table`` in which a group without a kind, as ``group.key=value`` makes it, has the default's kind."""
    filled = dict(table)
    for group in groups:
        if isinstance(filled.get(group), dict):
            filled[group] = {"kind": settings.model_fields[group].default.kind, **filled[group]}
    return filled


def short(union: Any, what: str) -> BeforeValidator:
    """Return the validator that lets a field of ``union`` take a short form."""
    return BeforeValidator(lambda value: expand(value, union, what) if isinstance(value, str) else value)


def parse(value: str | Mapping[str, Any], union: Any, what: str) -> Any:
    """Validate a short form or a table against a union of settings classes told apart by ``kind``."""
    table = expand(value, union, what) if isinstance(value, str) else dict(value)
    known = kinds(union)
    if table.get("kind") not in known:
        raise UserError(f"{what} needs a kind, one of {', '.join(known)}; got {table.get('kind')!r}")
    try:
        return TypeAdapter[Any](known[table["kind"]]).validate_python(table)
    except ValidationError as error:
        raise UserError(explain(error, known[table["kind"]], what)) from error


def parse_scheme(text: str) -> Scheme:
    """Return the partition scheme that ``text`` names, such as ``label-1``, ``dirichlet:0.05`` or ``iid``."""
    scheme: Scheme = parse(text, Scheme, "partition")
    return scheme


def guess(name: str, valid: Iterable[str]) -> str:
    """Return ' (did you mean ...?)' where something close to ``name`` is valid, else nothing."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def explain(error: ValidationError, settings: type, what: str) -> str:
    """Say a validation error in words a user can act on: the first mistakes, and how many more there are."""
    details = error.errors()
    told = [shortened(_explain_one(detail, settings, what)) for detail in details[:MOST_MISTAKES]]
    return "; ".join([*told, *([f"and {more} more mistakes"] if (more := len(details) - MOST_MISTAKES) > 0 else [])])


def shortened(text: str) -> str:
    """Return ``text`` for a message: what is far longer than any setting loses its middle."""
    return (
        text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS // 2]} ... {text[-MOST_CHARACTERS // 2 :]}"
    )


def _explain_one(detail: Any, settings: type, what: str) -> str:
    path, group = _locate([str(part) for part in detail["loc"]], settings)
    where = ".".join([*([what] if what else []), *path])
    if detail["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
        valid = list(field_defaults(group))
        return f"unknown key {where!r}{guess(path[-1], valid)}; valid here: {', '.join(valid)}"
    if detail["type"] in {"union_tag_not_found", "union_tag_invalid"}:
        known = kinds(_union(_members(_annotation(group, path[-1]))))
        given = detail["input"].get("kind")
        return f"{where} needs a kind, one of {', '.join(known)}; got {given!r}{guess(str(given), known)}"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{where} = {detail['input']!r}: {message[0].lower()}{message[1:]}" if where else message


def _locate(location: list[str], settings: type) -> tuple[list[str], type]:
    """Return (the keys a user wrote, the settings class that the last one belongs to).

    pydantic puts the kind it chose into the location, after the key of the union.
    """
    path: list[str] = []
    parts = iter(location)
    for part in parts:
        path.append(part)
        if part not in field_defaults(settings):
            continue
        members = [member for member in _members(_annotation(settings, part)) if _has_kind_or_fields(member)]
        if len(members) > 1:
            settings = kinds(_union(members)).get(next(parts, ""), settings)
        elif members:
            settings = members[0]
    return path, settings


def _annotation(settings: type, field: str) -> Any:
    if issubclass(settings, BaseModel):
        return settings.model_fields[field].annotation
    return get_type_hints(settings)[field]


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is not None else (annotation,)


def _union(members: Iterable[type]) -> Any:
    return Union[tuple(members)]  # noqa: UP007 (made at run time)


def _has_kind_or_fields(member: Any) -> bool:
    return isinstance(member, type) and (issubclass(member, BaseModel) or is_dataclass(member))
