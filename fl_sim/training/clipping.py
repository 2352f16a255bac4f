"""Gradients scaled down to a length: what torch.nn.utils.clip_grad_norm_ does, for one client and for a stack."""

from collections.abc import Mapping

import torch

_TINY = 1e-6
"""torch's own: keeps a gradient of length 0 from becoming no number."""


def clipped(gradients: Mapping[str, torch.Tensor], clip_norm: float) -> dict[str, torch.Tensor]:
    """Return ``gradients``, scaled down together to an L2 norm of ``clip_norm`` if theirs is larger; 0: as they are."""
    if not clip_norm:
        return dict(gradients)
    # (1,): products with a tensor of no axes bring numbers to the device under vmap, which no CUDA graph survives
    lengths = [torch.linalg.vector_norm(value.flatten(), dim=0, keepdim=True) for value in gradients.values()]
    length = torch.linalg.vector_norm(torch.cat(lengths), dim=0, keepdim=True)
    factor = (clip_norm / (length + _TINY)).clamp(max=1.0)
    return {name: (factor * value.flatten()).view_as(value) for name, value in gradients.items()}
