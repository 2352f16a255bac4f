"""LEAF's JSON (Caldas et al. 2018): folders train and test, each file with users, num_samples and user_data.

Files are read one after another. A user's records are a group of their own, in both parts.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.dataset import (
    ALPHABET,
    alphabet_set,
    as_classes,
    as_tokens,
    check_classes,
    listed_classes,
    most_bytes,
    own_dataset,
    read_off_classes,
    unlisted,
    widened,
)
from fl_sim.data.naming import OwnName
from fl_sim.data.table_file import similar_spellings
from fl_sim.errors import UserError
from fl_sim.mistakes import shortened
from fl_sim.own_code import in_one_line
from fl_sim.types import Dataset, Examples

FEMNIST_SIDE: Final = 28
"""FEMNIST's images are rows of 28 x 28 numbers from 0 (black) to 1."""

_BY_USER: Final = "each user is a client, the same one in train and test where names are equal"
_IMAGES_READ_OFF: Final = ("that all numbers of a record lie from 0 to 1, so that records are images",)
_SWELL: Final = 12  # times the bytes of a file that its objects take up in Python


@dataclass(frozen=True)
class _User:
    """One user's records: inputs (records, numbers), bytes where they are FEMNIST's, and labels (records,)."""

    name: str
    file: Path
    inputs: NDArray[np.uint8] | NDArray[np.float32]
    labels: NDArray[np.int64]
    is_text: bool = False

    def widened(self, length: int) -> "_User":
        """Return the same with padding up to ``length`` behind texts."""
        if not self.is_text:
            return self
        return replace(self, inputs=widened(self.inputs.astype(np.float32, copy=False), length))


def read(name: str, own: OwnName, path: Path) -> Dataset:
    """Return the records below ``path``. Raises UserError, with file and user, for what is no such JSON.

    Rows of 784 numbers from 0 to 1 are FEMNIST's images, and become bytes; other rows of numbers stay as they are, and
    classes are the labels that occur, or those of ``data.classes``, by size. Texts with one character as their label
    are Shakespeare's: sequences of tokens, and every character of the alphabet is a class: LEAF's, or
    ``data.alphabet``.
    """
    alphabet = alphabet_set(own.option("alphabet"))
    parts = [_users(path / part, alphabet) for part in ("train", "test")]
    everyone = [user for users in parts for user in users]
    is_text = everyone[0].is_text
    if is_text:
        length = max(user.inputs.shape[1] for user in everyone if user.is_text)
        parts = [[user.widened(length) for user in users] for users in parts]
    _check_alike([user for users in parts for user in users])
    numbers = {user: place for place, user in enumerate(sorted({user.name for user in everyone}))}
    listed = _listed(own, is_text=is_text)
    labels = [user.labels for user in everyone]
    found = np.arange(len(alphabet)) if is_text else _classes(labels, listed, str(path))
    train, test = (_examples(users, numbers, found) for users in parts)
    is_image, width = train.inputs.ndim == 4, train.inputs.shape[1]
    mean, std = ((0.5,), (0.5,)) if is_image else ((0.0,) * width, (1.0,) * width)
    strangers = len(numbers) - len(parts[0])
    left = f"{strangers:,} clients have test records alone" if strangers else ""
    doubles = similar_spellings("users", {user.name for user in everyone}, with_names=False)
    counted = tuple(filter(None, (left, doubles)))
    note = f"LEAF, {_what(train, is_text=is_text)}; {len(parts[0]):,} clients by user"
    if own.option("alphabet") and not is_text:
        raise UserError(f"data.alphabet is for texts, and {path} holds numbers; leave it out")
    if is_text:  # every character is a class, whether or not it occurs
        names, vocabulary = tuple(map(repr, alphabet)), len(alphabet) + 1
        whose = "LEAF's" if alphabet == ALPHABET else "of data.alphabet"
        inferred: tuple[str, ...] = (
            f"{len(alphabet):,} characters {whose} are the classes, and the tokens from 1",
            _BY_USER,
        )
        return Dataset(
            name, train, test, len(alphabet), mean, std, note, counted=counted, classes=names, vocabulary=vocabulary,
            read_off=("the length of the longest text",), inferred=inferred,
        )  # fmt: skip
    classes = tuple(map(str, found.tolist()))
    if not len(listed):
        check_classes(train.labels, test.labels, classes, str(path))
    kind = "rows of 784 numbers from 0 to 1 are images of 28x28, 1 becomes 255" if is_image else "rows are numbers"
    inferred = (kind, f"{len(classes):,} classes, in the order of their numbers", _BY_USER)
    made = own_dataset(name, train, test, mean, std, str(path), listed=classes if len(listed) else ())
    read_off = (*read_off_classes(len(listed)), *(_IMAGES_READ_OFF if is_image else ()))
    return replace(made, note=note, counted=counted, classes=classes, inferred=inferred, read_off=read_off)


