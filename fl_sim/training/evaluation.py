"""The predictions of a model on records, and the measures computed from these predictions.

The measures follow the definitions of scikit-learn, but are computed with numpy. The import of scikit-learn would take
longer than the computation.
"""

import math
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

from fl_sim.own_loss import OwnLoss
from fl_sim.params import copy_into, load_statistics, placed_in, running_in
from fl_sim.training.losses import LogitsOf
from fl_sim.training.records import Scale, Source, arithmetic
from fl_sim.types import Params
from partitions import Parts

EVALUATION_BATCH = 500
"""Records per forward pass on a CPU: few enough for the CPU's cache, and enough for efficient operators."""

OWN_BATCH = 50
"""Records per forward pass of a model that defines its own loss, which may return logits for each token of a record."""

_LARGEST = 700.0
"""The largest loss in the computation of the perplexity, so that its exponential does not overflow."""

EVALUATION_BATCH_ON_GPU = 2_000
"""Records per forward pass on a GPU, where the launch of an operation takes longer than its arithmetic."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The predictions of a model on n records.

    ``loss``: the mean cross-entropy. ``labels``: (n,), the true classes. ``predicted``: (n,), the predicted classes.
    ``margins``: (n,), the logit of class 1 minus the logit of class 0; None unless there are exactly two classes.

    A model with its own loss (fl_sim.own_loss) makes several predictions for a record, such as one per token. For such
    a model, ``predicted`` is empty, and ``loss`` is the mean over all predictions. ``right``: (n,), the number of
    correct predictions of each record. ``counts``: (n,), the number of all predictions of each record. ``right``
    and ``counts`` are None for a model with one prediction per record.
    """

    loss: float
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    margins: NDArray[np.float32] | None = None
    right: NDArray[np.int64] | None = None
    counts: NDArray[np.int64] | None = None

    @cached_property
    def accuracy(self) -> float:
        """Return the accuracy, in [0, 1]: the share of right predictions."""
        right, counts = self.predictions
        return int(right.sum()) / max(1, int(counts.sum()))

    @property
    def predictions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of correct predictions and of all predictions of each record, both of shape (n,)."""
        if self.right is not None and self.counts is not None:
            return self.right, self.counts
        return (self.labels == self.predicted).astype(np.int64), np.ones(len(self.labels), dtype=np.int64)

    @property
    def perplexity(self) -> float | None:
        """Return the perplexity, the exponential of the loss; None for a model that predicts one class per record."""
        return None if self.counts is None else math.exp(min(self.loss, _LARGEST))


def evaluate(
    model: nn.Module,
    params: Params,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    *,
    scale: Scale | None = None,
    workers: int = 1,
) -> Scores:
    """Return the scores of a model with weights ``params`` on inputs (n, *input shape) with labels (n,).

    ``scale``: the constants that normalise inputs of bytes. ``workers``: the number of threads that share the batches;
    the scores do not depend on this number. Matrix products are always computed in float32, even if training uses a
    lower precision on a GPU.
    """
    network, source = ready(model, params), Source(inputs, labels, scale)
    if isinstance(network, OwnLoss):
        return _score_own(network, source, inputs, labels)
    return score(lambda batch: network(source.normalised(batch)), inputs, labels, workers=workers)


def ready(model: nn.Module, params: Params) -> nn.Module:
    """Load the tensors ``params`` into ``model``, and return the model in evaluation mode.

    ``params``: weights and, if the model has them, running statistics of normalisation layers.
    """
    running = running_in(model)
    statistics = {name: value for name, value in params.items() if name in running}
    weights = {name: value for name, value in params.items() if name not in running} if statistics else params
    with torch.inference_mode():
        copy_into(placed_in(model, weights), weights)
        load_statistics(model, statistics)
    return model.eval()


def score(logits_of: LogitsOf, inputs: torch.Tensor, labels: torch.Tensor, *, workers: int = 1) -> Scores:
    """Return the scores of a model, as ``evaluate`` does. ``logits_of``: computes the model's logits of a batch."""
    threads = torch.get_num_threads()

    def scored(batch: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)  # PyTorch stores the number of its threads per Python thread
        with torch.inference_mode():
            logits = logits_of(batch)
            loss = functional.cross_entropy(logits, targets, reduction="sum").double()
            return (loss, logits.argmax(1), *([logits[:, 1] - logits[:, 0]] if logits.shape[1] == 2 else []))

    size = EVALUATION_BATCH if inputs.device.type == "cpu" else EVALUATION_BATCH_ON_GPU
    batches = torch.split(inputs, size), torch.split(labels, size)
    with ThreadPoolExecutor(workers) as pool, arithmetic(inputs.device):
        scores = list(pool.map(scored, *batches) if workers > 1 else map(scored, *batches))
    losses, *others = zip(*scores, strict=True)
    loss = sum(torch.stack(losses).tolist()) / len(labels)  # one transfer from the GPU for all losses
    predicted, *margins = (torch.cat(parts).numpy(force=True) for parts in others)
    return Scores(loss, labels.numpy(force=True), predicted, margins[0] if margins else None)


