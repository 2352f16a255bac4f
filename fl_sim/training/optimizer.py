"""Parts of an optimizer step, for one client or stacked clients: Adam, sharpness-aware ascent, gradient clipping."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from fl_sim.local_plan import Ascent, LocalPlan

BETAS = 0.9, 0.999
"""Adam's decay rates for the running means of gradients and of squared gradients (beta_1 and beta_2)."""

EPSILON = 1e-8

_TINY_ASCENT = 1e-12
"""A number that an ascent step adds to the norm of a gradient to avoid division by 0."""

_TINY_NORM = 1e-6
"""A number that clipping adds to the norm of gradients to avoid division by 0.

torch.nn.utils.clip_grad_norm_ uses the same number.
"""


@dataclass(frozen=True)
class Moments:
    """The state of Adam for one parameter. A step updates the state in place.

    ``first`` and ``second``: the running means of gradients and of squared gradients. ``num_steps``: (1,), the number
    of steps so far.
    """

    first: torch.Tensor
    second: torch.Tensor
    num_steps: torch.Tensor

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Self:
        """Return the moments before the first step, all zero, for a parameter of the shape of ``tensor``."""
        num_steps = torch.zeros(1, dtype=torch.float64, device=tensor.device)
        return cls(torch.zeros_like(tensor), torch.zeros_like(tensor), num_steps)

    def of_first(self, width: int) -> Self:
        """Return the moments of the first ``width`` clients of a stack, as views without a copy.

        The clients of a stack are trained together, in one computation.
        """
        return type(self)(self.first[:width], self.second[:width], self.num_steps)

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        """Update the moments with ``gradient``, and return Adam's step for the learning rate 1."""
        self.num_steps.add_(1)
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        # num_steps is float64, because 1 - 0.999 in float32 would lose half of the digits.
        first_share, second_share = ((1 - beta**self.num_steps).to(gradient.dtype) for beta in BETAS)
        return self.first / first_share / ((self.second / second_share).sqrt() + EPSILON)

    def at(self, axis: int, places: torch.Tensor) -> "Moments":
        """Return a copy of the moments at the indices ``places`` of an axis. The copy shares ``num_steps``."""
        return Moments(self.first.index_select(axis, places), self.second.index_select(axis, places), self.num_steps)

    def put(self, axis: int, places: torch.Tensor, part: "Moments") -> None:
        """Replace the moments at the indices ``places`` of an axis by the moments in ``part``."""
        self.first.index_copy_(axis, places, part.first)
        self.second.index_copy_(axis, places, part.second)


def ascent_of(plan: LocalPlan) -> Ascent | None:
    """Return the plan's ascent step (sharpness-aware minimisation).

    The result is None if the plan has no ascent step, or an ascent step without effect. An ascent step has no effect if
    its ``radius`` (the length of the step) or its ``share`` (the weight of the gradient after the step) is 0.
    """
    ascent = plan.ascent
    return ascent if ascent is not None and ascent.radius and ascent.share else None


def uphill(
    weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], ascent: Ascent
) -> dict[str, torch.Tensor]:
    """Return the weights after the ascent step of sharpness-aware minimisation, as {name: weight}.

    The caller computes a second gradient at these weights. Weights without a gradient are left out.
    """
    steps = {name: weights[name] ** 2 * value if ascent.adaptive else value for name, value in gradients.items()}
    scaled = [weights[name] * value if ascent.adaptive else value for name, value in gradients.items()]
    # keepdim=True: under vmap, a product with a tensor of shape () copies data, and CUDA graphs do not allow copies.
    length = torch.linalg.vector_norm(torch.cat([value.flatten() for value in scaled]), dim=0, keepdim=True)
    reach = ascent.radius / (length + _TINY_ASCENT)
    return {name: weights[name] + (reach * step.flatten()).view_as(step) for name, step in steps.items()}


def blended(
    gradients: Mapping[str, torch.Tensor], above: Mapping[str, torch.Tensor], ascent: Ascent
) -> dict[str, torch.Tensor]:
    """Return (1 - share) * ``gradients`` + share * ``above``; exactly ``above`` if the share is 1.

    ``gradients``: the gradients at the current weights. ``above``: the gradients at the weights after the ascent step
    (``uphill``). ``ascent``: the ascent step, which contains the share.
    """
    if ascent.share == 1:
        return dict(above)
    return {name: (1 - ascent.share) * value + ascent.share * above[name] for name, value in gradients.items()}


def clipped(gradients: Mapping[str, torch.Tensor], clip_norm: float) -> dict[str, torch.Tensor]:
    """Return ``gradients``, scaled by one factor to a joint L2 norm of at most ``clip_norm``; 0 means no clipping."""
    if not clip_norm:
        return dict(gradients)
    # keepdim=True: see ``uphill``
    lengths = [torch.linalg.vector_norm(value.flatten(), dim=0, keepdim=True) for value in gradients.values()]
    length = torch.linalg.vector_norm(torch.cat(lengths), dim=0, keepdim=True)
    factor = (clip_norm / (length + _TINY_NORM)).clamp(max=1.0)
    return {name: (factor * value.flatten()).view_as(value) for name, value in gradients.items()}
