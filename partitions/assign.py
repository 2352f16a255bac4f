"""Assignment of records to clients: functions, shared by all partitions, that make index arrays of sizes and counts."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from partitions.scheme import ImpossibleSplit, Indices, Parts

STRICT = {"extra": "forbid"}
"""Pydantic's configuration that refuses unknown parameters; as a plain dict, so that only numpy is required."""

USUAL_MIN_SIZE = 10
"""NIID-Bench's minimum number of records per client, for partitions that draw client sizes at random."""

MAX_BETA = 1e6
"""The largest ``beta``: above it Dir(beta) is uniform to 0.1 %, and sums of its gamma variates overflow soon after."""


def check_drawn(beta: float, min_size: int | None) -> None:
    """Raise ImpossibleSplit unless 0 < ``beta`` <= 1e6 and ``min_size`` is None (no minimum is set) or at least 0."""
    if not 0 < beta <= MAX_BETA:  # also refuses NaN
        raise ImpossibleSplit(f"beta={beta} is outside (0, {MAX_BETA:g}]; for equal parts use iid")
    if min_size is not None and min_size < 0:
        raise ImpossibleSplit(f"min_size={min_size} must be at least 0")


def drawn_until(
    draw: Callable[[], Indices], min_size: int | None, num_draws: int, refusal: Callable[[int, int], str]
) -> Indices:
    """Return the first draw in which every client holds at least ``min_size`` records.

    A draw is an array of record counts by client, or by client and class. If ``min_size`` is None, the minimum is
    NIID-Bench's 10, and the last of ``num_draws`` draws is returned if no draw reaches it. An explicit ``min_size``
    that no draw reaches raises ImpossibleSplit with the message ``refusal(num_draws, most)``; ``most`` is the size of
    the smallest client in the best draw.
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
    """Raise ImpossibleSplit if there are fewer than one client, or fewer records than clients."""
    if num_partitions < 1:
        raise ImpossibleSplit(f"{num_partitions} clients: at least 1 is needed")
    if num_partitions > num_records:
        raise ImpossibleSplit(
            f"{num_partitions} clients and only {num_records} records; use at most {num_records} clients"
        )


def count_classes(labels: Indices, num_partitions: int) -> Indices:
    """Return the number of records of each class 0..max(labels), after the checks of ``check_sizes``."""
    check_sizes(len(labels), num_partitions)
    if labels.min() < 0:
        raise ImpossibleSplit(f"label {labels.min()} is negative; number the classes from 0")
    return np.bincount(labels)


def cut(shares: NDArray[np.float64], total: int) -> Indices:
    """Round ``shares`` (summing to 1) of ``total`` records to whole numbers of records that sum to ``total``.

    Cumulative sums are rounded to the nearest integer, so each count differs from its share by at most 1. (NIID-Bench
    rounds cumulative sums down, which gives the last client one extra record of nearly every class.)
    """
    bounds = np.rint(np.cumsum(shares) * total).astype(np.int64)
    return np.diff(bounds, prepend=0)


def deal(labels: Indices, counts: Indices, rng: Generator) -> Parts:
    """Assign to each client i ``counts[i, c]`` randomly chosen records of each class c.

    ``counts``: (clients, classes). If a class has more records than the sum of its column, the rest belongs to no
    client.
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
    """Return the number of records of each client and class, shape (clients, ``num_classes``)."""
    held = parts if isinstance(parts, Parts) else Parts.of(parts)
    cells = held.owners * num_classes + labels[held.records]
    return np.bincount(cells, minlength=len(parts) * num_classes).reshape(len(parts), num_classes)


def shuffled(owner: Indices, num_partitions: int, rng: Generator) -> Parts:
    """Assign the records to clients in random order; ``owner`` lists one client per record, in any order."""
    shuffled_owner = np.empty_like(owner)
    shuffled_owner[rng.permutation(len(owner))] = owner
    return group(shuffled_owner, num_partitions)


def group(owner: Indices, num_partitions: int) -> Parts:
    """Return each client's record indices, sorted.

    ``owner[j]`` is the client of record j, or ``num_partitions`` if record j belongs to no client.
    """
    sizes = np.bincount(owner, minlength=num_partitions)[:num_partitions]
    bounds = np.cumsum(np.concatenate([[0], sizes]))
    return Parts(np.argsort(owner, kind="stable")[: bounds[-1]], bounds)
