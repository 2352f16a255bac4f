"""Reads LEAF's JSON files (Caldas et al. 2018), such as FEMNIST and Shakespeare.

The folders train and test contain JSON files with the keys users, num_samples and user_data. Files are read one after
another, to save memory. Each user has a number: all training and test records of the user have this number in
``Examples.groups``.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.dataset import (
    check_classes,
    listed_classes,
    most_bytes,
    own_dataset,
    read_off_classes,
    unlisted,
)
from fl_sim.data.naming import OwnName
from fl_sim.data.table_file import similar_spellings
from fl_sim.data.tokens import ALPHABET, Characters, alphabet_set, as_classes, as_tokens
from fl_sim.errors import UserError
from fl_sim.mistakes import shortened
from fl_sim.own_code import in_one_line
from fl_sim.types import Dataset, Examples

FEMNIST_SIDE: Final = 28
"""Height and width of FEMNIST's images. In JSON an image is a list of 784 numbers from 0 (black) to 1."""

_BY_USER: Final = "each user is a client; users with equal names in train and test are the same client"
_IMAGES_READ_OFF: Final = ("that all numbers of a record lie from 0 to 1, so that records are images",)
_SWELL: Final = 12  # memory for the Python objects of a JSON file, as a multiple of the file's size


@dataclass(frozen=True)
class _User:
    """The records of one user. ``inputs``: shape (records, numbers).

    The inputs are bytes for FEMNIST's images, tokens for texts, and float32 for other numbers.
    """

    name: str
    file: Path
    inputs: NDArray[np.uint8] | NDArray[np.float32]
    labels: NDArray[np.int64]
    is_text: bool = False


def read(name: str, own: OwnName, path: Path) -> Dataset:
    """Read the data set in the folder ``path``. Raises UserError for a file that is not in LEAF's format.

    Records of 784 numbers from 0 to 1 are images (FEMNIST) and become bytes. Other numbers are unchanged. Classes are
    the labels in the files, or the classes that ``data.classes`` lists, in numerical order. Texts with single
    characters as labels (Shakespeare) become sequences of tokens; each character of the alphabet is a class. The
    alphabet is LEAF's, or ``data.alphabet``. One additional class and token stands for all other characters.
    """
    alphabet = alphabet_set(own.option("alphabet"))
    parts = [_users(path / part, alphabet) for part in ("train", "test")]
    everyone = [user for users in parts for user in users]
    is_text = everyone[0].is_text
    if is_text:
        length = max(user.inputs.shape[1] for user in everyone if user.is_text)
        parts = [[_padded(user, length) for user in users] for users in parts]
        everyone = [user for users in parts for user in users]
    _check_alike(everyone)
    listed = _listed(own, is_text=is_text)
    found = np.unique(np.concatenate([user.labels for user in everyone]))
    if len(listed) and not np.isin(found, listed).all():
        raise unlisted(str(path))
    labels = np.arange(len(alphabet) + 1) if is_text else listed if len(listed) else found
    numbers = {user: place for place, user in enumerate(sorted({user.name for user in everyone}))}
    train, test = (_examples(users, numbers, labels) for users in parts)
    left = f"{strangers:,} clients have only test records" if (strangers := len(numbers) - len(parts[0])) else ""
    counted = tuple(filter(None, (left, similar_spellings("users", {*numbers}, with_names=False))))
    is_image, width = train.inputs.ndim == 4, train.inputs.shape[1]
    numeric = "images of 28x28, as bytes" if is_image else f"{width} numbers a record, as they are"
    note = f"LEAF, {'texts, what comes next is the class' if is_text else numeric}; {len(parts[0]):,} clients by user"
    mean, std = ((0.5,), (0.5,)) if is_image else ((0.0,) * width, (1.0,) * width)
    if is_text:
        return _of_texts(name, alphabet, (train, test), note, counted, tuple(numbers))
    if own.option("alphabet"):
        raise UserError(f"data.alphabet is for texts, but {path} contains numbers; leave data.alphabet out")
    classes = tuple(map(str, labels.tolist()))
    if not len(listed):
        check_classes(train.labels, test.labels, classes, str(path))
    kind = "rows of 784 numbers from 0 to 1 are images of 28x28, 1 becomes 255" if is_image else "rows are numbers"
    made = own_dataset(name, train, test, mean, std, str(path), listed=classes if len(listed) else ())
    read_off = (*read_off_classes(len(listed)), *(_IMAGES_READ_OFF if is_image else ()))
    order = f"{len(classes):,} classes, in the order of their numbers"
    return replace(
        made,
        note=note,
        counted=counted,
        classes=classes,
        inferred=(kind, order, _BY_USER),
        read_off=read_off,
        sources=tuple(numbers),
    )


