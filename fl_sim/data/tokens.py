"""Tokenizers: texts become rows of whole numbers (tokens). Token 0 is padding, at the end of a row.

There are three tokenizers. ``Characters``: one token for each character of an alphabet, and one token for all other
characters. ``Bytes``: one token for each byte of a text in UTF-8. ``Vocabulary``: the tokens of a file tokenizer.json,
the format of Hugging Face's library ``tokenizers``; the tokens of a large data set are cached.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.kept import cache_root, kept_arrays
from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.own_code import in_one_line, package_folders

ALPHABET: Final = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF's Shakespeare data. Character i is class i and token i + 1: token 0 is padding."""

MOST_CHARACTERS: Final = 10_000
"""Maximum number of characters in ``data.alphabet``; each character is a class."""

MOST_TOKENS: Final = 2**24
"""Maximum number of different tokens. Tokens are stored as float32, which is exact for whole numbers up to 2^24."""

UNKNOWN: Final = "\N{REPLACEMENT CHARACTER}"
"""The character that is shown in place of a character outside the alphabet."""

_CACHED: Final = 2**20
"""Tokens of a ``Vocabulary`` are cached if all texts have at least this many characters. Fewer need under a second."""

_FILE: Final = "tokenizer.json"


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of texts. ``rows``: float32, (texts, length). ``num_cut``: the number of truncated texts."""

    rows: NDArray[np.float32]
    num_cut: int


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    @property
    def name(self) -> str:
        """The description of the tokenizer, for the note of a data set."""
        ...

    @property
    def size(self) -> int:
        """The number of different tokens, padding included."""
        ...

    def tokens(self, texts: Sequence[str], most: int) -> Tokens:
        """Return the tokens of ``texts``. A text of more than ``most`` tokens is truncated."""
        ...

    def text(self, row: NDArray[np.float32]) -> str:
        """Return the text of the tokens ``row``, without padding."""
        ...


@dataclass(frozen=True)
class Characters:
    """The tokenizer with one token for each character of ``alphabet``, and one more token for all other characters.

    The tokens are numbered from 1.
    """

    alphabet: str

    @property
    def name(self) -> str:
        """The description of the tokenizer, for the note of a data set."""
        whose = "LEAF's" if self.alphabet == ALPHABET else "of data.alphabet"
        return f"the {len(self.alphabet):,} characters {whose}, and one token for all others"

    @property
    def size(self) -> int:
        """The number of characters, and two more: padding, and the token for all other characters."""
        return len(self.alphabet) + 2

    def tokens(self, texts: Sequence[str], most: int) -> Tokens:
        """Return one token for each of the first ``most`` characters of each text."""
        cut = [text[:most] for text in texts]
        places = places_in("".join(cut), self.alphabet)
        return Tokens(_in_rows(1 + places, [*map(len, cut)]), sum(len(text) > most for text in texts))

    def text(self, row: NDArray[np.float32]) -> str:
        """Return the characters of the tokens in ``row``."""
        shown = self.alphabet + UNKNOWN
        return "".join(shown[int(token) - 1] for token in row[row > 0])


@dataclass(frozen=True)
class Bytes:
    """The tokenizer with one token for each byte of a text in UTF-8: byte b is token b + 1."""

    name: str = "bytes of UTF-8"
    size: int = 257

    def tokens(self, texts: Sequence[str], most: int) -> Tokens:
        """Return one token for each of the first ``most`` bytes of each text."""
        written = [text.encode("utf-8", "surrogatepass") for text in texts]
        cut = [text[:most] for text in written]
        found = np.frombuffer(b"".join(cut), np.uint8).astype(np.int64)
        return Tokens(_in_rows(1 + found, [*map(len, cut)]), sum(len(text) > most for text in written))

    def text(self, row: NDArray[np.float32]) -> str:
        """Return the text of the bytes in ``row``. A truncated character becomes a replacement character."""
        return bytes(int(token) - 1 for token in row[row > 0]).decode("utf-8", "replace")


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer in the file ``path``. ``written``: the value of ``data.tokenizer``. ``digest``: the file's SHA-256.

    If token 0 of the file is padding, all tokens keep their numbers, because pretrained models with this tokenizer
    expect these numbers. Otherwise 1 is added to the number of every token, because token 0 is padding in fl-sim.
    """

    written: str
    path: Path
    digest: str

    @property
    def name(self) -> str:
        """The description of the tokenizer, for the note of a data set. It contains the start of the file's digest."""
        moved = ", each token one higher" if self._shift else ""
        return f"{shortened(self.written)}, {_FILE} {self.digest[:12]}{moved}"

    @cached_property
    def _library(self) -> Any:
        return _tokenizer_in(self.path, self.digest)

    @cached_property
    def _shift(self) -> int:
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        first = next((word for word, number in vocabulary.items() if number == 0), "")
        padding = self._library.padding
        is_padding = padding["pad_token"] == first if padding else first.strip("[]<>|").lower() in {"pad", "padding"}
        return 0 if is_padding else 1

    @cached_property
    def size(self) -> int:
        """The vocabulary size: the largest token, plus 1."""
        return int(max(self._library.get_vocab(with_added_tokens=True).values())) + 1 + self._shift

    def tokens(self, texts: Sequence[str], most: int) -> Tokens:
        """Return the tokens of ``texts`` with the tokenizer's special tokens, truncated to ``most`` tokens."""
        if sum(map(len, texts)) < _CACHED:
            return self._computed(texts, most)
        identity = hashlib.sha256(f"tokens-1 {self.digest} {most} {self._shift} {_digest(texts)}".encode()).hexdigest()
        path = cache_root() / f"tokens-{identity[:20]}" / "tokens.safetensors"

        def make() -> dict[str, NDArray[Any]]:
            made = self._computed(texts, most)
            return {"rows": made.rows, "cut": np.array([made.num_cut])}

        found = kept_arrays(
            path,
            ("rows", "cut"),
            identity,
            make,
            lambda found: found["rows"].ndim == 2 and len(found["rows"]) == len(texts) and found["cut"].shape == (1,),
            f"the tokens of {len(texts):,} texts",
            private=True,
        )
        return Tokens(found["rows"], int(found["cut"][0]))

    def _computed(self, texts: Sequence[str], most: int) -> Tokens:
        library = self._library
        library.no_padding()
        try:
            library.enable_truncation(most)
            found = library.encode_batch([*texts])
        except Exception as error:  # ``tokenizers`` raises Exception itself, no subclass
            raise UserError(
                f"data.tokenizer={shortened(self.written)} cannot tokenize these texts ({in_one_line(error)}); set "
                "another tokenizer, or a larger data.max_length"
            ) from error
        lengths = [len(one.ids) for one in found]
        flat = np.fromiter((token for one in found for token in one.ids), np.int64, sum(lengths))
        if not self._shift and not flat.all():  # texts must not contain the padding token
            raise UserError(
                f"data.tokenizer={shortened(self.written)} gives its padding token inside of texts, such as for "
                f"{shortened(next(text for text, one in zip(texts, found, strict=True) if 0 in one.ids))!r}; remove "
                "the word from these texts"
            )
        return Tokens(_in_rows(flat + self._shift, lengths), sum(bool(one.overflowing) for one in found))

    def text(self, row: NDArray[np.float32]) -> str:
        """Return the text of the tokens in ``row``, as the library decodes them, without special tokens."""
        joined: str = self._library.decode([int(token) - self._shift for token in row[row > 0]])
        return joined


