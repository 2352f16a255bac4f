"""FedProx: FedAvg with a proximal term that keeps local models near the global model (Li et al. 2020, algorithm 2)."""

from typing import Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import LocalPlan
from fl_sim.types import LocalTask
from strategies.algorithm import FEDAVG, Averaging


class FedProx(Averaging):
    """Each client minimises F_i(w) + mu/2 ||w - x||^2, which adds mu (w - x) to its gradient.

    F_i is the loss of client i, w its model, and x the global model that it received. ``mu``: the strength of the
    proximal term; the paper tries 0.001, 0.01, 0.1 and 1. With 0 the method is FedAvg.
    """

    kind: Literal["fedprox"] = "fedprox"
    mu: float = Field(0.01, ge=0)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        return [] if self.mu else [off("algorithm.mu=0", FEDAVG)]

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local objective (``LocalPlan``): the proximal term's gradient is added to every gradient."""
        del task
        return LocalPlan(proximal_mu=self.mu)
