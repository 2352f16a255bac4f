"""One optimizer step for many clients at once on a GPU. A CUDA graph can capture the step.

For a CUDA graph, a step must use the same memory addresses each time. So all inputs and results are in buffers that
stay at their addresses for all steps and rounds. The step allocates no lasting memory and never waits for the device.
It reads all its inputs, such as records and the number of clients still in training, only from these buffers.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.func import grad, grad_and_value, vmap

from fl_sim.local_plan import Ascent, LocalPlan, check_optimizer
from fl_sim.own_loss import OwnLoss, check_own_loss, losses_of
from fl_sim.params import Layout, check_layout, layout_of, placed_in, trainable
from fl_sim.training.features import Network
from fl_sim.training.losses import (
    LogitsOf,
    adjusted,
    check_smoothing,
    cross_entropies,
    mixed_losses,
    outputs_for,
    terms_of,
    with_terms,
)
from fl_sim.training.optimizer import Moments, ascent_of, blended, clipped, uphill
from fl_sim.training.records import Source, black_of, moved
from fl_sim.training.trainer import LocalJob
from fl_sim.types import Augment, Optimizer, Params

TAKES = frozenset({
    "learning_rate", "momentum", "weight_decay", "batch_size", "epochs", "clip_norm", "steps",
    "label_smoothing", "optimizer", "augment",
    "gradient_offset", "step_offset", "proximal_mu", "gradient_scale", "momentum_buffers", "mix", "logit_shift",
    "logit_scale", "distillation", "suppression", "ascent", "contrast", "pull", "loss_term", "class_features",
    "trained",
})  # fmt: skip
"""The fields of LocalSettings and LocalPlan that stacked training supports."""


@dataclass(frozen=True)
class Kind:
    """The settings that all clients of one stack share. These settings determine the operations of a step.

    ``warm``: True if the plans have initial momentum buffers. ``offset``: True if the plans add tensors to the
    gradients. ``drift``: True if the plans add tensors to the steps. ``proximal``: True if any client of the round has
    a proximal term. ``mixing``: an identifier of the mixing pool (FedMix's averaged records) and of the settings of
    mixing. ``adjusting``: the shapes of the scale and shift of the logits. ``terms``: for each loss term, its function
    and the names, shapes and types of its data. ``trained``: the names of the parameters to train; None means all.
    """

    layout: Layout
    batch_size: int
    momentum: float
    weight_decay: float
    warm: bool
    offset: bool
    proximal: bool
    mixing: tuple[Hashable, ...] = ()
    adjusting: tuple[Hashable, ...] = ()
    terms: tuple[Hashable, ...] = ()
    ascent: Ascent | None = None
    gradient_scale: float = 1.0
    drift: bool = False
    clip_norm: float = 0.0
    label_smoothing: float = 0.0
    optimizer: Optimizer = "sgd"
    augment: Augment = Augment()  # noqa: RUF009 (frozen)
    trained: frozenset[str] | None = None

    @classmethod
    def of(cls, job: LocalJob, *, proximal: bool) -> Self:
        """Return the settings of ``job`` that all clients of its stack must share.

        ``proximal``: True if any client of the round has a proximal term.
        """
        settings, plan, mix = job.task.settings, job.plan, job.plan.mix
        # id(...): clients may share a stack only if their plans contain the same pool object.
        mixing = () if mix is None else (id(mix.inputs), id(mix.labels), mix.weight, mix.linearise)
        terms = tuple((term.function, term.features, *_shapes(term.data)) for term in terms_of(plan))
        return cls(
            layout_of(job.task.params), settings.batch_size, settings.momentum, settings.weight_decay,
            bool(plan.momentum_buffers), bool(plan.gradient_offset), proximal, mixing,
            _shapes(adjustment_of(plan)), terms, ascent_of(plan),
            plan.gradient_scale, bool(plan.step_offset), settings.clip_norm,
            settings.label_smoothing, settings.optimizer, settings.augment, plan.trained,
        )  # fmt: skip


def adjustment_of(plan: LocalPlan) -> dict[str, torch.Tensor]:
    """Return the plan's scale and shift of logits, if any, as keyword arguments for ``losses.adjusted``."""
    parts = {"scale": plan.logit_scale, "shift": plan.logit_shift}
    return {name: part for name, part in parts.items() if part is not None}


class StackedStep:
    """An optimizer step for up to ``capacity`` clients. The clients still in training come first.

    The caller writes these inputs before each step. ``rows``: (capacity, batch), indices of records in ``source``.
    ``weights``: (capacity, batch), 1 / n for the n records of a batch, and 0 for padding. ``partners``: (capacity,),
    indices of averaged records in the mixing pool (FedMix). ``moves``: (capacity, batch, 3), the shifts and mirroring
    of images. ``active``: the number of clients that are still in training. ``padded``: True if a step may include more
    than ``active`` clients. Such a step does not change the surplus clients.
    """

    def __init__(
        self, model: nn.Module, kind: Kind, source: Source, plan: LocalPlan, capacity: int, *, padded: bool
    ) -> None:
        self.kind, self.capacity, self.padded = kind, capacity, padded
        check_own_loss(model, plan)
        self._mix, self._terms = plan.mix, terms_of(plan)
        self._own_losses = losses_of(model) if isinstance(model, OwnLoss) else None
        self._network, self._source, device = Network(model), source, source.inputs.device
        check_layout("the model's weights", placed_in(model, dict(kind.layout).keys()), kind.layout)
        self._adjustment = _room_like(adjustment_of(plan), capacity, device)
        self._data = [_room_like(term.data, capacity, device) for term in self._terms]
        chosen = kind.trained
        self._trainable = [name for name in self._moved_by_the_loss() if chosen is None or name in chosen]
        shapes = dict(kind.layout)
        self.params = _room(shapes, capacity, device)
        moved = shapes if kind.warm else {name: shapes[name] for name in self._trainable if kind.momentum}
        self.buffers = _room(moved, capacity, device)
        adaptive = self._trainable if kind.optimizer != "sgd" else []
        self.moments = {name: Moments.like(self.params[name]) for name in adaptive}
        self.losses = torch.zeros(capacity, dtype=torch.float64, device=device)
        self.rows = torch.zeros(capacity, kind.batch_size, dtype=torch.int64, device=device)
        self.weights = torch.zeros(capacity, kind.batch_size, device=device)
        self.partners = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.moves = torch.zeros(capacity, kind.batch_size, 3, dtype=torch.int64, device=device)
        self._black = black_of(kind.augment, device)
        self.active = torch.zeros((), dtype=torch.int64, device=device)
        self._anchor = _room(shapes if kind.proximal or self._terms else {}, capacity, device)
        self._offset = _room(shapes if kind.offset else {}, capacity, device)
        self._drift = _room(shapes if kind.drift else {}, capacity, device)
        self._rates, self._proximal_mu = (torch.zeros(capacity, device=device) for _ in range(2))
        self._places = torch.arange(capacity, device=device)
        pool = (torch.zeros(1), torch.zeros(1)) if plan.mix is None else (plan.mix.inputs, plan.mix.labels)
        self._pool = [part.to(device) for part in pool]

    def load(self, jobs: Sequence[LocalJob]) -> None:
        """Copy the clients' initial weights, plans and learning rates to the buffers.

        Raises UserError if a client's settings contradict its plan, for example label smoothing with removed classes.
        """
        for job in jobs:
            check_smoothing(job.plan, self.kind.label_smoothing)
            check_optimizer(job.plan, job.task.settings)
            check_own_loss(self._network.model, job.plan, job.task.settings)
        start = [job.task.params for job in jobs]
        _fill(self.params, start)
        _fill(self._anchor, start)
        _fill(self._offset, [job.plan.gradient_offset or {} for job in jobs])
        _fill(self._drift, [job.plan.step_offset or {} for job in jobs])
        _fill(self._adjustment, [adjustment_of(job.plan) for job in jobs])
        terms = [terms_of(job.plan) for job in jobs]
        for place, data in enumerate(self._data):
            _fill(data, [own[place].data for own in terms])
        for buffer in [*self.buffers.values(), *self._moments()]:
            buffer.zero_()
        if self.kind.warm:
            _fill(self.buffers, [job.plan.momentum_buffers or {} for job in jobs])
        self._rates[: len(jobs)] = torch.tensor([job.task.settings.learning_rate for job in jobs])
        self._proximal_mu[: len(jobs)] = torch.tensor([job.plan.proximal_mu for job in jobs])
        self.losses.zero_()

    def __call__(self, width: int) -> None:
        """Execute a step for the first ``width`` clients of the stack.

        All these clients must still be in training, unless ``padded`` is True.
        """
        live = self._places[:width] < self.active if self.padded else None
        rows = self.rows[:width]
        inputs = self._source.normalised(self._source.inputs[rows])
        inputs = moved(inputs, self.moves[:width], self.kind.augment, self._black)
        records = inputs, self._source.labels[rows], self.weights[:width]
        gradients, losses = self._gradients(width, records)
        corrected = {name: self._corrected(name, gradient.float()) for name, gradient in gradients.items()}
        if self.kind.clip_norm:
            corrected = vmap(partial(clipped, clip_norm=self.kind.clip_norm))(corrected)
        for name, gradient in corrected.items():
            self._move(name, gradient, live)
        self.losses[:width] += losses if live is None else torch.where(live, losses, torch.zeros_like(losses))

    def state(self) -> list[torch.Tensor]:
        """Return all tensors that a step changes: parameters, optimizer state and losses."""
        return [*self.params.values(), *self.buffers.values(), *self._moments(), self.losses]

    def _moments(self) -> list[torch.Tensor]:
        return [part for own in self.moments.values() for part in (own.first, own.second, own.num_steps)]

    def _move(self, name: str, gradient: torch.Tensor, live: torch.Tensor | None) -> None:
        width = len(gradient)
        changing = [tensors[name][:width] for tensors in (self.params, self.buffers) if name in tensors]
        before = [] if live is None else [target.clone() for target in changing]
        weight, *buffers = changing
        if self.kind.weight_decay and self.kind.optimizer == "adamw":
            weight.sub_(weight * _like(self._rates[:width] * self.kind.weight_decay, weight))
        elif self.kind.weight_decay:
            gradient = gradient + self.kind.weight_decay * weight
        if name in self.moments:
            gradient = self.moments[name].of_first(width).direction(gradient)
        elif self.kind.momentum:
            gradient = buffers[0].mul_(self.kind.momentum).add_(gradient)
        if self.kind.drift:
            gradient = gradient + self._drift[name][:width]
        weight.sub_(gradient * _like(self._rates[:width], weight))
        if live is not None:  # clients that have finished training get their old values back
            for target, value in zip(changing, before, strict=True):
                target.copy_(torch.where(_like(live, target), target, value))

    def _corrected(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        width = len(gradient)
        weight = self.params[name][:width]
        if self.kind.gradient_scale != 1:
            gradient = gradient * self.kind.gradient_scale
        if self.kind.offset:
            gradient = gradient + self._offset[name][:width]
        if self.kind.proximal:
            gradient = gradient + _like(self._proximal_mu[:width], weight) * (weight - self._anchor[name][:width])
        return gradient

    def _gradients(
        self, width: int, records: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[Params, torch.Tensor]:
        """Return the gradients and losses of the first ``width`` clients, by applying ``vmap`` to ``_gradient``."""
        moving = {name: self.params[name][:width] for name in self._trainable}
        fixed = {name: value[:width] for name, value in self.params.items() if name not in moving}
        pool_inputs, pool_labels = self._pool
        chosen = self.partners[:width]
        partners = pool_inputs[chosen], pool_labels[chosen]
        others = [{name: value[:width] for name, value in part.items()} for part in (self._anchor, self._adjustment)]
        data = [{name: value[:width] for name, value in part.items()} for part in self._data]
        found: tuple[Params, torch.Tensor]
        found = vmap(self._gradient)(moving, fixed, records, partners, *others, data)
        return found

    def _gradient(self, moving: Params, *rest: Any) -> tuple[Params, torch.Tensor]:
        found: Params
        found, loss = grad_and_value(self._loss)(moving, *rest)
        if self.kind.ascent is None:
            return found, loss
        above = grad(self._loss)({**moving, **uphill(moving, found, self.kind.ascent)}, *rest)
        return blended(found, above, self.kind.ascent), loss

    def _loss(
        self,
        moving: Params,
        fixed: Params,
        records: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        partner: tuple[torch.Tensor, torch.Tensor],
        anchor: Params,
        adjustment: Params,
        data: Sequence[Params],
    ) -> torch.Tensor:
        inputs, labels, weights = records
        params = {**moving, **fixed}
        if self._own_losses is not None:
            return (self._own_losses(params, inputs, labels) * weights).sum()
        if self._mix is None:
            outputs = self._outputs(params, inputs)
            shifted = adjusted(outputs[0], adjustment.get("scale"), adjustment.get("shift"))
            losses = cross_entropies(shifted, labels, self.kind.label_smoothing)
        else:
            logits_of = partial(self._network.logits_of, params)
            losses = mixed_losses(
                logits_of, inputs, labels, partner, self._mix.weight,
                linearise=self._mix.linearise, slope=_slope, smoothing=self.kind.label_smoothing,
            )  # fmt: skip
            if self._terms:
                outputs = self._outputs(params, inputs)
        loss = (losses * weights).sum()
        if not self._terms:
            return loss
        return with_terms(loss, self._terms, data, self._network.batch(records, outputs, params, anchor))

    def _outputs(self, params: Params, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return outputs_for(self._terms, self._network.model, lambda: self._network.logits_of(params, records))

    def _moved_by_the_loss(self) -> list[str]:
        """Return the names of the parameters on which the loss depends.

        All other parameters stay unchanged, even with weight decay, as in PyTorch's optimizers.
        """
        weights = placed_in(self._network.model, dict(self.kind.layout).keys())
        named = trainable(self._network.model)
        inputs, labels = self._source.normalised(self._source.inputs[:1]), self._source.labels[:1]
        if self._own_losses is not None:
            loss = self._own_losses(weights, inputs, labels).sum()
        else:
            outputs = self._outputs(weights, inputs)
            loss = outputs[0].sum()
        if self._terms:
            ones = torch.ones(1, device=inputs.device)
            anchor = {name: weight.detach() for name, weight in weights.items()}
            batch = self._network.batch((inputs, labels, ones), outputs, weights, anchor)
            data = [{name: value[0] for name, value in part.items()} for part in self._data]
            loss = with_terms(loss, self._terms, data, batch)
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return [name for name, gradient in zip(named, found, strict=True) if gradient is not None]


def _shapes(tensors: Params) -> tuple[Hashable, ...]:
    return tuple((name, tuple(value.shape), value.dtype) for name, value in tensors.items())


def _slope(
    logits_of: LogitsOf, inputs: torch.Tensor, labels: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logits, cross-entropy of each record, its gradient with respect to the inputs).

    The results can be differentiated once more, also under ``vmap``. For one client, use ``losses.by_autograd``.
    """

    def total(records: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        logits = logits_of(records)
        own = cross_entropies(logits, labels, smoothing)
        return own.sum(), (logits, own)

    slope, (logits, own) = grad(total, has_aux=True)(inputs)
    return logits, own, slope


def _room(shapes: Mapping[str, tuple[int, ...]], capacity: int, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(capacity, *shape, device=device) for name, shape in shapes.items()}


def _room_like(tensors: Params, capacity: int, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(capacity, *like.shape, dtype=like.dtype, device=device) for name, like in tensors.items()}


def _fill(buffers: Params, parts: Sequence[Params]) -> None:
    """Copy each client's tensors to its row of the buffers.

    A tensor that all clients share is transferred to the device only once.
    """
    shared = all(part is parts[0] for part in parts)
    for name, buffer in buffers.items():
        value = parts[0][name] if shared else torch.stack([part[name] for part in parts])
        buffer[: len(parts)] = value.to(buffer.device)


def _like(column: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return column.reshape(-1, *[1] * (tensor.ndim - 1))
