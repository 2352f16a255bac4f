"""MoFedSAM: sharpness-aware local training with FedCM's client-level momentum (Qu et al. 2022, algorithm 2)."""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Ascent, LocalPlan
from fl_sim.types import LocalTask
from strategies.fedcm import ClientMomentum


class MoFedSAM(ClientMomentum):
    """FedCM with the gradient computed at w + rho g / ||g||; ``rho`` 0 is FedCM.

    w is the client's model, and g the gradient of the loss at w.
    """

    kind: Literal["mofedsam"] = "mofedsam"
    rho: float = Field(0.1, ge=0)
    title: ClassVar[str] = "MoFedSAM"
    knobs: ClassVar[str] = ClientMomentum.knobs + (
        "; gradients are computed at a point of higher loss, a step of algorithm.rho away: set a smaller rho"
    )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        return [*super().remarks(experiment), *([] if self.rho else [off("algorithm.rho=0", "this is fedcm")])]

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return FedCM's local objective (``LocalPlan``), with gradients at a point of higher loss, ``rho`` away."""
        return replace(super().plan(task), ascent=Ascent(self.rho))
