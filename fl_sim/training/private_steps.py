"""DP-SGD (Abadi et al. 2016, algorithm 1): local steps that are private for each record of a client.

The compiled trainer or PyTorch executes the steps. Both use the same batches and the same noise, and both compute the
same clipped sums up to float32 rounding.

Adjacency: one record is removed. The number of records is public and does not change: the removed record is still
included in this number, but adds nothing to the sums. All other records stay in the same batches and in the same order.
Their gradients do not change either, because each gradient is computed from only one record. So the sensitivity of a
step's sum of clipped gradients is the clipping norm.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_sim.errors import UserError
from fl_sim.local_plan import LocalPlan, PrivateSteps, check_optimizer, fields_in_use
from fl_sim.native import private_steps
from fl_sim.native.kernel import Kernel
from fl_sim.native.layers import Stack
from fl_sim.native.private_steps import ClippingBounds, PrivateDraws
from fl_sim.own_loss import check_own_loss
from fl_sim.params import Layout, copy_into, detached, layout_of, num_in, placed_in
from fl_sim.privacy.mechanisms import Noise, add_noise, clipping_norm_on_grid, grid_spacing, words_below
from fl_sim.training.loop import Descent, trained_weights
from fl_sim.training.per_record import clipped_sum_of
from fl_sim.types import LocalSettings, LocalTask, Params, Trained

TAKES = frozenset({
    "learning_rate", "momentum", "weight_decay", "batch_size", "epochs", "clip_norm", "steps", "label_smoothing",
    "optimizer", "gradient_offset", "step_offset", "proximal_mu", "gradient_scale", "momentum_buffers", "trained",
    "private", "step_mask",
})  # fmt: skip
"""The fields of LocalSettings and LocalPlan that private steps support.

Most of these fields change only the noisy gradient or the number of steps. Label smoothing changes the loss of each
record. A plan with ``phases`` is trained phase by phase; each phase has its own plan (``LocalJob.in_phase``).
"""

COMPILED = TAKES - {"clip_norm", "label_smoothing", "trained", "step_mask"}
"""The fields that the compiled trainer supports in private steps."""


def unsupported(plan: LocalPlan, settings: LocalSettings) -> list[str]:
    """Return the sorted names of the fields in use that private steps do not support.

    A field of ``plan`` or ``settings`` is in use if its value is not the default.
    """
    return sorted((fields_in_use(plan) | fields_in_use(settings)) - TAKES - {"phases"})


def num_private_steps(plan: LocalPlan, settings: LocalSettings, num_records: int) -> int:
    """Return the number of steps of one local training on ``num_records`` records, summed over the plan's phases."""
    if not plan.phases:
        return settings.num_steps(num_records)
    return sum(phase.settings(settings).num_steps(num_records) for phase in plan.phases)


def sampling_rate(settings: LocalSettings, num_records: int) -> float:
    """Return the probability that a record joins a batch, in (0, 1], for a client with ``num_records`` records."""
    return min(1.0, settings.batch_size / max(1, num_records))


@dataclass(frozen=True)
class StepPlan:
    """The constants of a client's private steps. They depend only on the client's number of records, which is public.

    ``rate``: the probability with which a record joins a batch. ``num_steps``: the number of steps. ``size``: the
    number of trained parameters. ``std``: the standard deviation of the noise. ``limit``: the largest norm of a clipped
    gradient. ``divisor``: the noisy sum of gradients is divided by this number.
    """

    rate: float
    num_steps: int
    size: int
    std: float
    limit: float
    divisor: float

    @classmethod
    def of(cls, private: PrivateSteps, settings: LocalSettings, count: int, layout: Layout) -> Self:
        """Return the constants for a client with ``count`` records.

        ``layout``: the names and shapes of the trained parameters. Raises UserError if the rounding of the noise is too
        coarse.
        """
        norm, size = private.clipping.norm(private.clipping_norm, (name for name, _ in layout)), num_in(layout)
        std, rate = private.noise_multiplier * norm, sampling_rate(settings, count)
        limit = clipping_norm_on_grid(norm, std, size, summands=max(1, count))
        return cls(rate, settings.num_steps(count), size, std, limit, rate * count)


def is_compiled(stack: Stack, plan: LocalPlan, settings: LocalSettings) -> bool:
    """Return True if the compiled trainer supports private steps of this model with the plan's fields and noise."""
    asked = fields_in_use(plan) | fields_in_use(settings)
    is_known = plan.private is not None and type(plan.private.noise) is Noise
    return is_known and asked <= COMPILED and private_steps.is_supported(stack)


