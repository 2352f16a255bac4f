"""Balanced softmax: every client's logits shifted by its own class frequencies (Chen and Chao 2022, FedRoD, eq. 6)."""

from typing import ClassVar, Literal

from fl_sim.importing import torch
from fl_sim.local_plan import LocalPlan
from fl_sim.types import LocalTask
from strategies.algorithm import Averaging

_ABSENT = 1e-9
"""How many records a class counts more than it has, so that an absent class has a logarithm."""


class BalancedSoftmax(Averaging):
    """Each client adds log n_c to the logit of class c in training; the model is evaluated without (Ren et al. 2020).

    FedRoD's other half, a personal head, is not here: this is its generic model.
    """

    kind: Literal["balanced-softmax"] = "balanced-softmax"
    title: ClassVar[str] = "Balanced softmax"

    def plan(self, task: LocalTask) -> LocalPlan:
        """Shift the logits."""
        return LocalPlan(logit_shift=(torch.tensor(task.class_counts, dtype=torch.float32) + _ABSENT).log())
