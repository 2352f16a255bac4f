"""The predictions of a model on records, and the measures computed from them in one pass.

The measures follow the definitions of scikit-learn in numpy: importing scikit-learn takes longer than computing them.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fl_sim.params import copy_into, load_statistics, placed_in, running_in
from fl_sim.training.losses import LogitsOf
from fl_sim.training.records import Scale, Source, arithmetic
from fl_sim.types import Params
from partitions import Parts

EVALUATION_BATCH = 500
"""Records per forward pass of an evaluation: small enough for the cache, large enough for the operators."""

EVALUATION_BATCH_ON_GPU = 2_000
"""The same where launches cost more than arithmetic does."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The predictions of a model on n records.

    ``loss``: the mean cross-entropy. ``labels``: (n,), the classes of the records; ``predicted``: (n,), the predicted
    classes. ``margins``: (n,), for two classes, the logit of class 1 less that of class 0.
    """

    loss: float
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    margins: NDArray[np.float32] | None = None

    @cached_property
    def accuracy(self) -> float:
        """Return the accuracy, in [0, 1]."""
        return int((self.labels == self.predicted).sum()) / len(self.labels)


def evaluate(
    model: nn.Module,
    params: Params,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    *,
    scale: Scale | None = None,
    workers: int = 1,
) -> Scores:
    """Return the scores of ``params`` on (n, *input shape) inputs and (n,) labels.

    ``scale`` normalises inputs that are bytes. ``workers`` threads share out the batches; the numbers are the same for
    any number of them. Products are float32 on a GPU, too, whatever the training's are.
    """
    network, source = ready(model, params), Source(inputs, labels, scale)
    return score(lambda batch: network(source.normalised(batch)), inputs, labels, workers=workers)


def ready(model: nn.Module, params: Params) -> nn.Module:
    """Return ``model`` with the weights ``params``, running statistics among them if it has any, in evaluation mode."""
    running = running_in(model)
    statistics = {name: value for name, value in params.items() if name in running}
    weights = {name: value for name, value in params.items() if name not in running} if statistics else params
    with torch.inference_mode():
        copy_into(placed_in(model, weights), weights)
        load_statistics(model, statistics)
    return model.eval()


def score(logits_of: LogitsOf, inputs: torch.Tensor, labels: torch.Tensor, *, workers: int = 1) -> Scores:
    """Return the scores of the logits that ``logits_of`` returns: see ``evaluate``."""
    threads = torch.get_num_threads()

    def scored(batch: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)  # holds for the thread that calls it
        with torch.inference_mode():
            logits = logits_of(batch)
            loss = functional.cross_entropy(logits, targets, reduction="sum").double()
            return (loss, logits.argmax(1), *([logits[:, 1] - logits[:, 0]] if logits.shape[1] == 2 else []))

    size = EVALUATION_BATCH if inputs.device.type == "cpu" else EVALUATION_BATCH_ON_GPU
    batches = torch.split(inputs, size), torch.split(labels, size)
    with ThreadPoolExecutor(workers) as pool, arithmetic(inputs.device):
        scores = list(pool.map(scored, *batches) if workers > 1 else map(scored, *batches))
    losses, *others = zip(*scores, strict=True)
    loss = sum(torch.stack(losses).tolist()) / len(labels)  # the GPU is waited for
    predicted, *margins = (torch.cat(parts).numpy(force=True) for parts in others)
    return Scores(loss, labels.numpy(force=True), predicted, margins[0] if margins else None)


@dataclass(frozen=True, eq=False)
class Confusion:
    """A confusion matrix. ``counts[i, j]``: the number of records of class i with the prediction j."""

    counts: NDArray[np.int64]

    @classmethod
    def of(cls, scores: Scores, num_classes: int) -> Self:
        """Return the confusion matrix of ``scores``, whose labels are below ``num_classes``."""
        cells = np.bincount(scores.labels * num_classes + scores.predicted, minlength=num_classes**2)
        return cls(cells.reshape(num_classes, num_classes))

    @cached_property
    def recalls(self) -> NDArray[np.float64]:
        """Return the recall of each class; NaN for a class without records."""
        return _share(self.counts.diagonal(), self.counts.sum(1))

    @property
    def balanced_accuracy(self) -> float:
        """Return the mean recall of the classes that have records."""
        return _mean(self.recalls)

    @property
    def macro_f1(self) -> float:
        """Return the mean F1 of the classes that have records or predictions."""
        f1 = _share(2 * self.counts.diagonal(), self.counts.sum(0) + self.counts.sum(1))
        return _mean(f1)

    @property
    def majority_share(self) -> float:
        """Return the share of the most frequent class, the accuracy of a constant prediction."""
        return float(self.counts.sum(1).max() / self.counts.sum())


def area_under_roc(scores: Scores) -> float | None:
    """Return the share of pairs in which the record of class 1 has the larger margin; equal margins count half.

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
        """Return the quantiles of the accuracies at 0, 10, 20, ..., 100 %."""
        return tuple(float(value) for value in np.quantile(self.ascending, np.linspace(0, 1, 11)))

    @classmethod
    def of(cls, accuracies: NDArray[np.float64]) -> Self:
        """Return the statistics of at least one accuracy."""
        ascending = np.sort(accuracies)
        worst = ascending[: -(-len(accuracies) // 10)]
        return cls(float(accuracies.mean()), float(accuracies.std()), float(worst.mean()), ascending)


@dataclass(frozen=True, eq=False)
class Holdings:
    """Clients' class counts: ``owners[i]`` has ``counts[i]`` records of class ``labels[i]``; no pair comes twice."""

    owners: NDArray[np.int64]
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, splits: Sequence[Parts], labels: NDArray[np.int64]) -> Self:
        """Return the class counts over ``splits``, whose records are indices into ``labels``."""
        owners = np.concatenate([split.owners for split in splits])
        records = np.concatenate([split.records for split in splits])
        num_classes = int(labels.max()) + 1
        pairs, counts = np.unique(owners * num_classes + labels[records], return_counts=True)
        return cls(pairs // num_classes, pairs % num_classes, counts)

    def by_client(self, recalls: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return each client's accuracy: the ``recalls`` of the classes, weighted by its shares of them.

        That is the accuracy on test records of which each counts as often as its class does with the client, exactly,
        with nothing drawn. Records of classes that no test record is of (a recall of NaN) count nowhere; clients
        without others have NaN, and those after the last that has some are left out.
        """
        recall = recalls[self.labels]
        tested = ~np.isnan(recall)
        owners, counts = self.owners[tested], self.counts[tested]
        right, held = np.bincount(owners, counts * recall[tested]), np.bincount(owners, counts)
        found = np.full(len(held), np.nan)
        np.divide(right, held, out=found, where=held > 0)
        return found

    def accuracies(self, recalls: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the accuracies of the clients that have one."""
        return known(self.by_client(recalls))


@dataclass(frozen=True, eq=False)
class OwnTests:
    """The clients' own test records. ``owners``: the client of each test record, -1 for none."""

    owners: NDArray[np.int64]
    num_clients: int

    @classmethod
    def of(cls, shards: Parts, groups: NDArray[np.int64], tested: NDArray[np.int64]) -> Self | None:
        """Return the own test records by ``groups`` of training records, and ``tested``, those of test records.

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
        """Return the number of each client's test records."""
        return np.bincount(self.owners[self.owners >= 0], minlength=self.num_clients)

    def by_client(self, scores: Scores) -> NDArray[np.float64]:
        """Return the accuracy of every client on its own test records, NaN without any."""
        owned = self.owners >= 0
        right = (scores.labels == scores.predicted)[owned]
        counts = self.counts
        sums = np.bincount(self.owners[owned], right, minlength=self.num_clients)
        found = np.full(len(counts), np.nan)
        np.divide(sums, counts, out=found, where=counts > 0)
        return found

    def accuracies(self, scores: Scores) -> NDArray[np.float64]:
        """Return the accuracies of the clients that have test records."""
        return known(self.by_client(scores))


def known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values that are not NaN."""
    return values[~np.isnan(values)]


def _mean(shares: NDArray[np.float64]) -> float:
    """Return the mean of those that are not NaN; np.nanmean takes ten times as long."""
    values = known(shares)
    return float(values.sum() / len(values))


def _share(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return ``part`` / ``whole``, NaN where both are 0."""
    shares = np.full(len(whole), np.nan)
    np.divide(part, whole, out=shares, where=whole > 0)
    return shares
