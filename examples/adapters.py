"""A model whose body is frozen: clients train and send two small adapters and the head alone (Hu et al. 2022).

    fl-sim run model=adapters:adapted partition=dirichlet:0.5

A frozen parameter (``requires_grad=False``) is part of the architecture: it is never sent, clipped, noised or counted.
"""

import torch
from torch import nn


class Adapted(nn.Module):
    """A linear layer W x + b that is frozen, and beside it B A x of a small ``rank``, which starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what layer and adapter make of (n, features)."""
        out: torch.Tensor = self.layer(x) + x @ self.down.T @ self.up.T
        return out


def adapted(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return two frozen layers of 64 with adapters of rank 4, and a head that is trained."""
    numbers = torch.Size(input_shape).numel()
    return nn.Sequential(
        nn.Flatten(), Adapted(nn.Linear(numbers, 64), 4), nn.ReLU(), Adapted(nn.Linear(64, 64), 4), nn.ReLU(),
        nn.Linear(64, num_classes),
    )  # fmt: skip
