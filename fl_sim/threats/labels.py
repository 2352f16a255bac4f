"""Label inference: the counts of labels in a batch, from the gradient of the last layer's bias.

For cross-entropy, the bias gradient of one record is p - e_y: p is the record's softmax, and e_y the unit vector of its
label y. So the sum over a batch is (sum of p) - (counts of labels). If the sum of p is known, the counts follow exactly
(``exact_counts``). For a single record, the label is the only class with a negative entry (iDLG, Zhao et al. 2020,
section 3.1). For a batch, the attacker does not know p, so it uses its own similar records (LLG, Wainakh et al. 2022,
section 4). From these records it computes the mean bias gradient of each class, with the same clipping as the client.
Then it chooses non-negative counts: the sum of these mean gradients, weighted by the counts, must be as near as
possible to the observed gradient (``estimated_counts``).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.params import head_weight
from fl_sim.threats.finished import FinishedRun
from fl_sim.threats.observed import Observed, server_of

_MOST_HELPERS = 100
"""The largest number of the attacker's own records of each class."""
_KNOWN_SIZE = 10.0
"""The weight of the equation "the counts add up to the batch size"; the equation of each bias entry has weight 1."""


@dataclass(frozen=True, eq=False)
class Counted:
    """The counts of one client's records in each class; all arrays have shape (classes,).

    ``true``: the true counts. ``estimated``: the attacker's estimate, whole numbers with the same sum. ``guessed``: a
    baseline with the same sum and the class proportions of all clients' records together.
    """

    client: int
    true: NDArray[np.int64]
    estimated: NDArray[np.int64]
    guessed: NDArray[np.int64]

    @property
    def error(self) -> float:
        """The mean absolute error of the estimate, in records per class."""
        return float(np.abs(self.estimated - self.true).mean())

    @property
    def error_of_guess(self) -> float:
        """The mean absolute error of the baseline ``guessed``, in records per class."""
        return float(np.abs(self.guessed - self.true).mean())

    @property
    def right(self) -> float:
        """The fraction of correctly estimated labels, in [0, 1]."""
        return float(np.minimum(self.estimated, self.true).sum() / self.true.sum())

    @property
    def right_by_guess(self) -> float:
        """The fraction of labels that the baseline ``guessed`` gets right, in [0, 1]."""
        return float(np.minimum(self.guessed, self.true).sum() / self.true.sum())


def head_bias(observed: Observed) -> str:
    """Return the name of the bias of the model's last linear layer. Raises UserError if its gradient is not sent."""
    bias = f"{head_weight(dict(observed.model.named_parameters())).removesuffix('weight')}bias"
    if bias not in observed.sent & observed.trained.keys():
        raise UserError(
            f"label inference needs the gradient of the last layer's bias ({bias}), which no client of this run sends: "
            "the bias does not exist, is frozen, or stays on the client; give a run whose clients send it"
        )
    return bias


