"""Sequences of tokens: checked, and made of texts by LEAF's alphabet of Shakespeare's plays."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.mistakes import shortened

ALPHABET: Final = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters, in its order: character i is class i, and token i + 1, as token 0 is padding."""

VOCABULARY: Final = len(ALPHABET) + 1
MOST_TOKENS: Final = 2**24
"""Whole numbers up to here are exact in float32, in which all numbers of records are kept."""

_PLACE: Final = {character: place for place, character in enumerate(ALPHABET)}


def as_tokens(texts: Sequence[object], where: str) -> NDArray[np.float32]:
    """Return texts, each of at least one character, as rows of tokens, zeros behind the shorter ones."""
    if not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"{where} has inputs that are no texts, or empty ones, among texts")
    rows = np.zeros((len(texts), max(map(len, map(str, texts)))), dtype=np.float32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(str(text))] = [1 + _place(character, where) for character in str(text)]
    return rows


def as_classes(characters: Sequence[object], where: str) -> NDArray[np.int64]:
    """Return the classes of single characters: what follows each text."""
    if not all(isinstance(character, str) and len(character) == 1 for character in characters):
        raise UserError(
            f"{where} has texts for inputs and labels that are no single characters: of texts, next-character "
            "prediction (Shakespeare) alone is supported, not classes of texts (Sent140) or names of files (CelebA)"
        )
    return np.array([_place(str(character), where) for character in characters], dtype=np.int64)


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


def _place(character: str, where: str) -> int:
    if character not in _PLACE:
        raise UserError(f"{where} has the character {shortened(character)!r}, which is none of LEAF's 80; take it out")
    return _PLACE[character]
