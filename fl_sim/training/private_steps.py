"""DP-SGD in PyTorch (Abadi et al. 2016, algorithm 1): local steps that are private for each record of a client.

Adjacency: one record is replaced by nothing, while the number of records stays public. Batches, gradients of all other
records, and their order are then equal, because each gradient is computed from one record alone, at the same place of
its batch. So a step's sum of clipped gradients moves by at most the clipping norm.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fl_sim.errors import UserError
from fl_sim.local_plan import LocalPlan, check_optimizer, fields_in_use
from fl_sim.params import copy_into, detached, placed_in, trainable
from fl_sim.privacy.mechanisms import add_noise, clipping_norm_on_grid
from fl_sim.training.loop import Descent
from fl_sim.types import LocalSettings, LocalTask, Params, Trained

TAKES = frozenset({
    "learning_rate", "momentum", "weight_decay", "batch_size", "epochs", "clip_norm", "steps", "label_smoothing",
    "optimizer", "gradient_offset", "step_offset", "proximal_mu", "gradient_scale", "momentum_buffers", "trained",
    "private",
})  # fmt: skip
"""The supported fields of LocalSettings and LocalPlan: those that act on the noisy gradient, and label smoothing."""

_MOST_NUMBERS = 2**24  # of the per-record gradients that are held at once: 64 MiB

Gradients = Callable[[Params, torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]
"""A function (weights, inputs (b, ...), labels (b,)) -> per-record gradients, {name: (b, *shape)}."""


def unsupported(plan: LocalPlan, settings: LocalSettings) -> list[str]:
    """Return the names of the fields in use that private steps do not support, sorted."""
    return sorted((fields_in_use(plan) | fields_in_use(settings)) - TAKES)


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
    if unknown := unsupported(plan, settings):
        raise UserError(f"private steps do not support {', '.join(unknown)}: leave {unknown[0]} out")
    check_optimizer(plan, settings)
    weights: Params = placed_in(model, task.params)
    trained = {
        name: weight for name, weight in trainable(model).items() if plan.trained is None or name in plan.trained
    }
    with torch.no_grad():
        copy_into(weights, task.params)
    model.train()
    rest = {name: weight for name, weight in {**weights, **dict(model.named_buffers())}.items() if name not in trained}
    gradients_of = _per_record(model, rest, settings.label_smoothing)
    descent = Descent.of(trained, task, plan, inputs.device)
    rate, num_steps = sampling_rate(settings, count), settings.num_steps(count)
    size, std = sum(weight.numel() for weight in trained.values()), private.noise_multiplier * private.clipping_norm
    limit = clipping_norm_on_grid(private.clipping_norm, std, size, summands=max(1, count))
    for step in range(num_steps):
        drawn = partial(_named, private.stream, step)
        joins = private.noise.taking_part(count, rate, purpose=drawn("batch"), server_round=task.server_round)
        batch = torch.from_numpy(np.flatnonzero(joins)).to(inputs.device)
        total = clipped_sum(gradients_of, trained, inputs[batch], labels[batch], limit)
        if std:
            noise = private.noise.gaussian(size, std, purpose=drawn("noise"), server_round=task.server_round)
            total = add_noise(total, std, noise)
        descent.step(trained, _shaped(total / (rate * count), trained))
    return Trained(
        params=detached(weights.items()),
        momentum_buffers=detached(descent.buffers.items()),
        num_steps=num_steps,
        loss=None,
    )


def clipped_sum(
    gradients_of: Gradients, weights: Params, inputs: torch.Tensor, labels: torch.Tensor, limit: float
) -> NDArray[np.float64]:
    """Return the sum of the records' gradients, each clipped to the L2 norm ``limit``, in float64, shape (size,).

    A gradient that is not finite counts as zeros. ``size``: the number of all weights.
    """
    size = sum(weight.numel() for weight in weights.values())
    total = torch.zeros(size, dtype=torch.float64, device=inputs.device)
    for chunk in torch.split(torch.arange(len(labels), device=inputs.device), max(1, _MOST_NUMBERS // size)):
        each = gradients_of(weights, inputs[chunk], labels[chunk])
        flat = torch.cat([each[name].detach().flatten(1) for name in weights], dim=1).double()
        norms = flat.norm(dim=1)
        flat[~torch.isfinite(norms)] = 0.0  # 0 times NaN would be NaN
        norms = torch.where(torch.isfinite(norms), norms, 0.0)
        total += torch.where(norms <= limit, 1.0, limit / norms) @ flat
    return total.cpu().numpy()


def _named(stream: str, step: int, what: str) -> str:
    return f"{stream}: {what} {step}"


def _shaped(values: NDArray[np.float64], like: Params) -> dict[str, torch.Tensor]:
    """Return the vector ``values`` as float32 tensors with the names, shapes and device of ``like``."""
    parts = torch.split(torch.from_numpy(values).float(), [weight.numel() for weight in like.values()])
    pairs = zip(like.items(), parts, strict=True)
    return {name: part.view_as(weight).to(weight.device) for (name, weight), part in pairs}


def _per_record(model: nn.Module, rest: Params, smoothing: float) -> Gradients:
    """Return the function that computes per-record gradients. ``rest``: the tensors of the model that are not trained.

    All records are computed together (``vmap``). A layer without this rule, such as a GRU, is computed record by
    record.
    """

    def loss(weights: Params, record: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits = functional_call(model, {**rest, **weights}, (record[None],))
        return functional.cross_entropy(logits, label[None], label_smoothing=smoothing)

    together = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    works: bool | None = None  # unknown before the first batch with records

    def gradients(weights: Params, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal works
        fixed = {name: weight.detach() for name, weight in weights.items()}
        if works is not False:
            try:
                found: dict[str, torch.Tensor] = together(fixed, inputs, labels)
            except RuntimeError:
                if works:
                    raise
                works = False
            else:
                works = True
                return found
        leaves = {name: weight.requires_grad_() for name, weight in fixed.items()}
        losses = (loss(leaves, record, label) for record, label in zip(inputs, labels, strict=True))
        each = [torch.autograd.grad(one, list(leaves.values())) for one in losses]
        return {name: torch.stack(parts) for name, parts in zip(leaves, zip(*each, strict=True), strict=True)}

    return gradients
