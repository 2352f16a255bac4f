"""What the kernel is asked for, as it reads it: numbers, and where in memory tensors lie."""

import ctypes
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.local_plan import LocalPlan
from fl_sim.native.checks import check_lesson, vector_of
from fl_sim.native.layers import Stack
from fl_sim.params import num_in
from fl_sim.types import Params

if TYPE_CHECKING:
    from fl_sim.native.kernel import Lesson

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_SPARE = 16  # numbers behind the last parameter that the kernel reads and writes back: its widest vectors


class Distilled(ctypes.Structure):
    """``Distillation`` of distillation.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("classes", _POINTER), ("received", _POINTER), ("weight", _FLOAT), ("temperature", _FLOAT),
        ("exclude_true", _LONG),
    ]  # fmt: skip


class Suppressed(ctypes.Structure):
    """``Suppression`` of suppression.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("shares", _POINTER), ("weight", _FLOAT)]


class Contrasted(ctypes.Structure):
    """``Contrast`` of contrast.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("previous", _POINTER), ("leads", _POINTER), ("weight", _FLOAT), ("temperature", _FLOAT)
    ]  # fmt: skip


class Pulled(ctypes.Structure):
    """``Pull`` of pull.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("prototypes", _POINTER), ("present", _POINTER), ("weight", _FLOAT)]


class Terms(ctypes.Structure):
    """``Terms`` of terms.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("scale", _POINTER), ("shift", _POINTER), ("distillation", Distilled), ("suppression", Suppressed),
        ("contrast", Contrasted), ("pull", Pulled),
    ]  # fmt: skip


class Climbed(ctypes.Structure):
    """``Ascent`` of ascent.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("radius", _FLOAT), ("share", _FLOAT), ("adaptive", _LONG)]


class Moved(ctypes.Structure):
    """``Moves`` of moves.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("places", _POINTER), ("black", _POINTER), ("crop", _LONG)]


class Request(ctypes.Structure):
    """``Request`` of kernel.cpp."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("layers", _POINTER), ("num_layers", _LONG), ("input_shape", _POINTER), ("num_params", _LONG),
        ("params", _POINTER), ("buffers", _POINTER), ("anchor", _POINTER), ("warm", _POINTER), ("offset", _POINTER),
        ("drift", _POINTER),
        ("inputs", _POINTER), ("labels", _POINTER), ("order", _POINTER),
        ("partner_inputs", _POINTER), ("partner_labels", _POINTER), ("partners", _POINTER), ("masks", _LONG),
        ("num_partners", _LONG),
        ("num_examples", _LONG), ("num_steps", _LONG), ("batch_size", _LONG), ("linearise", _LONG),
        ("adam", _LONG),
        ("learning_rate", _FLOAT), ("momentum", _FLOAT), ("weight_decay", _FLOAT), ("proximal_mu", _FLOAT),
        ("own_weight", _FLOAT), ("partner_weight", _FLOAT), ("gradient_scale", _FLOAT), ("clip_norm", _FLOAT),
        ("weight_kept", _FLOAT),
        ("terms", Terms), ("ascent", Climbed), ("moves", Moved),
    ]  # fmt: skip


