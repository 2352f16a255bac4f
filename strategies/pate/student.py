"""PATE's students: models that are trained only on a public pool, of which a few records have noisy labels.

This module holds functions for training, and the students that use only the labelled records. ``Supervised`` is a small
network. ``ResidualStudent``, the student of Diff-RN, is a residual network (He et al. 2016, section 4.2: three stages
on small images; figure 5: bottleneck blocks). It is trained by momentum SGD with step decay. ``ForestStudent`` is a
random forest. It is stored as tensors, so that no pickle is needed. All training is post-processing of the labels and
costs no epsilon. All records that a student sees are public, and so are their statistics. So BatchNorm does not affect
privacy here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from clients.teacher import RandomForest, as_table
from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.seeding import rng, seed_torch, torch_kept
from fl_sim.settings import Settings
from strategies.fixmatch import Augmentation, view

_EVALUATION_BATCH = 500
_BOTTLENECK_FROM = 6


class TrainingPart(Protocol):
    """An object with state in a student's training, such as the network, the optimiser or a random generator."""

    def state_dict(self) -> dict[str, Any]:
        """Return the object's state, as values by name, for a checkpoint."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore the state from ``state_dict``, a result of the method ``state_dict``."""
        ...


class Watch(Protocol):
    """A callback that follows a student's training, and may checkpoint it."""

    def begin(self, parts: Mapping[str, TrainingPart]) -> int:
        """Restore ``parts`` from the checkpoint, if there is one; return the number of training steps already done.

        ``parts``: all objects with state, by name, as they are before the first step. A student whose ``train`` does
        not call this method starts again from step 0 after an interruption.
        """
        ...

    def __call__(self, step: int, learning_rate: float, model: torch.nn.Module) -> None:
        """Report a training step. ``step``: the number of steps so far. ``model``: the student after this step."""
        ...


class Nobody:
    """A callback that does nothing, for training without progress display and without checkpoints."""

    def begin(self, parts: Mapping[str, TrainingPart]) -> int:
        """Return 0: there is no checkpoint, so training begins at step 0."""
        del parts
        return 0

    def __call__(self, step: int, learning_rate: float, model: torch.nn.Module) -> None:
        """Do nothing: the training step is not reported."""


nobody = Nobody()


@dataclass(frozen=True)
class StudentData:
    """The data of a student: public records, and ``labels`` from noisy majority votes of the teachers.

    ``labelled``: (n, *input shape), normalised, with ``labels`` (n,) in 0..num_classes-1. ``unlabelled``: (m, *input
    shape); it may contain the labelled records, too.
    """

    labelled: torch.Tensor
    labels: torch.Tensor
    unlabelled: torch.Tensor
    num_classes: int

    def __post_init__(self) -> None:
        if len(self.labelled) == 0 or len(self.labelled) != len(self.labels):
            raise UserError(
                f"{len(self.labelled)} labelled records with {len(self.labels)} labels: nothing to learn from"
            )
        if not ((self.labels >= 0) & (self.labels < self.num_classes)).all():
            raise UserError(f"labels lie outside 0 to {self.num_classes - 1}: leave unanswered queries out")

    def to(self, device: torch.device) -> StudentData:
        """Return the same data on ``device``."""
        labelled, labels, unlabelled = (part.to(device) for part in (self.labelled, self.labels, self.unlabelled))
        return StudentData(labelled, labels, unlabelled, self.num_classes)


class Student(Protocol):
    """The settings of a student: its network and its training."""

    @property
    def steps(self) -> int:
        """Return the number of the student's training steps. A PATE run divides them equally among its rounds."""
        ...

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return the untrained student, with initial weights from torch's global generator."""
        ...

    def train(self, data: StudentData, model: torch.nn.Module, seed: int, watch: Watch = nobody) -> torch.nn.Module:
        """Return a trained copy of ``model``, in evaluation mode.

        The copy may contain running statistics of the public pool.
        """
        ...


