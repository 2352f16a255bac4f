"""FedSAM and FedASAM: sharpness-aware clients (Qu et al. 2022, algorithm 1; Caldarola et al. 2022, algorithm 1)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.local_plan import Ascent, LocalPlan
from fl_sim.types import LocalTask
from strategies.algorithm import Averaging


class FedSAM(Averaging):
    """Clients step with the gradient at w + rho g / ||g||; where ``adaptive`` (FedASAM) at w + rho w^2 g / || |w| g ||.

    ``rho``: 0 is FedAvg; Caldarola et al. take 0.1 (FedSAM) and 0.7 (FedASAM) on CIFAR-10. The norm is over the whole
    model, and weight decay joins at w.
    """

    kind: Literal["fedsam"] = "fedsam"
    rho: float = Field(0.05, ge=0)
    adaptive: bool = False
    title: ClassVar[str] = "FedSAM"
    knobs: ClassVar[str] = "gradients are taken algorithm.rho uphill: set a smaller one"

    def plan(self, task: LocalTask) -> LocalPlan:
        """Take gradients uphill."""
        del task
        return LocalPlan(ascent=Ascent(self.rho, adaptive=self.adaptive))
