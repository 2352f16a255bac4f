"""Short names of the rows of a table: the method, and the settings in which rows of the same method differ.

A full label of a row has the method and settings, such as "FedProx (mu=0.1), local.epochs=5".
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

_ALWAYS, _NEVER = "aggregator=", "aggregator=mean"
"""Prefix of a setting that short names always state, and a setting that they never state, respectively."""
_SETTING = re.compile(r"[\w.]+=")


def short_names(labels: Iterable[str]) -> dict[str, str]:
    """Return {label: short name}. A short name has the method, and the settings in which this method's rows differ.

    A short name always states an aggregator other than the mean. A text in brackets that is not a setting is kept. If
    two rows would have the same short name, both rows keep their whole labels.

    >>> list(short_names(["A, b=1, c=2", "A, b=2, c=2", "B (d=1) + C (ours), c=2"]).values())
    ['A, b=1', 'A, b=2', 'B + C (ours)']
    """
    parts = {label: (method_of(label), settings_of(label)) for label in labels}
    short = {}
    for label, (method, _) in parts.items():
        same = [settings for name, settings in parts.values() if name == method]
        common = set(same[0]).intersection(*same)
        short[label] = _keeping(label, partial(_is_shown, common))
    return {label: name if list(short.values()).count(name) == 1 else label for label, name in short.items()}


def method_of(label: str) -> str:
    """Return the method of a row: its label without any settings.

    >>> method_of("A (b=1, c=d (e=2)) + F, G (h=3), i=4")
    'A + F, G'
    """
    return _keeping(label, lambda _: False)


def settings_of(label: str) -> list[str]:
    """Return the settings in a label: the settings in brackets and the settings after a comma.

    >>> settings_of("A (b=1, c=d (e=2)) + F, G (h=3), i=4")
    ['b=1', 'c=d (e=2)', 'h=3', 'i=4']
    """
    return [one for part in outside_brackets(label, ", ") for one in _settings_in(part)]


def further_settings(label: str, name: str, parameters: str) -> str:
    """Return the settings of a row that its short ``name`` does not state, as text.

    ``label``: the row's full label. ``parameters``: further settings of the row, separated by commas.
    """
    named = settings_of(name)
    every = dict.fromkeys([*parameters.split(", "), *settings_of(label)])
    return ", ".join(one for one in every if one and one not in named)


def _is_shown(common: Collection[str], setting: str) -> bool:
    return setting != _NEVER and (setting.startswith(_ALWAYS) or setting not in common)


def _keeping(label: str, is_kept: Callable[[str], bool]) -> str:
    """Return the row's ``label`` without the settings for which the function ``is_kept`` returns False."""
    parts = []
    for part in outside_brackets(label, ", "):
        if _SETTING.match(part):
            parts += [part] * is_kept(part)
            continue
        words = []
        for word in outside_brackets(part, " "):
            if inside := _in_brackets(word):
                kept = ", ".join(filter(is_kept, inside))
                words += [f"({kept})"] if kept else []
            else:
                words.append(word)
        parts.append(" ".join(words))
    return ", ".join(parts)


def _settings_in(part: str) -> Iterator[str]:
    if _SETTING.match(part):
        yield part
        return
    for word in outside_brackets(part, " "):
        yield from _in_brackets(word)


def _in_brackets(word: str) -> list[str]:
    """Return the settings in a word such as "(mu=0.1, tau=2)". The list is empty for any other word."""
    inside = outside_brackets(word[1:-1], ", ") if word.startswith("(") and word.endswith(")") else []
    return inside if all(map(_SETTING.match, inside)) else []


def outside_brackets(text: str, separator: str) -> list[str]:
    """Split ``text`` at each ``separator`` that is outside brackets, and return the parts."""
    parts: list[str] = []
    for piece in text.split(separator):
        is_open = bool(parts) and parts[-1].count("(") > parts[-1].count(")")
        parts[len(parts) - is_open :] = [parts[-1] + separator + piece] if is_open else [piece]
    return parts
