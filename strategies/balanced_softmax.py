"""Balanced softmax: in training, a client's class frequencies shift its logits (Chen, Chao 2022, FedRoD, eq. 6)."""

from typing import ClassVar, Literal

from fl_sim.importing import torch
from fl_sim.local_plan import LocalPlan
from fl_sim.types import LocalTask
from strategies.algorithm import Averaging

_ABSENT = 1e-9
"""A number that is added to the number of records of each class, so that the logarithm is finite for 0 records."""


class BalancedSoftmax(Averaging):
    """Each client adds log n_c to the logit of class c in training, but not in evaluation (Ren et al. 2020).

    n_c is the client's number of records of class c. The model is FedRoD's generic model, without a personal head.
    """

    kind: Literal["balanced-softmax"] = "balanced-softmax"
    title: ClassVar[str] = "Balanced softmax"

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local plan that adds log n_c to the logit of each class c."""
        return LocalPlan(logit_shift=(torch.tensor(task.class_counts, dtype=torch.float32) + _ABSENT).log())
