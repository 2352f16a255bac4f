"""FedSAM and FedASAM: sharpness-aware clients (Qu et al. 2022, algorithm 1; Caldarola et al. 2022, algorithm 1)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Ascent, LocalPlan
from fl_sim.types import LocalTask
from strategies.algorithm import FEDAVG, Averaging


class FedSAM(Averaging):
    """Clients step with the gradient at w + rho g / ||g||; where ``adaptive`` (FedASAM) at w + rho w^2 g / || |w| g ||.

    ``rho``: 0 is FedAvg; Caldarola et al. take 0.1 (FedSAM) and 0.7 (FedASAM) on CIFAR-10. The norm is over the whole
    model, and weight decay joins at w. The released FedASAM has |w| + eta in place of |w|, eta 0.2 on CIFAR-10, and
    scales weights alone: a bias moves by rho g over the norm. Here eta is 0 and biases are scaled as weights are, so
    its 0.7 is another radius here, and models end elsewhere.
    """

    kind: Literal["fedsam"] = "fedsam"
    rho: float = Field(0.05, ge=0)
    adaptive: bool = False
    title: ClassVar[str] = "FedSAM"
    knobs: ClassVar[str] = "gradients are taken algorithm.rho uphill: set a smaller one"

    def remarks(self, experiment: Choices) -> list[str]:
        """Name settings without effect."""
        del experiment
        return [] if self.rho else [off("algorithm.rho=0", FEDAVG)]

    def plan(self, task: LocalTask) -> LocalPlan:
        """Take gradients uphill."""
        del task
        return LocalPlan(ascent=Ascent(self.rho, adaptive=self.adaptive))
