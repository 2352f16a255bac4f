"""Texts from files and foreign programs, for the screen: no character of theirs steers a terminal."""

import re
import unicodedata
from typing import Final

_STEERING: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters but tab and line feed, marks that turn the direction of a text, and halves of characters."""


def printable(text: str) -> str:
    """Return ``text`` with each character that steers a terminal as Python writes it, in ASCII."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def in_a_line(text: str) -> str:
    """Return ``text`` as one printable line: line breaks and tabs become spaces."""
    return printable(re.sub(r"\s*[\t\n\r\x0b\x0c\x85\u2028\u2029]+\s*", " ", text))


def as_cell(text: str) -> str:
    """Return ``text`` for a cell of a spreadsheet: what would be a formula there begins with an apostrophe.

    Numbers stay as they are.
    """
    first = unicodedata.normalize("NFKC", text.lstrip())[:1]
    return f"'{text}" if (first in {"=", "+", "-", "@"} and not _is_number(text)) or text[:1] in {"\t", "\r"} else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