def _of_texts(
    name: str,
    alphabet: str,
    parts: tuple[Examples, Examples],
    note: str,
    counted: tuple[str, ...],
    users: tuple[str, ...],
) -> Dataset:
    """Return a data set of texts. Every character of ``alphabet`` is a class, even if it does not occur.

    If the texts contain other characters, one additional class and token stands for all of them. If the texts contain
    only characters of LEAF's alphabet, the classes are the same as in LEAF.
    """
    train, test = parts
    foreign = sum(int((part.inputs > len(alphabet)).sum() + (part.labels == len(alphabet)).sum()) for part in parts)
    whose = "LEAF's" if alphabet == ALPHABET else "of data.alphabet"
    meaning = f"each of the {len(alphabet):,} characters {whose} is a class and a token; tokens are numbered from 1"
    read_off = ["the length of the longest text"]
    if foreign:
        counted = (
            *counted,
            f"{foreign:,} characters of the records are outside the alphabet and count as one (data.alphabet)",
        )
        meaning += "; all other characters together are the last class and the last token"
        read_off.append("that texts contain characters outside the alphabet (data.alphabet lists the alphabet)")
    classes = (*map(repr, alphabet), *(["another character"] if foreign else []))
    width = train.inputs.shape[1]
    return Dataset(
        name, train, test, len(classes), (0.0,) * width, (1.0,) * width, note, counted=counted, classes=classes,
        vocabulary=len(classes) + 1, read_off=tuple(read_off), inferred=(meaning, _BY_USER), sources=users,
        text_of=Characters(alphabet).text,
    )  # fmt: skip


def _padded(user: _User, length: int) -> _User:
    if not user.is_text:
        return user
    inputs = user.inputs.astype(np.float32, copy=False)
    return replace(user, inputs=np.pad(inputs, ((0, 0), (0, length - inputs.shape[1]))))


def _listed(own: OwnName, *, is_text: bool) -> NDArray[np.int64]:
    listed = listed_classes(own)
    if listed and is_text:
        raise UserError("data.classes: the classes of texts are the characters of the alphabet; leave data.classes out")
    if not all(text.isascii() and text.removeprefix("-").isdigit() and len(text) < 19 for text in listed):
        raise UserError(
            f"data.classes = {'+'.join(listed)!r}: LEAF's labels are whole numbers; list them, or give their number"
        )
    return np.unique(np.array([*map(int, listed)], dtype=np.int64))


def _users(folder: Path, alphabet: str) -> list[_User]:
    """Read all files of ``folder`` one by one; return the users with at least one record."""
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise UserError(
            f"{folder} holds no *.json; LEAF's files must be in the folders {folder.parent}/train and "
            f"{folder.parent}/test"
        )
    users: dict[str, _User] = {}
    num_bytes = 0
    for file in files:
        if _SWELL * file.stat().st_size > 2 * most_bytes():
            raise UserError(
                f"{file} has {file.stat().st_size:,} bytes, too many for this machine's memory; let LEAF write smaller "
                "files, or use fewer users"
            )
        content = _content(file)
        for name, size in zip(content["users"], content["num_samples"], strict=True):
            user = _user(file, name, size, content["user_data"], alphabet)
            if user.name in users:
                raise UserError(
                    f"{file}: user {shortened(user.name)!r} is also in {users[user.name].file}; remove one of the two"
                )
            users[user.name] = user
            num_bytes += user.inputs.nbytes
        if 2 * num_bytes > most_bytes():
            raise UserError(f"{folder} takes more than half of this machine's memory; use fewer users")
    with_records = [user for user in users.values() if len(user.labels)]
    if not with_records:
        raise UserError(f"{folder} holds no records of any user; sample the data with LEAF again")
    return with_records