class Supervised(Settings):
    """Supervised training by AdamW on randomly changed views of the labelled records.

    ``steps``: the number of optimiser steps. ``batch_size``: the number of labelled records in a step.
    ``learning_rate``: the learning rate of AdamW. ``weight_decay``: the weight decay of AdamW. ``augmentation``: the
    random changes of the views.
    """

    kind: Literal["supervised"] = "supervised"
    steps: int = Field(400, ge=1)
    batch_size: int = Field(50, ge=1)
    learning_rate: float = Field(4e-3, gt=0)
    weight_decay: float = Field(0.02, ge=0)
    augmentation: Augmentation = Augmentation()

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return the network ``student_cnn`` for images, or a multilayer perceptron for tables of numbers."""
        from fl_sim import models  # noqa: PLC0415 (needs torch as it is imported)
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        build = networks.student_cnn if len(input_shape) == 3 else models.mlp
        return build(input_shape, num_classes)

    def train(self, data: StudentData, model: torch.nn.Module, seed: int, watch: Watch = nobody) -> torch.nn.Module:
        """Return a copy of ``model`` (the student), trained on ``data``, in evaluation mode."""
        return _trained_on_labels(self, data, model, seed, watch, purpose="supervised student")

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return an optimiser for the parameters of ``model``, the student."""
        return torch.optim.AdamW(model.parameters(), self.learning_rate, weight_decay=self.weight_decay)

    def rate(self, step: int) -> float:
        """Return the learning rate of a training step. ``step``: its number, counted from 0."""
        return self.learning_rate * rise_and_cosine(step, self.steps)


class ResidualStudent(Settings):
    """A residual network of three stages; the second and third have twice and four times the channels of the first.

    ``blocks``: the number of residual blocks in each stage. ``width``: the number of channels in the first stage.
    ``block`` "auto": basic blocks (two 3x3 convolutions) for up to 5 blocks per stage, bottleneck blocks (1x1, 3x3,
    1x1) from 6 blocks on. ``decay_at``: after each of these shares of the steps the learning rate falls to a tenth.
    ``augmentation``: random changes of the labelled images; the default shifts them by up to 4 of 32 pixels and mirrors
    each with probability 1/2. ``norm``: batch or group normalisation. ``batch_size``: the number of labelled records in
    a step. ``learning_rate``: the learning rate of SGD at the start. ``momentum``: the momentum of SGD.
    ``weight_decay``: the weight decay of SGD. ``steps``: the number of optimiser steps.
    """

    kind: Literal["resnet"] = "resnet"
    blocks: int = Field(2, ge=1, le=50)
    width: int = Field(32, ge=8, multiple_of=8)
    block: Literal["auto", "basic", "bottleneck"] = "auto"
    norm: Literal["batch", "group"] = "batch"
    steps: int = Field(2000, ge=1)
    batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(0.1, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(5e-4, ge=0)
    decay_at: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.5, 0.75)
    augmentation: Augmentation = Augmentation(rotation=0, scale=0, shear=0, shift=0.25, elastic=0, erase=0, flip=True)

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return the residual network. Raises UserError for records that are not images of at least 4x4."""
        if len(input_shape) != 3 or min(input_shape[1:]) < 4:
            raise UserError(f"student resnet needs images of at least 4x4, these records have shape {input_shape}")
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        deep = self.block == "bottleneck" or (self.block == "auto" and self.blocks >= _BOTTLENECK_FROM)
        return networks.residual_network(input_shape, num_classes, self.blocks, self.width, self.norm, deep=deep)

    def train(self, data: StudentData, model: torch.nn.Module, seed: int, watch: Watch = nobody) -> torch.nn.Module:
        """Return a copy of ``model`` (the student), trained on ``data``, in evaluation mode."""
        return _trained_on_labels(self, data, model, seed, watch, purpose="resnet student")

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return an optimiser for the parameters of ``model``, the student."""
        return torch.optim.SGD(
            model.parameters(), self.learning_rate, self.momentum, weight_decay=self.weight_decay, nesterov=True
        )

    def rate(self, step: int) -> float:
        """Return the learning rate of a training step. ``step``: its number, counted from 0."""
        passed = sum(step >= share * self.steps for share in self.decay_at)
        return float(self.learning_rate * 0.1**passed)