class Held:
    """Holds what the kernel reads until the call is over; what clients share, such as the model, is there once."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._padded: dict[int, torch.Tensor] = {}
        self._tensors: list[torch.Tensor] = []

    def request(self, lesson: "Lesson", params: torch.Tensor, buffers: torch.Tensor) -> Request:
        """Ask for one client's training, whose results go to ``params`` and, with momentum, ``buffers``."""
        check_lesson(self._stack, lesson)
        task, plan, inputs, labels, draws = lesson
        settings, stack = task.settings, self._stack
        records, targets = self._whole(inputs), self._whole(labels)
        request = Request(
            layers=stack.pointers[0], num_layers=len(stack.layers), input_shape=stack.pointers[1],
            num_params=num_in(stack.layout), params=params.data_ptr(),
            buffers=buffers.data_ptr() if has_momentum(lesson) else None,
            anchor=self._vector("the weights", task.params),
            warm=self._vector("the momentum buffers", plan.momentum_buffers or None),
            offset=self._vector("the gradient offsets", plan.gradient_offset or None),
            drift=self._vector("the step offsets", plan.step_offset or None),
            inputs=records, labels=targets, order=self._array(draws.order), masks=draws.masks, num_examples=len(labels),
            num_steps=settings.num_steps(len(labels)), batch_size=min(settings.batch_size, len(labels)),
            adam=int(settings.optimizer != "sgd"), learning_rate=settings.learning_rate, momentum=settings.momentum,
            weight_decay=0 if settings.optimizer == "adamw" else settings.weight_decay,
            weight_kept=1 - settings.learning_rate * settings.weight_decay if settings.optimizer == "adamw" else 1,
            proximal_mu=plan.proximal_mu, gradient_scale=plan.gradient_scale, clip_norm=settings.clip_norm,
            terms=self._terms(plan),
        )  # fmt: skip
        if (ascent := plan.ascent) is not None and ascent.share:
            request.ascent = Climbed(ascent.radius, ascent.share, int(ascent.adaptive))
        if (augment := settings.augment).moves:
            black = None if augment.reflect else self._whole(torch.tensor(augment.black, dtype=torch.float32))
            request.moves = Moved(self._array(draws.moves), black, augment.crop)
        if (mix := plan.mix) is not None:
            request.partner_inputs, request.partner_labels = self._whole(mix.inputs), self._whole(mix.labels)
            request.partners, request.num_partners = self._array(draws.partners), len(mix.labels)
            request.linearise = int(mix.linearise)
            request.own_weight, request.partner_weight = 1 - mix.weight, mix.weight
        return request

    def _terms(self, plan: LocalPlan) -> Terms:
        terms = Terms(scale=self._given(plan.logit_scale), shift=self._given(plan.logit_shift))
        if (distillation := plan.distillation) is not None:
            terms.distillation = Distilled(
                classes=self._given(distillation.classes), weight=distillation.weight,
                temperature=distillation.temperature, exclude_true=int(distillation.exclude_true),
            )  # fmt: skip
        if (suppression := plan.suppression) is not None:
            terms.suppression = Suppressed(self._whole(suppression.shares), suppression.weight)
        if (contrast := plan.contrast) is not None:
            terms.contrast = Contrasted(
                previous=self._vector("the contrast's previous weights", contrast.previous),
                weight=contrast.weight, temperature=contrast.temperature,
            )  # fmt: skip
        if (pull := plan.pull) is not None:
            terms.pull = Pulled(self._whole(pull.prototypes), self._whole(pull.present), pull.weight)
        return terms

    def _given(self, values: torch.Tensor | None) -> int | None:
        return None if values is None else self._whole(values)

    def _whole(self, values: torch.Tensor) -> int:
        self._tensors.append(values.contiguous())
        return self._tensors[-1].data_ptr()

    def _array(self, values: NDArray[np.int64]) -> int:
        return self._whole(torch.from_numpy(values))

    def _vector(self, what: str, params: Params | None) -> int | None:
        if params is None:
            return None
        if id(params) not in self._padded:
            vector = vector_of(what, params, self._stack.layout)
            self._padded[id(params)] = torch.cat([vector, torch.zeros(padded(len(vector)) - len(vector))])
        return self._padded[id(params)].data_ptr()


def has_momentum(lesson: "Lesson") -> bool:
    """Say whether the optimiser keeps momentum buffers."""
    return bool(lesson.task.settings.momentum or lesson.plan.momentum_buffers)


def padded(size: int) -> int:
    """Return how many numbers a vector of ``size`` takes: the next one begins where the kernel's vectors do."""
    return -(-size // _SPARE) * _SPARE + _SPARE
