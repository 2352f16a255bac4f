"""The weights of many clients' networks as one vector, and Adam on it (Kingma and Ba 2015): one step for a whole stack.

Every network's part begins at a multiple of 64 numbers: vectorised kernels do what is left over at the end of a vector
in another way, that rounds otherwise. So a client gets the same bits whoever else is in the stack.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import nn

BETAS: Final = (0.5, 0.999)
_ALIGNMENT: Final = 64


class Weights:
    """``vector`` holds the parameters of all ``nets``, which become views of it; what lies between stays zero.

    ``parts_of`` a vector like it are those of each net.
    """

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        self.sizes = [sum(weight.numel() for weight in net.parameters()) for net in nets]
        self.gaps = [torch.zeros(-size % _ALIGNMENT) for size in self.sizes]
        self.vector = torch.zeros(sum(self.sizes) + sum(map(len, self.gaps)))
        start = 0
        for net, gap in zip(nets, self.gaps, strict=True):
            for weight in net.parameters():
                place = self.vector[start : start + weight.numel()].view_as(weight)
                weight.data = place.copy_(weight.data)
                start += weight.numel()
            start += len(gap)

    def parts_of(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return each net's part of a vector like ``vector``, without what lies between."""
        parts = torch.split(vector, [size + len(gap) for size, gap in zip(self.sizes, self.gaps, strict=True)])
        return [part[:size] for part, size in zip(parts, self.sizes, strict=True)]

    def joined(self, parts: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Return what is given for each network, in the order of its parameters, as one vector like ``vector``."""
        return torch.cat([one.reshape(-1) for part, gap in zip(parts, self.gaps, strict=True) for one in (*part, gap)])


class Adam:
    """torch.optim's costs over a second of imports at first use."""

    def __init__(self, weights: Weights, learning_rate: float) -> None:
        self.weights, self.learning_rate, self.steps = weights, learning_rate, 0
        self.mean = torch.zeros_like(weights.vector)
        self.square = torch.zeros_like(weights.vector)

    @torch.no_grad()
    def step(self, gradients: Iterable[Sequence[torch.Tensor]]) -> None:
        """Move the weights by each network's gradient, given as tensors in the order of its parameters."""
        self.steps += 1
        first, second = (1 - beta**self.steps for beta in BETAS)
        gradient = self.weights.joined(gradients)
        self.mean.lerp_(gradient, 1 - BETAS[0])
        self.square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        spread = (self.square / second).sqrt_().add_(1e-8)
        self.weights.vector.addcdiv_(self.mean, spread, value=-self.learning_rate / first)
