"""What a data set is, at a glance: sizes, classes, clients and columns."""

from typing import Any, Final

import numpy as np

from fl_sim.data.naming import is_own
from fl_sim.types import Dataset

FIRST: Final = 5
"""How many records of a table a card shows."""


def card_of(dataset: Dataset, *, with_records: bool) -> dict[str, Any]:
    """Return the facts as plain values. ``with_records``: also the first training records of a table, as models see it.

    ``range`` of a number is its smallest and largest value among the training records: a statistic of these, which is
    left out where they are.
    """
    train, test = dataset.train, dataset.test
    is_image = train.inputs.ndim == 4
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
        "classes": _classes(dataset),
        "clients": _clients(dataset),
        "columns": [{"name": name, "is": what} for name, what in dataset.shown],
        "inferred": list(dataset.inferred),
    }
    if with_records and not is_image:
        card["first_records"] = _first(dataset)
        card["ranges"] = _ranges(dataset)
    return card


def _classes(dataset: Dataset) -> list[dict[str, Any]]:
    counts = [np.bincount(part.labels, minlength=dataset.num_classes) for part in (dataset.train, dataset.test)]
    names = dataset.classes or tuple(map(str, range(dataset.num_classes)))
    return [
        {"name": name, "train": int(train), "test": int(test)} for name, train, test in zip(names, *counts, strict=True)
    ]


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


def _first(dataset: Dataset) -> list[dict[str, Any]]:
    part = dataset.train
    names = _names(dataset)
    classes = dataset.classes or tuple(map(str, range(dataset.num_classes)))
    return [
        {
            **{name: round(float(value), 6) for name, value in zip(names, part.inputs[row], strict=True)},
            "class": classes[part.labels[row]],
        }
        for row in range(min(FIRST, len(part)))
    ]


def _ranges(dataset: Dataset) -> list[dict[str, Any]]:
    inputs = dataset.train.inputs
    names = _names(dataset)
    return [
        {"name": name, "from": float(low), "to": float(high)}
        for name, low, high in zip(names, inputs.min(axis=0), inputs.max(axis=0), strict=True)
    ]


def _names(dataset: Dataset) -> tuple[str, ...]:
    """Return a name for each number of a record; a category's has the category behind an equals sign."""
    if dataset.names:
        return dataset.names
    if dataset.columns:
        parts = ([f"{one.name}={place}" for place in range(one.categories)] or [one.name] for one in dataset.columns)
        return tuple(name for part in parts for name in part)
    return tuple(f"x{place}" for place in range(dataset.input_shape[0]))
