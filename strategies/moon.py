"""MOON: local training with a model-contrastive loss term (Li et al. 2021, algorithm 1)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Contrast, LocalPlan
from fl_sim.types import ClientUpdate, LocalTask, Trained
from strategies.algorithm import FEDAVG, Averaging


class MOON(Averaging):
    """Clients pull features towards the received model's features, and away from their own last model's features.

    Adds mu times -log(exp(cos(z, z_x) / tau) / (exp(cos(z, z_x) / tau) + exp(cos(z, z_prev) / tau))) to the loss. The
    features z, z_x and z_prev are those of the trained model, the received model, and the client's model after its last
    participation. In a client's first round the term has no gradient. ``mu``: the paper uses 5 on CIFAR-10 and 1 on
    CIFAR-100; with 0 the method is FedAvg. The paper puts a projection of two layers below the head; here, as in other
    code, z is the input of the model's own last layer. ``tau``: the temperature of the contrastive term.
    """

    kind: Literal["moon"] = "moon"
    mu: float = Field(5.0, ge=0)
    tau: float = Field(0.5, gt=0)
    knobs: ClassVar[str] = "the contrast has the weight algorithm.mu / algorithm.tau: set a smaller mu or a larger tau"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        if not self.mu:
            return [off("algorithm.mu=0", FEDAVG)]
        first = "rounds=1, and a client's first round has no earlier model to move away from"
        return [off(f"algorithm.mu={self.mu:g}", first)] if experiment.rounds == 1 else []

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local objective (``LocalPlan``): loss plus contrastive term, away from the client's last model."""
        return LocalPlan(contrast=Contrast(self.mu, self.tau, task.state.get("model") or task.params))

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update y_i - x; x is the received model. The trained model y_i is stored as client state."""
        update = super().finish(task, trained)
        return ClientUpdate(update.payloads, update.num_examples, update.loss, state={"model": trained.params})
