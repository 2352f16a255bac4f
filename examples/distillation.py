"""A loss term of your own: clients are pulled to what the received model answers (after Yao et al. 2021, FedGKD).

    fl-sim run algorithm=distillation:Distilled algorithm.gamma=0.2

What a term may look at is ``fl_sim.local_plan.Batch``.
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
        """Add the term; what a client brings along for it would be LossTerm's second argument."""
        del task
        return LocalPlan(loss_term=LossTerm(self.distance))

    def distance(self, batch: Batch) -> torch.Tensor:
        """Return gamma/2 times the divergence of each record, shape (n,)."""
        received = functional.log_softmax(batch.logits_of(batch.anchor, batch.inputs), dim=1)
        own = functional.log_softmax(batch.logits, dim=1)
        return self.gamma / 2 * (received.exp() * (received - own)).sum(dim=1)
