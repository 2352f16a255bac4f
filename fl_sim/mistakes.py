"""Error messages for mistakes in settings."""

import difflib
from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ValidationError

from fl_sim.kinds import Choosing, field_defaults, is_settings, kinds
from fl_sim.other_words import bare, elsewhere, privacy_settings

MOST_MISTAKES, MOST_CHARACTERS, MOST_OF_A_MISTAKE, MOST_OF_A_VALUE = 5, 900, 600, 240
"""Limits of a message: number of mistakes; number of characters of all mistakes, of one mistake, and of one value."""


def guess(name: str, valid: Iterable[str], cutoff: float = 0.5) -> str:
    """Return a hint, " (did you mean 'x'?)", with the most similar of the valid names; empty if none is similar.

    Case, hyphens and underscores do not count: MNIST is close to mnist, and CIFAR-10 to cifar10.
    """
    names = list(valid)
    alike = [one for one in names if bare(one) == bare(name)]
    close = alike or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    close = close or difflib.get_close_matches(name.lower(), names, n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


def explain(error: ValidationError, settings: type, what: str) -> str:
    """Convert pydantic's validation error to a message for the user: the first mistakes, and the number of the others.

    ``settings``: the settings class that was validated. ``what``: the name of this group of settings in the experiment,
    such as "local"; empty for the experiment itself.
    """
    details = error.errors()
    told = [_middle_cut(_explain_one(detail, settings, what), MOST_OF_A_MISTAKE) for detail in details[:MOST_MISTAKES]]
    while len(told) > 1 and len("; ".join(told)) > MOST_CHARACTERS:
        told.pop()
    more = len(details) - len(told)
    return "; ".join([*told, *([f"and {more} more mistake{'s' * (more > 1)}"] if more else [])])


def shortened(text: str) -> str:
    """Return ``text``, a value to quote in a message. The middle of a very long text is replaced by "..."."""
    return _middle_cut(text, MOST_OF_A_VALUE)


def _middle_cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _explain_one(detail: Any, settings: type, what: str) -> str:
    path, group = _locate([str(part) for part in detail["loc"]], settings)
    where, given = ".".join([*([what] if what else []), *path]), detail["input"]
    if detail["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
        valid = list(field_defaults(group))
        meant = elsewhere(path[-1]) or guess(path[-1], valid)
        if settings_here := privacy_settings(path[-1]):
            return f"unknown key {where!r}: {settings_here}"
        return f"unknown key {where!r}{meant}; valid here: {', '.join(valid)}"
    if detail["type"] in {"union_tag_not_found", "union_tag_invalid"}:
        annotation, choosing = _field(group, path[-1])
        known = list(kinds(annotation)) if choosing is None else choosing.names(annotation)
        kind = given.get("kind")
        return f"{where} needs a kind, one of {', '.join(known)}; got {shortened(repr(kind))}{guess(str(kind), known)}"
    message: str = detail["msg"].removeprefix("Value error, ")
    if not where:
        return message
    several = (
        f"; several values are tried by 'fl-sim sweep {where}={shortened(given)}', or by a table's [grid]"
        if isinstance(given, str) and "," in given
        else ""
    )
    return f"{where} = {shortened(repr(given))}: {message[0].lower()}{message[1:]}{several}"


def _locate(location: list[str], settings: type) -> tuple[list[str], type]:
    """Return (path to the mistaken setting, settings class that has this setting), for the error message.

    The path is a list of keys, as the user wrote them, such as "local" and "epochs".

    ``location``: the location of the mistake, as pydantic returns it. If a field may be one of several classes,
    pydantic's location also contains the name of the chosen class. The user did not write this name as a key, so it is
    removed.
    """
    path: list[str] = []
    parts = iter(location)
    for part in parts:
        path.append(part)
        if part not in field_defaults(settings):
            continue
        annotation, choosing = _field(settings, part)
        if choosing is not None:
            settings = choosing.known(annotation).get(next(parts, ""), settings)
            continue
        members = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and is_settings(one)]
        if len(members) > 1:
            settings = {field_defaults(one)["kind"]: one for one in members}.get(next(parts, ""), settings)
        elif members:
            settings = members[0]
    return path, settings


def _field(settings: type, name: str) -> tuple[Any, Choosing | None]:
    """Return the type annotation of the field ``name``, and its ``Choosing`` marker (None without such a marker).

    A field with this marker has several variants, which the user chooses by name.
    """
    if not issubclass(settings, BaseModel):
        return get_type_hints(settings)[name], None
    field = settings.model_fields[name]
    return field.annotation, next((one for one in field.metadata if isinstance(one, Choosing)), None)
