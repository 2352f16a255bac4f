"""A loss term of your own: distillation from the received model into the trained model (Yao et al. 2021, FedGKD).

    fl-sim run algorithm=distillation:Distilled algorithm.gamma=0.2

The argument of a loss term is a ``fl_sim.local_plan.Batch``: records, logits and models.
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch.nn import functional

from fl_sim.local_plan import Batch, LocalPlan, LossTerm
from fl_sim.types import LocalTask
from strategies.algorithm import Averaging


class Distilled(Averaging):
    """FedAvg whose clients add gamma/2 KL(received model || own model) to the loss of every record."""

    title: ClassVar[str] = "FedGKD"
    gamma: float = Field(0.2, ge=0)

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the plan that adds the loss term. LossTerm has a second, optional argument: tensors of the client."""
        del task
        return LocalPlan(loss_term=LossTerm(self.distance))

    def distance(self, batch: Batch) -> torch.Tensor:
        """Return gamma/2 times the KL divergence of each record, shape (n,)."""
        received = functional.log_softmax(batch.logits_of(batch.anchor, batch.inputs), dim=1)
        own = functional.log_softmax(batch.logits, dim=1)
        return self.gamma / 2 * (received.exp() * (received - own)).sum(dim=1)
