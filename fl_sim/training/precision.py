"""How exactly products are computed: in float32, or less exactly and faster, as PyTorch offers it on GPUs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fl_sim.types import Precision


@contextmanager
def arithmetic(device: torch.device, precision: Precision = "float32") -> Iterator[None]:
    """Compute with ``precision`` in this block, and put PyTorch's settings back.

    On a GPU "float32" means all 24 bits, in convolutions too, where PyTorch by itself takes TF32. "tf32" rounds the
    factors of products to 11 bits; "bfloat16" rounds to 8 what PyTorch's autocast does, forward and backward. Weights
    and their steps stay float32. On a CPU "float32" and "tf32" change nothing (and threads may be in here at once).
    """
    if device.type == "cpu" and precision != "bfloat16":
        yield
        return
    before = [getattr(place, _NAME) for place in _PLACES]
    _set([_TF32 if precision == "tf32" else _IEEE] * len(_PLACES))
    try:
        # The cache of weights cast once is of no use where each is used once, and not allowed in CUDA graphs.
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False):
            yield
    finally:
        _set(before)


_LEGACY = not hasattr(torch.backends.cudnn, "conv")
"""Whether this PyTorch is older than 2.9; a newer one does not let the old settings be read beside the new ones."""
_NAME, _TF32, _IEEE = ("allow_tf32", True, False) if _LEGACY else ("fp32_precision", "tf32", "ieee")
_PLACES = (torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv", torch.backends.cudnn))


def _set(values: Sequence[object]) -> None:
    for place, value in zip(_PLACES, values, strict=True):
        setattr(place, _NAME, value)
