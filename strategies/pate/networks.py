"""Networks of PATE's students.

The students' settings import this module only when they need a network, because torch loads slowly.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestClassifier

_WIDENING: Final = 4  # in a bottleneck block: number of output channels / number of inner channels
_LEAST: Final = 1e-3
"""The least probability of a class in a forest's output, so that no cross-entropy is infinite."""


def student_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a small convolutional network with BatchNorm, whose statistics come from public records only."""
    channels, height, width = input_shape

    def block(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.1)]

    flat = 64 * (-(-height // 4) // 2) * (-(-width // 4) // 2)
    return nn.Sequential(
        *block(channels, 32, 5, 2), *block(32, 64, 3, 2), *block(64, 64, 3, 1),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(flat, num_classes),
    )  # fmt: skip


def gan_classifier(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the MNIST classifier of Salimans et al. 2016: six weight-normalised linear layers with Gaussian noise.

    The paper's noise of 0.3 on pixels from 0 to 1 corresponds to about 1 on normalised pixels.
    """
    widths = [int(torch.Size(input_shape).numel()), 1000, 500, 250, 250, 250]
    layers: list[nn.Module] = [nn.Flatten(), GaussianNoise(1.0)]
    for inputs, outputs in pairwise(widths):
        layers += [_normalised(nn.Linear(inputs, outputs)), nn.ReLU(), GaussianNoise(0.5)]
    return nn.Sequential(*layers, _normalised(nn.Linear(widths[-1], num_classes)))


def conv_classifier(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the CIFAR-10 classifier of Salimans et al. 2016, with six convolutions instead of nine."""
    layers: list[nn.Module] = [nn.Dropout(0.2)]
    inputs = input_shape[0]
    for outputs, stride, drop in ((32, 1, 0.0), (32, 2, 0.5), (64, 1, 0.0), (64, 2, 0.5), (128, 1, 0.0), (128, 1, 0.0)):
        layers += [_normalised(nn.Conv2d(inputs, outputs, 3, stride, 1)), nn.LeakyReLU(0.2)]
        layers += [nn.Dropout(drop)] if drop else []
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), _normalised(nn.Linear(inputs, num_classes)))


def _normalised(layer: nn.Linear | nn.Conv2d) -> nn.Module:
    """Return ``layer`` with weight normalisation and the paper's random initial weight directions."""
    nn.init.normal_(layer.weight, std=0.05)  # short weight vectors: then a step of Adam changes their direction more
    normalised: nn.Module = nn.utils.parametrizations.weight_norm(layer)
    return normalised


class GaussianNoise(nn.Module):
    """A layer that adds noise N(0, ``std``^2) to its inputs in training mode."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``inputs`` plus noise in training mode, and ``inputs`` unchanged in evaluation mode."""
        return inputs + self.std * torch.randn_like(inputs) if self.training else inputs


def start_from(model: nn.Module, records: torch.Tensor) -> None:
    """Initialise weight-normalised layers of a ``Sequential`` to outputs of mean 0 and std 1 on ``records``.

    After this call the lengths of weight vectors are fixed, except in the last layer, as in the program of Salimans et
    al. 2016.
    """
    length = None
    with torch.no_grad():
        for layer in model.children():
            if nn.utils.parametrize.is_parametrized(layer):
                weights, outputs = dict(layer.named_parameters()), layer(records)
                over = [axis for axis in range(outputs.ndim) if axis != 1]
                spread = outputs.std(dim=over).clamp(min=1e-6)
                weights["bias"].sub_(outputs.mean(dim=over)).div_(spread)
                length = weights["parametrizations.weight.original0"]
                length.div_(spread.view(-1, *[1] * (length.ndim - 1)))
                length.requires_grad = False
            records = layer(records)
    if length is not None:
        length.requires_grad = True


def forger(shape: torch.Size, latent_dim: int) -> nn.Module:
    """Return a GAN's generator network, with outputs from 0 to 1.

    It has transposed convolutions for colour images, else linear layers.
    """
    if len(shape) == 3 and shape[0] == 3 and shape[1] % 8 == shape[2] % 8 == 0:
        height, width = shape[1] // 8, shape[2] // 8
        return nn.Sequential(
            nn.Linear(latent_dim, 128 * height * width), nn.BatchNorm1d(128 * height * width), nn.ReLU(),
            nn.Unflatten(1, (128, height, width)),
            nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip
    return nn.Sequential(
        nn.Linear(latent_dim, 500), nn.BatchNorm1d(500), nn.Softplus(),
        nn.Linear(500, 500), nn.BatchNorm1d(500), nn.Softplus(),
        nn.Linear(500, int(shape.numel())), nn.Sigmoid(),
    )  # fmt: skip


def residual_network(
    input_shape: tuple[int, ...], num_classes: int, blocks: int, width: int, norm: str, *, deep: bool
) -> nn.Module:
    """Return a residual network with three stages of ``blocks`` blocks, and ``width`` channels in the first stage.

    The second stage has 2 ``width`` channels, and the third one 4 ``width``.
    """
    layers: list[nn.Module] = [_conv(input_shape[0], width, 3), _norm(norm, width), nn.ReLU()]
    inputs = width
    for stage in range(3):
        for number in range(blocks):
            stride = 2 if stage and not number else 1
            block = StudentBlock(inputs, width * 2**stage, stride, norm, deep=deep)
            layers.append(block)
            inputs = block.outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))


