"""Diff-RN's student: a residual network trained on the noisy labels alone by momentum SGD with step decay.

Residual networks: He et al. 2016, section 4.2 (three stages on small images); bottleneck blocks: their figure 5. All
records and their statistics are public, so BatchNorm is sound here.
"""

from __future__ import annotations

import copy
from typing import Annotated, Literal

from pydantic import Field

from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.seeding import seed_torch, torch_kept
from fl_sim.settings import Settings
from strategies.pate.augmentation import Augmentation
from strategies.pate.student import (
    Batches,
    Coins,
    Part,
    StudentData,
    Watch,
    descend,
    generator_for,
    nobody,
    set_rate,
    view,
)

_BOTTLENECK_FROM = 6


class ResidualStudent(Settings):
    """``blocks`` residual blocks in each of three stages of ``width``, 2 ``width`` and 4 ``width`` channels.

    ``block`` "auto": basic blocks (two 3x3 convolutions) up to 5 a stage, bottleneck blocks (1x1, 3x3, 1x1) from 6 on.
    ``decay_at``: after these shares of ``steps`` the learning rate falls to a tenth. ``augmentation``: moves of the
    labelled images; the default shifts by up to 4 of 32 pixels and mirrors. ``norm``: batch or group normalisation.
    ``batch_size``: labelled records in a step. ``learning_rate``, ``momentum`` and ``weight_decay``: SGD's.
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
        """Return the residual network. Raises UserError for records that are no images of at least 4x4."""
        if len(input_shape) != 3 or min(input_shape[1:]) < 4:
            raise UserError(f"student resnet needs images of at least 4x4, these records have shape {input_shape}")
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        deep = self.block == "bottleneck" or (self.block == "auto" and self.blocks >= _BOTTLENECK_FROM)
        return networks.residual_network(input_shape, num_classes, self.blocks, self.width, self.norm, deep=deep)

    def train(self, data: StudentData, model: torch.nn.Module, seed: int, watch: Watch = nobody) -> torch.nn.Module:
        """Return a trained copy of ``model``, in evaluation mode."""
        with torch_kept():
            seed_torch(seed, "resnet student")
            generator, model = generator_for(seed, "resnet student"), copy.deepcopy(model)
            optimizer = torch.optim.SGD(
                model.parameters(), self.learning_rate, self.momentum, weight_decay=self.weight_decay, nesterov=True
            )
            labelled = Batches(len(data.labels), self.batch_size, generator)
            parts: dict[str, Part] = {
                "model": model,
                "optimizer": optimizer,
                "labelled": labelled,
                "coins": Coins(generator),
            }
            for step in range(watch.begin(parts), self.steps):
                rate = set_rate(optimizer, self.rate(step))
                batch = next(labelled)
                views = view(self.augmentation.strong, data.labelled[batch], generator)
                descend(optimizer, torch.nn.functional.cross_entropy(model.train()(views), data.labels[batch]))
                watch(step + 1, rate, model)
        return model.eval()

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, which are numbered from 0."""
        passed = sum(step >= share * self.steps for share in self.decay_at)
        return float(self.learning_rate * 0.1**passed)
