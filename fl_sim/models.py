"""The networks of the experiments, each a function from (input shape, classes) to a fresh ``nn.Module``."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.model_names import GRU, known_model
from fl_sim.own_model import build_own
from fl_sim.running_statistics import all_norms_in, norms_in
from fl_sim.seeding import seed_torch, torch_alone
from fl_sim.sequences import GatedRecurrent
from fl_sim.types import BatchNorm

Shape: TypeAlias = tuple[int, ...]
Factory: TypeAlias = Callable[[Shape, int], nn.Module]


def niid_cnn(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return NIID-Bench's CNN: conv5x5(6)-pool-conv5x5(16)-pool-120-84-classes (Li et al. 2022, section 5).

    44,426 parameters on 28x28x1. Images of at least 16x16.
    """
    channels, height, width = _image(input_shape, "niid-cnn", 16)
    flat = 16 * _after_pool(_after_pool(height)) * _after_pool(_after_pool(width))
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes),
    )  # fmt: skip


def niid_mlp(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return NIID-Bench's perceptron for tables of numbers: three hidden layers, 32, 16 and 8 wide."""
    return _perceptron(input_shape, (32, 16, 8), num_classes)


def dafl_cnn(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return DA-FL's classifier: two 3x3 convolutions (32, 64 channels, padded) with pooling, and two linear layers.

    The paper says "2 conv + 2 FC" and no sizes. Images of at least 4x4, so it also fits the embedded 8x8 digits.
    """
    channels, height, width = _image(input_shape, "dafl-cnn", 4)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), 128), nn.ReLU(), nn.Linear(128, num_classes),
    )  # fmt: skip


def mlp(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return a perceptron with two hidden layers, 600 and 100 wide (784-600-100-10 on MNIST)."""
    return _perceptron(input_shape, (600, 100), num_classes)


def two_nn(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return "2NN" of McMahan et al. 2017 (section 3), which FedVLS' program has, too: two hidden layers of 200."""
    return _perceptron(input_shape, (200, 200), num_classes)


def logistic(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(_flat(input_shape), num_classes))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm and a shortcut (He et al. 2016, basic block; Wu and He 2018 for the norm)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False), nn.GroupNorm(8, channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.GroupNorm(8, channels),
        )  # fmt: skip
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (batch, channels_in, h, w) to (batch, channels, h / stride, w / stride)."""
        return torch.relu(self.body(inputs) + self.shortcut(inputs))


def resnet(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return ResNet-8 (16, 32, 64 channels) with GroupNorm: no running statistics that clients had to average."""
    channels, _, _ = _image(input_shape, "resnet", 4)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU(),
        ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes),
    )  # fmt: skip


MODELS: dict[str, Factory] = {
    "niid-cnn": niid_cnn, "niid-mlp": niid_mlp, "dafl-cnn": dafl_cnn, "mlp": mlp, "2nn": two_nn, "logistic": logistic,
    "resnet": resnet,
}  # fmt: skip


def default_model(input_shape: Shape, vocabulary: int = 0) -> str:
    """Return the model a run uses when none is named: the papers' CNN where it fits, else the CNN that always does."""
    if vocabulary:
        return GRU
    if len(input_shape) != 3:
        return "mlp"
    return "niid-cnn" if min(input_shape[1:]) >= 16 else "dafl-cnn"


def build(
    name: str,
    input_shape: Shape,
    num_classes: int,
    seed: int,
    *,
    batch_norm: BatchNorm = "none",
    vocabulary: int = 0,
    trial: torch.Tensor | None = None,
) -> nn.Module:
    """Build the model called ``name``: one of ours, or ``package.module:factory`` of the user's own.

    ``vocabulary``: above 0, records are sequences of tokens below it, which take "gru" or a model of the user's own.
    ``trial``: two records that the latter is tried on.
    Initial weights depend on ``seed`` alone. Raises UserError for an unknown name, for a model of the user's own
    that cannot be trained here (``build_own``), and for one without BatchNorm layers where ``batch_norm`` says what
    becomes of them.
    """
    own = build_own(name, input_shape, num_classes, seed, batch_norm, vocabulary, trial) if ":" in name else None
    if batch_norm != "none" and (own is None or not norms_in(own)):
        kept = own is not None and all_norms_in(own)
        has = "keeps all its BatchNorm layers in evaluation mode" if kept else "has no BatchNorm layers"
        raise UserError(f"model {name!r} {has}: leave local.batch_norm={batch_norm} out")
    if own is not None:
        return own
    if (known_model(name) == GRU) != (vocabulary > 0):
        what = "these records are no other" if vocabulary else "it is given none here"
        raise UserError(
            f"model {GRU!r} alone is for sequences of tokens, and {what}: leave model out, or take another method"
        )
    factory = partial(_gru, vocabulary) if vocabulary else MODELS[name]
    with torch_alone():
        seed_torch(seed, "model")
        return factory(input_shape, num_classes)


def _gru(vocabulary: int, input_shape: Shape, num_classes: int) -> nn.Module:
    del input_shape  # of any length
    return GatedRecurrent(vocabulary, num_classes)


def _image(input_shape: Shape, name: str, smallest: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise UserError(
            f"model {name!r} needs images of at least {smallest}x{smallest}, these records have shape {input_shape}; "
            "mlp, 2nn and logistic take any shape, dafl-cnn images from 4x4"
        )
    return input_shape[0], input_shape[1], input_shape[2]


def _after_pool(size: int) -> int:
    return (size - 4) // 2


def _perceptron(input_shape: Shape, hidden: tuple[int, ...], num_classes: int) -> nn.Module:
    widths = (_flat(input_shape), *hidden)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], num_classes))


def _flat(input_shape: Shape) -> int:
    return int(torch.Size(input_shape).numel())
