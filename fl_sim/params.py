"""Arithmetic on named tensors: small, pure, always in the order of the first argument's names."""

import math
from collections.abc import Iterable, Sequence

import torch

from fl_sim.types import Params, Payloads


def add(left: Params, right: Params, scale: float = 1.0) -> Params:
    """Return left + scale * right."""
    return {name: torch.add(value, right[name], alpha=scale) for name, value in left.items()}


def subtract(left: Params, right: Params) -> Params:
    """Return left - right."""
    return {name: value - right[name] for name, value in left.items()}


def scale(params: Params, factor: float) -> Params:
    """Return factor * params."""
    return {name: value * factor for name, value in params.items()}


def zeros_like(params: Params) -> Params:
    """Return zeros of the same names and shapes."""
    return {name: torch.zeros_like(value) for name, value in params.items()}


def weighted_mean(items: Sequence[Params], weights: Sequence[float]) -> Params:
    """Return sum_i weights_i * items_i / sum_i weights_i, summed in the given order in float64.

    Raises ValueError where the weights add up to nothing.
    """
    total = math.fsum(weights)
    if total <= 0:
        raise ValueError(f"a mean needs a positive total weight, got {total}")
    sums = {name: torch.zeros_like(first, dtype=torch.float64) for name, first in items[0].items()}
    for item, weight in zip(items, weights, strict=True):
        for name, value in item.items():
            sums[name].add_(value, alpha=weight / total)
    return {name: value.to(items[0][name].dtype) for name, value in sums.items()}


def is_finite(payloads: Payloads) -> bool:
    """Say whether every number of every tensor is finite.

    A float64 sum of float32 numbers cannot overflow and keeps any NaN or infinity: one pass; isfinite takes three.
    """
    tensors = [value for params in payloads.values() for value in params.values()]
    return all(math.isfinite(value.sum(dtype=torch.float64)) for value in tensors)


def num_parameters(params: Params) -> int:
    """Count the numbers in ``params``."""
    return sum(value.numel() for value in params.values())


def detached(named: Iterable[tuple[str, torch.Tensor]]) -> Params:
    """Copy named tensors, such as ``model.named_parameters()``, out of any graph and to the CPU."""
    return {name: value.detach().to("cpu", copy=True) for name, value in named}