def _score_own(network: OwnLoss, source: Source, inputs: torch.Tensor, labels: torch.Tensor) -> Scores:
    """Return the scores of a model that defines its own loss."""
    batches = torch.split(inputs, OWN_BATCH), torch.split(labels, OWN_BATCH)
    with torch.inference_mode(), arithmetic(inputs.device):
        found = [network.loss_of(source.normalised(batch), targets) for batch, targets in zip(*batches, strict=True)]
        losses, right, counts = (torch.cat(parts).double() for parts in zip(*found, strict=True))
        loss = float((losses * counts).sum() / counts.sum().clamp(min=1))
    whole = [part.long().numpy(force=True) for part in (right, counts)]
    return Scores(loss, labels.numpy(force=True), np.zeros(0, np.int64), None, *whole)


@dataclass(frozen=True, eq=False)
class ClassCounts:
    """Numbers of records by class, three arrays of shape (classes,).

    ``held``: the number of records of each class. ``predicted``: the number of records that are predicted as the class.
    ``right``: the number of correct predictions of the class.
    """

    held: NDArray[np.int64]
    predicted: NDArray[np.int64]
    right: NDArray[np.int64]

    @cached_property
    def recalls(self) -> NDArray[np.float64]:
        """Return the recall of each class; NaN for a class without records."""
        return _share(self.right, self.held)

    @property
    def balanced_accuracy(self) -> float:
        """Return the mean recall of the classes that have records."""
        return _mean(self.recalls)

    @property
    def macro_f1(self) -> float:
        """Return the mean F1 of the classes that have records or predictions."""
        return _mean(_share(2 * self.right, self.predicted + self.held))


@dataclass(frozen=True, eq=False)
class Confusion:
    """A confusion matrix. ``counts[i, j]`` is the number of records of class i that are predicted as class j."""

    counts: NDArray[np.int64]

    @classmethod
    def of(cls, scores: Scores, num_classes: int) -> Self:
        """Return the confusion matrix of ``scores``, whose labels are below ``num_classes``."""
        cells = np.bincount(scores.labels * num_classes + scores.predicted, minlength=num_classes**2)
        return cls(cells.reshape(num_classes, num_classes))

    @cached_property
    def by_class(self) -> ClassCounts:
        """Return the numbers of records, predictions and correct predictions of each class."""
        return ClassCounts(self.counts.sum(1), self.counts.sum(0), self.counts.diagonal())

    @property
    def recalls(self) -> NDArray[np.float64]:
        """Return the recall of each class; NaN for a class without records."""
        return self.by_class.recalls

    @property
    def balanced_accuracy(self) -> float:
        """Return the mean recall of the classes that have records."""
        return self.by_class.balanced_accuracy

    @property
    def macro_f1(self) -> float:
        """Return the mean F1 of the classes that have records or predictions."""
        return self.by_class.macro_f1

    @property
    def majority_share(self) -> float:
        """Return the share of the most frequent class among all records: the majority-class baseline."""
        return float(self.counts.sum(1).max() / self.counts.sum())


