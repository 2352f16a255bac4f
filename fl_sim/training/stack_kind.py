"""Which clients can be one stack: those whose steps compute the same but for numbers."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Self

import torch

from fl_sim.local_plan import Ascent, LocalPlan, LossTerm, Mix
from fl_sim.params import Layout, layout_of
from fl_sim.training.ascent import ascent_of
from fl_sim.training.terms import terms_of
from fl_sim.training.trainer import LocalJob
from fl_sim.types import Augment, Optimizer, Params

TAKES = frozenset({
    "learning_rate", "momentum", "weight_decay", "batch_size", "epochs", "clip_norm", "steps",
    "label_smoothing", "optimizer", "augment",
    "gradient_offset", "step_offset", "proximal_mu", "gradient_scale", "momentum_buffers", "mix", "logit_shift",
    "logit_scale", "distillation", "suppression", "ascent", "contrast", "pull", "loss_term", "class_features",
})  # fmt: skip
"""The fields of LocalSettings and LocalPlan that stacks know."""


@dataclass(frozen=True)
class Kind:
    """What is the same for all clients of a stack and decides what a step computes.

    ``warm``: the optimiser starts from buffers that the plans bring; ``offset``, ``drift``, ``proximal``: the
    plans have offsets of the gradient, of the step, a proximal term.
    ``mixing``: the mixing pool and how it is mixed in, as a key; ``adjusting``: the shapes of what scales and shifts
    logits; ``terms``: of each term of the loss its function and the names, shapes and types of its data.
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

    @classmethod
    def of(cls, job: LocalJob, *, proximal: bool) -> Self:
        """Return the kind of ``job``, in a stack of which some are ``proximal``."""
        settings, plan = job.task.settings, job.plan
        return cls(
            layout_of(job.task.params), settings.batch_size, settings.momentum, settings.weight_decay,
            bool(plan.momentum_buffers), bool(plan.gradient_offset), proximal, _key_of_mix(plan.mix),
            _shapes(adjustment_of(plan)), tuple(map(_key_of_term, terms_of(plan))), ascent_of(plan),
            plan.gradient_scale, bool(plan.step_offset), settings.clip_norm,
            settings.label_smoothing, settings.optimizer, settings.augment,
        )  # fmt: skip


def _key_of_mix(mix: Mix | None) -> tuple[Hashable, ...]:
    """Return what two plans that mix alike have in common: the very same pool."""
    return () if mix is None else (id(mix.inputs), id(mix.labels), mix.weight, mix.linearise)


def _key_of_term(term: LossTerm) -> tuple[Hashable, ...]:
    return (term.function, term.features, *_shapes(term.data))


def _shapes(tensors: Params) -> tuple[Hashable, ...]:
    return tuple((name, tuple(value.shape), value.dtype) for name, value in tensors.items())


def adjustment_of(plan: LocalPlan) -> dict[str, torch.Tensor]:
    """Return what is done to the logits before the softmax, by the names of ``adjusted``."""
    parts = {"scale": plan.logit_scale, "shift": plan.logit_shift}
    return {name: part for name, part in parts.items() if part is not None}
