"""Co-Boosting: DENSE with harder images, and with client weights computed on these images (Dai et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.types import Params
from strategies.ensemble import Lesson, Taught, ensemble_logits
from strategies.generated_images import Album, ImageStudent, OnMadeImages, divergence

_GENERATORS_TEMPERATURE, _DIRECTIONS_TEMPERATURE = 3.0, 4.0
_LONGEST, _WEIGHT_DECAY, _DECAY = 10.0, 1e-4, 0.99


class CoBoosting(OnMadeImages):
    """FedAvg; after each round, the mean model (the student) is trained on generated images by a weighted ensemble.

    f_k are the logits of client k's model. The logits of the ensemble are f(x) = sum_k w_k f_k(x) / sum_k w_k, and s(x)
    are the logits of the student. The weights w_k start at 1/m for m clients. CE is the cross-entropy, and KL the
    Kullback-Leibler divergence. In each epoch a new generator G makes images G(z) from noise z, for random labels y. G
    is trained by ``generator_steps`` steps of Adam with learning rate ``generator_rate``. Its loss is (1 -
    p)^``hardness`` CE(f(G(z)), y) - T² KL(softmax f/T || softmax s/T) with T = 3, where p is the ensemble's probability
    of y. The step with the lowest loss gives the epoch's ``images`` images. From the second epoch on (t = 1, 2, ...),
    each batch of earlier images changes the weights: w_k <- clip(w_k - ``mu`` 0.99^t sign(dCE/dw_k), 0, 1).

    Then the student is trained for one epoch on all images, by SGD with momentum 0.9 and weight decay 1e-4. The
    student's loss is T² KL(softmax f/T || softmax s/T) with T = ``temperature``. Before each step of the student, every
    pixel is moved up or down by ``pixels``/255. The direction is the sign of the gradient of a random combination of
    the ensemble's class probabilities.

    ``epochs``: the number of epochs; 200 in the released code; 0 is FedAvg, bit for bit. ``channels``: the width of the
    generator before its last layer. ``mu``: the step size of the weights w_k; 0 keeps equal weights.
    ``distillation_rate``: the student's learning rate, with a cosine schedule over all epochs. ``distillation_batch``:
    the number of images in a step. All other defaults are those of the released code. Differences from this code: the
    student starts from the mean model (there, from random weights). The result is the model of the last epoch (there,
    of the best epoch on test records). Models with BatchNorm are refused.

    A further table has the accuracy of the weighted ensemble: an upper bound that needs the models of all clients.
    ``result.json`` has the weights.
    """

    kind: Literal["co-boosting"] = "co-boosting"
    title: ClassVar[str] = "Co-Boosting"
    images: int = Field(128, ge=2)
    hardness: float = Field(1.0, ge=0)
    mu: float = Field(0.01, ge=0)
    pixels: float = Field(8.0, ge=0, le=255)
    temperature: float = Field(4.0, gt=0)
    distillation_rate: float = Field(0.01, gt=0)
    distillation_batch: int = Field(128, ge=1)

    def taught(self, student: Params, models: Sequence[Params], lesson: Lesson) -> Taught:
        """Return the student after ``epochs`` epochs, and the weights of the clients."""
        learner = ImageStudent(student, lesson, self.distillation_rate, _WEIGHT_DECAY)
        album, weights = Album.empty(lesson), (1 / len(models),) * len(models)
        for epoch in range(self.epochs):
            made = album.made(self.making(_LONGEST), partial(self._loss, models, weights, learner, lesson))
            for _, images, labels in album.batches(self.distillation_batch):
                weights = self.weighed(weights, _logits_of_each(models, images, lesson), labels, epoch)
            album.add(*made)
            rate = self.distillation_rate * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
            for _, images, _ in album.batches(self.distillation_batch):
                moved = images + album.step_of(self.pixels) * self._direction(images, models, weights, lesson)
                with torch.no_grad():
                    goal = ensemble_logits(models, moved, lesson.logits_of, weights)
                learner.step(moved, goal, self.temperature, rate)
        return Taught(learner.trained(), weights)

    def _loss(
        self,
        models: Sequence[Params],
        weights: Sequence[float],
        learner: ImageStudent,
        lesson: Lesson,
        images: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        teacher = ensemble_logits(models, images, lesson.logits_of, weights)
        each = torch.nn.functional.cross_entropy(teacher, labels, reduction="none")
        hard = (1 - (-each.detach()).exp()) ** self.hardness
        return (hard * each - divergence(learner.logits(images), teacher, _GENERATORS_TEMPERATURE)).mean()

    def weighed(
        self, weights: tuple[float, ...], logits: torch.Tensor, labels: torch.Tensor, epoch: int
    ) -> tuple[float, ...]:
        """Return the clients' weights in the ensemble after one gradient step on a batch of images.

        ``logits``: the logits of each client's model, (clients, n, classes). ``labels``: (n,). ``epoch``: from 0 on.
        """
        held = torch.tensor(weights, dtype=torch.float64, device=logits.device, requires_grad=True)
        together = (held[:, None, None] * logits.double()).sum(0) / held.sum()
        [slope] = torch.autograd.grad(torch.nn.functional.cross_entropy(together, labels), [held])
        moved = (held.detach() - self.mu * _DECAY**epoch * slope.sign()).clamp(0, 1)
        return tuple(moved.tolist()) if float(moved.sum()) > 0 else weights

    def _direction(
        self, images: torch.Tensor, models: Sequence[Params], weights: Sequence[float], lesson: Lesson
    ) -> torch.Tensor:
        """Return the direction, up or down, in which each pixel is moved.

        The direction is the sign of the gradient of a random combination of the ensemble's class probabilities.
        """
        moved = images.detach().clone().requires_grad_()
        soft = (ensemble_logits(models, moved, lesson.logits_of, weights) / _DIRECTIONS_TEMPERATURE).softmax(1)
        mixture = torch.from_numpy(lesson.generator.uniform(-1, 1, soft.shape)).to(soft)
        [slope] = torch.autograd.grad((mixture * soft).sum(), [moved])
        return slope.sign()


def _logits_of_each(models: Sequence[Params], images: torch.Tensor, lesson: Lesson) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([lesson.logits_of(model, images) for model in models])