def area_under_roc(scores: Scores) -> float | None:
    """Return the area under the ROC curve; None if there are not exactly two classes that both have records.

    The area is the share of all pairs (record of class 1, record of class 0) in which the record of class 1 has the
    larger margin. A pair with equal margins counts half.
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
    """Statistics of the clients' accuracies.

    ``mean``, ``deviation``: mean and standard deviation over all clients. ``worst_tenth``: the mean of the lowest
    tenth of the accuracies. The number of clients in this tenth is rounded up. ``ascending``: all accuracies, the
    lowest first. ``entropy``: the sum of -s log s in nats, where s is an accuracy divided by the sum of all accuracies
    (Li et al. 2020). If all accuracies are equal, even if all are 0, the entropy has its largest value: the logarithm
    of the number of clients.
    """

    mean: float
    deviation: float
    worst_tenth: float
    entropy: float
    ascending: NDArray[np.float64]

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Return the quantiles of the accuracies at 0 %, 10 %, 20 %, ..., 100 %."""
        return tuple(float(value) for value in np.quantile(self.ascending, np.linspace(0, 1, 11)))

    @classmethod
    def of(cls, accuracies: NDArray[np.float64]) -> Self:
        """Return the statistics of the clients' ``accuracies``, an array of at least one number."""
        ascending = np.sort(accuracies)
        worst = ascending[: -(-len(accuracies) // 10)]
        shares = ascending / ascending.sum() if ascending.any() else np.full(len(ascending), 1 / len(ascending))
        entropy = float(-sum(share * math.log(share) for share in shares if share))
        return cls(float(accuracies.mean()), float(accuracies.std()), float(worst.mean()), entropy, ascending)


@dataclass(frozen=True, eq=False)
class Holdings:
    """The class distributions of all clients, as the numbers of records of each class.

    Client ``owners[i]`` has ``counts[i]`` records of class ``labels[i]``. Each pair of client and class occurs once.
    """

    owners: NDArray[np.int64]
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, splits: Sequence[Parts], labels: NDArray[np.int64]) -> Self:
        """Return the number of records of each client and class, summed over ``splits``.

        ``splits``: one or more ``Parts``, each of which assigns record indices to clients. ``labels``: the label of
        each record.
        """
        owners = np.concatenate([split.owners for split in splits])
        records = np.concatenate([split.records for split in splits])
        num_classes = int(labels.max()) + 1
        pairs, counts = np.unique(owners * num_classes + labels[records], return_counts=True)
        return cls(pairs // num_classes, pairs % num_classes, counts)

    def by_client(self, recalls: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return each client's accuracy: the mean of the class recalls, weighted by the client's class distribution.

        The result equals the accuracy on test records that are weighted by the client's class distribution. Classes
        without test records (recall NaN) are ignored. A client whose records all belong to such classes has the
        accuracy NaN. The array ends at the last client whose accuracy is a number, so it may be shorter than the number
        of clients.
        """
        recall = recalls[self.labels]
        tested = ~np.isnan(recall)
        owners, counts = self.owners[tested], self.counts[tested]
        right, held = np.bincount(owners, counts * recall[tested]), np.bincount(owners, counts)
        found = np.full(len(held), np.nan)
        np.divide(right, held, out=found, where=held > 0)
        return found

    def accuracies(self, recalls: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the clients' accuracies (``by_client``), without the clients whose accuracy is NaN."""
        return known(self.by_client(recalls))


@dataclass(frozen=True, eq=False)
class OwnTests:
    """The assignment of test records to clients.

    ``owners``: the client of each test record, or -1 if it belongs to no client. ``num_clients``: the number of all
    clients.
    """

    owners: NDArray[np.int64]
    num_clients: int

    @classmethod
    def of(
        cls, shards: Parts, groups: NDArray[np.int64], tested: NDArray[np.int64], labels: NDArray[np.int64]
    ) -> Self | None:
        """Return the assignment of test records to clients by groups of records, such as writers or domains.

        A test record belongs to the client that has the training records of the same group. If several clients have the
        training records of a group, its test records are divided equally among these clients, class by class.
        ``groups``: the group of each training record. ``tested``: the group of each test record. ``labels``: the label
        of each test record. ``shards``: the training records of each client. Returns None if several clients share a
        group, and one of these clients also has records of another group.
        """
        known, numbers = np.unique(groups[shards.records], return_inverse=True)
        # Pairs (group, client), sorted by group, then by client.
        pairs = np.unique(numbers * len(shards) + shards.owners)
        holders, of_group = pairs % len(shards), pairs // len(shards)
        num_holders, num_groups = np.bincount(of_group), np.bincount(holders)
        if ((num_holders[of_group] > 1) & (num_groups[holders] > 1)).any():
            return None
        places = np.minimum(np.searchsorted(known, tested), len(known) - 1)
        is_known = known[places] == tested
        places = places[is_known]
        order = np.lexsort((labels[is_known], places))
        starts = np.searchsorted(places[order], np.arange(len(known)))
        turns = np.empty(len(places), dtype=np.int64)
        turns[order] = np.arange(len(places)) - starts[places[order]]
        first = np.cumsum(num_holders) - num_holders
        owners = np.full(len(tested), -1)
        owners[is_known] = holders[first[places] + turns % num_holders[places]]
        return cls(owners, len(shards))

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return the number of test records of each client."""
        return np.bincount(self.owners[self.owners >= 0], minlength=self.num_clients)

    def by_client(self, scores: Scores) -> NDArray[np.float64]:
        """Return the accuracy of every client on its own test records; NaN for a client without test records."""
        owned = self.owners >= 0
        right, of_record = (part[owned] for part in scores.predictions)
        sums, counts = (np.bincount(self.owners[owned], part, self.num_clients) for part in (right, of_record))
        found = np.full(len(counts), np.nan)
        np.divide(sums, counts, out=found, where=counts > 0)
        return found

    def accuracies(self, scores: Scores) -> NDArray[np.float64]:
        """Return the clients' accuracies on their own test records, without clients that have no test records."""
        return known(self.by_client(scores))


def known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the numbers in ``values`` that are not NaN."""
    return values[~np.isnan(values)]


def _mean(shares: NDArray[np.float64]) -> float:
    """Return the mean of the values that are not NaN, in a tenth of the time of np.nanmean."""
    values = known(shares)
    return float(values.sum() / len(values))


def _share(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the elementwise ratio ``part`` / ``whole``; NaN where ``whole`` is 0."""
    shares = np.full(len(whole), np.nan)
    np.divide(part, whole, out=shares, where=whole > 0)
    return shares
