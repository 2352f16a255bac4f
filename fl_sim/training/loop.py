"""The plain PyTorch training loop: minibatch SGD or Adam on one client's records, for every algorithm."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fl_sim.errors import UserError
from fl_sim.local_plan import Ascent, LocalPlan, LossTerm, check_optimizer, fields_in_use
from fl_sim.own_loss import OwnLoss, check_own_loss
from fl_sim.params import (
    check_layout,
    copy_into,
    detached,
    layout_of,
    load_statistics,
    norms_in,
    placed_in,
    running_in,
    statistics_of,
    trainable,
)
from fl_sim.training.features import Network, Passes, feature_sums
from fl_sim.training.losses import adjusted, check_smoothing, mixed_losses, outputs_for, terms_of, with_terms
from fl_sim.training.optimizer import Moments, ascent_of, blended, clipped, uphill
from fl_sim.training.records import Scale, Source, black_of, moved
from fl_sim.types import Dataset, Examples, LocalSettings, LocalTask, Params, Trained

TAKES = frozenset({
    "learning_rate", "momentum", "weight_decay", "batch_size", "epochs", "clip_norm", "steps",
    "label_smoothing", "optimizer", "augment",
    "gradient_offset", "step_offset", "proximal_mu", "gradient_scale", "momentum_buffers", "mix", "logit_shift",
    "logit_scale", "distillation", "suppression", "ascent", "contrast", "pull", "loss_term", "class_features",
    "trained", "step_mask",
})  # fmt: skip
"""The fields of LocalSettings and LocalPlan that ``train`` supports. These are all fields.

The other trainers support fewer fields. They call ``train`` for a client whose settings or plan they do not support.
"""

LARGE = 2**17
"""A parameter with at least so many numbers is called large. A step may update only a part of a large parameter."""

BLOCK = 2**17
"""The numbers per thread in one block of a large parameter. The tensors of a block fit into the CPU's cache."""

FEW = 0.25
"""If a step changes at most this share of a large parameter, only this part is updated, else the whole parameter."""

Partner: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""An averaged record for FedMix: (mean input of several records, (*input shape); class proportions, (classes,))."""


def to_tensors(examples: Examples, dataset: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pair (normalised float32 inputs, int64 labels) of ``examples``.

    A byte b becomes (b / 255 - mean) / std. A float feature x becomes (x - mean) / std. Here ``mean`` and ``std`` are
    public constants of the data set.
    """
    inputs = torch.from_numpy(np.array(examples.inputs, order="C")).to(torch.float32)
    scale = Scale.of(dataset, examples.inputs.dtype, inputs.ndim)
    return scale.normalise_(inputs), torch.from_numpy(np.array(examples.labels))


def resident(examples: Examples, dataset: Dataset, device: torch.device) -> Source:
    """Copy ``examples`` to ``device``, and return them as a ``Source`` (read-only records on a device).

    On a GPU, inputs of bytes stay bytes to save memory. All other inputs become normalised float32.
    """
    if not stays_bytes(examples, device):
        inputs, labels = to_tensors(examples, dataset)
        return Source(inputs.to(device), labels.to(device))
    scale = Scale.of(dataset, examples.inputs.dtype, examples.inputs.ndim).to(device)
    inputs, labels = (torch.from_numpy(np.array(part, order="C")) for part in (examples.inputs, examples.labels))
    return Source(inputs.to(device), labels.to(device), scale)


def stays_bytes(examples: Examples, device: torch.device) -> bool:
    """Return True if ``resident`` keeps inputs as bytes: only on a GPU. The trainer for CPUs needs float32 inputs."""
    return device.type != "cpu" and examples.inputs.dtype == np.uint8