def tokenizer_by(written: str, alphabet: str) -> Tokenizer:
    """Return the tokenizer that ``data.tokenizer`` names: characters, bytes, or the location of a tokenizer.json.

    ``alphabet``: the value of ``data.alphabet``; empty if it is not set. The location is a file, a folder with a file
    tokenizer.json, or the name of an installed package with such a folder. Raises UserError if the tokenizer does not
    exist.
    """
    if alphabet and written != "characters":
        raise UserError("data.alphabet is for data.tokenizer=characters; leave data.alphabet out")
    if written == "characters":
        return Characters(alphabet_set(alphabet))
    if written in {"", "bytes"}:
        return Bytes()
    path = _place(written)
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"data.tokenizer: {path} cannot be read ({error.strerror}); make it readable") from error
    made = Vocabulary(written, path, digest)
    if made.size > MOST_TOKENS:
        raise UserError(f"data.tokenizer: {path} has {made.size:,} tokens; use a tokenizer of at most {MOST_TOKENS:,}")
    return made


def place_of(written: str) -> Path | None:
    """Return the file of the tokenizer that ``data.tokenizer`` names; None for characters and bytes."""
    return None if written in {"", "characters", "bytes"} else _place(written)


def alphabet_set(given: str) -> str:
    """Return the alphabet that the setting ``data.alphabet`` gives.

    ``given``: the value of the setting; empty for the alphabet of LEAF. Raises UserError for a repeated character, and
    for fewer than 2 or more than 10,000 characters.
    """
    if not given:
        return ALPHABET
    if twice := [character for character in given if given.count(character) > 1][:1]:
        raise UserError(f"data.alphabet names the character {twice[0]!r} twice; name each once, in order")
    if not 2 <= len(given) <= MOST_CHARACTERS:
        raise UserError(f"data.alphabet names {len(given):,} characters; it must name 2 to {MOST_CHARACTERS:,}")
    return given


