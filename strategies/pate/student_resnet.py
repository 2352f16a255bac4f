"""Diff-RN's student: a residual network trained on the noisy labels alone by momentum SGD with step decay.

Residual networks: He et al. 2016, section 4.2 (three stages on small images); bottleneck blocks: their figure 5. All
records and their statistics are public, so BatchNorm is sound here.
"""

import copy
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from fl_sim.errors import UserError
from fl_sim.seeding import seed_torch, torch_kept
from fl_sim.settings import Settings
from strategies.pate.augmentation import Augmentation
from strategies.pate.student import StudentData, Watch, batches, descend, generator_for, nobody, set_rate, view

_BOTTLENECK_FROM = 6
_WIDENING = 4


class ResidualStudent(Settings):
    """``blocks`` residual blocks in each of three stages of ``width``, 2 ``width`` and 4 ``width`` channels.

    ``block`` "auto": basic blocks (two 3x3 convolutions) up to 5 a stage, bottleneck blocks (1x1, 3x3, 1x1) from 6 on.
    ``decay_at``: after these shares of ``steps`` the learning rate falls to a tenth. ``augmentation``: moves of the
    labelled images; the default shifts by up to 4 of 32 pixels and mirrors.
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

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the residual network. Raises UserError for records that are no images of at least 4x4."""
        if len(input_shape) != 3 or min(input_shape[1:]) < 4:
            raise UserError(f"student resnet needs images of at least 4x4, these records have shape {input_shape}")
        deep = self.block == "bottleneck" or (self.block == "auto" and self.blocks >= _BOTTLENECK_FROM)
        layers: list[nn.Module] = [_conv(input_shape[0], self.width, 3), _norm(self.norm, self.width), nn.ReLU()]
        inputs = self.width
        for stage in range(3):
            width = self.width * 2**stage
            for number in range(self.blocks):
                stride = 2 if stage and not number else 1
                block = _Block(inputs, width, stride, self.norm, deep=deep)
                layers.append(block)
                inputs = block.outputs
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))

    def train(self, data: StudentData, model: nn.Module, seed: int, watch: Watch = nobody) -> nn.Module:
        """Return a trained copy of ``model``, in evaluation mode."""
        with torch_kept():
            seed_torch(seed, "resnet student")
            generator, model = generator_for(seed, "resnet student"), copy.deepcopy(model)
            optimizer = torch.optim.SGD(
                model.parameters(), self.learning_rate, self.momentum, weight_decay=self.weight_decay, nesterov=True
            )
            labelled = batches(len(data.labels), self.batch_size, generator)
            for step in range(self.steps):
                rate = set_rate(optimizer, self.rate(step))
                batch = next(labelled)
                views = view(self.augmentation.strong, data.labelled[batch], generator)
                descend(optimizer, functional.cross_entropy(model.train()(views), data.labels[batch]))
                watch(step + 1, rate, model)
        return model.eval()

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, which are numbered from 0."""
        passed = sum(step >= share * self.steps for share in self.decay_at)
        return float(self.learning_rate * 0.1**passed)


class _Block(nn.Module):
    """A residual block: basic, or bottleneck where ``deep``."""

    def __init__(self, inputs: int, width: int, stride: int, norm: str, *, deep: bool) -> None:
        super().__init__()
        self.outputs = width * _WIDENING if deep else width
        if deep:
            body = [
                _conv(inputs, width, 1), _norm(norm, width), nn.ReLU(),
                _conv(width, width, 3, stride), _norm(norm, width), nn.ReLU(),
                _conv(width, self.outputs, 1), _norm(norm, self.outputs),
            ]  # fmt: skip
        else:
            body = [
                _conv(inputs, width, 3, stride), _norm(norm, width), nn.ReLU(),
                _conv(width, width, 3), _norm(norm, width),
            ]  # fmt: skip
        self.body = nn.Sequential(*body)
        same = stride == 1 and inputs == self.outputs
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(_conv(inputs, self.outputs, 1, stride), _norm(norm, self.outputs))
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        return torch.relu(self.body(inputs) + self.shortcut(inputs))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(8, channels)