def train(
    model: nn.Module,
    task: LocalTask,
    plan: LocalPlan,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    generator: np.random.Generator,
    passes: Passes | None = None,
) -> Trained:
    """Train one client for ``task.settings.num_steps(n)`` local steps from ``task.params``, and return the result.

    ``model``: provides the architecture; its weights are overwritten. Frozen parameters (``requires_grad=False``) are
    not trained. The value of a frozen parameter comes from ``task.params``, or from ``model`` if ``task.params`` does
    not contain it. ``inputs``: (n, *input shape), normalised. ``labels``: (n,). n may be 0; then nothing is trained.
    ``generator``: the random generator for shuffling, image augmentation and mixing partners. ``passes``: faster
    passes of ``model``, for a plan whose loss terms need no second derivatives; or None. Raises ValueError for
    tensors whose shapes do not fit the model. Raises UserError for a plan with fields that no trainer supports.
    """
    weights: Params = placed_in(model, task.params)
    trained = trained_weights(model, plan)
    _check(plan, task.settings, weights, inputs)
    check_own_loss(model, plan, task.settings)
    with torch.no_grad():
        copy_into(weights, task.params)
        load_statistics(model, task.statistics)
    descent = Descent.of(trained, task, plan, inputs.device)
    network = Network(model, passes)
    objective = Objective.of(network, plan, descent.anchor, inputs.device, smoothing=task.settings.label_smoothing)
    model.train()
    losses: list[torch.Tensor] = []
    norms, running = list(norms_in(model).values()), running_in(model)
    augment, black = task.settings.augment, black_of(task.settings.augment, inputs.device)
    for batch, moves in batches(task.settings, len(labels), generator, inputs.device):
        records = moved(inputs.index_select(0, batch), moves, augment, black)
        loss_of = partial(objective.loss, records, labels.index_select(0, batch), objective.partner(generator))
        for norm in norms:
            # BatchNorm uses running statistics for a batch of one record, which has no variance.
            norm.train(len(batch) > 1)
        loss, gradients = _gradients(loss_of, trained, running, ascent_of(plan))
        descent.step(trained, gradients)
        losses.append(loss)
    return Trained(
        params=detached(weights.items()),
        momentum_buffers=detached(descent.buffers.items()),
        num_steps=len(losses),
        loss=float(torch.stack(losses).mean()) if losses else None,
        feature_sums=feature_sums(model, {}, inputs, labels) if plan.class_features else None,
        statistics=statistics_of(model),
    )


def trained_weights(model: nn.Module, plan: LocalPlan) -> dict[str, torch.Tensor]:
    """Return the parameters of ``model`` that are trained under the local plan ``plan``, {name: parameter}."""
    return {name: weight for name, weight in trainable(model).items() if plan.trained is None or name in plan.trained}


