"""Losses of a batch that is mixed with averaged records."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.nn import functional

LogitsOf: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""(n, *input shape) records -> (n, classes) logits."""

Slope: TypeAlias = Callable[
    [LogitsOf, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]


def cross_entropies(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return each record's cross-entropy, (n,); ``labels``: (n,), or (n, classes) proportions.

    ``smoothing``: what part of a label is spread evenly over all classes, as torch.nn.CrossEntropyLoss has it.
    """
    return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


def by_autograd(
    logits_of: LogitsOf, inputs: torch.Tensor, labels: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logits, each record's cross-entropy, its gradient by the record), differentiable once more."""
    records = inputs.requires_grad_()
    logits = logits_of(records)
    own = cross_entropies(logits, labels, smoothing)
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
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the batch mean of ``mixed_losses``."""
    mean = mean_input, mean_label
    return mixed_losses(logits_of, inputs, labels, mean, weight, linearise=linearise, smoothing=smoothing).mean()


def mixed_losses(
    logits_of: LogitsOf,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    partner: tuple[torch.Tensor, torch.Tensor],
    weight: float,
    *,
    linearise: bool,
    slope: Slope = by_autograd,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Return, per record, FedMix's (``linearise``) or NaiveMix's loss (Yoon et al. 2021), (n,).

    ``partner``: one averaged record, (*input shape), and its (classes,) proportions; ``weight``: lambda.
    ``smoothing``: see ``cross_entropies``; it smooths own and averaged labels alike.
    """
    mean_input, mean_label = partner
    if not linearise:
        logits = logits_of((1 - weight) * inputs + weight * mean_input)
        own = cross_entropies(logits, labels, smoothing)
        return (1 - weight) * own + weight * cross_entropies(logits, mean_label.expand_as(logits), smoothing)
    logits, own, gradient = slope(logits_of, (1 - weight) * inputs, labels, smoothing)
    expansion = (gradient * mean_input).flatten(1).sum(1)
    averaged = cross_entropies(logits, mean_label.expand_as(logits), smoothing)
    return (1 - weight) * own + weight * averaged + weight * expansion
