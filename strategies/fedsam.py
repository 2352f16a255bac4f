"""FedSAM and FedASAM: sharpness-aware clients (Qu et al. 2022, algorithm 1; Caldarola et al. 2022, algorithm 1)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Ascent, LocalPlan
from fl_sim.types import LocalTask
from strategies.algorithm import FEDAVG, Averaging


class FedSAM(Averaging):
    """Clients step with the gradient at w + rho g / ||g||; if ``adaptive`` (FedASAM), at w + rho w^2 g / || |w| g ||.

    w is the client's model and g its gradient. ``rho``: the size of the step to the point where the gradient is
    computed; 0 is FedAvg. Caldarola et al. use 0.1 (FedSAM) and 0.7 (FedASAM) on CIFAR-10. The norm is over the whole
    model, and weight decay is computed at w. The released FedASAM code has |w| + eta in place of |w|, with eta 0.2 on
    CIFAR-10, and scales only weights: a bias moves by rho g / norm. Here eta is 0, and biases are scaled like weights.
    So the same ``rho`` moves w by another distance here than in the released code, and gives other models.
    """

    kind: Literal["fedsam"] = "fedsam"
    rho: float = Field(0.05, ge=0)
    adaptive: bool = False
    title: ClassVar[str] = "FedSAM"
    knobs: ClassVar[str] = (
        "gradients are computed at a point of higher loss, a step of algorithm.rho away: set a smaller rho"
    )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        return [] if self.rho else [off("algorithm.rho=0", FEDAVG)]

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local objective (``LocalPlan``): gradients are computed at a point of higher loss."""
        del task
        return LocalPlan(ascent=Ascent(self.rho, adaptive=self.adaptive))