def _listed(own: OwnName, *, is_text: bool) -> NDArray[np.int64]:
    """Return the labels that ``data.classes`` lists, by size. Raises UserError where they are no whole numbers."""
    listed = listed_classes(own)
    if listed and is_text:
        raise UserError("data.classes: of texts every character of LEAF's alphabet is a class; leave data.classes out")
    if not all(text.isascii() and text.removeprefix("-").isdigit() and len(text) < 19 for text in listed):
        raise UserError(
            f"data.classes = {'+'.join(listed)!r}: LEAF's labels are whole numbers; list those, or how many"
        )
    return np.unique(np.array([*map(int, listed)], dtype=np.int64))


def _classes(labels: Sequence[NDArray[np.int64]], listed: NDArray[np.int64], where: str) -> NDArray[np.int64]:
    """Return the labels that are classes, by size. Raises UserError for records of one that is not ``listed``."""
    occurring = np.unique(np.concatenate(labels))
    if len(listed) and not np.isin(occurring, listed).all():
        raise unlisted(where)
    return listed if len(listed) else occurring


def _what(train: Examples, *, is_text: bool) -> str:
    if is_text:
        return "texts, what comes next is the class"
    if train.inputs.ndim == 4:
        return "images of 28x28, as bytes"
    return f"{train.inputs.shape[1]} numbers a record, as they are"


def _users(folder: Path, alphabet: str) -> list[_User]:
    """Return the users in all files of ``folder`` that have records, with one file's objects in memory at a time."""
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise UserError(f"{folder} holds no *.json; wanted are LEAF's folders {folder.parent}/train and test")
    users: dict[str, _User] = {}
    num_bytes = 0
    for file in files:
        if _SWELL * file.stat().st_size > 2 * most_bytes():
            raise UserError(
                f"{file} has {file.stat().st_size:,} bytes, too many to read at once on this machine; have LEAF write "
                "smaller files, or take fewer users"
            )
        for user in _of_file(file, alphabet):
            if user.name in users:
                raise UserError(
                    f"{file}: user {shortened(user.name)!r} is in {users[user.name].file}, too; keep one of both"
                )
            users[user.name] = user
            num_bytes += user.inputs.nbytes
        if 2 * num_bytes > most_bytes():
            raise UserError(f"{folder} takes more than half of this machine's memory; take fewer users")
    held = [user for user in users.values() if len(user.labels)]
    if not held:
        raise UserError(f"{folder} holds no records of any user")
    return held


def _of_file(file: Path, alphabet: str) -> Iterator[_User]:
    content = _content(file)
    for user, size in zip(content["users"], content["num_samples"], strict=True):
        yield _user(file, user, size, content["user_data"], alphabet)


