"""The input of the compiled trainer: checked against the model, then laid out as numbers and pointers."""

import ctypes
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.local_plan import LocalPlan, check_optimizer, fields_in_use
from fl_sim.native.layers import FIELDS, Stack
from fl_sim.params import Layout, check_layout, num_in, vector_in
from fl_sim.types import LocalSettings, Params

if TYPE_CHECKING:
    from fl_sim.native.kernel import Lesson

TAKES = frozenset({
    "learning_rate", "momentum", "weight_decay", "batch_size", "epochs", "clip_norm", "steps", "augment", "optimizer",
    "gradient_offset", "proximal_mu", "momentum_buffers", "mix", "gradient_scale", "logit_scale", "logit_shift",
    "distillation", "suppression", "ascent", "contrast", "pull", "step_offset",
    "class_features",
})  # fmt: skip
"""The fields of LocalSettings and LocalPlan that the compiled trainer knows."""

TERMS = frozenset({"distillation", "suppression", "contrast", "pull"})
"""Those of them that look at records as they are: of mixed ones the compiled trainer makes nothing else."""

RECEIVED = frozenset({"distillation", "contrast"})
"""Those that compare with what another model makes of a record: once for all epochs, so that no record may move."""

_COUNTING, _REAL, _CHOICE = torch.int64, torch.float32, torch.bool

if TYPE_CHECKING:
    from fl_sim.native.kernel import Lesson

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_SPARE = 16  # numbers behind the last parameter that the kernel reads and writes back: its widest vectors


def unknown_settings(settings: LocalSettings) -> list[str]:
    """Return the settings in use that the compiled trainer does not take."""
    return sorted(fields_in_use(settings) - TAKES)


def vector_of(what: str, params: Params, layout: Layout) -> torch.Tensor:
    """Return ``params`` as one contiguous vector in the order of ``layout``.

    Raises ValueError, which names ``what`` they are, where names, shapes, type or device are not the model's.
    """
    check_layout(what, params, layout)
    vector = vector_in(params, layout)
    check_vector(what, vector, num_in(layout))
    return vector.contiguous()


def check_vector(what: str, vector: torch.Tensor, size: int) -> None:
    """Raise ValueError, which names ``what`` it is, where ``vector`` is not one of ``size`` float32 numbers."""
    _expect(what, vector, _REAL, (size,))


def check_lesson(stack: Stack, lesson: "Lesson") -> None:
    """Raise ValueError, which says what is wrong, where records, draws, pool or settings do not fit the model.

    UserError where momentum stands beside an optimiser that has its own.
    """
    task, plan, inputs, labels, draws = lesson
    count, settings = len(labels), task.settings
    if unknown := sorted((fields_in_use(settings) | fields_in_use(plan)) - TAKES):
        raise ValueError(f"the compiled trainer does not know {', '.join(unknown)} of the plan")
    check_optimizer(plan, settings)
    if count < 1 or settings.batch_size < 1 or settings.num_steps(count) < 1:
        raise ValueError(
            "local training needs a record, a batch and a part of an epoch at least, not "
            f"{count} records in batches of {settings.batch_size} for {settings.epochs} epochs"
        )
    check_records(stack, "the records", inputs, count)
    _expect("the labels", labels, _COUNTING, (count,))
    _expect("the order of the records", torch.from_numpy(draws.order), _COUNTING, (settings.num_passes(count), count))
    for what, values, dtype, shape in tensors_of(plan, stack):
        _expect(what, values, dtype, shape)
    if settings.augment.moves:
        _check_moves(stack, lesson)
    if (mix := plan.mix) is not None:
        if terms := sorted(fields_in_use(plan) & TERMS):
            raise ValueError(f"the compiled trainer knows no mixing with {', '.join(terms)}")
        check_records(stack, "the mixing pool's records", mix.inputs, len(mix.inputs))
        _expect("the mixing pool's labels", mix.labels, _REAL, (len(mix.inputs), stack.num_classes))
        _expect("the mixing partners", torch.from_numpy(draws.partners), _COUNTING, (settings.num_steps(count),))


def tensors_of(plan: LocalPlan, stack: Stack) -> list[tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]]]:
    """Return the tensors of the terms in use: what they are, the values, and the type and shape that they must have."""
    taught, lowered, pull = plan.distillation, plan.suppression, plan.pull
    given = [
        ("the scale of the logits", plan.logit_scale, _REAL, ("outputs",)),
        ("the shift of the logits", plan.logit_shift, _REAL, ("outputs",)),
        ("the distilled classes", None if taught is None else taught.classes, _CHOICE, ("outputs",)),
        ("the shares of the classes", None if lowered is None else lowered.shares, _REAL, ("outputs",)),
        ("the prototypes", None if pull is None else pull.prototypes, _REAL, ("outputs", "inputs")),
        ("the present classes", None if pull is None else pull.present, _CHOICE, ("outputs",)),
    ]
    sized = [(what, values, dtype, sizes) for what, values, dtype, sizes in given if values is not None]
    return [
        (what, values, dtype, tuple(int(stack.layers[-1, FIELDS.index(size)]) for size in sizes))
        for what, values, dtype, sizes in sized
    ]


def check_records(stack: Stack, what: str, inputs: torch.Tensor, count: int) -> None:
    """Raise ValueError where ``inputs`` are not ``count`` records of the shape that the model takes."""
    shape = (*inputs.shape[1:], 1, 1)
    has_axes = inputs.ndim in {2, 4} and tuple(stack.input_shape.tolist()) == shape[:3]
    _expect(what, inputs, _REAL, (count, *(inputs.shape[1:] if has_axes else stack.input_shape.tolist())))


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


def _check_moves(stack: Stack, lesson: "Lesson") -> None:
    settings, count, channels = lesson.task.settings, len(lesson.labels), int(stack.input_shape[0])
    if compared := sorted(fields_in_use(lesson.plan) & RECEIVED):
        raise ValueError(f"the compiled trainer moves no images beside {', '.join(compared)}")
    if lesson.inputs.ndim != 4 or len(settings.augment.black) != channels or settings.augment.crop < 0:
        raise ValueError(
            f"images of {channels} channels are moved over a black for each, by a crop of at least 0; not records of "
            f"shape {tuple(lesson.inputs.shape[1:])} over {settings.augment.black}, by {settings.augment.crop}"
        )
    moves = torch.from_numpy(lesson.draws.moves)
    _expect("the moves of the images", moves, _COUNTING, (settings.num_passes(count), count, 3))


def _expect(what: str, values: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    is_plain = values.layout is torch.strided and values.device.type == "cpu" and values.dtype is dtype
    if is_plain and tuple(values.shape) == shape:
        return
    raise ValueError(
        f"{what} have the shape {tuple(values.shape)} and the type {_type(values)}; the compiled trainer wants "
        f"{shape} and {str(dtype).removeprefix('torch.')} in main memory"
    )


def _type(values: torch.Tensor) -> str:
    kind = "" if values.layout is torch.strided else f"{values.layout} ".removeprefix("torch.")
    return f"{kind}{str(values.dtype).removeprefix('torch.')} on {values.device}"
