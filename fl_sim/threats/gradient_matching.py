"""Gradient inversion by optimisation (Geiping et al. 2020, "Inverting Gradients", section 4, equation 4).

The attacker searches for inputs x that look like images, and whose gradient has the direction of the observed gradient
g. It minimises 1 - cos(gradient of the loss at x, g) + ``variation`` * TV(x) over images with pixels in [0, 1]. TV, the
total variation, is the mean absolute difference of neighbouring pixels. The optimiser is Adam on the sign of each
derivative. The learning rate is 0.1, and is divided by 10 after 3/8, 5/8 and 7/8 of all steps. The attacker knows the
labels, or has inferred them before (``fl_sim.threats.labels``).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fl_sim.training.optimizer import Moments
from fl_sim.types import Params

LEARNING_RATE = 0.1
"""The initial learning rate of the optimiser, in units of normalised inputs."""
_FALLS = 3 / 8, 5 / 8, 7 / 8
_TINY = 1e-30


@dataclass(frozen=True)
class PixelBounds:
    """The limits of normalised pixels: ``low`` and ``high`` are tensors that broadcast with (n, *input shape).

    Both are None for inputs that are not images, because such inputs have no limits.
    """

    low: torch.Tensor | None = None
    high: torch.Tensor | None = None

    def within(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``inputs``, clipped to the limits."""
        if self.low is None or self.high is None:
            return inputs
        return torch.maximum(torch.minimum(inputs, self.high), self.low)


def matched(
    model: nn.Module,
    seen: Params,
    labels: torch.Tensor,
    start: torch.Tensor,
    *,
    steps: int,
    variation: float,
    bounds: PixelBounds,
    show: Callable[[int], object] = lambda step: step,
) -> torch.Tensor:
    """Return inputs whose gradient has the direction of the observed gradient ``seen``, {name: gradient}.

    The norm of ``seen`` is ignored. ``model``: the attacked model, in evaluation mode. ``labels``: (n,), the labels
    of the inputs. ``start``: (n, *input shape), the inputs before the first step. ``steps``: the number of optimiser
    steps. ``show``: a function that is called with each step's index.
    """
    weights = {name: weight for name, weight in model.named_parameters() if name in seen}
    wanted = {name: seen[name].to(weight) for name, weight in weights.items()}
    inputs = bounds.within(start.clone())
    moments = Moments.like(inputs)
    length = torch.stack([value.square().sum() for value in wanted.values()]).sum().sqrt()
    for step in range(steps):
        show(step)
        inputs = inputs.detach().requires_grad_()
        loss = functional.cross_entropy(model(inputs), labels)
        made = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        product = torch.stack([(one * two).sum() for one, two in zip(made, wanted.values(), strict=True)]).sum()
        norm = torch.stack([one.square().sum() for one in made]).sum().sqrt()
        cost = 1 - product / (norm * length).clamp(min=_TINY)
        (slope,) = torch.autograd.grad(cost + variation * total_variation(inputs), inputs)
        rate = LEARNING_RATE * 0.1 ** sum(step >= fall * steps for fall in _FALLS)
        inputs = bounds.within(inputs.detach() - rate * moments.direction(slope.sign()))
    return inputs


def total_variation(images: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute difference of neighbouring pixels of ``images``, (n, channels, height, width).

    The result is 0 for inputs of another shape.
    """
    if images.ndim != 4:
        return images.new_zeros(())
    return images.diff(dim=2).abs().mean() + images.diff(dim=3).abs().mean()


def start_of(shape: tuple[int, ...], like: torch.Tensor, coins: np.random.Generator) -> torch.Tensor:
    """Return random inputs of ``shape`` with standard normal values, with the type and the device of ``like``."""
    return torch.from_numpy(coins.standard_normal(shape)).to(like)
