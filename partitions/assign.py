"""Functions that all partitions use: they check parameters and turn record counts into arrays of record indices."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from partitions.scheme import ImpossibleSplit, Indices, Parts

STRICT = {"extra": "forbid"}
"""Pydantic configuration that refuses unknown parameters.

The configuration is a plain dict, so pydantic is not required.
"""

USUAL_MIN_SIZE = 10
"""The minimum number of records per client in NIID-Bench, for partitions with random sizes of shards."""

MAX_BETA = 1e6
"""The largest allowed ``beta`` of Dir(beta). With this value, the clients' shares differ by about 0.1 % only.

numpy overflows for much larger values.
"""


def check_drawn(beta: float, min_size: int | None) -> None:
    """Check the parameters of a partition that draws class shares or shard sizes from Dir(``beta``).

    Raises ImpossibleSplit unless 0 < ``beta`` <= 1e6. Also raises ImpossibleSplit if ``min_size`` is negative; the
    value None means that no minimum is set.
    """
    if not 0 < beta <= MAX_BETA:  # also refuses NaN: every comparison with NaN is False
        raise ImpossibleSplit(f"beta={beta} is outside (0, {MAX_BETA:g}]; for equal shards use the partition iid")
    if min_size is not None and min_size < 0:
        raise ImpossibleSplit(f"min_size={min_size} must be at least 0")


def drawn_until(
    draw: Callable[[], Indices], min_size: int | None, num_draws: int, message: Callable[[int, int], str]
) -> Indices:
    """Draw the clients' numbers of records until each client has ``min_size`` records. Return the last draw.

    ``draw``: a function that returns one draw, of shape (clients,) or (clients, classes). It is called at most
    ``num_draws`` times. If ``min_size`` is None, the minimum is 10, as in NIID-Bench, and the last draw is returned
    even if a client has fewer records. If ``min_size`` is given and no draw reaches this minimum, ImpossibleSplit is
    raised with the text ``message(num_draws, most)``. Here ``most`` is the size of the smallest client in the best
    draw.
    """
    wanted, most = USUAL_MIN_SIZE if min_size is None else min_size, 0
    for _ in range(num_draws):
        counts = draw()
        smallest = int(counts.reshape(len(counts), -1).sum(axis=1).min())
        if smallest >= wanted:
            return counts
        most = max(most, smallest)
    if min_size is not None:
        raise ImpossibleSplit(message(num_draws, most))
    return counts


def check_sizes(num_records: int, num_partitions: int) -> None:
    """Raise ImpossibleSplit if there is no client, or if there are fewer records than clients.

    ``num_partitions``: the number of clients.
    """
    if num_partitions < 1:
        raise ImpossibleSplit(f"{num_partitions} clients: at least 1 is needed")
    if num_partitions > num_records:
        raise ImpossibleSplit(
            f"{num_partitions} clients and only {num_records} records; use at most {num_records} clients"
        )


def count_classes(labels: Indices, num_partitions: int) -> Indices:
    """Return the number of records of each class 0 to max(``labels``).

    Raises ImpossibleSplit if a label is negative, if there are no clients, or if there are more clients than records.
    """
    check_sizes(len(labels), num_partitions)
    if labels.min() < 0:
        raise ImpossibleSplit(f"label {labels.min()} is negative; number the classes from 0")
    return np.bincount(labels)


def cut(shares: NDArray[np.float64], total: int) -> Indices:
    """Divide ``total`` records in proportion to ``shares``, and return the whole number of records for each share.

    The shares sum to 1. The cumulative sums of shares times ``total`` are rounded to the nearest integer. So each
    number of records differs from the exact product by at most 1. (NIID-Bench rounds cumulative sums down, so the last
    client gets one extra record of nearly every class.)
    """
    bounds = np.rint(np.cumsum(shares) * total).astype(np.int64)
    return np.diff(bounds, prepend=0)


def deal(labels: Indices, counts: Indices, rng: Generator) -> Parts:
    """Assign ``counts[i, c]`` randomly chosen records of class c to client i, for all clients and classes.

    ``counts``: shape (clients, classes). If a class has more records than the sum of its counts, the remaining records
    belong to no client.
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
    """Return each client's number of records of each class, shape (clients, ``num_classes``).

    ``parts``: the record indices of every client.
    """
    held = parts if isinstance(parts, Parts) else Parts.of(parts)
    cells = held.owners * num_classes + labels[held.records]
    return np.bincount(cells, minlength=len(parts) * num_classes).reshape(len(parts), num_classes)


def shuffled(owner: Indices, num_partitions: int, rng: Generator) -> Parts:
    """Assign records to clients at random, and return the sorted record indices of every client.

    ``owner``: one client ID for each record, in any order. Client i receives one record for each time that its ID
    occurs in ``owner``.
    """
    shuffled_owner = np.empty_like(owner)
    shuffled_owner[rng.permutation(len(owner))] = owner
    return group(shuffled_owner, num_partitions)


def group(owner: Indices, num_partitions: int) -> Parts:
    """Return the sorted record indices of every client.

    ``owner[j]`` is the client of record j, or ``num_partitions`` if record j belongs to no client.
    """
    sizes = np.bincount(owner, minlength=num_partitions)[:num_partitions]
    bounds = np.cumsum(np.concatenate([[0], sizes]))
    return Parts(np.argsort(owner, kind="stable")[: bounds[-1]], bounds)
