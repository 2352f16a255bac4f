"""Local training of many clients as one computation over stacked parameters: for GPUs, where launches are what costs.

Does what ``fl_sim.learning.train`` does for each client, to float32 rounding. Clients that have more steps than others
come first, so that those still training are always the first few: nobody's steps are padding. Only the smaller last
batch of an epoch is filled up, with records of weight zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional

from fl_sim.cohort import Job
from fl_sim.learning import LogitsOf, mixed_losses
from fl_sim.native.kernel import Draws
from fl_sim.types import LocalSettings, Params, Trained

Precision: TypeAlias = Literal["float32", "bfloat16"]


def train_stacked(model: nn.Module, jobs: Sequence[Job], precision: Precision = "float32") -> list[Trained]:
    """Train all clients of a round together, each from its own ``task.params``; returns one result per job.

    ``model`` lends its architecture and must draw no random numbers and treat every record by itself (no batch
    statistics). All jobs share batch size, epochs, momentum, weight decay and kind of plan; learning rates may differ.
    ``precision`` "bfloat16": forward and backward in bfloat16 where PyTorch's autocast does so, weights in float32.
    """
    if not jobs:
        return []
    by_steps = sorted(range(len(jobs)), key=lambda place: -_num_steps(jobs[place]))
    ordered = [jobs[place] for place in by_steps]
    results = _train(model, ordered, precision)
    return [trained for _, trained in sorted(zip(by_steps, results, strict=True), key=lambda pair: pair[0])]


@dataclass(frozen=True)
class _Schedule:
    """Which records meet in which step: clients x steps x batch, and the mixing partners: clients x steps.

    ``rows`` counts through the records of all clients; ``weights`` are 1 / n for the n records of a batch and 0 for
    what fills it up.
    """

    rows: torch.Tensor
    weights: torch.Tensor
    partners: torch.Tensor


def _train(model: nn.Module, jobs: list[Job], precision: Precision) -> list[Trained]:
    settings = _shared_settings(jobs)
    steps = [_num_steps(job) for job in jobs]
    device = jobs[0].inputs.device
    inputs, labels = (torch.cat([getattr(job, name) for job in jobs]) for name in ("inputs", "labels"))
    schedule = _schedule(jobs, steps, device)
    start = {name: torch.stack([job.task.params[name] for job in jobs]).to(device) for name in jobs[0].task.params}
    params = {name: value.clone() for name, value in start.items()}
    warm = jobs[0].plan.momentum_buffers
    buffers = _stacked([job.plan.momentum_buffers for job in jobs], device)
    offset = _stacked([job.plan.gradient_offset for job in jobs], device)
    correction = _Correction(
        start, offset, _column([job.plan.proximal_mu for job in jobs], device), settings.weight_decay
    )
    rates = _column([job.task.settings.learning_rate for job in jobs], device)
    trainable = _trainable(model, inputs) if steps[0] else []
    gradients_of = _Gradients(model, trainable, jobs, device, precision)
    losses = torch.zeros(len(jobs), max(steps[0], 1), device=device)
    for step in range(steps[0]):
        active = sum(count > step for count in steps)
        rows = schedule.rows[:active, step]
        batch = inputs[rows], labels[rows], schedule.weights[:active, step]
        found, losses[:active, step] = gradients_of(params, batch, schedule.partners[:active, step])
        for name, gradient in found.items():
            weight = params[name][:active]
            move = correction(name, weight, gradient)
            if settings.momentum:
                buffer = buffers.setdefault(name, torch.zeros_like(params[name]))[:active]
                move = buffer.mul_(settings.momentum).add_(move)
            weight.sub_(move * _like(rates[:active], move))
    totals = losses.sum(1).tolist()
    kept = buffers if settings.momentum or warm else {}
    return [
        Trained(
            params={name: value[place] for name, value in params.items()},
            momentum_buffers={name: value[place] for name, value in kept.items()} if count or warm else {},
            num_steps=count,
            loss=totals[place] / count if count else None,
        )
        for place, count in enumerate(steps)
    ]


@dataclass(frozen=True)
class _Correction:
    """What algorithms and weight decay add to the gradients of the clients still training."""

    anchor: Params
    offset: Params
    proximal_mu: torch.Tensor
    weight_decay: float

    def __call__(self, name: str, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        active = len(gradient)
        if self.offset:
            gradient = gradient + self.offset[name][:active]
        if self.proximal_mu.any():
            gradient = gradient + _like(self.proximal_mu[:active], weight) * (weight - self.anchor[name][:active])
        return gradient + self.weight_decay * weight if self.weight_decay else gradient


class _Gradients:
    """The gradients and losses of one step of all clients, by ``vmap`` over one client's."""

    def __init__(
        self, model: nn.Module, trainable: list[str], jobs: list[Job], device: torch.device, precision: Precision
    ) -> None:
        self._model = model
        self._trainable = trainable
        self._precision = precision
        self._device = device
        mixes = [job.plan.mix for job in jobs]
        self._mix = mixes[0]
        for mix in mixes:  # every client of a run mixes with the same pool
            assert (mix and mix.inputs) is (self._mix and self._mix.inputs)
        pool = (torch.zeros(1), torch.zeros(1)) if self._mix is None else (self._mix.inputs, self._mix.labels)
        self._pool = [part.to(device) for part in pool]

    def __call__(
        self, params: Params, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], partners: torch.Tensor
    ) -> tuple[Params, torch.Tensor]:
        inputs, labels, weights = batch
        moving = {name: params[name][: len(labels)] for name in self._trainable}
        fixed = {name: value[: len(labels)] for name, value in params.items() if name not in moving}
        others = tuple(part[partners] for part in self._pool)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bfloat16"):
            gradients, losses = vmap(grad_and_value(self._loss))(moving, fixed, inputs, labels, weights, *others)
        return {name: gradient.float() for name, gradient in gradients.items()}, losses.float()

    def _loss(
        self,
        moving: Params,
        fixed: Params,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        mean_inputs: torch.Tensor,
        mean_labels: torch.Tensor,
    ) -> torch.Tensor:
        def logits_of(records: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = functional_call(self._model, {**moving, **fixed}, (records,))
            return logits

        if self._mix is None:
            losses = functional.cross_entropy(logits_of(inputs), labels, reduction="none")
        else:
            losses = mixed_losses(
                logits_of, inputs, labels, mean_inputs, mean_labels, self._mix.weight,
                linearise=self._mix.linearise, slope=_slope,
            )  # fmt: skip
        return (losses * weights).sum()


def _slope(
    logits_of: LogitsOf, inputs: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logits, each record's cross-entropy, its gradient by the record), differentiable once more."""

    def total(records: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        logits = logits_of(records)
        own = functional.cross_entropy(logits, labels, reduction="none")
        return own.sum(), (logits, own)

    slope, (logits, own) = grad(total, has_aux=True)(inputs)
    return logits, own, slope


def _schedule(jobs: list[Job], steps: list[int], device: torch.device) -> _Schedule:
    """Draw what ``fl_sim.learning.train`` draws from every client's generator, in the same order."""
    size = jobs[0].task.settings.batch_size
    rows = np.zeros((len(jobs), max(steps[0], 1), size), dtype=np.int64)
    weights = np.zeros(rows.shape, dtype=np.float32)
    partners = np.zeros(rows.shape[:2], dtype=np.int64)
    before = 0
    for place, job in enumerate(jobs):
        count = len(job.labels)
        draws = Draws.of(job.task, job.plan, count, job.generator)
        batches = [order[first : first + size] for order in draws.order for first in range(0, count, size)]
        for step, batch in enumerate(batches):
            rows[place, step, : len(batch)] = before + batch
            weights[place, step, : len(batch)] = 1 / len(batch)
        partners[place, : len(draws.partners)] = draws.partners
        before += count
    return _Schedule(*(torch.from_numpy(array).to(device) for array in (rows, weights, partners)))


def _trainable(model: nn.Module, inputs: torch.Tensor) -> list[str]:
    """Return the parameters that the loss depends on: local SGD, weight decay included, leaves the others alone."""
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    found = torch.autograd.grad(model(inputs[:1]).sum(), [weight for _, weight in named], allow_unused=True)
    return [name for (name, _), gradient in zip(named, found, strict=True) if gradient is not None]


def _shared_settings(jobs: list[Job]) -> LocalSettings:
    settings = jobs[0].task.settings
    shared = (settings.momentum, settings.weight_decay, settings.batch_size, settings.epochs)
    for job in jobs:
        own = job.task.settings
        assert (own.momentum, own.weight_decay, own.batch_size, own.epochs) == shared
    return settings


def _stacked(parts: Sequence[Params | None], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the clients' tensors on top of one another; all have them, or none has."""
    first = parts[0]
    if not first:
        assert not any(parts)
        return {}
    return {name: torch.stack([(part or {})[name] for part in parts]).to(device) for name in first}


def _num_steps(job: Job) -> int:
    return job.task.settings.num_steps(len(job.labels))


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _like(column: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return column.reshape(-1, *[1] * (tensor.ndim - 1))
