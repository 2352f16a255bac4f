"""FedLC: logits calibrated by a client's own label counts (Zhang et al. 2022, eq. 8)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Batch, LocalPlan, LossTerm
from fl_sim.types import LocalTask
from strategies.algorithm import Averaging

_LEAST = -1e30
"""In place of minus infinity, whose logarithm of a sum has no gradient where nothing else is added up."""


class FedLC(Averaging):
    """Each client lowers the logit of class c by tau n_c^(-1/4) in training; classes it lacks leave the softmax.

    ``tau``: the paper tries 0.01, 0.1, 0.5 and 1; 0 changes nothing but for the absent classes. Where a client holds
    one class its loss is 0, so that 1-Label clients learn nothing. ``exclude_true``: leave a record's own class out of
    the sum below the fraction, as the paper's equation does (recalled, not read again); all released code that was
    read keeps it. Without it the loss, log(sum over the other classes of exp f_c) - f_y, has no lower bound. PyTorch
    trains it: the compiled trainer does not know it.
    """

    kind: Literal["fedlc"] = "fedlc"
    tau: float = Field(1.0, ge=0)
    exclude_true: bool = False
    title: ClassVar[str] = "FedLC"
    knobs: ClassVar[str] = "with algorithm.exclude_true its loss has no lower bound: leave that out"

    def remarks(self, experiment: Choices) -> list[str]:
        """Name settings without effect."""
        del experiment
        return [] if self.tau else [off("algorithm.tau=0", "no logit is shifted, absent classes alone are left out")]

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
        shift = torch.where(counts > 0, -self.tau * counts.clamp(min=1) ** -0.25, -torch.inf)
        several = ((counts > 0).sum() > 1).float()
        term = LossTerm(without_true, {"shift": shift, "several": several}) if self.exclude_true else None
        return LocalPlan(logit_shift=shift, loss_term=term)


def without_true(batch: Batch) -> torch.Tensor:
    """Return the term that removes a record's own class from the sum of its cross-entropy, (n,); 0 for one class."""
    logits = batch.logits + batch.data["shift"]
    of_class = batch.labels.unsqueeze(1) == torch.arange(logits.shape[1], device=logits.device)
    others = logits.masked_fill(of_class, -torch.inf).clamp(min=_LEAST)
    return batch.data["several"] * (others.logsumexp(1) - logits.logsumexp(1))