def as_tokens(texts: Sequence[object], where: str, alphabet: str) -> NDArray[np.float32]:
    """Convert texts to tokens: float32 of shape (texts, length of the longest text), padded at the end with zeros.

    All characters outside ``alphabet`` become the same token: the first number after the tokens of the alphabet. Raises
    UserError for an empty text, and for a value that is no text.
    """
    if not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"{where}: some inputs are texts, and others are empty or no texts; make all of them texts")
    found = [*map(str, texts)]
    return Characters(alphabet).tokens(found, max(map(len, found))).rows


def as_classes(characters: Sequence[object], where: str, alphabet: str) -> NDArray[np.int64]:
    """Convert ``characters``, the labels of texts, to class numbers.

    The label of a text is the character after the text. All characters outside ``alphabet`` become the same class: the
    first number after the classes of the alphabet. Raises UserError for labels that are not single characters.
    """
    if not all(isinstance(character, str) and len(character) == 1 for character in characters):
        raise UserError(
            f"{where} has texts as inputs, but its labels are not single characters. For texts only next-character "
            "prediction is supported (Shakespeare), not classes of texts (Sent140) or file names as inputs (CelebA)"
        )
    return places_in("".join(map(str, characters)), alphabet)


def tokens_in(where: str, array: NDArray[np.generic], vocabulary: int) -> NDArray[np.float32]:
    """Return ``array``, whole numbers of shape (records, length), as float32 tokens. ``where``: for error messages.

    Raises UserError for an array of another type or shape, for numbers outside 0 to ``vocabulary`` - 1, and for padding
    (0) before a token of the same record.
    """
    if array.dtype.kind not in "iu" or array.ndim != 2 or 0 in array.shape:
        raise UserError(f"{where}: {array.dtype} {array.shape}; tokens are whole numbers of shape (records, length)")
    tokens = array.astype(np.int64)
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise UserError(
            f"{where}: tokens run from {tokens.min()} to {tokens.max()}; with vocabulary {vocabulary} they must be 1 "
            f"to {vocabulary - 1}, and 0 for padding"
        )
    is_token = tokens != 0
    bad = ~is_token[:, 0] | (is_token[:, 1:] & ~is_token[:, :-1]).any(axis=1)
    if bad.any():
        raise UserError(
            f"{where}: record {int(bad.argmax())} has no token, or padding (0) before a token; put padding at the end"
        )
    return tokens.astype(np.float32)


def places_in(text: str, alphabet: str) -> NDArray[np.int64]:
    """Return the index of each character of ``text`` in ``alphabet``, from 0.

    A character outside the alphabet gets the index ``len(alphabet)``.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    known, places = _sorted(alphabet)
    found = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.where(known[found] == codes, places[found], len(alphabet))


@lru_cache(maxsize=2)
def _sorted(alphabet: str) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    codes = np.array([*map(ord, alphabet)], dtype=np.uint32)
    order = np.argsort(codes)
    return codes[order], order


def _in_rows(tokens: NDArray[np.int64], lengths: list[int]) -> NDArray[np.float32]:
    """Split the concatenated ``tokens`` of all texts into one row per text, padded with zeros at the end."""
    rows = np.zeros((len(lengths), max(lengths, default=0)), dtype=np.float32)
    rows[np.arange(rows.shape[1]) < np.array(lengths, dtype=np.int64)[:, None]] = tokens
    return rows


def _place(written: str) -> Path:
    """Return the path of the tokenizer.json at the location ``written``. Raises UserError if there is no file."""
    path = Path(written).expanduser().absolute()
    if os.path.isfile(path):  # noqa: PTH113 (Path.is_file raises for a long name)
        return path
    folders = [path] if os.path.isdir(path) else package_folders(written)  # noqa: PTH112 (as above)
    for folder in folders:
        if found := sorted([*folder.glob(_FILE), *folder.glob(f"*/{_FILE}")], key=lambda file: len(file.parts)):
            return found[0]
    if folders:
        raise UserError(f"data.tokenizer: {folders[0]} holds no {_FILE}; name its file or its folder")
    valid = ("characters", "bytes")
    raise UserError(
        f"data.tokenizer = {shortened(written)!r}{guess(written, valid)}: it must be characters, bytes, or the "
        f"location of a {_FILE}: a file, a folder or an installed package"
    )


@lru_cache(maxsize=2)
def _tokenizer_in(path: Path, digest: str) -> Any:
    del digest  # ``digest`` is only a part of the cache key, so that a changed file is read again
    try:
        import tokenizers  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise UserError(
            f"data.tokenizer={path.name} needs the library tokenizers, which is not installed ({in_one_line(error)}): "
            "pip install 'fl-sim[text]', or pip install tokenizers; characters and bytes need no library"
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # ``tokenizers`` raises Exception itself, no subclass
        raise UserError(f"data.tokenizer: {path} is no {_FILE} ({in_one_line(error)}); name another file") from error


def _digest(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()
