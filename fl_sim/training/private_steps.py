"""DP-SGD in PyTorch (Abadi et al. 2016, algorithm 1): local steps that are private for each record of a client.

Adjacency: one record is replaced by nothing, while the number of records stays public. Batches, gradients of all other
records, and their order are then equal, because each gradient is computed from one record alone, at the same place of
its batch. So a step's sum of clipped gradients moves by at most the clipping norm.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_sim.errors import UserError
from fl_sim.local_plan import LocalPlan, check_optimizer, fields_in_use
from fl_sim.params import copy_into, detached, placed_in
from fl_sim.privacy.mechanisms import add_noise, clipping_norm_on_grid
from fl_sim.training.loop import Descent, trained_weights
from fl_sim.training.per_record import clipped_sum_of
from fl_sim.types import LocalSettings, LocalTask, Params, Trained

TAKES = frozenset({
    "learning_rate", "momentum", "weight_decay", "batch_size", "epochs", "clip_norm", "steps", "label_smoothing",
    "optimizer", "gradient_offset", "step_offset", "proximal_mu", "gradient_scale", "momentum_buffers", "trained",
    "private",
})  # fmt: skip
"""The supported fields of LocalSettings and LocalPlan: those that act on the noisy gradient, and label smoothing.

A plan with ``phases`` is trained phase by phase, each with a plan of its own (``LocalJob.in_phase``).
"""


def unsupported(plan: LocalPlan, settings: LocalSettings) -> list[str]:
    """Return the names of the fields in use that private steps do not support, sorted."""
    return sorted((fields_in_use(plan) | fields_in_use(settings)) - TAKES - {"phases"})


def num_private_steps(plan: LocalPlan, settings: LocalSettings, num_records: int) -> int:
    """Return the number of steps of a training on ``num_records`` records, in all phases of the plan together."""
    if not plan.phases:
        return settings.num_steps(num_records)
    return sum(phase.settings(settings).num_steps(num_records) for phase in plan.phases)


def sampling_rate(settings: LocalSettings, num_records: int) -> float:
    """Return the probability with which each of ``num_records`` records joins a batch, in (0, 1]."""
    return min(1.0, settings.batch_size / max(1, num_records))


def train_privately(
    model: nn.Module, task: LocalTask, plan: LocalPlan, inputs: torch.Tensor, labels: torch.Tensor
) -> Trained:
    """Train one client by the private steps of ``plan.private``, and return the result, without a loss.

    ``model``: provides the architecture; its weights are overwritten. ``inputs``: (n, *input shape), normalised.
    ``labels``: (n,). The number of steps is ``task.settings.num_steps(n)``. A batch without records still takes a noisy
    step. Raises UserError for a field of plan or settings that private steps do not support, and for noise that is too
    coarse for the model.
    """
    private, settings, count = plan.private, task.settings, len(labels)
    assert private is not None
    assert not plan.phases
    if unknown := unsupported(plan, settings):
        raise UserError(f"private steps do not support {', '.join(unknown)}: leave {unknown[0]} out")
    check_optimizer(plan, settings)
    weights: Params = placed_in(model, task.params)
    trained = trained_weights(model, plan)
    with torch.no_grad():
        copy_into(weights, task.params)
    model.train()
    clipped_sum = clipped_sum_of(model, trained, settings.label_smoothing)
    descent = Descent.of(trained, task, plan, inputs.device)
    rate, num_steps = sampling_rate(settings, count), settings.num_steps(count)
    size, std = sum(weight.numel() for weight in trained.values()), private.noise_multiplier * private.clipping_norm
    limit = clipping_norm_on_grid(private.clipping_norm, std, size, summands=max(1, count))
    for step in range(num_steps):
        joins = private.noise.taking_part(
            count, rate, purpose=f"batch {step} of {private.stream}", server_round=task.server_round
        )
        batch = torch.from_numpy(np.flatnonzero(joins)).to(inputs.device)
        total = clipped_sum(inputs[batch], labels[batch], limit)
        if std:
            noise = private.noise.gaussian(
                size, std, purpose=f"noise {step} of {private.stream}", server_round=task.server_round
            )
            total = add_noise(total, std, noise)
        descent.step(trained, _shaped(total / (rate * count), trained))
    return Trained(
        params=detached(weights.items()),
        momentum_buffers=detached(descent.buffers.items()),
        num_steps=num_steps,
        loss=None,
    )


def _shaped(values: NDArray[np.float64], like: Params) -> dict[str, torch.Tensor]:
    """Return the vector ``values`` as float32 tensors with the names, shapes and device of ``like``."""
    parts = torch.split(torch.from_numpy(values).float(), [weight.numel() for weight in like.values()])
    pairs = zip(like.items(), parts, strict=True)
    return {name: part.view_as(weight).to(weight.device) for (name, weight), part in pairs}
