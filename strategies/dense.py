"""DENSE: the server generates images with the clients' models, and distils the models' ensemble (Zhang et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.types import Params
from strategies.ensemble import Lesson, Norms, Taught, ensemble_logits
from strategies.generated_images import Album, ImageStudent, OnMadeImages, divergence


class Dense(OnMadeImages):
    """FedAvg; after each round, the mean model (the student) is trained on generated images by the clients' ensemble.

    The server needs no records. f(x) = mean_k f_k(x) are the logits of the ensemble, s(x) are the logits of the
    student. CE is the cross-entropy, and KL the Kullback-Leibler divergence. In each epoch a new generator G makes
    images G(z) from noise z, for random labels y. G is trained by ``generator_steps`` steps of Adam with learning rate
    ``generator_rate``. Its loss is CE(f(G(z)), y) + ``statistics`` S - ``divergence`` D. D is the mean of KL(softmax f
    || softmax s) over the images, with 0 for images for which f and s predict the same class. S is the sum of |m - m'|
    + |v - v'| over clients and their BatchNorm layers, if any (``local.batch_norm=average``). Here m and v are means
    and variances of the layer's inputs on G(z), and m' and v' are the layer's running statistics. The step with the
    lowest loss gives the epoch's ``images`` images. Then the student is trained for one epoch on the images of all
    epochs, by SGD with momentum 0.9 on T² KL(softmax f/T || softmax s/T).

    ``epochs``: the number of epochs; 200 in the released code; 0 is FedAvg, bit for bit. ``channels``: the width of the
    generator before its last layer. ``temperature``: the temperature T of the distillation. ``distillation_rate``: the
    student's learning rate. ``distillation_batch``: the number of images in a step. All other defaults are those of the
    released code's command. Differences from this code: the student starts from the mean model (there, from random
    weights). Images are not cropped or mirrored. The result is the model of the last epoch (there, of the best epoch on
    test records).

    A further table has the accuracy of the ensemble itself: an upper bound that needs the models of all clients.
    """

    kind: Literal["dense"] = "dense"
    title: ClassVar[str] = "DENSE"
    keeps_statistics: ClassVar[bool] = True
    divergence: float = Field(1.0, ge=0)
    statistics: float = Field(1.0, ge=0)
    temperature: float = Field(20.0, gt=0)
    distillation_rate: float = Field(5e-3, gt=0)
    distillation_batch: int = Field(256, ge=1)

    def taught(self, student: Params, models: Sequence[Params], lesson: Lesson) -> Taught:
        """Return the student after ``epochs`` epochs."""
        learner, album = ImageStudent(student, lesson, self.distillation_rate), Album.empty(lesson)
        goals = torch.zeros(0, lesson.dataset.num_classes, device=lesson.device)

        def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            distances = list[torch.Tensor]()
            logits_of = lesson.logits_of if lesson.norms is None else partial(_logits_and, distances, lesson.norms)
            teacher, own = ensemble_logits(models, images, logits_of), learner.logits(images)
            differ = (teacher.argmax(1) != own.argmax(1)).float()
            apart = (divergence(own, teacher, 1.0) * differ).mean()
            loss = torch.nn.functional.cross_entropy(teacher, labels) - self.divergence * apart
            return loss + self.statistics * torch.stack(distances).sum() if distances else loss

        for _ in range(self.epochs):
            made, labels = album.made(self.making(), loss_of)
            album.add(made, labels)
            with torch.no_grad():  # the ensemble's logits of an image are the same in all epochs
                goals = torch.cat([goals, ensemble_logits(models, album.shown(made), lesson.logits_of)])
            for rows, images, _ in album.batches(self.distillation_batch):
                learner.step(images, goals[rows], self.temperature, self.distillation_rate)
        return Taught(learner.trained())


def _logits_and(distances: list[torch.Tensor], norms: Norms, model: Params, images: torch.Tensor) -> torch.Tensor:
    """Return the logits of ``model``, and append the distance of its statistics on ``images`` to ``distances``."""
    logits, distance = norms.distances_of(model, images)
    distances.append(distance)
    return logits
