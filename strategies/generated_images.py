"""Images that the server makes without data: a small generator is trained on the outputs of an ensemble of models.

The generator network is that of DENSE (Zhang et al. 2022). The released code of Co-Boosting (Dai et al. 2024) uses the
same network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.types import Dataset, Params
from strategies.algorithm import FEDAVG, check_images
from strategies.ensemble import UPPER_BOUND, Lesson, OnEnsemble

_NOISE, _STD, _SLOPE = 256, 0.02, 0.2
"""Of the generator: length of the noise vector, standard deviation of initial weights, slope of the leaky ReLU."""

_BETAS = (0.5, 0.999)  # beta_1 and beta_2 of Adam

_LONGEST = 10.0
"""Gradients of a student are clipped to this L2 norm, as in Co-Boosting's released code."""

LossOf = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""A function (normalised images (n, *input shape), labels (n,)) -> the generator's loss, a number."""


@dataclass(frozen=True)
class Making:
    """The settings of a generator: its training and its number of images.

    ``steps``: the number of steps of Adam. ``rate``: the learning rate. ``count``: the number of images. ``channels``:
    the number of input channels of the generator's last layer. ``longest``: the L2 norm to which the generator's
    gradients are clipped.
    """

    steps: int
    rate: float
    count: int
    channels: int
    longest: float = math.inf


