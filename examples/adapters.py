"""A model with a frozen body: clients train and send only two small adapters and the head (Hu et al. 2022).

    fl-sim run model=adapters:adapted partition=dirichlet:0.5

A frozen parameter (``requires_grad=False``) is part of the architecture: it is never sent, clipped, noised or counted.
"""

import torch
from torch import nn


class Adapted(nn.Module):
    """The sum of a frozen linear layer W x + b and a trained adapter B A x of low ``rank``, which starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of layer and adapter, shape (n, outputs), for inputs ``x`` of shape (n, features)."""
        out: torch.Tensor = self.layer(x) + x @ self.down.T @ self.up.T
        return out


def adapted(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a network of two frozen layers with 64 units, each with an adapter of rank 4, and a trained head."""
    numbers = torch.Size(input_shape).numel()
    return nn.Sequential(
        nn.Flatten(), Adapted(nn.Linear(numbers, 64), 4), nn.ReLU(), Adapted(nn.Linear(64, 64), 4), nn.ReLU(),
        nn.Linear(64, num_classes),
    )  # fmt: skip
