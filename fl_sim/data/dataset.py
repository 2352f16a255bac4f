"""Builds a ``Dataset`` from arrays, after checks of labels and classes.

All functions that read data sets use this module. The list of classes is public if the user sets ``data.classes``.
Otherwise the list is read from the private records, and ``Dataset.read_off`` and the privacy statement contain a note
about it. ``card_of`` summarises a data set for the command line.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.naming import KnownSet, OwnName, is_own
from fl_sim.errors import UserError
from fl_sim.mistakes import shortened
from fl_sim.types import Dataset, Examples

CLASSES_READ_OFF: Final = (
    "the list of classes, and so the number of the model's outputs (set data.classes=A+B to make it public)"
)
SIZE_READ_OFF: Final = "the size of the images (set data.size=WIDTHxHEIGHT to make it public)"
COLOUR_READ_OFF: Final = "whether any image has colour, and so the number of the model's input channels"
_MOST_LISTED: Final = 1000

FIRST: Final = 5
"""The number of training records that the summary of a table shows (``card_of``)."""


def known_dataset(
    known: KnownSet, train: Examples, test: Examples, where: str, remarks: tuple[str, ...] = ()
) -> Dataset:
    """Return a public data set, such as ``cifar10``, from its records ``train`` and ``test``.

    The caller has read the records from files. ``known``: the published facts of the data set. ``where``: the files,
    for error messages. ``remarks``: sentences about the reading of the files, for ``Dataset.note``. The note also
    states missing records. Raises UserError for records whose shape, type or labels differ from the published facts.
    """
    for split, part in (("training", train), ("test", test)):
        if not len(part):
            raise UserError(f"{where}: no {split} records; the file is incomplete, so fetch it again")
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
    labelled: bool = True,
) -> Dataset:
    """Check the user's own records and return them as a data set. ``where``: the file, for error messages.

    ``listed``: the classes in the setting ``data.classes``; empty if it is not set. Raises UserError if there are no
    training or no test records, or if their shapes or types differ. With L classes, labels must be 0 to L - 1. Without
    ``listed`` there must be at least two classes, each with training records. A class in ``listed`` may have no record.
    ``labelled``: False for records without labels; all labels are then 0.
    """
    for split, part in (("train", train), ("test", test)):
        if not len(part):
            raise UserError(f"{where}: no records in the {split} part; add some")
        if len(part.inputs) != len(part.labels):
            raise UserError(
                f"{where}: {len(part.inputs)} records but {len(part.labels)} labels in the {split} part; give one "
                "label for each record"
            )
    if train.inputs.shape[1:] != test.inputs.shape[1:] or train.inputs.dtype != test.inputs.dtype:
        raise UserError(
            f"{where}: training records are {_type(train)} but test records {_type(test)}; give both the same "
            "shape and type"
        )
    if not labelled:
        return Dataset(name, train, test, 1, mean, std)
    if listed:
        for labels in (train.labels, test.labels):
            if not 0 <= labels.min() <= labels.max() < len(listed):
                raise unlisted(where)
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


def with_validation(dataset: Dataset, validation: Examples | None, where: str) -> Dataset:
    """Return a copy of ``dataset`` with ``validation`` as its validation records; no change if ``validation`` is None.

    The setting ``evaluate.validation=given`` uses these records. Raises UserError unless the validation records have
    the same shape, type and range of labels as the training records.
    """
    if validation is None:
        return dataset
    if not len(validation) or len(validation.inputs) != len(validation.labels):
        raise UserError(
            f"{where}: {len(validation.inputs)} records and {len(validation.labels)} labels in the validation part; "
            "give at least one record, and one label for each record"
        )
    train, labels = dataset.train.inputs, validation.labels
    if train.shape[1:] != validation.inputs.shape[1:] or train.dtype != validation.inputs.dtype:
        raise UserError(
            f"{where}: training records are {_type(dataset.train)} but validation records {_type(validation)}; "
            "give both the same shape and type"
        )
    if labels.min() < 0 or labels.max() >= dataset.num_classes:
        raise UserError(
            f"{where}: validation labels run from {labels.min()} to {labels.max()}, but the labels of training and "
            f"test records run from 0 to {dataset.num_classes - 1}; number all labels in the same way"
        )
    return replace(dataset, validation=validation)


def check_classes(train: NDArray[np.int64], test: NDArray[np.int64], classes: tuple[str, ...], where: str) -> None:
    """Raise UserError if there is only one class, or if a class has test records but no training records.

    ``train`` and ``test``: labels. ``classes``: the names of the classes, for the message.
    """
    if len(classes) < 2:
        raise UserError(f"{where}: all records are of class {classes[0]}; classification needs at least two classes")
    if strangers := sorted({*np.unique(test).tolist()} - {*np.unique(train).tolist()}):
        names = ", ".join(classes[label] for label in strangers[:5])
        raise UserError(
            f"{where}: class {names} occurs only in the test part, so no model can learn it; move some of its records "
            "to the training part, or remove the class"
        )


def as_labels(labels: NDArray[np.generic], where: str) -> NDArray[np.int64]:
    """Return integer labels of shape (records,) or (records, 1) as int64 of shape (records,).

    Raises UserError for labels of any other type or shape.
    """
    if labels.dtype.kind not in "iu" or labels.ndim not in {1, 2} or labels.shape[1:] not in {(), (1,)}:
        raise UserError(
            f"{where}: labels must be integers of shape (records,), got {labels.dtype} {labels.shape}; several "
            "labels per record (multi-label) and numbers with fractions (regression) are not supported"
        )
    return labels.reshape(-1).astype(np.int64)


def looks_channels_first(shape: tuple[int, ...]) -> bool:
    """Return True if ``shape`` of an array of images is probably (records, channels, height, width).

    The result is True in three cases. (1) Axis 1 has length 1 or 3, and the last axis is longer than 4. (2) Axis 1 has
    at most length 4, and axes 2 and 3 are longer. (3) Axes 2 and 3 are equal (square images), and axis 1 is shorter.
    """
    _, first, second, last = shape
    return (first in {1, 3} and last > 4) or first <= 4 < min(second, last) or first < second == last


def looks_channels_last(shape: tuple[int, ...]) -> bool:
    """Return True if ``shape`` of an array of images is probably (records, height, width, channels)."""
    _, first, second, last = shape
    return last <= 4 < min(first, second) or last < first == second


def enumerated(names: Iterable[str], most: int = 20) -> str:
    """Join the first ``most`` names with commas. If there are N more names, add ``and N more``. Long names are cut."""
    found = [*names]
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"{', '.join(map(shortened, found[:most]))}{more}"


def most_bytes() -> int:
    """Return the maximum size in bytes of one array that is read from a file: half of the machine's memory."""
    return machine_bytes() // 2