@dataclass
class Album:
    """All images that the server has generated so far, as uint8 of shape (n, *input shape), with labels (n,)."""

    lesson: Lesson
    images: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def empty(cls, lesson: Lesson) -> Album:
        """Return an album without images."""
        images = torch.zeros(0, *lesson.dataset.input_shape, dtype=torch.uint8, device=lesson.device)
        return cls(lesson, images, torch.zeros(0, dtype=torch.int64, device=lesson.device))

    def made(self, making: Making, loss_of: LossOf) -> tuple[torch.Tensor, torch.Tensor]:
        """Train a new generator, and return its images as uint8, with their labels.

        Labels are drawn uniformly. The images are those of the training step with the lowest loss.
        """
        lesson, draw = self.lesson, torch.Generator().manual_seed(int(self.lesson.generator.integers(2**62)))
        labels = torch.randint(lesson.dataset.num_classes, (making.count,), generator=draw).to(lesson.device)
        weights = {
            name: value.to(lesson.device).requires_grad_()
            for name, value in _first_weights(lesson.dataset.input_shape, making.channels, draw).items()
        }
        noise = torch.randn(making.count, _NOISE, generator=draw).to(lesson.device).requires_grad_()
        adam = torch.optim.Adam([*weights.values(), noise], lr=making.rate, betas=_BETAS)
        best, kept = math.inf, None
        for _ in range(making.steps):
            made = _generated(weights, noise, lesson.dataset.input_shape)
            loss = loss_of(self._normalised(made), labels)
            if kept is None or float(loss.detach()) < best:
                best, kept = float(loss.detach()), made.detach()
            adam.zero_grad()
            torch.autograd.backward(loss)
            if making.longest < math.inf:
                torch.nn.utils.clip_grad_norm_(list(weights.values()), making.longest)
            adam.step()
        assert kept is not None
        return (255 * kept).round().to(torch.uint8), labels

    def add(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Add new images, as uint8, with their labels."""
        self.images, self.labels = torch.cat([self.images, images]), torch.cat([self.labels, labels])

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield batches (indices, normalised images, labels) of at most ``size`` images, in a new random order."""
        order = torch.from_numpy(self.lesson.generator.permutation(len(self.labels))).to(self.lesson.device)
        for rows in torch.split(order, size):
            yield rows, self.shown(self.images[rows]), self.labels[rows]

    def shown(self, images: torch.Tensor) -> torch.Tensor:
        """Return the uint8 ``images`` as normalised float32, the inputs of the models."""
        return self._normalised(images.float() / 255)

    def _normalised(self, images: torch.Tensor) -> torch.Tensor:
        mean, std = (
            torch.tensor(one, dtype=torch.float32, device=images.device).reshape(1, -1, 1, 1)
            for one in (self.lesson.dataset.mean, self.lesson.dataset.std)
        )
        return (images - mean) / std

    def step_of(self, pixels: float) -> torch.Tensor:
        """Convert ``pixels``, a difference of pixel values (0 to 255), to normalised units, (1, channels, 1, 1)."""
        std = torch.tensor(self.lesson.dataset.std, dtype=torch.float32, device=self.lesson.device)
        return pixels / 255 / std.reshape(1, -1, 1, 1)


class OnMadeImages(OnEnsemble):
    """Base class of methods whose server generates images, and with them distils an ensemble into a student model.

    ``epochs``: the number of epochs; with 0 the method is FedAvg. In each epoch the server trains a new generator,
    makes new images and distils the ensemble into the student. ``images``: the number of new images in an epoch.
    ``generator_steps``, ``generator_rate``: steps and learning rate of each generator. ``channels``: the number of
    input channels of a generator's last layer.
    """

    epochs: int = Field(0, ge=0, le=10**5)
    generator_steps: int = Field(30, ge=1, le=10**5)
    generator_rate: float = Field(1e-3, gt=0)
    channels: int = Field(64, ge=1)
    images: int = Field(256, ge=2)

    @property
    def learns(self) -> bool:
        """Return True if the server generates images and distils, that is, if ``epochs`` is above 0."""
        return self.epochs > 0

    def check_data(self, dataset: Dataset, features: str) -> None:
        """Raise UserError for records that are not images."""
        del features
        check_images(self, dataset, "makes images", "take algorithm=feddf with a proxy, or leave features out")

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a remark if ``epochs`` is 0: the method is then FedAvg."""
        del experiment
        return [] if self.learns else [off("algorithm.epochs=0", FEDAVG)]

    def making(self, longest: float = math.inf) -> Making:
        """Return the settings of the image generator. ``longest``: the norm to which its gradients are clipped."""
        return Making(self.generator_steps, self.generator_rate, self.images, self.channels, longest)

    def note(self) -> str:
        """Return the note below result tables. It states how many images the server generated."""
        made = f"{self.epochs} epochs of {self.images} generated images; the result is the last epoch's model"
        return f"{type(self).title}: {made if self.learns else 'no distillation'}; {UPPER_BOUND}."


class ImageStudent:
    """A model that learns from a teacher's logits by SGD with momentum 0.9. Gradients are clipped to norm 10.

    Each step also updates the running statistics of the model, if it has BatchNorm layers.
    """

    def __init__(self, params: Params, lesson: Lesson, rate: float, weight_decay: float = 0.0) -> None:
        self._lesson = lesson
        copies = {name: value.detach().clone() for name, value in params.items()}
        names = frozenset[str]() if lesson.norms is None else lesson.norms.statistics
        self.params = {name: value.requires_grad_() for name, value in copies.items() if name not in names}
        self._statistics = {name: value for name, value in copies.items() if name in names}
        self._sgd = torch.optim.SGD(list(self.params.values()), lr=rate, momentum=0.9, weight_decay=weight_decay)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Return the student's logits, (n, classes)."""
        return self._lesson.logits_of({**self.params, **self._statistics}, images)

    def step(self, images: torch.Tensor, teacher: torch.Tensor, temperature: float, rate: float) -> None:
        """Take one step with learning rate ``rate`` to reduce the divergence from the ``teacher``'s logits."""
        norms = self._lesson.norms
        training = self._lesson.logits_of if norms is None else norms.training_logits_of
        logits = training({**self.params, **self._statistics}, images)
        loss = divergence(logits, teacher, temperature).mean()
        self._sgd.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(list(self.params.values()), _LONGEST)
        self._sgd.param_groups[0]["lr"] = rate
        self._sgd.step()

    def trained(self) -> Params:
        """Return the student's parameters and running statistics, after all steps so far."""
        return {name: value.detach() for name, value in {**self.params, **self._statistics}.items()}


def divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the distillation loss T² KL(softmax(teacher / T) || softmax(student / T)) of each record, (n,).

    T is ``temperature``. ``student``, ``teacher``: logits, (n, classes).
    """
    own, goal = ((one / temperature).log_softmax(1) for one in (student, teacher))
    return temperature**2 * (goal.exp() * (goal - own)).sum(1)


def _first_weights(shape: tuple[int, ...], channels: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    colours, height, width = shape
    wide, first = 2 * channels, -(-height // 4) * -(-width // 4)

    def normal(*size: int, mean: float = 0.0) -> torch.Tensor:
        return mean + _STD * torch.randn(*size, generator=draw)

    weights = {"linear": normal(wide * first, _NOISE), "linear bias": torch.zeros(wide * first)}
    for name, size in (("norm 0", wide), ("norm 1", wide), ("norm 2", channels)):
        weights |= {name: normal(size, mean=1.0), f"{name} bias": torch.zeros(size)}
    weights |= {"1": normal(wide, wide, 3, 3), "2": normal(channels, wide, 3, 3)}
    return weights | {"last": normal(colours, channels, 3, 3), "last bias": torch.zeros(colours)}


def _generated(weights: Params, noise: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the generator's images with pixels in [0, 1], (n, *shape), for random inputs ``noise``, (n, 256)."""
    functional, (_, height, width) = torch.nn.functional, shape

    def norm(images: torch.Tensor, name: str) -> torch.Tensor:
        return functional.batch_norm(images, None, None, weights[name], weights[f"{name} bias"], training=True)

    images = functional.linear(noise, weights["linear"], weights["linear bias"])
    images = norm(images.reshape(len(noise), -1, -(-height // 4), -(-width // 4)), "norm 0")
    for layer in ("1", "2"):
        images = functional.interpolate(images, scale_factor=2.0)
        images = norm(functional.conv2d(images, weights[layer], padding=1), f"norm {layer}")
        images = functional.leaky_relu(images, _SLOPE)
    images = functional.conv2d(images, weights["last"], weights["last bias"], padding=1).sigmoid()
    return images[:, :, :height, :width]
