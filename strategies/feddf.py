"""FedDF: after each round the server distils the clients' models on unlabelled public records (Lin et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, hides_clients, is_none, kind_of, off, path_in
from fl_sim.params import scale
from fl_sim.types import Params
from strategies.algorithm import FEDAVG, Averaging

_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # of Adam


class FedDF(Averaging):
    """FedAvg, and then the mean model learns from the ensemble of the round's models, as in algorithm 1 of the paper.

    The student x starts from the mean model. Each step lowers KL(softmax(mean_k f_k(u)) || softmax(f_x(u))) over a
    batch of public records u, by Adam with a cosine schedule. f_k are the logits of the round's model k.

    ``proxy``: the name of the data set with the public records u; its labels are not used. Its inputs need the shape of
    the clients' inputs. "none" gives FedAvg, bit for bit. ``steps``: the number of steps after each round. (The paper
    takes up to 10,000, and stops after 1,000 without a gain on validation records. There is no such stop here.)
    ``distillation_rate``: the learning rate of Adam. ``distillation_batch``: the number of records in a step.

    An additional table has the accuracy of the ensemble itself. It is an upper bound that keeps the models of all
    clients.
    """

    kind: Literal["feddf"] = "feddf"
    title: ClassVar[str] = "FedDF"
    layer: ClassVar[str] = "strategies.server_step:StepOnModels"
    stage: ClassVar[str] = "fl_sim.stages.distillation:EnsembleDistillation"
    proxy: str = Field("none", min_length=1)
    steps: int = Field(1000, ge=1, le=10**6)
    distillation_rate: float = Field(1e-3, gt=0)
    distillation_batch: int = Field(128, ge=1)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the server does not see single models, or if the proxy is the clients' own data set."""
        seen, reason = f"algorithm {self.kind} looks at the model of each client", ""
        if hides_clients(experiment.aggregator):
            reason = f"aggregator {kind_of(experiment.aggregator)} hides these models: take aggregator=mean"
        elif path_in(type(experiment.server), "procedure"):
            reason = f"with server={kind_of(experiment.server)} they begin from different ones: leave server out"
        elif experiment.local.batch_norm != "none":
            reason = "its ensemble has no running statistics: leave local.batch_norm out"
        elif not is_none(experiment.local.privacy):
            reason = "no statement covers both here: leave local.privacy out"
        elif self.proxy == getattr(experiment, "data", ""):
            reason = f"{self.proxy} is what clients hold: algorithm.proxy must be another data set, of public records"
        if reason:
            raise ValueError(f"{seen}, and {reason}")

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a warning if there is no proxy data set."""
        del experiment
        return [off("algorithm.proxy=none", FEDAVG)] if self.proxy == "none" else []

    def further_data(self) -> str:
        """Return the name of the data set with the public records."""
        return "" if self.proxy == "none" else self.proxy

    def mean_only(self) -> str:
        """Return the reason why robust aggregators do not fit."""
        return "its server distils all models of the round, also those that a robust aggregator leaves out"

    def note(self) -> str:
        """Return the note for tables."""
        steps = "no distillation" if self.proxy == "none" else f"{self.steps:,} steps on {self.proxy}, unlabelled"
        return f"FedDF: {steps}; the ensemble's accuracy is an upper bound that keeps the models of all clients."


def distilled(
    settings: FedDF,
    student: Params,
    models: list[Params],
    batches: Iterable[torch.Tensor],
    logits_of: Callable[[Params, torch.Tensor], torch.Tensor],
) -> Params:
    """Return the student after one step of Adam on each of the ``settings.steps`` batches (n, *input shape).

    ``models``: the teachers. The student stays as it is, bit for bit, if all models are equal to it.
    """
    weights = {name: value.detach().clone().requires_grad_() for name, value in student.items()}
    means, squares = scale(student, 0.0), scale(student, 0.0)
    for step, records in enumerate(batches, start=1):
        rate = settings.distillation_rate * (1 + math.cos(math.pi * (step - 1) / settings.steps)) / 2
        logits = logits_of(weights, records)
        # Autograd would not return exactly 0 where student and teacher agree, and Adam enlarges rounding errors.
        slope = (logits.detach().softmax(1) - ensemble_logits(models, records, logits_of).softmax(1)) / len(records)
        gradients = torch.autograd.grad(logits, list(weights.values()), slope)
        with torch.no_grad():
            for (name, value), gradient in zip(weights.items(), gradients, strict=True):
                means[name].lerp_(gradient, 1 - _BETAS[0])
                squares[name].lerp_(gradient.square(), 1 - _BETAS[1])
                spread = (squares[name] / (1 - _BETAS[1] ** step)).sqrt().add_(_EPSILON)
                value.addcdiv_(means[name], spread, value=-rate / (1 - _BETAS[0] ** step))
    return {name: value.detach() for name, value in weights.items()}


def ensemble_logits(
    models: list[Params], records: torch.Tensor, logits_of: Callable[[Params, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the mean of the models' logits, (n, classes). The mean of equal logits is exactly these logits."""
    with torch.no_grad():
        logits = [logits_of(model, records) for model in models]
        mean: torch.Tensor = torch.stack([one.double() for one in logits]).mean(0).to(logits[0].dtype)
    return mean
