"""Per-FedAvg: a global model from which one gradient step leads to a good model of each client (Fallah et al. 2020)."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Batch, FurtherModel, LocalPlan, LossTerm
from fl_sim.params import add
from fl_sim.types import LocalTask, Params, Trained
from strategies.algorithm import FEDAVG, Averaging, Weighting, check_plain_sgd

if TYPE_CHECKING:
    from fl_sim.training.courses import Course
    from fl_sim.training.trainer import LocalJob


class PerFedAvg(Averaging):
    """FedAvg on the loss after one step, F_i(w - alpha grad F_i(w)) (Fallah et al. 2020, algorithm 1).

    The method is MAML, model-agnostic meta-learning. F_i is the loss of client i, f(w; B) the loss of the model w on a
    batch B, and eta the learning rate. A local step draws independent batches B, B' and B'': w' = w - alpha grad f(w;
    B), then w <- w - eta g. ``variant``: with "first-order" (FO), g = grad f(w'; B'); with "exact", g = (I - alpha
    Hessian f(w; B'')) grad f(w'; B'). ``personal_learning_rate``: alpha, 0.01 to 0.03 in the paper.
    ``local.learning_rate``: eta, the paper's beta, 0.001 to 0.01. The batches B' are those of FedAvg, so
    ``local.epochs`` is the number of passes over them. B and B'' come from further shuffles of the client's records. A
    local step computes two gradients. The variant "exact" also computes a product with the Hessian.

    Clients keep no model. A client uses the received model after one step with rate alpha on a batch of its training
    records. The measurement ``trained`` evaluates this model. Common released code uses two successive batches of one
    shuffle as B and B'. Before the released code measures a client's model, the client makes two steps, one with rate
    alpha and one with rate eta.
    """

    kind: Literal["per-fedavg"] = "per-fedavg"
    title: ClassVar[str] = "Per-FedAvg"
    weighting: ClassVar[Weighting] = "uniform"
    starts_with: ClassVar[dict[str, dict[str, float]]] = {"local": {"momentum": 0.0}}
    personal_learning_rate: float = Field(0.01, ge=0)
    variant: Literal["first-order", "exact"] = "first-order"

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for local momentum, for another optimizer than SGD, or for "exact" with label smoothing."""
        check_plain_sgd(self, experiment)
        if self.variant == "exact" and experiment.local.label_smoothing:
            raise ValueError(
                f"algorithm.variant=exact uses the Hessian of the loss without label smoothing, and "
                f"local.label_smoothing={experiment.local.label_smoothing:g} is set: leave it out, or take "
                "algorithm.variant=first-order"
            )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a remark if ``personal_learning_rate`` is 0, so that no client makes a personal step."""
        del experiment
        return [] if self.personal_learning_rate else [off("algorithm.personal_learning_rate=0", FEDAVG)]

    def course(self, job: LocalJob) -> Course:
        """Return a generator of the client's local steps. Each step computes two or three gradients."""
        from fl_sim.training.courses import gradient_in, gradient_job, steps_of  # noqa: PLC0415 (it loads torch)

        w, settings, losses = job.task.params, job.task.settings, list[float]()
        statistics, alpha = job.task.statistics, self.personal_learning_rate
        thirds = steps_of(job, 2) if self.variant == "exact" else repeat(job)
        for step, first, third in zip(steps_of(job), steps_of(job, 1), thirds, strict=False):
            [there] = yield [gradient_job(first, w)]
            adapted = add(w, gradient_in(there), -alpha)
            [after] = yield [gradient_job(step, adapted, statistics=statistics)]
            gradient, statistics = gradient_in(after), after.statistics
            if self.variant == "exact":
                [bent] = yield [gradient_job(third, w, _along(gradient, len(job.task.class_counts)), clip_norm=0.0)]
                gradient = add(gradient, gradient_in(bent), -alpha)
            if settings.weight_decay:
                gradient = add(gradient, w, settings.weight_decay)
            w = add(w, gradient, -settings.learning_rate)
            losses.append(after.loss or 0.0)
        loss = sum(losses) / len(losses) if losses else None
        return Trained(w, {}, len(losses), loss, statistics=statistics)

    def adapted(self, task: LocalTask) -> FurtherModel:
        """Return the received model after one step with rate alpha, on a batch of the client's training records."""
        settings = replace(task.settings, learning_rate=self.personal_learning_rate, steps=1, weight_decay=0.0)
        return FurtherModel(task.params, LocalPlan(), settings)


def _along(direction: Params, num_classes: int) -> LocalPlan:
    """Return a local objective (``LocalPlan``) whose gradient is the product of the Hessian with ``direction``.

    The objective multiplies the logits by 0, so the cross-entropy has no gradient. Only the term ``_slope`` has one.
    """
    return LocalPlan(logit_scale=torch.zeros(num_classes), loss_term=LossTerm(_slope, {**direction}))


def _slope(batch: Batch) -> torch.Tensor:
    """Return the loss's derivative along the vector in ``batch.data``. Its gradient is Hessian times vector."""

    def loss(params: Params) -> torch.Tensor:
        logits = batch.logits_of(params, batch.inputs)
        losses = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="none")
        return (losses * batch.weights).sum()

    gradient = torch.func.grad(loss)(dict(batch.params))
    return torch.stack([(value * batch.data[name]).sum() for name, value in gradient.items()]).sum()