class StudentBlock(nn.Module):
    """A residual block: a bottleneck block if ``deep`` is True, else a basic block."""

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
        """Return outputs of shape (batch, outputs, h / stride, w / stride) for inputs (batch, inputs, h, w)."""
        return torch.relu(self.body(inputs) + self.shortcut(inputs))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(8, channels)


class Forest(nn.Module):
    """Decision trees as padded tables, one row for each tree. A node whose ``left`` child is the node itself is a leaf.

    At a node, a record goes to the left child if the node's ``feature`` of the record is at most ``threshold``. Else
    the record goes to the right child. ``value``: the class probabilities of a leaf.
    """

    def __init__(self, num_trees: int, num_nodes: int, num_classes: int) -> None:
        super().__init__()
        shape = (num_trees, num_nodes)
        for name in ("feature", "left", "right"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int64))
        self.register_buffer("threshold", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("value", torch.zeros((*shape, num_classes)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of each record's class probabilities, shape (records, classes).

        The probabilities are means over all decision trees, but at least ``_LEAST``, so that no logarithm is infinite.
        """
        rows = inputs.flatten(1)
        tables = dict(self.named_buffers())
        trees = torch.arange(len(tables["feature"]), device=rows.device).expand(len(rows), -1)
        node = torch.zeros_like(trees)
        while True:
            smaller = rows.gather(1, tables["feature"][trees, node]) <= tables["threshold"][trees, node]
            below = torch.where(smaller, tables["left"][trees, node], tables["right"][trees, node])
            if torch.equal(below, node):
                return tables["value"][trees, node].mean(dim=1).clamp(min=_LEAST).log()
            node = below


def forest_of(grown: "RandomForestClassifier", num_classes: int) -> Forest:
    """Return scikit-learn's forest ``grown`` as tensors. Classes without training records get probability 0."""
    trees = [one.tree_ for one in grown.estimators_]
    forest = Forest(len(trees), max(tree.node_count for tree in trees), num_classes)
    tables = dict(forest.named_buffers())
    seen = torch.from_numpy(np.asarray(grown.classes_, dtype=np.int64))
    for number, tree in enumerate(trees):
        own, is_leaf = np.arange(tree.node_count), tree.children_left < 0
        columns = {
            "feature": np.where(is_leaf, 0, tree.feature),
            "threshold": np.where(is_leaf, 0.0, tree.threshold),
            "left": np.where(is_leaf, own, tree.children_left),
            "right": np.where(is_leaf, own, tree.children_right),
        }
        for name, column in columns.items():
            tables[name][number, : tree.node_count] = torch.from_numpy(column)
        shares = tree.value[:, 0] / tree.value[:, 0].sum(axis=1, keepdims=True)
        tables["value"][number, : tree.node_count, seen] = torch.from_numpy(shares).to(torch.float32)
    return forest
