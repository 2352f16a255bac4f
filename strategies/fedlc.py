"""FedLC: logits calibrated by a client's own label counts (Zhang et al. 2022, eq. 8)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices
from fl_sim.late_torch import torch
from fl_sim.local_plan import LocalPlan
from fl_sim.types import LocalTask
from strategies.algorithm import Averaging


class FedLC(Averaging):
    """Each client lowers the logit of class c by tau n_c^(-1/4) in training; classes it lacks leave the softmax.

    ``tau``: the paper tries 0.01, 0.1, 0.5 and 1; 0 changes nothing but for the absent classes. The paper leaves a
    record's own class out of the sum below the fraction; as in all released code it stays in here. Where a client
    holds one class its loss is 0, so that 1-Label clients learn nothing.
    """

    kind: Literal["fedlc"] = "fedlc"
    tau: float = Field(1.0, ge=0)
    title: ClassVar[str] = "FedLC"

    def check(self, experiment: Choices) -> None:
        """Raise ValueError where labels are spread over the classes that a client lacks."""
        if experiment.local.label_smoothing:
            raise ValueError(
                f"algorithm fedlc cannot run with local.label_smoothing={experiment.local.label_smoothing:g}: it takes "
                "the classes that a client lacks out of the softmax, and a label that gives them a part has an "
                "infinite loss; leave local.label_smoothing out"
            )

    def plan(self, task: LocalTask) -> LocalPlan:
        """Shift the logits; minus infinity takes a class out."""
        counts = torch.tensor(task.class_counts, dtype=torch.float32)
        return LocalPlan(logit_shift=torch.where(counts > 0, -self.tau * counts.clamp(min=1) ** -0.25, -torch.inf))
