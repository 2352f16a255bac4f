"""PATE's students: a model trained on a public pool, a few records of which have noisy labels, and nothing else.

``Supervised`` uses the labelled records alone. ``FixMatch`` (Sohn et al. 2020, algorithm 1) also learns, from strongly
moved views of all records, what it is sure of on weakly moved ones; here it also doubts its labels once (a network that
has not learnt them by heart yet disagrees with the wrong ones), and believes neighbours that agree more than itself.
All is post-processing of the labels: no epsilon.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from pydantic import Field

from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.seeding import rng, seed_torch, torch_kept
from fl_sim.settings import Settings
from strategies.pate.augmentation import Augmentation
from strategies.pate.neighbours import spread

_EVALUATION_BATCH = 500
_Move: TypeAlias = "Callable[[torch.Tensor, torch.Generator], torch.Tensor]"


class Part(Protocol):
    """Something that training changes: a network, an optimiser, what batches or coins come next."""

    def state_dict(self) -> dict[str, Any]:
        """Return all of it by name: tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Become what ``state_dict`` said."""
        ...


class Watch(Protocol):
    """Whoever follows a student's training, and may keep where it stands."""

    def begin(self, parts: Mapping[str, Part]) -> int:
        """Return how many steps were taken before this process; ``parts`` are then as they were after these.

        ``parts``: all that training changes, by name, as it is before the first step. Who has never heard of them is
        no worse off: a student that does not call this begins anew after a stop.
        """
        ...

    def __call__(self, step: int, learning_rate: float, model: torch.nn.Module) -> None:
        """Hear of a step: how many there were, its learning rate, the model as it would be returned now."""
        ...


class Nobody:
    """Watches nothing."""

    def begin(self, parts: Mapping[str, Part]) -> int:
        """Return 0."""
        del parts
        return 0

    def __call__(self, step: int, learning_rate: float, model: torch.nn.Module) -> None:
        """Ignore a step."""


nobody = Nobody()


@dataclass(frozen=True)
class StudentData:
    """What a student may see: all of it is public but for the noise in ``labels``.

    ``labelled``: (n, *input shape), normalised, with ``labels`` (n,) in 0..num_classes-1; ``unlabelled``: (m, *input
    shape), which may hold the labelled records again.
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
        """Return the same on ``device``."""
        labelled, labels, unlabelled = (part.to(device) for part in (self.labelled, self.labels, self.unlabelled))
        return StudentData(labelled, labels, unlabelled, self.num_classes)


class Student(Protocol):
    """A way to train a student."""

    @property
    def steps(self) -> int:
        """Return how many steps training takes; a run's rounds are equal parts of them."""
        ...

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return the student before training, with weights from torch's global generator."""
        ...

    def train(self, data: StudentData, model: torch.nn.Module, seed: int, watch: Watch = nobody) -> torch.nn.Module:
        """Return a trained copy of ``model``, in evaluation mode; it may keep running statistics of the public pool."""
        ...


