"""What can be said of a classifier beside its accuracy, all of it from one pass over the records.

By the definitions of scikit-learn's metrics, in numpy: importing those costs more than all of this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fl_sim.training.evaluation import Scores
from partitions import Parts


@dataclass(frozen=True, eq=False)
class Confusion:
    """``counts[i, j]``: how many records of class i the model takes for class j, shape (classes, classes)."""

    counts: NDArray[np.int64]

    @classmethod
    def of(cls, scores: Scores, num_classes: int) -> Self:
        """Return that of ``scores``, whose labels are below ``num_classes``."""
        cells = np.bincount(scores.labels * num_classes + scores.predicted, minlength=num_classes**2)
        return cls(cells.reshape(num_classes, num_classes))

    @cached_property
    def recalls(self) -> NDArray[np.float64]:
        """Return, for each class, which part of its records is taken for it; NaN for a class without records."""
        return _share(self.counts.diagonal(), self.counts.sum(1))

    @property
    def balanced_accuracy(self) -> float:
        """Return the mean recall of the classes that have records."""
        return _mean(self.recalls)

    @property
    def macro_f1(self) -> float:
        """Return the mean F1 of the classes that have records, or that some record is taken for."""
        f1 = _share(2 * self.counts.diagonal(), self.counts.sum(0) + self.counts.sum(1))
        return _mean(f1)

    @property
    def majority_share(self) -> float:
        """Return which part of the records is of the most frequent class: a constant guess is right so often."""
        return float(self.counts.sum(1).max() / self.counts.sum())


def area_under_roc(scores: Scores) -> float | None:
    """Return how often a record of class 1 has a larger margin than one of class 0, where equals count half.

    None where there are not two classes, or no record of one of them.
    """
    if scores.margins is None:
        return None
    positive, negative = scores.margins[scores.labels == 1], np.sort(scores.margins[scores.labels == 0])
    if not len(positive) or not len(negative):
        return None
    below, up_to = (np.searchsorted(negative, positive, side).mean() for side in ("left", "right"))
    return float((below + up_to) / 2 / len(negative))


@dataclass(frozen=True, eq=False)
class OverClients:
    """The accuracies of clients: mean, standard deviation, and mean of the worst tenth, rounded up.

    ``ascending``: all of them, from the lowest to the highest.
    """

    mean: float
    deviation: float
    worst_tenth: float
    ascending: NDArray[np.float64]

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Return the lowest accuracy, those that 10, 20, ..., 90 % of the clients are at or below, and the highest."""
        return tuple(float(value) for value in np.quantile(self.ascending, np.linspace(0, 1, 11)))

    @classmethod
    def of(cls, accuracies: NDArray[np.float64]) -> Self:
        """Return that of at least one accuracy."""
        ascending = np.sort(accuracies)
        worst = ascending[: -(-len(accuracies) // 10)]
        return cls(float(accuracies.mean()), float(accuracies.std()), float(worst.mean()), ascending)


@dataclass(frozen=True, eq=False)
class Holdings:
    """What clients hold: ``owners[i]`` has ``counts[i]`` records of class ``labels[i]``; no pair comes twice."""

    owners: NDArray[np.int64]
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, splits: Sequence[Parts], labels: NDArray[np.int64]) -> Self:
        """Return it where each client has its part of every split: indices into ``labels``, of all records."""
        owners = np.concatenate([split.owners for split in splits])
        records = np.concatenate([split.records for split in splits])
        num_classes = int(labels.max()) + 1
        pairs, counts = np.unique(owners * num_classes + labels[records], return_counts=True)
        return cls(pairs // num_classes, pairs % num_classes, counts)

    def accuracies(self, recalls: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return each client's accuracy: the ``recalls`` of the classes, weighted by its shares of them.

        That is the accuracy on test records of which each counts as often as its class does with the client, exactly,
        with nothing drawn. Records of classes that no test record is of (a recall of NaN) count nowhere; clients
        without others are left out.
        """
        recall = recalls[self.labels]
        tested = ~np.isnan(recall)
        owners, counts = self.owners[tested], self.counts[tested]
        right, held = np.bincount(owners, counts * recall[tested]), np.bincount(owners, counts)
        found: NDArray[np.float64] = right[held > 0] / held[held > 0]
        return found


@dataclass(frozen=True, eq=False)
class OwnTests:
    """Which test records are whose: ``owners`` has a client for each of them, -1 for those that nobody has."""

    owners: NDArray[np.int64]
    num_clients: int

    @classmethod
    def of(cls, shards: Parts, groups: NDArray[np.int64], tested: NDArray[np.int64]) -> Self | None:
        """Return it by where records come from: ``groups`` of the training records, ``tested`` of the test records.

        ``shards``: each client's training records. A test record belongs to the client that holds its group; None where
        a group is spread over several clients.
        """
        owner_of = np.full(len(groups), -1)
        owner_of[shards.records] = shards.owners
        held = owner_of >= 0
        owner_of, numbers = owner_of[held], groups[held]
        order = np.lexsort((owner_of, numbers))
        known, first = np.unique(numbers[order], return_index=True)
        last = np.append(first[1:], len(order)) - 1
        owners = owner_of[order]
        if (owners[first] != owners[last]).any():
            return None
        places = np.minimum(np.searchsorted(known, tested), len(known) - 1)
        return cls(np.where(known[places] == tested, owners[first][places], -1), len(shards))

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return how many test records each client has."""
        return np.bincount(self.owners[self.owners >= 0], minlength=self.num_clients)

    def accuracies(self, scores: Scores) -> NDArray[np.float64]:
        """Return the accuracy of every client that has test records, on these."""
        owned = self.owners >= 0
        right = (scores.labels == scores.predicted)[owned]
        counts = self.counts
        sums = np.bincount(self.owners[owned], right, minlength=self.num_clients)
        return np.asarray(sums[counts > 0] / counts[counts > 0])


def _mean(shares: NDArray[np.float64]) -> float:
    """Return the mean of those that are not NaN; np.nanmean takes ten times as long."""
    known = shares[~np.isnan(shares)]
    return float(known.sum() / len(known))


def _share(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return ``part`` / ``whole``, NaN where both are 0."""
    shares = np.full(len(whole), np.nan)
    np.divide(part, whole, out=shares, where=whole > 0)
    return shares
