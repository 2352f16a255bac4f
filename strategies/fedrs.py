"""FedRS: a restricted softmax, so that a client's training changes absent classes less (Li and Zhan 2021)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.local_plan import LocalPlan
from fl_sim.types import LocalTask
from strategies.algorithm import FEDAVG, Averaging


class FedRS(Averaging):
    """In training, each client multiplies the logits of classes that it lacks by ``alpha``; with 1 this is FedAvg.

    The paper scales the rows of the last layer's weights and has no bias; here the bias is scaled, too. The authors'
    released code (lxcnju/FedRepo, issue 7) scales class c by alpha + (1 - alpha) n_c / max n, where n_c is the client's
    number of records of class c. Both rules agree if the classes that a client has are equally frequent. Otherwise the
    released code also scales down the client's rarer classes.
    """

    kind: Literal["fedrs"] = "fedrs"
    alpha: float = Field(0.5, ge=0, le=1)
    title: ClassVar[str] = "FedRS"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        return [] if self.alpha < 1 else [off("algorithm.alpha=1", FEDAVG)]

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the client's local objective (``LocalPlan``): logits of absent classes are multiplied by ``alpha``."""
        counts = torch.tensor(task.class_counts)
        return LocalPlan(logit_scale=torch.where(counts > 0, 1.0, self.alpha))