class Supervised(Settings):
    """AdamW on weakly moved views of the labelled records; ``batch_size`` of them a step.

    ``steps``: of the optimiser. ``learning_rate`` and ``weight_decay``: AdamW's. ``augmentation``: how the views are
    moved.
    """

    kind: Literal["supervised"] = "supervised"
    steps: int = Field(400, ge=1)
    batch_size: int = Field(50, ge=1)
    learning_rate: float = Field(4e-3, gt=0)
    weight_decay: float = Field(0.02, ge=0)
    augmentation: Augmentation = Augmentation()

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return ``student_cnn`` for images, a perceptron for tables of numbers."""
        from fl_sim import models  # noqa: PLC0415 (needs torch as it is imported)
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        build = networks.student_cnn if len(input_shape) == 3 else models.mlp
        return build(input_shape, num_classes)

    def train(self, data: StudentData, model: torch.nn.Module, seed: int, watch: Watch = nobody) -> torch.nn.Module:
        """Return a trained copy of ``model``, in evaluation mode."""
        with torch_kept():
            seed_torch(seed, "supervised student")
            generator = generator_for(seed, "supervised student")
            model = copy.deepcopy(model)
            optimizer = torch.optim.AdamW(model.parameters(), self.learning_rate, weight_decay=self.weight_decay)
            labelled = Batches(len(data.labels), self.batch_size, generator)
            parts: dict[str, Part] = {
                "model": model,
                "optimizer": optimizer,
                "labelled": labelled,
                "coins": Coins(generator),
            }
            for step in range(watch.begin(parts), self.steps):
                rate = set_rate(optimizer, self.learning_rate * _rise_and_cosine(step, self.steps))
                batch = next(labelled)
                views = view(self.augmentation.strong, data.labelled[batch], generator)
                descend(optimizer, torch.nn.functional.cross_entropy(model.train()(views), data.labels[batch]))
                watch(step + 1, rate, model)
        return model.eval()


class FixMatch(Settings):
    """Pseudo-labels of weak views, where one has at least ``threshold`` probability, teach the strong views.

    ``unlabelled_ratio``: unlabelled records per labelled one in a batch. ``neighbours``: labels spread over a graph of
    records that are alike first, and where they are sure of a record, that is its pseudo-label throughout.
    ``doubt_after``: the share of the steps after which labels that the network disagrees with are left out, once; 1
    trusts all. ``averaging``: of the weights, for the model that is returned. ``steps``: of the optimiser, with
    ``batch_size`` labelled records each. ``learning_rate`` and ``weight_decay``: AdamW's. ``augmentation``: how the
    strong views are moved.
    """

    kind: Literal["fixmatch"] = "fixmatch"
    steps: int = Field(900, ge=1)
    batch_size: int = Field(50, ge=1)
    unlabelled_ratio: int = Field(4, ge=1)
    threshold: float = Field(0.9, gt=0, lt=1)
    learning_rate: float = Field(4e-3, gt=0)
    weight_decay: float = Field(0.02, ge=0)
    averaging: float = Field(0.99, ge=0, lt=1)
    neighbours: bool = True
    doubt_after: float = Field(0.06, ge=0, le=1)
    augmentation: Augmentation = Augmentation(rotation=15, scale=0.12, shear=0.2, shift=0.1, elastic=0.05, erase=0.2)

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return ``student_cnn``. Raises UserError for records that are no images."""
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        if len(input_shape) != 3:
            raise UserError(
                f"student fixmatch learns from moved views of images, and these records have shape {input_shape}: take "
                "student supervised or random-forest"
            )
        return networks.student_cnn(input_shape, num_classes)

    def train(self, data: StudentData, model: torch.nn.Module, seed: int, watch: Watch = nobody) -> torch.nn.Module:
        """Return a trained copy of ``model``, in evaluation mode."""
        if len(data.unlabelled) == 0 or data.unlabelled.ndim != 4:
            raise UserError(
                f"student fixmatch learns from unlabelled images, (n, channels, height, width), and the pool has shape "
                f"{tuple(data.unlabelled.shape)}: take supervised"
            )
        with torch_kept():
            seed_torch(seed, "fixmatch student")
            generator = generator_for(seed, "fixmatch student")
            fast = copy.deepcopy(model).to(memory_format=torch.channels_last)  # a third less time on a CPU
            return _FixMatchRun(self, data, fast, generator).result(watch).to(memory_format=torch.contiguous_format)


