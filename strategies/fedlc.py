"""FedLC: calibration of logits by a client's own label counts (Zhang et al. 2022, eq. 8)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Batch, LocalPlan, LossTerm
from fl_sim.types import LocalTask
from strategies.algorithm import Averaging

_LEAST = -1e30
"""The logit of a class that is left out. If all logits were minus infinity, the gradient would not be finite."""


class FedLC(Averaging):
    """In training, each client lowers the logit of class c by tau n_c^(-1/4), and leaves absent classes out.

    n_c is the client's number of records of class c. ``tau``: the strength of the shift; the paper tries 0.01, 0.1, 0.5
    and 1; with 0, absent classes are still left out of the softmax. The loss of a client with one class is 0, so with
    partition ``label-1`` clients learn nothing. ``exclude_true``: if true, a record's own class is left out of the
    softmax's denominator, as the paper's equation probably does (this was not verified). The released code keeps this
    class in the denominator. Let f_c be the logit of class c, and y the record's own class. Without class y in the
    denominator, the loss is log(sum over all c except y of exp f_c) - f_y, which has no lower bound. The compiled C++
    trainer does not support this loss, so PyTorch computes it.
    """

    kind: Literal["fedlc"] = "fedlc"
    tau: float = Field(1.0, ge=0)
    exclude_true: bool = False
    title: ClassVar[str] = "FedLC"
    knobs: ClassVar[str] = "with algorithm.exclude_true the loss has no lower bound: leave exclude_true out"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        return [] if self.tau else [off("algorithm.tau=0", "no logit is shifted, and only absent classes are left out")]

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for label smoothing, which gives absent classes a share of the label."""
        if experiment.local.label_smoothing:
            raise ValueError(
                f"algorithm fedlc cannot run with local.label_smoothing={experiment.local.label_smoothing:g}: its "
                "softmax leaves absent classes out, and a smoothed label gives them a share, so the loss would be "
                "infinite; leave local.label_smoothing out"
            )

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local objective (``LocalPlan``): shifted logits, and very low logits for absent classes."""
        counts = torch.tensor(task.class_counts, dtype=torch.float32)
        shift = torch.where(counts > 0, -self.tau * counts.clamp(min=1) ** -0.25, -torch.inf)
        several = ((counts > 0).sum() > 1).float()
        term = LossTerm(without_true, {"shift": shift, "several": several}) if self.exclude_true else None
        return LocalPlan(logit_shift=shift, loss_term=term)


def without_true(batch: Batch) -> torch.Tensor:
    """Return for each record the loss term that removes the record's own class from the softmax denominator, (n,).

    The term is 0 for a client with one class.
    """
    logits = batch.logits + batch.data["shift"]
    of_class = batch.labels.unsqueeze(1) == torch.arange(logits.shape[1], device=logits.device)
    others = logits.masked_fill(of_class, -torch.inf).clamp(min=_LEAST)
    return batch.data["several"] * (others.logsumexp(1) - logits.logsumexp(1))
