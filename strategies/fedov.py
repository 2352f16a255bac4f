"""FedOV: clients also learn a class "unknown", and the server lets their models vote (Diao et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Batch, LocalPlan, LossTerm
from fl_sim.params import head_weight
from fl_sim.types import Dataset, Params, ServerState, Trained
from strategies.algorithm import check_images, check_sgd
from strategies.ensemble import LogitsOf
from strategies.feddf import FedDF
from strategies.outliers import NEVER, loss_of_unknown, outliers_of

if TYPE_CHECKING:
    from fl_sim.training.courses import Course
    from fl_sim.training.trainer import LocalJob


class FedOV(FedDF):
    """Models have a further class "unknown", for inputs unlike a client's records; the server lets the models vote.

    Each local step lowers the sum of four mean cross-entropies over C + 1 classes: C known classes and "unknown" (Diao
    et al. 2023, section 4). The first is computed on the batch with its true labels. The other three have the label
    "unknown". The second is computed on the batch, but the softmax leaves each record's true class out. The third is
    computed on outliers: images of the batch that are cut, pasted, turned, blurred or erased. The fourth is computed on
    these outliers after ``adversarial_steps`` steps along the sign of the gradient, towards a known class. The vote for
    a known class is the sum of its softmax probabilities over all models.

    The accuracy of the vote is in a separate table: it is an upper bound that needs the models of all clients. The
    method's main accuracy is the accuracy of one model, which never predicts "unknown". Without ``proxy`` this is the
    mean model; with ``proxy``, the mean model after ``steps`` steps of FedDF towards the vote. The paper has one round
    (``rounds=1``), and evaluates the vote.

    ``adversarial_rate``: the size of an adversarial step, in units of normalised inputs; the released code has .002 of
    the pixel range. ``proxy``, ``steps``, ``distillation_rate``, ``distillation_batch``: as in ``feddf``. Deviations
    from the paper: clients use SGD, not Adam; there is no loss on mixed features with the label "unknown" (weight .01
    in the released code).
    """

    kind: Literal["fedov"] = "fedov"  # type: ignore[assignment]  # another kind than its base class
    title: ClassVar[str] = "FedOV"
    needs_head: ClassVar[bool] = True
    further_outputs: ClassVar[int] = 1
    computes_with_records: ClassVar[bool] = True
    adversarial_steps: int = Field(5, ge=0, le=1000)
    adversarial_rate: float = Field(0.008, gt=0)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings that FedDF refuses, an optimizer other than SGD, or ``evaluate.clients``."""
        super().check(experiment)
        if experiment.evaluate.measures_clients:
            raise ValueError(
                "algorithm fedov cannot run with evaluate.clients: clients' models may predict the class of unknown "
                "inputs, which no test record has; leave evaluate.clients out"
            )
        check_sgd(self, experiment, "its local steps are steps of SGD, and each step uses new outliers")

    def check_data(self, dataset: Dataset, features: str) -> None:
        """Raise UserError if the records are not images."""
        del features
        check_images(
            self, dataset, "makes outliers of images", "take another algorithm, such as fens, or leave features out"
        )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a warning if there are no adversarial steps."""
        del experiment
        why = "no adversarial steps change the outliers"
        return [] if self.adversarial_steps else [off("algorithm.adversarial_steps=0", why)]

    def course(self, job: LocalJob) -> Course:
        """Return a generator that trains a client one step at a time; each step also uses outliers of its batch."""
        from fl_sim.training.courses import at, steps_of, stream  # noqa: PLC0415 (it loads torch)

        draw, term = stream(job, 1), self.unknown
        made, losses = Trained(job.task.params, {}, 0, None, statistics=job.task.statistics), list[float]()
        buffers = job.plan.momentum_buffers
        for step in steps_of(job):
            outliers = outliers_of(step.records.tensors()[0], draw)
            plan = LocalPlan(
                loss_term=LossTerm(term, {"outliers": outliers}, first_order=True), momentum_buffers=buffers
            )
            (made,) = yield [at(step, made.params, plan, statistics=made.statistics)]
            buffers = made.momentum_buffers or None
            losses.append(made.loss or 0.0)
        return replace(made, num_steps=len(losses), loss=sum(losses) / len(losses) if losses else None)

    def unknown(self, batch: Batch) -> torch.Tensor:
        """Return the part of the loss with the label "unknown", shape (): the sum of three mean cross-entropies."""
        return loss_of_unknown(batch, self.adversarial_steps, self.adversarial_rate)

    def joint(
        self, models: Sequence[Params], records: torch.Tensor, logits_of: LogitsOf, weights: Sequence[float] = ()
    ) -> torch.Tensor:
        """Return the models' joint prediction: the logarithm of each known class's share of the votes, (n, C)."""
        del weights
        votes = torch.stack([logits_of(model, records).double().softmax(1)[:, :-1] for model in models]).sum(0)
        return votes.clamp(min=1e-300).log().log_softmax(1).to(records.dtype)

    def teacher(self, models: Sequence[Params], records: torch.Tensor, logits_of: LogitsOf) -> torch.Tensor:
        """Return the target probabilities for the student, (n, C + 1): the vote, and 0 for "unknown"."""
        return torch.nn.functional.pad(self.joint(models, records, logits_of).softmax(1), (0, 1))

    def reported(self, server: ServerState) -> Params:
        """Return the evaluated model. It never predicts "unknown", because this class gets a very low intercept."""
        name = f"{head_weight(server.params).rpartition('.')[0]}.bias".removeprefix(".")
        if name not in server.params:
            raise UserError("algorithm fedov needs a model whose last layer has intercepts: take another model")
        bias = server.params[name].clone()
        bias[-1] = NEVER
        return {**server.params, name: bias}

    def reports(self) -> str:
        """Return a phrase that describes the evaluated model."""
        return "the mean model, which never predicts the class of unknown inputs"

    def note(self) -> str:
        """Return the note below result tables."""
        return f"FedOV: models vote on known classes; {self._told()}"