class _FixMatchRun:
    """One training: the network, the average of its weights, how often it predicts each class, what neighbours say."""

    def __init__(
        self, settings: FixMatch, data: StudentData, model: torch.nn.Module, generator: torch.Generator
    ) -> None:
        self.settings, self.data, self.model, self.generator = settings, data, model, generator
        self.average = copy.deepcopy(model).eval()
        self.trusted = torch.ones(len(data.labels))
        self.predicted = torch.full((data.num_classes,), 1 / data.num_classes)
        self.spread = torch.zeros(len(data.unlabelled), data.num_classes, device=data.unlabelled.device)
        if settings.neighbours:
            shares = spread(torch.cat([data.labelled, data.unlabelled]), data.labels, data.num_classes)
            shares = shares[len(data.labels) :].square()  # the shares themselves are too modest
            self.spread = shares / shares.sum(dim=1, keepdim=True)

    def result(self, watch: Watch) -> torch.nn.Module:
        settings, data = self.settings, self.data
        optimizer = torch.optim.AdamW(
            self.model.parameters(),
            settings.learning_rate,
            betas=(0.9, 0.99),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        labelled = Batches(len(data.labels), settings.batch_size, self.generator)
        unlabelled = Batches(len(data.unlabelled), settings.batch_size * settings.unlabelled_ratio, self.generator)
        doubt = round(settings.doubt_after * settings.steps)
        parts: dict[str, Part] = {
            "model": self.model, "average": self.average, "optimizer": optimizer, "labelled": labelled,
            "unlabelled": unlabelled, "coins": Coins(self.generator), "beliefs": self,
        }  # fmt: skip
        for step in range(watch.begin(parts), settings.steps):
            if step == doubt:
                self.trusted = self._agreement()
            rate = set_rate(optimizer, settings.learning_rate * _rise_and_cosine(step, settings.steps))
            descend(optimizer, self._loss(next(labelled), next(unlabelled)))
            move_average(self.average, self.model, min(settings.averaging, (step + 1) / (step + 10)))
            watch(step + 1, rate, self.average)
        return self.average

    def state_dict(self) -> dict[str, Any]:
        """Return what it believes of its labels and of the classes."""
        return {"trusted": self.trusted, "predicted": self.predicted}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Believe what it did."""
        self.trusted, self.predicted = state_dict["trusted"], state_dict["predicted"]

    def _loss(self, labelled: torch.Tensor, unlabelled: torch.Tensor) -> torch.Tensor:
        settings, data, moves = self.settings, self.data, self.settings.augmentation
        public, labels = data.unlabelled[unlabelled], data.labels[labelled]
        self.model.train()
        with torch.no_grad():
            guess = self._aligned(self.model(view(moves.weak, public, self.generator)).softmax(dim=1))
            given = self.spread[unlabelled]
            guess = torch.where(given.amax(dim=1, keepdim=True) >= settings.threshold, given, guess)
        sure, pseudo = guess.max(dim=1)
        views = [view(moves.strong, records, self.generator) for records in (data.labelled[labelled], public)]
        logits = self.model(torch.cat(views))
        ours, theirs = logits[: len(labelled)], logits[len(labelled) :]
        supervised = torch.nn.functional.cross_entropy(ours, labels, reduction="none") * self.trusted[labelled]
        consistent = torch.nn.functional.cross_entropy(theirs, pseudo, reduction="none") * (sure >= settings.threshold)
        return supervised.mean() + consistent.mean()

    def _aligned(self, guess: torch.Tensor) -> torch.Tensor:
        """Return guesses whose classes are about equally frequent (distribution alignment, Berthelot et al. 2020)."""
        self.predicted = 0.99 * self.predicted + 0.01 * guess.mean(dim=0)
        aligned = guess / self.predicted
        return aligned / aligned.sum(dim=1, keepdim=True)

    def _agreement(self) -> torch.Tensor:
        """Return 1 for labels that the averaged network predicts itself, 0 for others; all 1 where it knows little."""
        agrees = (predict(self.average, self.data.labelled) == self.data.labels).float()
        return agrees if agrees.mean() >= 0.5 else torch.ones_like(agrees)


def predict(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the class of each record, shape (n,)."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(batch).argmax(dim=1) for batch in torch.split(inputs, _EVALUATION_BATCH)])


def view(move: _Move, records: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return moved images; records that are no images (tables of numbers) stay as they are."""
    return move(records, generator) if records.ndim == 4 else records


class Batches:
    """Batches for ever, of ``batch_size`` or all there are; every record once before any comes again."""

    def __init__(self, num_records: int, batch_size: int, generator: torch.Generator) -> None:
        self._num_records, self._size, self._generator = num_records, min(batch_size, num_records), generator
        self._order = torch.empty(0, dtype=torch.int64)

    def __next__(self) -> torch.Tensor:
        """Return the next batch's places, int64, (size,)."""
        if len(self._order) < self._size:
            order = torch.randperm(self._num_records, generator=self._generator)
            self._order = torch.cat([self._order, order])
        batch, self._order = self._order[: self._size], self._order[self._size :]
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the order of those that come next."""
        return {"order": self._order}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on in that order."""
        self._order = state_dict["order"]


@dataclass(frozen=True)
class Coins:
    """All that chance decides: ``generator``, and torch's own generators, of the processor and of the GPU in use."""

    generator: torch.Generator

    def state_dict(self) -> dict[str, Any]:
        """Return what comes next."""
        own = {"own": self.generator.get_state(), "global": torch.get_rng_state()}
        return {**own, "gpu": torch.cuda.get_rng_state()} if torch.cuda.is_available() else own

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Draw that next."""
        self.generator.set_state(state_dict["own"])
        torch.set_rng_state(state_dict["global"])
        if "gpu" in state_dict:
            torch.cuda.set_rng_state(state_dict["gpu"])


def _rise_and_cosine(step: int, steps: int) -> float:
    """Return what this step's learning rate is multiplied with: a short rise, then half a cosine."""
    return min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * step / steps)) / 2


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> float:
    """Set the learning rate, and return it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Take one step."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def move_average(average: torch.nn.Module, model: torch.nn.Module, keep: float) -> None:
    """Move the weights and statistics of ``average`` towards those of ``model``, keeping the share ``keep``."""
    with torch.no_grad():
        for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            if value.dtype.is_floating_point:
                mean.lerp_(value, 1 - keep)
            else:
                mean.copy_(value)


def generator_for(seed: int, purpose: str) -> torch.Generator:
    """Return torch's generator for ``purpose``, as ``seeding.rng`` is numpy's."""
    return torch.Generator().manual_seed(int(rng(seed, purpose).integers(2**63)))
