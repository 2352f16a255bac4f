"""FedVLS: distillation on a client's absent classes, and a penalty on logits (Guo et al. 2025, eq. 3 to 6)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Distillation, LocalPlan, Suppression
from fl_sim.types import LocalTask
from strategies.algorithm import Averaging


class FedVLS(Averaging):
    """A client's loss is the sum of three terms: a calibrated cross-entropy, a distillation, a suppression of logits.

    f_c is the logit of class c, C the number of classes, and pi_c the share of class c in the client's records. The
    first term is the cross-entropy of f + log pi, so the softmax leaves absent classes out. The second term is
    ``distillation_weight`` (the paper's lambda) times KL(received model || trained model) over the absent classes. The
    third term is ``logit_weight`` times the sum over c of pi_c log(mean of e_c over the batch). For a record of class
    c, e_c is 1. For any other record, e_c is exp(f_c) / (C pi_c).

    The third term and its weight follow the released code. In the paper, e_c is 0 for a record of class c and exp(f_c)
    for any other record, and the weight is 1. That term has no lower bound, and training diverges. The paper's lambda
    is 0.5 on CIFAR-100 and 0.1 otherwise. For an absent class the released code has log 1e-9 in place of log pi. The
    released code evaluates models on training and test records together, so its MNIST figures are not test accuracies.
    """

    kind: Literal["fedvls"] = "fedvls"
    distillation_weight: float = Field(0.1, ge=0)
    logit_weight: float = Field(0.005, ge=0)
    title: ClassVar[str] = "FedVLS"
    knobs: ClassVar[str] = (
        "two terms of the loss have the weights algorithm.logit_weight and algorithm.distillation_weight: set smaller "
        "ones"
    )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        parts = {
            "distillation_weight": (self.distillation_weight, "nothing is distilled"),
            "logit_weight": (self.logit_weight, "no logit is suppressed"),
        }
        return [off(f"algorithm.{name}=0", instead) for name, (weight, instead) in parts.items() if not weight]

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the client's local objective (``LocalPlan``): the three loss terms, from the client's label counts."""
        counts = torch.tensor(task.class_counts, dtype=torch.float32)
        shares = counts / counts.sum().clamp(min=1)
        return LocalPlan(
            logit_shift=shares.log(),
            distillation=Distillation(self.distillation_weight, classes=counts == 0),
            suppression=Suppression(shares, self.logit_weight),
        )
