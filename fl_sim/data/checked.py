"""From arrays as read to a Dataset: the checks that every source of records passes."""

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.known import KnownSet
from fl_sim.data.listed import unlisted
from fl_sim.errors import UserError
from fl_sim.types import Dataset, Examples


def known_dataset(
    known: KnownSet, train: Examples, test: Examples, where: str, remarks: tuple[str, ...] = ()
) -> Dataset:
    """Return ``known`` with these records; the note says where the copy differs from the official one.

    Raises UserError for records that cannot be this data set's; ``where`` names the files in the message.
    """
    for split, part in (("training", train), ("test", test)):
        if not len(part):
            raise UserError(f"{where}: no {split} records")
        if part.inputs.shape != (len(part), *known.shape) or part.inputs.dtype != np.uint8:
            raise UserError(
                f"{where}: {len(part)} {split} labels and {len(part.inputs)} records that are {_type(part)}, but "
                f"{known.name} is uint8 of shape {known.shape} (channels, height, width)"
            )
        low, high = int(part.labels.min()), int(part.labels.max())
        if low < 0 or high >= known.num_classes:
            raise UserError(f"{where}: {split} labels {low}..{high}, but {known.name} has 0..{known.num_classes - 1}")
    counts = [
        f"{len(part):,} of {official:,} {split} images"
        for part, official, split in ((train, known.num_train, "training"), (test, known.num_test, "test"))
        if len(part) != official
    ]
    note = "; ".join([*remarks, *counts])
    return Dataset(known.name, train, test, known.num_classes, known.mean, known.std, note)


def own_dataset(
    name: str,
    train: Examples,
    test: Examples,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    where: str,
    *,
    listed: tuple[str, ...] = (),
) -> Dataset:
    """Return the user's own records as a data set, checked. ``listed``: the classes, where they are public.

    Raises UserError unless both parts are non-empty, of one shape and type, and labelled 0..L-1: with every class
    there, of at least two, and in the training part, where they are not ``listed``. A listed class may have no record.
    """
    for split, part in (("train", train), ("test", test)):
        if not len(part):
            raise UserError(f"{where}: no records in the {split} part")
        if len(part.inputs) != len(part.labels):
            raise UserError(f"{where}: {len(part.inputs)} records but {len(part.labels)} labels in the {split} part")
    if train.inputs.shape[1:] != test.inputs.shape[1:] or train.inputs.dtype != test.inputs.dtype:
        raise UserError(f"{where}: training records are {_type(train)} but test records {_type(test)}")
    if listed:
        check_listed((train.labels, test.labels), listed, where)
        return Dataset(name, train, test, len(listed), mean, std, classes=listed)
    classes = np.unique(np.concatenate([train.labels, test.labels]))
    num_classes = len(classes)
    if classes[0] != 0 or classes[-1] != num_classes - 1:
        raise UserError(
            f"{where}: labels run from {classes[0]} to {classes[-1]} with {num_classes} different values; "
            f"number the classes 0..{num_classes - 1} without gaps"
        )
    check_classes(train.labels, test.labels, tuple(map(str, range(num_classes))), where)
    return Dataset(name, train, test, num_classes, mean, std)


def check_listed(parts: Sequence[NDArray[np.int64]], listed: tuple[str, ...], where: str) -> None:
    """Raise UserError for labels beyond the ``listed`` classes; none is quoted."""
    if any(len(labels) and not 0 <= labels.min() <= labels.max() < len(listed) for labels in parts):
        raise unlisted(where)


def with_validation(dataset: Dataset, validation: Examples | None, where: str) -> Dataset:
    """Return ``dataset`` with its validation records, if any.

    Raises UserError unless they are like its training records.
    """
    if validation is None:
        return dataset
    if not len(validation) or len(validation.inputs) != len(validation.labels):
        raise UserError(
            f"{where}: {len(validation.inputs)} records and {len(validation.labels)} labels in the validation part; "
            "wanted is a label for each, and at least one"
        )
    train, labels = dataset.train.inputs, validation.labels
    if train.shape[1:] != validation.inputs.shape[1:] or train.dtype != validation.inputs.dtype:
        raise UserError(
            f"{where}: training records are {_type(dataset.train)} but validation records {_type(validation)}"
        )
    if labels.min() < 0 or labels.max() >= dataset.num_classes:
        raise UserError(
            f"{where}: validation labels run from {labels.min()} to {labels.max()}, and those of the training and test "
            f"records from 0 to {dataset.num_classes - 1}"
        )
    return replace(dataset, validation=validation)


def check_classes(train: NDArray[np.int64], test: NDArray[np.int64], classes: tuple[str, ...], where: str) -> None:
    """Raise UserError for one class alone, and for a class that test records have and no training record."""
    if len(classes) < 2:
        raise UserError(f"{where}: all records are of class {classes[0]}; there is nothing to tell apart")
    if strangers := sorted({*np.unique(test).tolist()} - {*np.unique(train).tolist()}):
        names = ", ".join(classes[label] for label in strangers[:5])
        raise UserError(
            f"{where}: class {names} occurs in the test part alone, so nobody can learn it; move records of it into "
            "the training part, or leave it out"
        )


def as_labels(labels: NDArray[np.generic], where: str) -> NDArray[np.int64]:
    """Return integer labels of shape (records,) or (records, 1) as int64 of shape (records,)."""
    if labels.dtype.kind not in "iu" or labels.ndim not in {1, 2} or labels.shape[1:] not in {(), (1,)}:
        raise UserError(
            f"{where}: labels must be integers of shape (records,), got {labels.dtype} {labels.shape}; several "
            "labels a record (multi-label) and numbers with fractions (regression) are not supported"
        )
    return labels.reshape(-1).astype(np.int64)


def looks_channels_first(shape: tuple[int, ...]) -> bool:
    """Say whether images of ``shape`` (records, ...) have their channels in front of height and width.

    Read with channels last, such images have up to four rows and more than four columns and channels, or fewer rows
    than columns and as many channels as columns.
    """
    _, first, second, last = shape
    return (first in {1, 3} and last > 4) or first <= 4 < min(second, last) or first < second == last


def looks_channels_last(shape: tuple[int, ...]) -> bool:
    """Say whether images of ``shape`` (records, ...) have their channels behind height and width."""
    _, first, second, last = shape
    return last <= 4 < min(first, second) or last < first == second


def most_bytes() -> int:
    """Return how many bytes one array may take."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _type(part: Examples) -> str:
    return f"{part.inputs.dtype} of shape {part.inputs.shape[1:]}"
