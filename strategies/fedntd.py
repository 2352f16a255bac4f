"""FedNTD: not-true distillation, so that clients do not forget classes that they lack (Lee et al. 2022, eq. 4)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Distillation, LocalPlan
from fl_sim.types import LocalTask
from strategies.algorithm import FEDAVG, Averaging


class FedNTD(Averaging):
    """Each client adds ``beta`` T^2 KL(received model || own model) to its loss.

    KL is the Kullback-Leibler divergence; the softmax of each model leaves the record's own class out. ``beta`` 0 is
    FedAvg. ``temperature``: the temperature T of both softmax functions, the paper's tau. The factor T^2 follows the
    released code.
    """

    kind: Literal["fedntd"] = "fedntd"
    beta: float = Field(1.0, ge=0)
    temperature: float = Field(1.0, gt=0)
    title: ClassVar[str] = "FedNTD"
    knobs: ClassVar[str] = (
        "distillation has the weight algorithm.beta * algorithm.temperature^2: set a smaller beta or temperature"
    )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        return [] if self.beta else [off("algorithm.beta=0", FEDAVG)]

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the client's local objective (``LocalPlan``): the loss plus the distillation term."""
        del task
        return LocalPlan(distillation=Distillation(self.beta, self.temperature, exclude_true=True))
