"""MOON: model-contrastive learning (Li et al. 2021, algorithm 1)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Contrast, LocalPlan
from fl_sim.types import ClientUpdate, LocalTask, Trained
from strategies.algorithm import FEDAVG, Averaging


class MOON(Averaging):
    """Clients draw features to those of the received model and away from those of their own last model.

    Adds mu times -log(exp(cos(z, z_x) / tau) / (exp(cos(z, z_x) / tau) + exp(cos(z, z_prev) / tau))), where z_prev is
    of the client's model after its last participation; in its first round the term has no gradient. ``mu``: the paper
    takes 5 on CIFAR-10 and 1 on CIFAR-100; 0 is FedAvg. The paper puts a projection of two layers below the head; here,
    as in other code, z is what enters the model's own last layer. ``tau``: the temperature of the contrast.
    """

    kind: Literal["moon"] = "moon"
    mu: float = Field(5.0, ge=0)
    tau: float = Field(0.5, gt=0)
    knobs: ClassVar[str] = "the contrast weighs algorithm.mu / algorithm.tau: set a smaller mu or a larger tau"

    def remarks(self, experiment: Choices) -> list[str]:
        """Name settings without effect."""
        if not self.mu:
            return [off("algorithm.mu=0", FEDAVG)]
        first = "rounds=1, and a client's first round has no earlier model to move away from"
        return [off(f"algorithm.mu={self.mu:g}", first)] if experiment.rounds == 1 else []

    def plan(self, task: LocalTask) -> LocalPlan:
        """Add the contrast to the client's own last model."""
        return LocalPlan(contrast=Contrast(self.mu, self.tau, task.state.get("model") or task.params))

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Send y_i - x and keep y_i."""
        update = super().finish(task, trained)
        return ClientUpdate(update.payloads, update.num_examples, update.loss, state={"model": trained.params})
