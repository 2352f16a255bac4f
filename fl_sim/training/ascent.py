"""The gradient after a step uphill: sharpness-aware minimisation (Foret et al. 2021; Kwon et al. 2021)."""

from collections.abc import Mapping

import torch

from fl_sim.local_plan import Ascent, LocalPlan

_TINY = 1e-12
"""Keeps a gradient of length 0 from becoming no number."""


def ascent_of(plan: LocalPlan) -> Ascent | None:
    """Return the plan's ascent, None where it changes nothing."""
    ascent = plan.ascent
    return ascent if ascent is not None and ascent.radius and ascent.share else None


def uphill(
    weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], ascent: Ascent
) -> dict[str, torch.Tensor]:
    """Return the weights, of those that have a gradient, from which the second gradient is taken."""
    steps = {name: weights[name] ** 2 * value if ascent.adaptive else value for name, value in gradients.items()}
    scaled = [weights[name] * value if ascent.adaptive else value for name, value in gradients.items()]
    # (1,): products with a tensor of no axes bring numbers to the device under vmap, which no CUDA graph survives
    length = torch.linalg.vector_norm(torch.cat([value.flatten() for value in scaled]), dim=0, keepdim=True)
    reach = ascent.radius / (length + _TINY)
    return {name: weights[name] + (reach * step.flatten()).view_as(step) for name, step in steps.items()}


def blended(
    gradients: Mapping[str, torch.Tensor], above: Mapping[str, torch.Tensor], ascent: Ascent
) -> dict[str, torch.Tensor]:
    """Return (1 - share) * gradients + share * above; exactly ``above`` where the share is 1."""
    if ascent.share == 1:
        return dict(above)
    return {name: (1 - ascent.share) * value + ascent.share * above[name] for name, value in gradients.items()}