@dataclass(frozen=True)
class Descent:
    """The steps of SGD, Adam or AdamW, with the corrections of a local plan.

    ``anchor``: the received model. ``offset``: the tensors that the plan adds to each gradient. ``drift``: the tensors
    that the plan adds to each step, before multiplication by the learning rate. ``mask``: True for the numbers that
    steps may change; all numbers of a parameter without a mask may change. ``offset``, ``drift`` and ``mask`` may be
    empty. ``buffers``: the momentum buffers. ``moments``: the running means of Adam and AdamW. ``touched``: masks for
    large parameters: True at each index of the longest axis where a gradient was not 0 before. All these fields are
    dictionaries with parameter names as keys.
    """

    settings: LocalSettings
    plan: LocalPlan
    anchor: Params
    offset: Params
    drift: Params
    mask: Params
    buffers: dict[str, torch.Tensor]
    moments: Mapping[str, Moments]
    touched: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, weights: Params, task: LocalTask, plan: LocalPlan, device: torch.device) -> Self:
        """Return the optimizer state before the first step of training ``weights`` on ``device``."""
        adaptive = weights.items() if task.settings.optimizer != "sgd" else ()
        return cls(
            task.settings,
            plan,
            anchor=_on(task.params, device),
            offset=_on(plan.gradient_offset or {}, device),
            drift=_on(plan.step_offset or {}, device),
            mask=_on(plan.step_mask or {}, device),
            buffers=_on(plan.momentum_buffers or {}, device, copy=True),
            moments={name: Moments.like(weight.detach()) for name, weight in adaptive},
        )

    @torch.no_grad()
    def step(self, weights: Params, gradients: Params) -> None:
        """Update ``weights`` in place by one step.

        ``gradients``: the gradients of all weights on which the loss depends.
        """
        corrected = {name: self._corrected(name, weights[name], gradient) for name, gradient in gradients.items()}
        for name, gradient in clipped(corrected, self.settings.clip_norm).items():
            before = weights[name].clone() if name in self.mask else None
            self._step(name, weights[name], gradient)
            if before is not None:  # masked weights keep their values, despite momentum, offsets and weight decay
                weights[name].copy_(torch.where(self.mask[name], weights[name], before))

    def _corrected(self, name: str, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        # Nothing is computed in place, because autograd may return the same tensor as the gradient of two parameters.
        if self.plan.gradient_scale != 1:
            gradient = gradient * self.plan.gradient_scale
        if self.offset:
            gradient = gradient + self.offset[name]
        if self.plan.proximal_mu:
            gradient = gradient.add(weight - self.anchor[name], alpha=self.plan.proximal_mu)
        return gradient * self.mask[name] if name in self.mask else gradient

    def _step(self, name: str, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update one parameter in place.

        An SGD step equals the step of torch.optim.SGD in every bit. The classes of torch.optim are not used, because
        importing them takes over a second.
        """
        if (part := self._part(name, weight, gradient)) is None:
            self._update_whole(name, weight, gradient)
            return
        axis, places = part
        weights, gradients = (one.index_select(axis, places) for one in (weight, gradient))
        buffers = {key: value.index_select(axis, places) for key, value in self.buffers.items() if key == name}
        moments = {key: value.at(axis, places) for key, value in self.moments.items() if key == name}
        self._update(name, weights, gradients, buffers, moments)
        weight.index_copy_(axis, places, weights)
        for buffer in buffers.values():
            self.buffers.setdefault(name, torch.zeros_like(weight)).index_copy_(axis, places, buffer)
        for changed in moments.values():
            self.moments[name].put(axis, places, changed)

    def _part(self, name: str, weight: torch.Tensor, gradient: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """Return the part of a large parameter that a step changes, as (axis, indices on this axis).

        All earlier gradients of the rest of the parameter were 0, so its momentum is 0. An example is an embedding: the
        texts of a client contain only few of the tokens. The result is None if the whole parameter must be updated, or
        if this is faster.
        """
        settings, has_state = self.settings, name in self.moments or bool(self.settings.momentum)
        if weight.numel() < LARGE or weight.ndim < 2 or weight.device.type != "cpu" or not has_state:
            return None
        if settings.weight_decay or self.drift or self.plan.momentum_buffers:
            return None
        axis = max(range(weight.ndim), key=lambda one: weight.shape[one])
        touched = self.touched.setdefault(name, torch.zeros(weight.shape[axis], dtype=torch.bool))
        if int(touched.sum()) <= FEW * len(touched):
            others = [one for one in range(weight.ndim) if one != axis]
            # amax and amin of floats are several times as fast as ``any``. NaN is also treated as not 0.
            touched |= (gradient.amax(others) != 0) | (gradient.amin(others) != 0)
        return (axis, touched.nonzero().flatten()) if int(touched.sum()) <= FEW * len(touched) else None

    def _update_whole(self, name: str, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update one parameter in place. A large parameter is updated block by block, with the same result in all bits.

        In blocks, all temporary tensors are small. A large one would be slow: it causes a page fault for every 4 kB.
        """
        moments = self.moments.get(name)
        is_large = weight.numel() >= LARGE and weight.device.type == "cpu" and weight.is_contiguous()
        if moments is None or not is_large or self.drift:
            self._update(name, weight, gradient, self.buffers, self.moments)
            return
        size = BLOCK * torch.get_num_threads()
        changed = weight, moments.first, moments.second  # ``view`` fails where a copy would lose the update
        parts = (torch.split(one, size) for one in (gradient.reshape(-1), *(one.view(-1) for one in changed)))
        for change, block, first, second in zip(*parts, strict=True):
            own = Moments(first, second, moments.num_steps.clone())
            self._update(name, block, change, {}, {name: own})
        moments.num_steps.add_(1)

    def _update(
        self,
        name: str,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        buffers: dict[str, torch.Tensor],
        all_moments: Mapping[str, Moments],
    ) -> None:
        """Update ``weight``, a parameter or a part of it, in place, with its momentum buffer or its moments."""
        settings = self.settings
        if settings.weight_decay and settings.optimizer == "adamw":
            weight.mul_(1 - settings.learning_rate * settings.weight_decay)
        elif settings.weight_decay:
            gradient = gradient.add(weight, alpha=settings.weight_decay)
        if settings.optimizer != "sgd":
            gradient = all_moments[name].direction(gradient)
        elif settings.momentum:
            if name in buffers:
                buffers[name].mul_(settings.momentum).add_(gradient)
            else:
                buffers[name] = gradient.clone()
            gradient = buffers[name]
        if self.drift:
            gradient = gradient + self.drift[name]
        weight.add_(gradient, alpha=-settings.learning_rate)


@dataclass(frozen=True)
class Objective:
    """The training loss that a client's local plan defines, computed with the current weights of a model.

    The tensors of the plan are on the same device as the records.
    """

    network: Network
    plan: LocalPlan
    anchor: Params
    terms: tuple[LossTerm, ...]
    data: tuple[Params, ...]
    scale: torch.Tensor | None
    shift: torch.Tensor | None
    smoothing: float

    @classmethod
    def of(
        cls, network: Network, plan: LocalPlan, anchor: Params, device: torch.device, *, smoothing: float = 0.0
    ) -> Self:
        """Return the loss that ``plan`` defines. ``anchor``: the model that the client received, on ``device``.

        ``smoothing``: the label smoothing. Raises UserError if ``check_smoothing`` refuses the plan.
        """
        check_smoothing(plan, smoothing)
        terms = terms_of(plan)
        data = tuple({name: value.to(device) for name, value in term.data.items()} for term in terms)
        scale, shift = (None if part is None else part.to(device) for part in (plan.logit_scale, plan.logit_shift))
        return cls(network, plan, anchor, terms, data, scale, shift, smoothing)

    def partner(self, generator: np.random.Generator) -> Partner | None:
        """Return a random averaged record that FedMix mixes with the next batch; None for a plan without mixing."""
        if (mix := self.plan.mix) is None:
            return None
        chosen, device = int(generator.integers(len(mix.labels))), next(iter(self.anchor.values())).device
        return mix.inputs[chosen].to(device), mix.labels[chosen].to(device)

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor, partner: Partner | None) -> torch.Tensor:
        """Return the training loss, a tensor of shape () with a gradient; inputs (n, *input shape), labels (n,)."""
        if isinstance(model := self.network.model, OwnLoss):
            return model.loss_of(inputs, labels).losses.mean()
        if (mix := self.plan.mix) is None or partner is None:
            outputs = self._outputs(inputs)
            shifted = adjusted(outputs[0], self.scale, self.shift)
            loss = functional.cross_entropy(shifted, labels, label_smoothing=self.smoothing)
        else:
            losses = mixed_losses(
                self.network.model, inputs, labels, partner, mix.weight,
                linearise=mix.linearise, smoothing=self.smoothing,
            )  # fmt: skip
            loss = losses.mean()
            if self.terms:  # loss terms use the original records, before mixup
                outputs = self._outputs(inputs)
        if not self.terms:
            return loss
        weights = torch.full((len(labels),), 1 / len(labels), dtype=outputs[0].dtype, device=inputs.device)
        params = placed_in(self.network.model, self.anchor)
        batch = self.network.batch((inputs, labels, weights), outputs, params, self.anchor)
        return with_terms(loss, self.terms, self.data, batch)

    def _outputs(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        network = self.network
        if network.passes is not None:
            return network.passes.logits(placed_in(network.model, self.anchor), inputs), None
        return outputs_for(self.terms, network.model, lambda: network.model(inputs))


def batches(
    settings: LocalSettings, count: int, generator: np.random.Generator, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batch of each local step: (record indices, random shifts and mirroring of the batch's images).

    All random numbers of an epoch are drawn at the beginning of the epoch.
    """
    left = settings.num_steps(count)
    while left:
        drawn = [generator.permutation(count), settings.augment.draw(count, generator)]
        batches, moves = (torch.split(torch.from_numpy(one).to(device), settings.batch_size)[:left] for one in drawn)
        yield from zip(batches, moves, strict=True)
        left -= len(batches)


def _gradients(
    loss_of: Callable[[], torch.Tensor],
    weights: dict[str, torch.Tensor],
    running: dict[str, torch.Tensor],
    ascent: Ascent | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return (loss, {name: gradient}); ``weights`` that do not affect the loss have no gradient.

    With an ``ascent`` (sharpness-aware minimisation), a second gradient is computed at the weights after the ascent
    step. The two gradients are then combined. The running statistics ``running`` are updated only at the original
    weights.
    """
    loss = loss_of()
    gradients = _differentiated(loss, weights)
    if ascent is None:
        return loss.detach(), gradients
    with torch.no_grad():
        changing = {**weights, **running}
        before = {name: value.clone() for name, value in changing.items()}
        for name, value in uphill(weights, gradients, ascent).items():
            weights[name].copy_(value)
    above = _differentiated(loss_of(), weights)
    with torch.no_grad():
        for name, value in changing.items():
            value.copy_(before[name])
        return loss.detach(), blended(gradients, above, ascent)


def _differentiated(loss: torch.Tensor, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(weights, found, strict=True) if gradient is not None}


def _check(plan: LocalPlan, settings: LocalSettings, weights: Params, inputs: torch.Tensor) -> None:
    for asked in (plan, settings):
        if unknown := sorted(fields_in_use(asked) - TAKES):
            raise UserError(
                f"no trainer supports {', '.join(unknown)} of {type(asked).__name__}: leave it at its default, or "
                "implement it in fl_sim.training.loop.train and add its name to TAKES there"
            )
    check_optimizer(plan, settings)
    buffers = plan.momentum_buffers or {}
    # Frozen weights have no momentum buffers.
    moved = {name: weight for name, weight in weights.items() if name in buffers}
    check_layout("the momentum buffers", buffers, layout_of(moved))
    for what, offset in (("gradient", plan.gradient_offset), ("step", plan.step_offset)):
        if offset:
            check_layout(f"the {what} offsets", offset, layout_of(weights))
    if plan.mix is not None and plan.mix.inputs.shape[1:] != inputs.shape[1:]:
        raise ValueError(
            f"the mixing pool has records of shape {tuple(plan.mix.inputs.shape[1:])}, but the client's records have "
            f"the shape {tuple(inputs.shape[1:])}"
        )


def _on(params: Params, device: torch.device, *, copy: bool = False) -> dict[str, torch.Tensor]:
    return {name: value.to(device, copy=copy) for name, value in params.items()}
