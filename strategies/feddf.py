"""FedDF: after each round the server distils the clients' models on unlabelled records (Lin et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.params import scale
from fl_sim.types import Params
from strategies.algorithm import FEDAVG
from strategies.ensemble import UPPER_BOUND, Lesson, LogitsOf, OnEnsemble, Taught, ensemble_logits

_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # of Adam


class FedDF(OnEnsemble):
    """FedAvg; after each round, the round's models are distilled into the mean model (Lin et al. 2020, algorithm 1).

    The student x starts from the mean model. Each step lowers KL(softmax(mean_k f_k(u)) || softmax(f_x(u))) over a
    batch of unlabelled records u, by Adam with a cosine schedule. f_k and f_x are the logits of client k's model and of
    the student.

    ``proxy``: the name of the data set with the public records u. Its labels are not used, and its inputs must have the
    shape of the clients' inputs. "pool" uses the synthetic records of the run's preprocess stage, such as DA-FL's. With
    "none" the run is bit-identical to FedAvg. ``steps``: the number of steps after each round. (The paper uses up to
    10,000 steps, and stops after 1,000 steps without a gain on validation records. This class does not stop early.)
    ``distillation_rate``: the learning rate of Adam. ``distillation_batch``: the number of records in a step.

    An additional table has the accuracy of the ensemble itself: an upper bound that needs the models of all clients.
    """

    kind: Literal["feddf"] = "feddf"
    title: ClassVar[str] = "FedDF"
    proxy: str = Field("none", min_length=1)
    steps: int = Field(1000, ge=1, le=10**6)
    distillation_rate: float = Field(1e-3, gt=0)
    distillation_batch: int = Field(128, ge=1)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a warning if there is no proxy data set."""
        del experiment
        return [] if self.learns else [off("algorithm.proxy=none", FEDAVG)]

    @property
    def learns(self) -> bool:
        """Return True if there are public records (``proxy`` is not "none"), so that the server distils."""
        return self.proxy != "none"

    @property
    def public_records(self) -> str:
        """Return the setting ``proxy``: the data set with the public records, "pool" or "none"."""
        return self.proxy

    def taught(self, student: Params, models: Sequence[Params], lesson: Lesson) -> Taught:
        """Return the student after ``steps`` steps on batches of the public records."""
        teacher = partial(self.teacher, models, logits_of=lesson.logits_of)
        return Taught(distilled(self, student, teacher, self._batches(lesson), lesson.logits_of))

    def teacher(self, models: Sequence[Params], records: torch.Tensor, logits_of: LogitsOf) -> torch.Tensor:
        """Return the target probabilities for the student, (n, classes): the softmax of the ensemble's logits."""
        return ensemble_logits(models, records, logits_of).softmax(1)

    def _batches(self, lesson: Lesson) -> Iterator[torch.Tensor]:
        proxy = lesson.public
        assert proxy is not None
        for _ in range(self.steps):
            size = min(self.distillation_batch, len(proxy.labels))
            rows = np.sort(lesson.generator.choice(len(proxy.labels), size, replace=False))
            yield proxy.normalised(proxy.inputs[torch.from_numpy(rows).to(proxy.inputs.device)])

    def note(self) -> str:
        """Return the note below result tables: the number of distillation steps."""
        return f"FedDF: {self._told()}"

    def _told(self) -> str:
        records = "the run's synthetic records" if self.uses_pool else f"{self.proxy}, unlabelled"
        return f"{f'{self.steps:,} steps on {records}' if self.learns else 'no distillation'}; {UPPER_BOUND}."


def distilled(
    settings: FedDF,
    student: Params,
    teacher: Callable[[torch.Tensor], torch.Tensor],
    batches: Iterable[torch.Tensor],
    logits_of: LogitsOf,
) -> Params:
    """Return the student after one step of Adam on each of the ``settings.steps`` batches (n, *input shape).

    ``teacher``: a function from records to the target probabilities for the student, (n, classes). If the student
    already predicts exactly these probabilities, its parameters do not change.
    """
    weights = {name: value.detach().clone().requires_grad_() for name, value in student.items()}
    means, squares = scale(student, 0.0), scale(student, 0.0)
    for step, records in enumerate(batches, start=1):
        rate = settings.distillation_rate * (1 + math.cos(math.pi * (step - 1) / settings.steps)) / 2
        logits = logits_of(weights, records)
        # If student and teacher agree, this gradient is exactly 0. Autograd's gradient is not, and Adam would enlarge
        # it.
        with torch.no_grad():
            slope = (logits.softmax(1) - teacher(records)) / len(records)
        gradients = torch.autograd.grad(logits, list(weights.values()), slope)
        with torch.no_grad():
            for (name, value), gradient in zip(weights.items(), gradients, strict=True):
                means[name].lerp_(gradient, 1 - _BETAS[0])
                squares[name].lerp_(gradient.square(), 1 - _BETAS[1])
                spread = (squares[name] / (1 - _BETAS[1] ** step)).sqrt().add_(_EPSILON)
                value.addcdiv_(means[name], spread, value=-rate / (1 - _BETAS[0] ** step))
    return {name: value.detach() for name, value in weights.items()}
