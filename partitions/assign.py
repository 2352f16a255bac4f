"""Assignment of records to clients: from sizes and label counts to disjoint index arrays, for all schemes."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from partitions.scheme import ImpossibleSplit, Indices, Parts

STRICT = {"extra": "forbid"}
"""Pydantic's spelling of "unknown parameters are refused"; as plain data, so that this package needs numpy alone."""

USUAL_MIN_SIZE = 10
"""NIID-Bench's least number of records a client, where sizes are drawn."""

MAX_BETA = 1e6
"""Beyond it Dir(beta) is the uniform split to 0.1 %, and sums of its gamma variates overflow soon after."""


def check_drawn(beta: float, min_size: int | None) -> None:
    """Raise ImpossibleSplit unless 0 < ``beta`` <= 1e6, and for a negative ``min_size``; None promises nothing."""
    if not 0 < beta <= MAX_BETA:  # also refuses NaN
        raise ImpossibleSplit(f"beta={beta} is outside (0, {MAX_BETA:g}]; for equal parts use iid")
    if min_size is not None and min_size < 0:
        raise ImpossibleSplit(f"min_size={min_size} must be at least 0")


def drawn_until(
    draw: Callable[[], Indices], min_size: int | None, num_draws: int, refusal: Callable[[int, int], str]
) -> Indices:
    """Return the first draw, record counts by client (and class), in which every client holds ``min_size`` records.

    None aims at NIID-Bench's 10, and takes the last of ``num_draws`` draws where none has them. Raises ImpossibleSplit
    where an explicit number is out of reach, with the message ``refusal(num_draws, most)``; ``most`` is the size of the
    smallest client in the best draw.
    """
    wanted, most = USUAL_MIN_SIZE if min_size is None else min_size, 0
    for _ in range(num_draws):
        counts = draw()
        smallest = int(counts.reshape(len(counts), -1).sum(axis=1).min())
        if smallest >= wanted:
            return counts
        most = max(most, smallest)
    if min_size is not None:
        raise ImpossibleSplit(refusal(num_draws, most))
    return counts


def check_sizes(num_records: int, num_partitions: int) -> None:
    """Raise ImpossibleSplit unless there are at least one client and as many records as clients."""
    if num_partitions < 1:
        raise ImpossibleSplit(f"{num_partitions} clients: at least 1 is needed")
    if num_partitions > num_records:
        raise ImpossibleSplit(
            f"{num_partitions} clients and only {num_records} records; use at most {num_records} clients"
        )


def count_classes(labels: Indices, num_partitions: int) -> Indices:
    """Return the number of records of each class 0..max(labels), after ``check_sizes``."""
    check_sizes(len(labels), num_partitions)
    if labels.min() < 0:
        raise ImpossibleSplit(f"label {labels.min()} is negative; number the classes from 0")
    return np.bincount(labels)


def cut(shares: NDArray[np.float64], total: int) -> Indices:
    """Round ``shares`` (summing to 1) of ``total`` records to whole records that sum to ``total``.

    Cumulative sums are rounded to the nearest, so each count is within 1 of its share. (NIID-Bench rounds them down,
    which hands the last client a stray record of nearly every class.)
    """
    bounds = np.rint(np.cumsum(shares) * total).astype(np.int64)
    return np.diff(bounds, prepend=0)


def deal(labels: Indices, counts: Indices, rng: Generator) -> Parts:
    """Assign ``counts[i, c]`` randomly chosen records of each class c to client i.

    ``counts``: (clients, classes). Records beyond the sum of a column belong to no client.
    """
    num_partitions, num_classes = counts.shape
    left_over = np.bincount(labels, minlength=num_classes) - counts.sum(axis=0)
    counts = np.vstack([counts, left_over])
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled].astype(np.min_scalar_type(num_classes)), kind="stable")]
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(num_partitions + 1), num_classes), counts.T.ravel())
    return group(owner, num_partitions)


def label_counts(labels: Indices, parts: Sequence[Indices], num_classes: int) -> Indices:
    """Return the number of records of each class that every client holds: (clients, ``num_classes``)."""
    held = parts if isinstance(parts, Parts) else Parts.of(parts)
    cells = held.owners * num_classes + labels[held.records]
    return np.bincount(cells, minlength=len(parts) * num_classes).reshape(len(parts), num_classes)


def shuffled(owner: Indices, num_partitions: int, rng: Generator) -> Parts:
    """Assign records in random order to the clients that ``owner`` lists."""
    shuffled_owner = np.empty_like(owner)
    shuffled_owner[rng.permutation(len(owner))] = owner
    return group(shuffled_owner, num_partitions)


def group(owner: Indices, num_partitions: int) -> Parts:
    """Return each client's record indices, sorted; ``owner[j]`` is record j's client, ``num_partitions`` for none."""
    sizes = np.bincount(owner, minlength=num_partitions)[:num_partitions]
    bounds = np.cumsum(np.concatenate([[0], sizes]))
    return Parts(np.argsort(owner, kind="stable")[: bounds[-1]], bounds)
