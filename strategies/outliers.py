"""Outliers that a client makes from its own images, and the loss on these outliers (Diao et al. 2023, section 4).

Image operations, such as blurring, destroy the typical features of an image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from fl_sim.importing import torch
from fl_sim.local_plan import Batch

NEVER: Final = -1e4
"""A logit that is so low that a softmax gives its class the probability 0."""


def outliers_of(images: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    """Return one outlier for each of ``images``, (n, channels, height, width), of the same shape.

    For each image one of five operations is drawn, with the frequencies of the released code.
    """
    chosen = generator.choice(len(_OPERATIONS), len(images))
    made = [_OPERATIONS[which](image, generator) for which, image in zip(chosen, images, strict=True)]
    return torch.stack(made) if made else images


def loss_of_unknown(batch: Batch, steps: int, rate: float) -> torch.Tensor:
    """Return the loss that trains the last class, "unknown", shape (): a sum of three mean cross-entropies.

    All three have the label "unknown". The first is over the records of the batch; the softmax omits each record's own
    class. The second is over ``batch.data["outliers"]``. The third is over these outliers after ``steps`` adversarial
    steps: steps of size ``rate`` along the sign of the gradient of their loss.
    """
    outliers, num_classes = batch.data["outliers"], batch.logits.shape[1]
    own = batch.labels[:, None] == torch.arange(num_classes, device=batch.labels.device)
    unknown, pushed = torch.full((len(outliers),), num_classes - 1, device=outliers.device), outliers
    for _ in range(steps):
        pushed = pushed + rate * batch.input_slopes(batch.params, pushed, unknown).sign()
    without = (batch.logits + NEVER * own.to(batch.logits.dtype)).log_softmax(1)[:, -1]
    both = batch.logits_of(batch.params, torch.cat([outliers, pushed])).log_softmax(1)[:, -1]
    return -2 * both.mean() - (batch.weights * without).sum()  # two means, of the outliers before and after the steps


def enlarged(image: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    """Return a random part of an image, 10 % to 33 % of its area, enlarged to the size of the image."""
    height, width = _part(image, generator.uniform(0.1, 0.33), generator)
    top, left = _place(image, height, width, generator)
    part = image[None, :, top : top + height, left : left + width]
    made: torch.Tensor = torch.nn.functional.interpolate(part, size=tuple(image.shape[1:]), mode="bilinear")
    return made[0]


def blurred(image: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    """Return the image, each pixel replaced by the mean of a window.

    The window is 3 to 9 pixels long and 1 to 5 pixels wide, in a random direction. The released code uses the weights
    of a Gaussian of 10 to 100 pixels, cut off at this window. Inside the window these weights are almost equal.
    """
    window = [2 * int(generator.integers(1, 5)) + 1, 2 * int(generator.integers(0, 3)) + 1]
    if generator.random() < 0.5:
        window.reverse()
    (high, wide), functional = window, torch.nn.functional
    padded = functional.pad(image[None], (wide // 2, wide // 2, high // 2, high // 2), mode="replicate")
    made: torch.Tensor = functional.avg_pool2d(padded, (high, wide), stride=1)
    return made[0]


def erased(image: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    """Return the image with a rectangle of 33 % to 50 % of its area set to 0."""
    height, width = _part(image, generator.uniform(0.33, 0.5), generator)
    top, left = _place(image, height, width, generator)
    made = image.clone()
    made[:, top : top + height, left : left + width] = 0
    return made


def pasted(image: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    """Return the image with a copy of half its rows or columns pasted elsewhere, or with its halves exchanged."""
    made, axis = image.clone(), int(generator.integers(1, 3))
    half = image.shape[axis] // 2
    if generator.random() < 1 / 3:
        return torch.roll(made, half, dims=axis)
    to, start = generator.integers(0, half, 2) if half > 1 else (0, 0)
    while abs(to - start) < half / 2 and half > 1:
        start = generator.integers(0, half)
    made.narrow(axis, int(to), half).copy_(image.narrow(axis, int(start), half))
    return made


def turned(image: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    """Return the image with two squares of half its size, side by side, turned by a multiple of 90 degrees."""
    half, made = min(image.shape[1:]) // 2, image.clone()
    top, quarters = int(generator.integers(0, max(half, 1))), int(generator.integers(1, 4))
    for left in (0, image.shape[2] - half):
        square = image[:, top : top + half, left : left + half]
        made[:, top : top + half, left : left + half] = torch.rot90(square, quarters, (1, 2))
    return made


_OPERATIONS: Final[tuple[Callable[[torch.Tensor, np.random.Generator], torch.Tensor], ...]] = (
    enlarged, blurred, erased, pasted, turned, pasted, turned,
)  # fmt: skip


def _part(image: torch.Tensor, share: float, generator: np.random.Generator) -> tuple[int, int]:
    """Return height and width of a random rectangle. Its area is about a ``share`` of the image's area.

    Height / width is random, from 3:4 to 4:3. Height and width are measured as shares of the image's sides.
    """
    ratio = np.exp(generator.uniform(np.log(3 / 4), np.log(4 / 3)))
    sides = (side * (share * one) ** 0.5 for side, one in zip(image.shape[1:], (ratio, 1 / ratio), strict=True))
    high, wide = (min(max(1, round(float(one))), side) for one, side in zip(sides, image.shape[1:], strict=True))
    return high, wide


def _place(image: torch.Tensor, height: int, width: int, generator: np.random.Generator) -> tuple[int, int]:
    """Return the upper left corner, (top, left), of a randomly placed rectangle inside the image."""
    top, left = (int(generator.integers(0, side - own + 1)) for side, own in
                 zip(image.shape[1:], (height, width), strict=True))  # fmt: skip
    return top, left