def _content(file: Path) -> Mapping[str, Any]:
    try:
        content: Any = json.loads(file.read_bytes(), object_pairs_hook=partial(_once, file))
    except UserError:
        raise
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{file} is no readable JSON ({in_one_line(error)}); write it again with LEAF") from error
    wanted = {"users": list, "num_samples": list, "user_data": dict}
    is_leaf = isinstance(content, dict) and all(isinstance(content.get(key), kind) for key, kind in wanted.items())
    if not is_leaf or len(content["users"]) != len(content["num_samples"]):
        raise UserError(f"{file} is not LEAF's JSON: wanted are users and num_samples, equally long, and user_data")
    checked: Mapping[str, Any] = content
    return checked


def _once(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises UserError for one that has a key twice, of which only the last would be read."""
    found = dict(pairs)
    if len(found) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise UserError(f"{file} has the key {shortened(key)!r} twice in one object; keep one of both")
    return found


def _user(file: Path, user: object, size: object, data: Mapping[str, Any], alphabet: str) -> _User:
    where = f"{file}: user {shortened(repr(user))}"
    own = data.get(user) if isinstance(user, str) else None
    if not isinstance(user, str) or not isinstance(own, dict) or not {"x", "y"} <= own.keys():
        raise UserError(f"{where} has no records: user_data must hold x and y of every user")
    x, y = own["x"], own["y"]
    if not isinstance(x, list) or not isinstance(y, list) or not len(x) == len(y) == size:
        raise UserError(f"{where} must have {size} entries in x and in y, as num_samples says")
    if not x:
        return _User(user, file, np.zeros((0, 0), np.float32), np.zeros(0, np.int64))
    if isinstance(x[0], str):
        return _User(user, file, as_tokens(x, where, alphabet), as_classes(y, where, alphabet), is_text=True)
    if isinstance(x[0], list) and any(isinstance(part, str) for part in x[0]):
        raise UserError(
            f"{where} has lists with texts for inputs (Sent140): of texts, next-character prediction (Shakespeare) "
            "alone is supported"
        )
    return _of_numbers(user, file, x, y, where)


def _of_numbers(user: str, file: Path, x: list[Any], y: list[Any], where: str) -> _User:
    try:
        inputs, labels = np.array(x, dtype=np.float32), np.array(y)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(
            f"{where} has inputs that are no numbers, or not equally many ({in_one_line(error)})"
        ) from error
    if inputs.ndim != 2 or not np.isfinite(inputs).all():
        raise UserError(f"{where} has inputs that are no rows of finite numbers")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"{where} has labels that are no whole numbers, one a record (others are not supported)")
    is_image = inputs.shape[1] == FEMNIST_SIDE**2 and inputs.min() >= 0 and inputs.max() <= 1
    return _User(user, file, np.rint(255 * inputs).astype(np.uint8) if is_image else inputs, labels.astype(np.int64))


def _check_alike(users: list[_User]) -> None:
    first = users[0]
    for user in users:
        if user.inputs.shape[1] != first.inputs.shape[1]:
            raise UserError(
                f"{user.file}: records of user {shortened(user.name)!r} have {user.inputs.shape[1]} numbers, those of "
                f"{shortened(first.name)!r} have {first.inputs.shape[1]}; they must be equally long"
            )
        if (user.inputs.dtype, user.is_text) != (first.inputs.dtype, first.is_text):
            raise UserError(
                f"{user.file}: numbers of user {shortened(user.name)!r} and of {shortened(first.name)!r} are not both "
                "texts, or both images from 0 to 1; write them alike"
            )


def _examples(users: list[_User], numbers: Mapping[str, int], classes: NDArray[np.int64]) -> Examples:
    groups = np.repeat([numbers[user.name] for user in users], [len(user.labels) for user in users])
    labels = np.searchsorted(classes, np.concatenate([user.labels for user in users]))
    inputs = np.concatenate([user.inputs for user in users])
    if inputs.dtype == np.uint8:
        inputs = inputs.reshape(-1, 1, FEMNIST_SIDE, FEMNIST_SIDE)
    return Examples(inputs, labels, groups)
