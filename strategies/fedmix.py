"""FedMix and NaiveMix: mixup with averaged records of other clients (Yoon et al. 2021, algorithms 1 and 2).

Clients send averages of their records without noise, so these methods have no privacy guarantee.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_sim.importing import torch
from fl_sim.local_plan import LocalPlan, Mix
from fl_sim.types import LocalTask
from strategies.algorithm import Averaging


class _Mixing(Averaging):
    """Base class of FedMix and NaiveMix.

    ``mixing_weight``: weight of the averages in the mixture, the paper's lambda. ``records_per_average``: number of
    records in each average, the paper's M_k.
    """

    computes_with_records: ClassVar[bool] = True

    mixing_weight: float = Field(0.1, gt=0, lt=1)
    records_per_average: int = Field(5, ge=2, le=10**9)

    def mean_only(self) -> str:
        return (
            "clients train on averages that others share before the first round, and no aggregator checks these, so "
            "that one hostile client could harm all others"
        )

    def share(
        self, inputs: torch.Tensor, labels: torch.Tensor, num_classes: int, generator: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        """Return the averages that a client sends before round 1, each over ``records_per_average`` records."""
        return averages(inputs, labels, num_classes, self.records_per_average, generator)


class FedMix(_Mixing):
    """Local loss (1-lam) l(f((1-lam)x), y) + lam l(f((1-lam)x), y_bar) + lam <dl/dx, x_bar>, dl/dx at (1-lam)x and y.

    l is the cross-entropy, and f the model. (x, y) is a record of the client, (x_bar, y_bar) an average of records, and
    lam is ``mixing_weight``. The loss is a first-order approximation of NaiveMix's loss, expanded at (1-lam)x. Its
    error is of order lam^2. The last term has the factor lam, as in the paper's equation. The paper's algorithm has the
    factor lam (1-lam). Both factors are equally good, because they differ by lam^2. (Equation and algorithm are cited
    from memory, because the paper's text was not available.) Flower's baseline has lam (1-lam), and by mistake also
    divides by the batch size. Every client draws from the averages of all clients, including its own. It is not known
    if the paper excludes a client's own averages.

    The paper tries lam in {0.05, 0.1, 0.2}. The last term has no lower bound: if each client holds one class, long
    training can diverge.
    """

    kind: Literal["fedmix"] = "fedmix"
    knobs: ClassVar[str] = (
        "the last term of FedMix's loss has no lower bound and grows with the scale of the inputs: set "
        "local.momentum=0, as in its paper, or a smaller algorithm.mixing_weight"
    )

    def advice(self, momentum: float) -> str:
        """Return a warning about local momentum, which the paper does not use, or an empty string if it is 0."""
        if not momentum:
            return ""
        return f"FedMix's paper has no local momentum: at local.momentum={momentum:g} its loss, unbounded, may diverge"

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local objective (``LocalPlan``): the loss on mixed batches, expanded to first order."""
        return LocalPlan(mix=_mix(task, self.mixing_weight, linearise=True))


class NaiveMix(_Mixing):
    """Local loss (1-lam) l(f(x_m), y) + lam l(f(x_m), y_bar) at x_m = (1-lam) x + lam x_bar.

    l is the cross-entropy, and f the model. (x, y) is a record of the client, (x_bar, y_bar) a shared average of
    records, and lam is ``mixing_weight``.
    """

    kind: Literal["naivemix"] = "naivemix"

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local objective (``LocalPlan``): the loss on batches that are mixed with shared averages."""
        return LocalPlan(mix=_mix(task, self.mixing_weight, linearise=False))


def averages(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    num_classes: int,
    records_per_average: int,
    generator: np.random.Generator,
) -> dict[str, torch.Tensor]:
    """Return means of disjoint random groups of ``records_per_average`` records.

    In the result, "inputs" has shape (groups, *input shape), and "labels" has shape (groups, classes), with proportions
    that add up to 1. Records that do not fill a group are left out, because a mean of fewer records would reveal more.
    A client with fewer than ``records_per_average`` records shares no averages.
    """
    groups = len(labels) // records_per_average
    chosen = torch.from_numpy(generator.permutation(len(labels))[: groups * records_per_average])
    proportions = torch.nn.functional.one_hot(labels[chosen], num_classes).to(torch.float32)
    return {
        "inputs": inputs[chosen].reshape(groups, records_per_average, *inputs.shape[1:]).mean(1),
        "labels": proportions.reshape(groups, records_per_average, num_classes).mean(1),
    }


def _mix(task: LocalTask, weight: float, *, linearise: bool) -> Mix | None:
    if len(task.pool["labels"]) == 0:
        return None
    return Mix(task.pool["inputs"], task.pool["labels"], weight, linearise)