def exact_counts(summed: NDArray[np.float64], softmax: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the exact counts of labels in a batch, (classes,).

    ``summed``: the sum of the bias gradients of the batch's records. ``softmax``: the sum of their softmax outputs.
    """
    return softmax - summed


def estimated_counts(summed: NDArray[np.float64], by_class: NDArray[np.float64], num_records: int) -> NDArray[np.int64]:
    """Return the estimated counts of labels, (classes,), whole numbers with the sum ``num_records``.

    ``summed``: the sum of the records' bias gradients, (classes,). ``by_class``: the result of ``bias_gradients``, one
    mean bias gradient per class, (classes, classes).
    """
    from scipy.optimize import nnls  # noqa: PLC0415 (the import takes half a second)

    equations = np.vstack([by_class.T, np.full(len(by_class), _KNOWN_SIZE)])
    found, _ = nnls(equations, np.append(summed, _KNOWN_SIZE * num_records))
    return whole(found, num_records)


def whole(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Return whole numbers with the sum ``total`` and nearly the proportions of ``shares`` (largest remainder method).

    >>> whole(np.array([1.0, 1.0, 2.0]), 5).tolist()
    [1, 1, 3]
    """
    exact = shares / shares.sum() * total if shares.sum() > 0 else np.full(len(shares), total / len(shares))
    counts: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def bias_gradients(observed: Observed, records: tuple[torch.Tensor, torch.Tensor]) -> NDArray[np.float64]:
    """Return the mean bias gradient of one record of each class, (classes, classes).

    The gradients have the same clipping as the client's gradients, and no noise. ``records``: inputs and labels of the
    attacker's own records. For a class without records, the mean softmax of all classes is used.
    """
    inputs, labels = records
    name = head_bias(observed)
    num_classes = len(observed.trained[name])
    found: list[NDArray[np.float64] | None] = []
    for label in range(num_classes):
        some = torch.nonzero(labels == label).flatten()[:_MOST_HELPERS]
        total = observed.summed(inputs[some], labels[some])[name].double().cpu().numpy() if len(some) else None
        found.append(None if total is None else total / len(some))
    units = np.eye(num_classes)
    softmax = np.mean([one + unit for one, unit in zip(found, units, strict=True) if one is not None], axis=0)
    return np.stack([softmax - unit if one is None else one for one, unit in zip(found, units, strict=True)])


def infer(
    finished: FinishedRun, clients: int, at: str, show: Callable[[str], object] = str
) -> tuple[list[Counted], list[Counted]]:
    """Return two lists of estimates for up to ``clients`` clients.

    The first list comes from the gradient of one batch, the second from the update of one round. ``at``: the attacked
    model, "initial" or "final". The first list is empty if clients send no gradient, the second if they send no update.
    """
    server, batches, updates = server_of(finished, at), list[Counted](), list[Counted]()
    holders = np.flatnonzero(finished.job.shards.sizes)[:clients].tolist()
    for number, client in enumerate(holders):
        show(f"client {number + 1} of {len(holders)}")
        observed = Observed.of(finished, client, server)
        by_class = bias_gradients(observed, finished.test)
        if observed.shows_gradients:
            size = observed.training.job.task.settings.batch_size
            batches.append(counted_in_batch(finished, observed, client, size, by_class))
        if one := counted_in_update(finished, observed, client, by_class):
            updates.append(one)
    return batches, updates


def counted_in_batch(
    finished: FinishedRun, observed: Observed, client: int, size: int, by_class: NDArray[np.float64]
) -> Counted:
    """Estimate the labels of the first ``size`` records of ``client`` from their gradient in one step of the run."""
    inputs, labels = (part[:size] for part in finished.held_by(client))
    seen = observed.noisy(observed.summed(inputs, labels), 0)[head_bias(observed)]
    estimated = estimated_counts(seen.double().cpu().numpy(), by_class, len(labels))
    return _counted(finished, client, labels, estimated)


def counted_in_update(
    finished: FinishedRun, observed: Observed, client: int, by_class: NDArray[np.float64]
) -> Counted | None:
    """Estimate the labels of all records of ``client`` from its update of a round.

    The attacker assumes that all local steps use the same gradient: the mean over all records. For the mean bias
    gradient of each class (``by_class``), it uses the average of the values at the received model and at the sent
    model. The result is None if the update is not a change of the model, or if the optimiser is not SGD.
    """
    task, name = observed.training.job.task, head_bias(observed)
    settings, update = task.settings, observed.update()
    if update is None or name not in update or settings.optimizer != "sgd" or not settings.learning_rate:
        return None
    steps = np.arange(1, settings.num_steps(observed.num_records) + 1)
    moved = settings.learning_rate * float(((1 - settings.momentum**steps) / (1 - settings.momentum)).sum())
    labels = finished.held_by(client)[1]
    seen = -update[name].double().cpu().numpy() / moved * len(labels)
    sent = {key: value + update[key] for key, value in task.params.items() if key in update}
    by_class = (by_class + bias_gradients(observed.at(sent), finished.test)) / 2
    return _counted(finished, client, labels, estimated_counts(seen, by_class, len(labels)))


def _counted(finished: FinishedRun, client: int, labels: torch.Tensor, estimated: NDArray[np.int64]) -> Counted:
    num_classes = len(estimated)
    true = np.bincount(labels.cpu().numpy(), minlength=num_classes)
    shares = np.bincount(finished.job.dataset.train.labels, minlength=num_classes).astype(np.float64)
    return Counted(client, true, estimated, whole(shares, len(labels)))