def machine_bytes() -> int:
    """Return the size in bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def listed_classes(own: OwnName) -> tuple[str, ...]:
    """Return the classes that the setting ``data.classes`` lists, in order; empty if it is not set.

    A single number, such as ``data.classes=10``, means the classes 0 to 9. ``+`` separates classes. In a value without
    ``+``, commas separate classes. Raises UserError for fewer than two classes and for a class that is listed twice.
    """
    given = own.options.get("classes", ())
    if len(given) == 1 and "," in given[0]:
        given = tuple(name.strip() for name in given[0].split(","))
    if len(given) == 1 and given[0].isascii() and given[0].isdigit() and 2 <= int(given[0][:5]) <= _MOST_LISTED:
        return tuple(map(str, range(int(given[0]))))
    if given and ("" in given or len(set(given)) < max(2, len(given))):
        raise UserError(
            f"data.classes = {'+'.join(given)!r}: list two classes or more, each once, with + or , between them "
            f"(data.classes=ill,well). If the classes are 0, 1, 2, ..., give their number, at most {_MOST_LISTED}"
        )
    return given


def read_off_classes(listed: object) -> tuple[str, ...]:
    """Return a note for ``Dataset.read_off``: the list of classes was read from the private records.

    ``Dataset.read_off`` collects such notes, and the privacy statement prints them. ``listed``: the classes in the
    setting ``data.classes``. If ``listed`` is not empty, the classes are public, and no note is needed: the result is
    empty.
    """
    return () if listed else (CLASSES_READ_OFF,)


def unlisted(where: str, cure: str = "") -> UserError:
    """Return the error for a record whose class is not in ``data.classes``.

    The message does not name the class, because the name would reveal something about a private record. The message
    tells the user how to correct the settings. ``cure``: text for the message with one more correction.
    """
    return UserError(
        f"{where}: some records have a class that data.classes does not list; list it, leave data.classes out{cure}"
    )


def check_unit_range(dataset: Dataset, preprocess: str) -> None:
    """Raise UserError if training inputs are floats and any of them is outside the range from 0 to 1.

    ``preprocess``: the name of the stage that needs this range, such as da-fl. The error message states it.
    """
    inputs = dataset.train.inputs
    if inputs.dtype == np.float32 and len(inputs) and not 0 <= inputs.min() <= inputs.max() <= 1:
        raise UserError(
            f"preprocess {preprocess} needs inputs from 0 to 1, but {dataset.name} has inputs outside this range: "
            "scale each column by public bounds (data.range.COLUMN=LOW..HIGH of a table), not by bounds that are "
            "computed from the records"
        )


def card_of(dataset: Dataset, *, with_records: bool) -> dict[str, Any]:
    """Return a summary of a data set as a dict for JSON: number of records, classes, clients, columns.

    ``with_records``: True to include the first five training records (texts, or the numbers that models receive), and
    the minimum and maximum of each number in the records of a table. These values reveal training records. Images are
    never included.
    """
    train, test = dataset.train, dataset.test
    is_image = train.inputs.ndim == 4
    counts = [np.bincount(part.labels, minlength=dataset.num_classes) for part in (train, test)]
    card: dict[str, Any] = {
        "name": dataset.name,
        "note": dataset.note,
        "counted": list(dataset.counted),
        "read_off": list(dataset.read_off),
        "own": is_own(dataset.name),
        "shows_records": with_records and not is_image,
        "records": {
            "train": len(train),
            "test": len(test),
            **({"validation": len(dataset.validation)} if dataset.validation is not None else {}),
        },
        "inputs": {
            "kind": "images" if is_image else "tokens" if dataset.vocabulary else "numbers",
            **({"vocabulary": dataset.vocabulary} if dataset.vocabulary else {}),
            "shape": list(dataset.input_shape),
            "type": str(train.inputs.dtype),
        },
        "classes": [
            {"name": name, "train": int(train_count), "test": int(test_count)}
            for name, train_count, test_count in zip(_class_names(dataset), *counts, strict=True)
            if dataset.has_labels
        ],
        "clients": _clients(dataset),
        "columns": [{"name": name, "is": what} for name, what in dataset.shown],
        "inferred": list(dataset.inferred),
    }
    if with_records and dataset.text_of is not None:
        classes = _class_names(dataset)
        card["first_records"] = [
            {
                "text": dataset.text_of(train.inputs[row]),
                **({"class": classes[train.labels[row]]} if dataset.has_labels else {}),
            }
            for row in range(min(FIRST, len(train)))
        ]
    elif with_records and not is_image:
        names, classes, inputs = _names(dataset), _class_names(dataset), train.inputs
        card["first_records"] = [
            {
                **{name: round(float(value), 6) for name, value in zip(names, inputs[row], strict=True)},
                "class": classes[train.labels[row]],
            }
            for row in range(min(FIRST, len(train)))
        ]
        card["ranges"] = [
            {"name": name, "from": float(low), "to": float(high)}
            for name, low, high in zip(names, inputs.min(axis=0), inputs.max(axis=0), strict=True)
        ]
    return card


def _type(part: Examples) -> str:
    return f"{part.inputs.dtype} of shape {part.inputs.shape[1:]}"


def _class_names(dataset: Dataset) -> tuple[str, ...]:
    return dataset.classes or tuple(map(str, range(dataset.num_classes)))


def _clients(dataset: Dataset) -> dict[str, Any] | None:
    groups, tested = dataset.train.groups, dataset.test.groups
    if groups is None:
        return None
    numbers, sizes = np.unique(groups, return_counts=True)
    has_test = int(np.isin(numbers, tested).sum()) if tested is not None else 0
    bounds = [0, *(2**power for power in range(1, int(sizes.max()).bit_length() + 1))]
    counts, _ = np.histogram(sizes, bounds)
    return {
        "count": len(sizes),
        "smallest": int(sizes.min()),
        "median": float(np.median(sizes)),
        "largest": int(sizes.max()),
        "with_one_record": int((sizes == 1).sum()),
        "with_test_records": has_test,
        "histogram": [
            {"from": max(1, low), "to": high - 1, "clients": int(count)}
            for low, high, count in zip(bounds, bounds[1:], counts, strict=False)
            if count
        ],
    }


def _names(dataset: Dataset) -> tuple[str, ...]:
    if dataset.names:
        return dataset.names
    if dataset.columns:
        parts = ([f"{one.name}={place}" for place in range(one.categories)] or [one.name] for one in dataset.columns)
        return tuple(name for part in parts for name in part)
    return tuple(f"x{place}" for place in range(dataset.input_shape[0]))
