"""The weighted mean of clients' updates, in float64. Compiled code and PyTorch give the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fl_sim.importing import torch
from fl_sim.params import FlatParams
from fl_sim.types import Params


def weighted_mean(items: Sequence[Params], weights: Sequence[float]) -> Params:
    """Return the weighted mean, sum_i weights_i * items_i / sum_i weights_i.

    The computation is defined so that all machines get the same bits: a float64 sum in the given order. Each item is
    multiplied by the float64 factor weights_i / sum(weights) and added, as one fused multiply-add. At the end the sum
    is rounded to the type of the items. Raises ValueError if the sum of the weights is not positive.
    """
    total = math.fsum(weights)
    if total <= 0:
        raise ValueError(f"a mean needs a positive total weight, got {total}")
    factors = [weight / total for weight in weights]
    first = items[0]
    if not isinstance(first, FlatParams) or not all(
        isinstance(item, FlatParams) and item.layout == first.layout for item in items
    ):
        return {name: by_torch([item[name] for item in items], factors) for name in first}
    # Imported late, because the kernel imports torch, which is slow. The settings import this file and must load fast.
    from fl_sim.native.kernel import load_kernel  # noqa: PLC0415

    vectors = [item.flat for item in items if isinstance(item, FlatParams)]
    kernel, _ = load_kernel()
    is_plain = all(vector.device.type == "cpu" and vector.dtype is torch.float32 for vector in vectors)
    mean = kernel.weighted_sum if kernel is not None and is_plain else by_torch
    return FlatParams(mean(vectors, factors), first.layout)


def by_torch(values: Sequence[torch.Tensor], factors: Sequence[float]) -> torch.Tensor:
    """Return sum_i factors_i * values_i, computed by PyTorch.

    This is slower than the compiled code: for every item, PyTorch reads and writes the whole float64 sum.
    """
    total = torch.zeros_like(values[0], dtype=torch.float64)
    for value, factor in zip(values, factors, strict=True):
        total.add_(value, alpha=factor)
    return total.to(values[0].dtype)
