"""Sequences of tokens: checked, and made of texts by LEAF's alphabet of Shakespeare's plays."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.mistakes import shortened

ALPHABET: Final = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters, in its order: character i is class i, and token i + 1, as token 0 is padding."""

MOST_CHARACTERS: Final = 10_000
"""Of an alphabet of one's own; each is a class."""

MOST_TOKENS: Final = 2**24
"""Whole numbers up to here are exact in float32, in which all numbers of records are kept."""


def alphabet_set(given: str) -> str:
    """Return the characters that a setting names, LEAF's where it is empty. Raises UserError for one named twice."""
    if not given:
        return ALPHABET
    if twice := [character for character in given if given.count(character) > 1][:1]:
        raise UserError(f"data.alphabet names the character {twice[0]!r} twice; name each once, in order")
    if not 2 <= len(given) <= MOST_CHARACTERS:
        raise UserError(f"data.alphabet names {len(given):,} characters; wanted are 2 to {MOST_CHARACTERS:,}")
    return given


def as_tokens(texts: Sequence[object], where: str, alphabet: str) -> NDArray[np.float32]:
    """Return texts, each of at least one character, as rows of tokens, zeros behind the shorter ones."""
    if not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"{where} has inputs that are no texts, or empty ones, among texts")
    rows = np.zeros((len(texts), max(map(len, map(str, texts)))), dtype=np.float32)
    places = _places(alphabet)
    for row, text in zip(rows, texts, strict=True):
        row[: len(str(text))] = [1 + _place(character, places, where) for character in str(text)]
    return rows


def as_classes(characters: Sequence[object], where: str, alphabet: str) -> NDArray[np.int64]:
    """Return the classes of single characters: what follows each text."""
    if not all(isinstance(character, str) and len(character) == 1 for character in characters):
        raise UserError(
            f"{where} has texts for inputs and labels that are no single characters: of texts, next-character "
            "prediction (Shakespeare) alone is supported, not classes of texts (Sent140) or names of files (CelebA)"
        )
    places = _places(alphabet)
    return np.array([_place(str(character), places, where) for character in characters], dtype=np.int64)


def tokens_in(where: str, array: NDArray[np.generic], vocabulary: int) -> NDArray[np.float32]:
    """Return whole numbers (records, length) as tokens. Raises UserError for others, and for padding before a token."""
    if array.dtype.kind not in "iu" or array.ndim != 2 or 0 in array.shape:
        raise UserError(f"{where}: {array.dtype} {array.shape}; tokens are whole numbers of shape (records, length)")
    tokens = array.astype(np.int64)
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise UserError(
            f"{where}: tokens run from {tokens.min()} to {tokens.max()}; with vocabulary {vocabulary} they are 1 to "
            f"{vocabulary - 1}, and 0 is padding"
        )
    is_token = tokens != 0
    bad = ~is_token[:, 0] | (is_token[:, 1:] & ~is_token[:, :-1]).any(axis=1)
    if bad.any():
        raise UserError(
            f"{where}: record {int(bad.argmax())} has padding (0) before a token, or no token; put it behind them"
        )
    return tokens.astype(np.float32)


def widened(rows: NDArray[np.float32], length: int) -> NDArray[np.float32]:
    """Return tokens with padding up to ``length``."""
    return np.pad(rows, ((0, 0), (0, length - rows.shape[1])))


@lru_cache(maxsize=2)
def _places(alphabet: str) -> Mapping[str, int]:
    return {character: place for place, character in enumerate(alphabet)}


def _place(character: str, places: Mapping[str, int], where: str) -> int:
    if character not in places:
        whose = "of LEAF's 80" if places is _places(ALPHABET) else f"of the {len(places)} in data.alphabet"
        raise UserError(
            f"{where} has the character {shortened(character)!r}, which is none {whose}; take it out, or name all "
            "characters by data.alphabet"
        )
    return places[character]
