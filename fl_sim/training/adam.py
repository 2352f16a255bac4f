"""Adam and AdamW: the steps of torch.optim, for one client and for a stack of them."""

from dataclasses import dataclass
from typing import Self

import torch

BETAS = 0.9, 0.999
"""What part of the running means of gradients and of their squares is kept in a step."""

EPSILON = 1e-8


@dataclass(frozen=True)
class Moments:
    """The running means of gradients and of their squares, and the steps taken, (1,): written to in place."""

    first: torch.Tensor
    second: torch.Tensor
    num_steps: torch.Tensor

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Self:
        """Return those before the first step."""
        num_steps = torch.zeros(1, dtype=torch.float64, device=tensor.device)
        return cls(torch.zeros_like(tensor), torch.zeros_like(tensor), num_steps)

    def of_first(self, width: int) -> Self:
        """Return those of the first ``width`` clients of a stack; what is written to them is written here."""
        return type(self)(self.first[:width], self.second[:width], self.num_steps)

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        """Take in a step's ``gradient``; return what the weights move against, in units of the learning rate."""
        self.num_steps.add_(1)
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        # 1 - 0.999 loses half its digits in float32
        first_share, second_share = ((1 - beta**self.num_steps).to(gradient.dtype) for beta in BETAS)
        return self.first / first_share / ((self.second / second_share).sqrt() + EPSILON)
