"""FedNTD: not-true distillation, so that clients do not forget the classes they lack (Lee et al. 2022, eq. 4)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Distillation, LocalPlan
from fl_sim.types import LocalTask
from strategies.algorithm import FEDAVG, Averaging


class FedNTD(Averaging):
    """Each client adds ``beta`` T^2 KL(received model || own model), both softmaxes without a record's own class.

    ``beta`` 0 is FedAvg. ``temperature`` is the paper's tau, T here. The released code has T^2, too.
    """

    kind: Literal["fedntd"] = "fedntd"
    beta: float = Field(1.0, ge=0)
    temperature: float = Field(1.0, gt=0)
    title: ClassVar[str] = "FedNTD"
    knobs: ClassVar[str] = "distillation weighs algorithm.beta * algorithm.temperature^2: set a smaller one"

    def remarks(self, experiment: Choices) -> list[str]:
        """Name settings without effect."""
        del experiment
        return [] if self.beta else [off("algorithm.beta=0", FEDAVG)]

    def plan(self, task: LocalTask) -> LocalPlan:
        """Add the distillation."""
        del task
        return LocalPlan(distillation=Distillation(self.beta, self.temperature, exclude_true=True))
