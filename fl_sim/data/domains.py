"""Joins several data sets of images as the domains of one task, such as digits, MNIST and Fashion-MNIST.

The joined data sets are called parts. All parts have the same classes: class c has the same meaning in every part. The
records of each part form a domain. All domains have equally many records, so that the largest part does not dominate.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.dataset import enumerated
from fl_sim.data.naming import OwnName, parts_of
from fl_sim.data.pictures import image_settings, scaled
from fl_sim.errors import UserError
from fl_sim.mistakes import shortened
from fl_sim.seeding import rng
from fl_sim.types import Dataset, Examples

SEED: Final = 0
"""The seed for drawing records. It is fixed, so that the name of a data set determines its records."""

_HALF: Final = 0.5


def joined(name: str, own: OwnName, parts: Sequence[Dataset]) -> Dataset:
    """Join the data sets ``parts`` to one data set ``name``. Domain i has the records of the i-th part.

    Images are scaled to the setting ``data.size``, or else to the size of the part with the largest images. Grey images
    get three equal channels if any part has colour. Each domain has ``data.records`` training records (default: the
    number in the smallest part). The number of test records of each domain is the number in the smallest part. The
    records of a domain are drawn with the class distribution of its part. Images are normalised by mean 0.5 and
    standard deviation 0.5. Raises UserError for parts that are not images, for parts with different classes, and if
    ``data.records`` exceeds the training records of a part.
    """
    names = dict(zip(parts_of(name), parts, strict=True))
    _check(name, names)
    size, channels = _size(own, parts), max(part.input_shape[0] for part in parts)
    num_train, num_test = _num_records(own, names), min(len(part.test) for part in parts)
    train, test = list[Examples](), list[Examples]()
    for domain, (called, part) in enumerate(names.items()):
        for drawn, of, count in ((train, "train", num_train), (test, "test", num_test)):
            chosen = _drawn(getattr(part, of), count, part.num_classes, f"{called} {of}")
            images = _as_one(chosen.inputs.astype(np.uint8, copy=False), size, channels)
            drawn.append(Examples(images, chosen.labels, np.full(count, domain)))
    return Dataset(
        name,
        _concatenated(train),
        _concatenated(test),
        parts[0].num_classes,
        (_HALF,) * channels,
        (_HALF,) * channels,
        note=_note(names, num_train, num_test, size, channels),
        counted=tuple(f"{called}: {line}" for called, part in names.items() for line in part.counted),
        sources=tuple(names),
        classes=next((part.classes for part in parts if part.classes), ()),
        read_off=tuple(dict.fromkeys(fact for part in parts for fact in part.read_off)),
        inferred=tuple(f"{called}: {line}" for called, part in names.items() for line in part.inferred),
    )


def _check(name: str, names: Mapping[str, Dataset]) -> None:
    """Raise UserError unless the parts are images with the same classes. ``names``: {name of a part: its data}."""
    others = [called for called, part in names.items() if part.train.inputs.ndim != 4]
    if others:
        raise UserError(
            f"data={shortened(name)}: the records of {shortened(others[0])} are not images: join images only. To "
            "join tables, write one table with a column of domains, and set data.client to this column"
        )
    if odd := [called for called, part in names.items() if part.input_shape[0] not in {1, 3}]:
        raise UserError(
            f"data={shortened(name)}: images must have 1 or 3 channels, and those of {shortened(odd[0])} have "
            f"{names[odd[0]].input_shape[0]}: leave this data set out"
        )
    if len({part.num_classes for part in names.values()}) > 1:
        counts = enumerated(f"{part.num_classes} of {called}" for called, part in names.items())
        raise UserError(
            f"data={shortened(name)}: all parts must have the same classes, but these parts have different numbers of "
            f"classes ({counts}): leave out the parts with other classes"
        )
    listed = {part.classes: called for called, part in names.items() if part.classes}
    if len(listed) > 1:
        first, second, *_ = listed.items()
        raise UserError(
            f"data={shortened(name)}: {first[1]} has the classes {enumerated(first[0])}, and {second[1]} has "
            f"{enumerated(second[0])}: name and order them alike (by data.classes in the name of a part)"
        )
    if validated := [called for called, part in names.items() if part.validation is not None]:
        raise UserError(
            f"data={shortened(name)}: {shortened(validated[0])} comes with validation records: leave them out, and set "
            "evaluate.validation=0.1"
        )


def _size(own: OwnName, parts: Sequence[Dataset]) -> tuple[int, int]:
    """Return the (width, height) of all images: ``data.size`` if set, else the size of the largest images."""
    _, height, width = max((part.input_shape for part in parts), key=lambda shape: shape[1] * shape[2])
    return image_settings(own).size or (width, height)


def _num_records(own: OwnName, names: Mapping[str, Dataset]) -> int:
    """Return the number of training records of each domain. Raises UserError for an invalid ``data.records``."""
    smallest = min(names, key=lambda called: len(names[called].train))
    most, given = len(names[smallest].train), own.option("records")
    if not given:
        return most
    if not re.fullmatch(r"[1-9]\d{0,9}", given) or int(given) > most:
        raise UserError(
            f"data.records = {given!r}: it must be a whole number from 1 to {most:,}, the number of training records "
            f"of {shortened(smallest)}"
        )
    return int(given)


def _drawn(part: Examples, count: int, num_classes: int, purpose: str) -> Examples:
    """Draw ``count`` records of ``part`` at random, with the same class proportions as in ``part``.

    The drawn records keep their order. The proportional number of records of each class is rounded down. The classes
    with the largest remainders then get one more record, until there are ``count`` records.
    """
    if count == len(part):
        return part
    held = np.bincount(part.labels, minlength=num_classes)
    exact = held * (count / len(part))
    wanted = np.floor(exact).astype(np.int64)
    wanted[np.argsort(wanted - exact, kind="stable")[: count - wanted.sum()]] += 1
    coins = rng(SEED, f"domain {purpose}")
    chosen = [coins.permutation(np.flatnonzero(part.labels == c))[:number] for c, number in enumerate(wanted.tolist())]
    return part.take(np.sort(np.concatenate(chosen)))


def _as_one(images: NDArray[np.uint8], size: tuple[int, int], channels: int) -> NDArray[np.uint8]:
    """Scale ``images`` (n, c, height, width) to ``size`` (width, height), and repeat grey channels if needed.

    The result has ``channels`` channels. If other parts have colour, a grey image gets three equal channels.
    """
    images = scaled(images, size)
    return images if images.shape[1] == channels else np.repeat(images, channels, axis=1)


def _concatenated(parts: Sequence[Examples]) -> Examples:
    groups = [part.groups for part in parts if part.groups is not None]
    inputs = np.concatenate([part.inputs for part in parts])
    return Examples(inputs, np.concatenate([part.labels for part in parts]), np.concatenate(groups))


def _note(names: Mapping[str, Dataset], num_train: int, num_test: int, size: tuple[int, int], channels: int) -> str:
    """Describe the domains, and the changes of their images (size, channels), in words for ``Dataset.note``."""
    of = ", ".join(
        f"{domain} {shortened(called)} (of {len(part.train):,} and {len(part.test):,})"
        for domain, (called, part) in enumerate(names.items())
    )
    resized = [called for called, part in names.items() if part.input_shape[:0:-1] != size]
    grey = [called for called, part in names.items() if part.input_shape[0] < channels]
    each = f"domains with {num_train:,} training and {num_test:,} test records each"
    said = [
        f"{each}, drawn by seed {SEED} with the class distribution of the set: {of}",
        f"bilinearly scaled to {size[0]}x{size[1]}: {enumerated(resized)}" if resized else "",
        f"grey images with three equal channels: {enumerated(grey)}" if grey else "",
        "normalised by mean 0.5 and deviation 0.5",
        *(f"{called}: {part.note}" if part.note else "" for called, part in names.items()),
    ]
    return "; ".join(filter(None, said))