def _content(file: Path) -> Mapping[str, Any]:
    def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)  # dict keeps only the last value of a repeated key; such a file is refused
        if len(found) < len(pairs):
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise UserError(f"{file} has the key {shortened(key)!r} twice in one object; remove one of the two")
        return found

    try:
        content: Any = json.loads(file.read_bytes(), object_pairs_hook=without_twins)
    except UserError:
        raise
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{file} cannot be read as JSON ({in_one_line(error)}); create it again with LEAF") from error
    wanted = {"users": list, "num_samples": list, "user_data": dict}
    is_leaf = isinstance(content, dict) and all(isinstance(content.get(key), kind) for key, kind in wanted.items())
    if not is_leaf or len(content["users"]) != len(content["num_samples"]):
        raise UserError(
            f"{file} is not LEAF's JSON: it needs the lists users and num_samples, equally long, and the object "
            "user_data"
        )
    checked: Mapping[str, Any] = content
    return checked


def _user(file: Path, user: object, size: object, data: Mapping[str, Any], alphabet: str) -> _User:
    where = f"{file}: user {shortened(repr(user))}"
    own = data.get(user) if isinstance(user, str) else None
    if not isinstance(user, str) or not isinstance(own, dict) or not {"x", "y"} <= own.keys():
        raise UserError(f"{where} has no records: user_data must contain x and y of every user")
    x, y = own["x"], own["y"]
    if not isinstance(x, list) or not isinstance(y, list) or not len(x) == len(y) == size:
        raise UserError(f"{where} must have {size} entries in x and in y, as num_samples says")
    if not x:
        return _User(user, file, np.zeros((0, 0), np.float32), np.zeros(0, np.int64))
    if isinstance(x[0], str):
        return _User(user, file, as_tokens(x, where, alphabet), as_classes(y, where, alphabet), is_text=True)
    if isinstance(x[0], list) and any(isinstance(part, str) for part in x[0]):
        raise UserError(
            f"{where} has lists with texts as inputs (Sent140). For texts, only next-character prediction "
            "(Shakespeare) is supported"
        )
    return _of_numbers(user, file, x, y, where)


def _of_numbers(user: str, file: Path, x: list[Any], y: list[Any], where: str) -> _User:
    try:
        inputs, labels = np.array(x, dtype=np.float32), np.array(y)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(
            f"{where} has inputs that are no numbers, or of different lengths ({in_one_line(error)})"
        ) from error
    if inputs.ndim != 2 or not np.isfinite(inputs).all():
        raise UserError(f"{where} has inputs that are no rows of finite numbers")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"{where} needs one label per record, a whole number; its labels are different")
    is_image = inputs.shape[1] == FEMNIST_SIDE**2 and inputs.min() >= 0 and inputs.max() <= 1
    return _User(user, file, np.rint(255 * inputs).astype(np.uint8) if is_image else inputs, labels.astype(np.int64))


def _check_alike(users: list[_User]) -> None:
    first = users[0]
    for user in users:
        if user.inputs.shape[1] != first.inputs.shape[1]:
            raise UserError(
                f"{user.file}: records of user {shortened(user.name)!r} have {user.inputs.shape[1]} numbers, but "
                f"records of {shortened(first.name)!r} have {first.inputs.shape[1]}; they must be equally long"
            )
        if (user.inputs.dtype, user.is_text) != (first.inputs.dtype, first.is_text):
            raise UserError(
                f"{user.file}: records of user {shortened(user.name)!r} and of {shortened(first.name)!r} differ in "
                "kind (texts, images from 0 to 1, other numbers); all users need the same kind"
            )


def _examples(users: list[_User], numbers: Mapping[str, int], classes: NDArray[np.int64]) -> Examples:
    groups = np.repeat([numbers[user.name] for user in users], [len(user.labels) for user in users])
    labels = np.searchsorted(classes, np.concatenate([user.labels for user in users]))
    inputs = np.concatenate([user.inputs for user in users])
    if inputs.dtype == np.uint8:
        inputs = inputs.reshape(-1, 1, FEMNIST_SIDE, FEMNIST_SIDE)
    return Examples(inputs, labels, groups)
