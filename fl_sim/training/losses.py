"""Losses of a batch that is mixed with averaged records."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.nn import functional

LogitsOf: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""(n, *input shape) records -> (n, classes) logits."""

Slope: TypeAlias = Callable[[LogitsOf, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def by_autograd(
    logits_of: LogitsOf, inputs: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logits, each record's cross-entropy, its gradient by the record), differentiable once more."""
    records = inputs.requires_grad_()
    logits = logits_of(records)
    own = functional.cross_entropy(logits, labels, reduction="none")
    # The gradient of the sum holds each record's own gradient; that of the batch mean would be B times too small.
    (slope,) = torch.autograd.grad(own.sum(), records, create_graph=True)
    return logits, own, slope


def mixed_loss(
    logits_of: LogitsOf,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    mean_input: torch.Tensor,
    mean_label: torch.Tensor,
    weight: float,
    *,
    linearise: bool,
) -> torch.Tensor:
    """Return the batch mean of ``mixed_losses``."""
    return mixed_losses(logits_of, inputs, labels, mean_input, mean_label, weight, linearise=linearise).mean()


def mixed_losses(
    logits_of: LogitsOf,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    mean_input: torch.Tensor,
    mean_label: torch.Tensor,
    weight: float,
    *,
    linearise: bool,
    slope: Slope = by_autograd,
) -> torch.Tensor:
    """Return, per record, FedMix's (``linearise``) or NaiveMix's loss (Yoon et al. 2021, eq. 3 and algorithm 2), (n,).

    ``mean_input``: one averaged record, (*input shape); ``mean_label``: (classes,) proportions; ``weight``: lambda.
    """
    if not linearise:
        logits = logits_of((1 - weight) * inputs + weight * mean_input)
        own = functional.cross_entropy(logits, labels, reduction="none")
        return (1 - weight) * own + weight * _soft_cross_entropy(logits, mean_label)
    logits, own, gradient = slope(logits_of, (1 - weight) * inputs, labels)
    expansion = (gradient * mean_input).flatten(1).sum(1)
    return (1 - weight) * own + weight * _soft_cross_entropy(logits, mean_label) + weight * expansion


def _soft_cross_entropy(logits: torch.Tensor, proportions: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, proportions.expand_as(logits), reduction="none")
