"""One step of local SGD for many clients, over buffers that stay where they are from step to step and round to round.

So the step can be captured in a CUDA graph: it allocates nothing that outlives it, asks the device nothing, and takes
the clients, their records and how many are still training from the buffers alone.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional

from fl_sim.local_plan import Batch, LocalPlan, LossTerm, Mix
from fl_sim.params import Layout, check_layout, layout_of
from fl_sim.training.losses import LogitsOf, added_by, mixed_losses
from fl_sim.training.records import Source
from fl_sim.training.trainer import LocalJob
from fl_sim.types import Params

TAKES = frozenset({
    "learning_rate", "momentum", "weight_decay", "batch_size", "epochs",
    "gradient_offset", "proximal_mu", "momentum_buffers", "mix", "loss_term",
})  # fmt: skip
"""The fields of LocalSettings and LocalPlan that ``StackedStep`` knows."""


@dataclass(frozen=True)
class Kind:
    """What is the same for all clients of a stack and decides what a step computes.

    ``warm``: the optimiser starts from buffers that the plans bring; ``offset``, ``proximal``: the plans have such.
    ``mixing``: the mixing pool and how it is mixed in, as a key; ``term``: the loss term's function and the names,
    shapes and types of its data.
    """

    layout: Layout
    batch_size: int
    epochs: int
    momentum: float
    weight_decay: float
    warm: bool
    offset: bool
    proximal: bool
    mixing: tuple[Hashable, ...] = ()
    term: tuple[Hashable, ...] = ()

    @classmethod
    def of(cls, job: LocalJob, *, proximal: bool) -> Self:
        """Return the kind of ``job``, in a stack of which some are ``proximal``."""
        settings, plan = job.task.settings, job.plan
        return cls(
            layout_of(job.task.params), settings.batch_size, settings.epochs, settings.momentum, settings.weight_decay,
            bool(plan.momentum_buffers), bool(plan.gradient_offset), proximal, _key_of_mix(plan.mix),
            _key_of_term(plan.loss_term),
        )  # fmt: skip


def _key_of_mix(mix: Mix | None) -> tuple[Hashable, ...]:
    """Return what two plans that mix alike have in common: the very same pool."""
    return () if mix is None else (id(mix.inputs), id(mix.labels), mix.weight, mix.linearise)


def _key_of_term(term: LossTerm | None) -> tuple[Hashable, ...]:
    if term is None:
        return ()
    return (term.function, *((name, tuple(value.shape), value.dtype) for name, value in term.data.items()))


class StackedStep:
    """A step of up to ``capacity`` clients, the first of which are still training.

    Written from outside: ``rows``, ``weights``, ``partners`` of the step, (capacity, batch), (capacity, batch) and
    (capacity,): places in ``source``; 1 / n for each of the n records of a batch and 0 for what fills it up; places in
    the mixing pool. If ``padded``, a step may be taken with more clients than are still training: those from
    ``active`` on stay as they are.
    """

    def __init__(
        self, model: nn.Module, kind: Kind, source: Source, plan: LocalPlan, capacity: int, *, padded: bool
    ) -> None:
        self.kind, self.capacity, self.padded = kind, capacity, padded
        self._mix, self._term = plan.mix, plan.loss_term
        self._model, self._source, device = model, source, source.inputs.device
        check_layout("the model's weights", dict(model.named_parameters()), kind.layout)
        data = {} if plan.loss_term is None else plan.loss_term.data
        self._data = {
            name: torch.zeros(capacity, *like.shape, dtype=like.dtype, device=device) for name, like in data.items()
        }
        self._trainable = self._moved_by_the_loss()
        shapes = dict(kind.layout)
        self.params = _room(shapes, capacity, device)
        moved = shapes if kind.warm else {name: shapes[name] for name in self._trainable if kind.momentum}
        self.buffers = _room(moved, capacity, device)
        self.losses = torch.zeros(capacity, dtype=torch.float64, device=device)
        self.rows = torch.zeros(capacity, kind.batch_size, dtype=torch.int64, device=device)
        self.weights = torch.zeros(capacity, kind.batch_size, device=device)
        self.partners = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.active = torch.zeros((), dtype=torch.int64, device=device)
        self._anchor = _room(shapes if kind.proximal or plan.loss_term else {}, capacity, device)
        self._offset = _room(shapes if kind.offset else {}, capacity, device)
        self._rates, self._proximal_mu = (torch.zeros(capacity, device=device) for _ in range(2))
        self._places = torch.arange(capacity, device=device)
        pool = (torch.zeros(1), torch.zeros(1)) if plan.mix is None else (plan.mix.inputs, plan.mix.labels)
        self._pool = [part.to(device) for part in pool]

    def load(self, jobs: Sequence[LocalJob]) -> None:
        """Put the clients where they start."""
        start = [job.task.params for job in jobs]
        _fill(self.params, start)
        _fill(self._anchor, start)
        _fill(self._offset, [job.plan.gradient_offset or {} for job in jobs])
        _fill(self._data, [job.plan.loss_term.data if job.plan.loss_term else {} for job in jobs])
        for buffer in self.buffers.values():
            buffer.zero_()
        if self.kind.warm:
            _fill(self.buffers, [job.plan.momentum_buffers or {} for job in jobs])
        self._rates[: len(jobs)] = torch.tensor([job.task.settings.learning_rate for job in jobs])
        self._proximal_mu[: len(jobs)] = torch.tensor([job.plan.proximal_mu for job in jobs])
        self.losses.zero_()

    def __call__(self, width: int) -> None:
        """Take a step with the first ``width`` clients, all of them still training unless the step is padded."""
        live = self._places[:width] < self.active if self.padded else None
        rows = self.rows[:width]
        records = self._source.normalised(self._source.inputs[rows]), self._source.labels[rows], self.weights[:width]
        gradients, losses = self._gradients(width, records)
        for name, gradient in gradients.items():
            self._move(name, gradient.float(), live)
        self.losses[:width] += losses if live is None else torch.where(live, losses, torch.zeros_like(losses))

    def state(self) -> list[torch.Tensor]:
        """Return all that a step changes."""
        return [*self.params.values(), *self.buffers.values(), self.losses]

    def _move(self, name: str, gradient: torch.Tensor, live: torch.Tensor | None) -> None:
        width = len(gradient)
        changing = [tensors[name][:width] for tensors in (self.params, self.buffers) if name in tensors]
        before = [] if live is None else [target.clone() for target in changing]
        weight, *buffers = changing
        if self.kind.offset:
            gradient = gradient + self._offset[name][:width]
        if self.kind.proximal:
            gradient = gradient + _like(self._proximal_mu[:width], weight) * (weight - self._anchor[name][:width])
        if self.kind.weight_decay:
            gradient = gradient + self.kind.weight_decay * weight
        if self.kind.momentum:
            gradient = buffers[0].mul_(self.kind.momentum).add_(gradient)
        weight.sub_(gradient * _like(self._rates[:width], weight))
        if live is not None:  # those who are done go back to where they were
            for target, value in zip(changing, before, strict=True):
                target.copy_(torch.where(_like(live, target), target, value))

    def _gradients(
        self, width: int, records: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[Params, torch.Tensor]:
        """Return the gradients and losses of all clients, by ``vmap`` over one client's."""
        moving = {name: self.params[name][:width] for name in self._trainable}
        fixed = {name: value[:width] for name, value in self.params.items() if name not in moving}
        pool_inputs, pool_labels = self._pool
        chosen = self.partners[:width]
        partners = pool_inputs[chosen], pool_labels[chosen]
        others = [{name: value[:width] for name, value in tensors.items()} for tensors in (self._anchor, self._data)]
        found: tuple[Params, torch.Tensor]
        found = vmap(grad_and_value(self._loss))(moving, fixed, records, partners, *others)
        return found

    def _loss(
        self,
        moving: Params,
        fixed: Params,
        records: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        partner: tuple[torch.Tensor, torch.Tensor],
        anchor: Params,
        data: Params,
    ) -> torch.Tensor:
        inputs, labels, weights = records
        params = {**moving, **fixed}
        logits_of = partial(self._logits_of, params)
        logits: torch.Tensor | None = None
        if self._mix is None:
            logits = logits_of(inputs)
            losses = functional.cross_entropy(logits, labels, reduction="none")
        else:
            losses = mixed_losses(
                logits_of, inputs, labels, *partner, self._mix.weight, linearise=self._mix.linearise, slope=_slope
            )
        loss = (losses * weights).sum()
        if self._term is None:
            return loss
        logits = logits_of(inputs) if logits is None else logits
        return loss + added_by(
            self._term, Batch(inputs, labels, weights, logits, params, anchor, data, self._logits_of)
        )

    def _logits_of(self, params: Params, records: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = functional_call(self._model, dict(params), (records,))
        return logits

    def _moved_by_the_loss(self) -> list[str]:
        """Return the parameters that the loss depends on: local SGD, weight decay included, leaves the others alone."""
        weights = dict(self._model.named_parameters())
        named = {name: weight for name, weight in weights.items() if weight.requires_grad}
        inputs, labels = self._source.normalised(self._source.inputs[:1]), self._source.labels[:1]
        logits = self._model(inputs)
        loss = logits.sum()
        if self._term is not None:
            data = {name: value[0] for name, value in self._data.items()}
            ones = torch.ones(1, device=inputs.device)
            anchor = {name: weight.detach() for name, weight in weights.items()}
            batch = Batch(inputs, labels, ones, logits, weights, anchor, data, self._logits_of)
            loss = loss + added_by(self._term, batch)
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return [name for name, gradient in zip(named, found, strict=True) if gradient is not None]


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


def _room(shapes: Mapping[str, tuple[int, ...]], capacity: int, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(capacity, *shape, device=device) for name, shape in shapes.items()}


def _fill(buffers: Params, parts: Sequence[Params]) -> None:
    """Copy each client's tensors to its place; what all of them share goes to the device once."""
    shared = all(part is parts[0] for part in parts)
    for name, buffer in buffers.items():
        value = parts[0][name] if shared else torch.stack([part[name] for part in parts])
        buffer[: len(parts)] = value.to(buffer.device)


def _like(column: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return column.reshape(-1, *[1] * (tensor.ndim - 1))