def train_compiled(
    kernel: Kernel, stack: Stack, task: LocalTask, plan: LocalPlan, records: tuple[torch.Tensor, torch.Tensor]
) -> Trained:
    """Train one client as ``train_privately`` does, but with the compiled trainer. ``is_compiled`` must be True.

    ``records``: inputs (n, *input shape) and labels (n,), n at least 1.
    """
    private, count = plan.private, len(records[1])
    assert private is not None
    assert isinstance(private.noise, Noise)
    if private.sums_only:
        bounds = ClippingBounds.of(private.clipping, private.clipping_norm, stack.layout)
        job = private_steps.job_without_order(task, plan, *records)
        total = private_steps.clipped_sum(kernel, stack, job, bounds)
        return _unchanged(task, _parts(total, {name: task.params[name] for name, _ in stack.layout}))
    steps, noise = StepPlan.of(private, task.settings, count, stack.layout), private.noise
    turn, stream, each = task.server_round, private.stream, range(steps.num_steps)

    def exactly(step: int, place: int) -> float:
        return noise.gaussian_number(
            place, steps.size, steps.std, purpose=f"noise {step} of {stream}", server_round=turn
        )

    batches = [noise.stream_key(purpose=f"batch {step} of {stream}", server_round=turn) for step in each]
    noises = [noise.stream_key(purpose=f"noise {step} of {stream}", server_round=turn) for step in each]
    spacing = grid_spacing(steps.std) if steps.std else 1.0
    draws = PrivateDraws(
        batch_keys=_rows(batches), noise_keys=_rows(noises) if steps.std else None,
        below=words_below(steps.rate), bounds=ClippingBounds.of(private.clipping, steps.limit, stack.layout),
        ratio=steps.std / spacing, spacing=spacing, divisor=steps.divisor, exactly=exactly,
    )  # fmt: skip
    return private_steps.train(kernel, stack, private_steps.job_without_order(task, plan, *records), draws)


def _rows(keys: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)


def train_privately(
    model: nn.Module, task: LocalTask, plan: LocalPlan, inputs: torch.Tensor, labels: torch.Tensor
) -> Trained:
    """Train one client by the private steps of ``plan.private``, and return the result, without a training loss.

    ``model``: provides the architecture; its weights are overwritten. ``inputs``: (n, *input shape), normalised.
    ``labels``: (n,). The number of steps is ``task.settings.num_steps(n)``. A batch without records still takes a noisy
    step. Raises UserError for a field of the plan or the settings that private steps do not support, and if the
    rounding of the noise is too coarse for the model.
    """
    private, settings, count = plan.private, task.settings, len(labels)
    assert private is not None
    assert not plan.phases
    if unknown := unsupported(plan, settings):
        raise UserError(f"private steps do not support {', '.join(unknown)}: leave {unknown[0]} out")
    check_optimizer(plan, settings)
    check_own_loss(model, plan, settings)
    weights: Params = placed_in(model, task.params)
    trained = trained_weights(model, plan)
    with torch.no_grad():
        copy_into(weights, task.params)
    model.train()
    clipped_sum = clipped_sum_of(model, trained, settings.label_smoothing, private.clipping)
    descent = Descent.of(trained, task, plan, inputs.device)
    if private.sums_only:
        return _unchanged(task, _parts(clipped_sum(inputs, labels, private.clipping_norm), trained))
    steps = StepPlan.of(private, settings, count, layout_of(trained))
    for step in range(steps.num_steps):
        joins = private.noise.taking_part(
            count, steps.rate, purpose=f"batch {step} of {private.stream}", server_round=task.server_round
        )
        batch = torch.from_numpy(np.flatnonzero(joins)).to(inputs.device)
        total = clipped_sum(inputs[batch], labels[batch], steps.limit)
        if steps.std:
            noise = private.noise.gaussian(
                steps.size, steps.std, purpose=f"noise {step} of {private.stream}", server_round=task.server_round
            )
            total = add_noise(total, steps.std, noise)
        descent.step(trained, _shaped(total / steps.divisor, trained))
    return Trained(
        params=detached(weights.items()),
        momentum_buffers=detached(descent.buffers.items()),
        num_steps=steps.num_steps,
        loss=None,
    )


def _unchanged(task: LocalTask, gradient_sum: Params) -> Trained:
    return Trained(dict(task.params), {}, num_steps=1, loss=None, gradient_sum=gradient_sum)


def _shaped(values: NDArray[np.float64], like: Params) -> dict[str, torch.Tensor]:
    """Split the vector ``values`` into float32 tensors with the names, shapes and devices of the tensors ``like``."""
    return {name: part.float().to(like[name].device) for name, part in _parts(values, like).items()}


def _parts(values: NDArray[np.float64], like: Params) -> dict[str, torch.Tensor]:
    """Split the vector ``values`` into float64 tensors with the names and shapes of the tensors ``like``."""
    parts = torch.split(torch.from_numpy(values), [weight.numel() for weight in like.values()])
    return {name: part.view(weight.shape) for (name, weight), part in zip(like.items(), parts, strict=True)}