class ForestStudent(RandomForest):
    """A random forest that is trained only on the labelled records."""

    @property
    def steps(self) -> int:
        """Return 1: a forest is trained in one step."""
        return 1

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return an empty forest, without trees."""
        del input_shape
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        return networks.Forest(0, 1, num_classes)

    def train(self, data: StudentData, model: torch.nn.Module, seed: int, watch: Watch = nobody) -> torch.nn.Module:
        """Return a forest trained on the labelled records."""
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        del model
        inputs, labels = as_table(data.labelled.numpy(force=True)), data.labels.numpy(force=True)
        forest = networks.forest_of(self.fit(inputs, labels, rng(seed, "forest student")), data.num_classes)
        watch(1, 0.0, forest)
        return forest


def _trained_on_labels(
    student: Supervised | ResidualStudent,
    data: StudentData,
    model: torch.nn.Module,
    seed: int,
    watch: Watch,
    *,
    purpose: str,
) -> torch.nn.Module:
    """Return a copy of ``model``, trained on strong views of the labelled records, in evaluation mode."""
    with torch_kept():
        seed_torch(seed, purpose)
        generator, model = generator_for(seed, purpose), copy.deepcopy(model)
        optimizer, labelled = student.optimizer(model), Batches(len(data.labels), student.batch_size, generator)
        parts: dict[str, TrainingPart] = {
            "model": model, "optimizer": optimizer, "labelled": labelled, "coins": Coins(generator)
        }  # fmt: skip
        for step in range(watch.begin(parts), student.steps):
            rate, batch = set_rate(optimizer, student.rate(step)), next(labelled)
            views = view(student.augmentation.strong, data.labelled[batch], generator)
            descend(optimizer, torch.nn.functional.cross_entropy(model.train()(views), data.labels[batch]))
            watch(step + 1, rate, model)
    return model.eval()


def predict(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the predicted class of each record, shape (n,)."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(batch).argmax(dim=1) for batch in torch.split(inputs, _EVALUATION_BATCH)])


class Batches:
    """An endless sequence of batches of ``batch_size`` records, or of all records if there are fewer.

    Each pass contains every record once, in random order.
    """

    def __init__(self, num_records: int, batch_size: int, generator: torch.Generator) -> None:
        self._num_records, self._size, self._generator = num_records, min(batch_size, num_records), generator
        self._order = torch.empty(0, dtype=torch.int64)

    def __next__(self) -> torch.Tensor:
        """Return the record indices of the next batch, int64, shape (size,)."""
        if len(self._order) < self._size:
            order = torch.randperm(self._num_records, generator=self._generator)
            self._order = torch.cat([self._order, order])
        batch, self._order = self._order[: self._size], self._order[self._size :]
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state: the indices of the next records, in order."""
        return {"order": self._order}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the order of the next records from a checkpoint."""
        self._order = state_dict["order"]


@dataclass(frozen=True)
class Coins:
    """Saves and restores the random generators of training: ``generator``, and torch's global ones (CPU and GPU)."""

    generator: torch.Generator

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators."""
        own = {"own": self.generator.get_state(), "global": torch.get_rng_state()}
        return {**own, "gpu": torch.cuda.get_rng_state()} if torch.cuda.is_available() else own

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the states of the generators."""
        self.generator.set_state(state_dict["own"])
        torch.set_rng_state(state_dict["global"])
        if "gpu" in state_dict:
            torch.cuda.set_rng_state(state_dict["gpu"])


def rise_and_cosine(step: int, steps: int) -> float:
    """Return the factor of the learning rate at ``step``: a half cosine from 1 to 0, with a warm-up of 20 steps."""
    return min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * step / steps)) / 2


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> float:
    """Set the learning rate of ``optimizer`` to ``rate``, and return ``rate``."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Take one optimiser step on ``loss``."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def move_average(average: torch.nn.Module, model: torch.nn.Module, keep: float) -> None:
    """Update a moving average of weights: ``average`` <- ``keep`` * ``average`` + (1 - ``keep``) * ``model``."""
    with torch.no_grad():
        for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            if value.dtype.is_floating_point:
                mean.lerp_(value, 1 - keep)
            else:
                mean.copy_(value)


def generator_for(seed: int, purpose: str) -> torch.Generator:
    """Return a torch generator of random numbers, seeded by ``seed`` and ``purpose`` (such as "student")."""
    return torch.Generator().manual_seed(int(rng(seed, purpose).integers(2**63)))
