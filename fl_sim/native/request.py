"""The input of the compiled trainer: it is checked against the model, and converted to C structures."""

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.local_plan import LocalPlan, check_optimizer, fields_in_use
from fl_sim.native.layers import Stack
from fl_sim.params import check_layout, num_in, vector_in
from fl_sim.types import LocalSettings, LocalTask, Params

TAKES = frozenset({
    "learning_rate", "momentum", "weight_decay", "batch_size", "epochs", "clip_norm", "steps", "augment", "optimizer",
    "gradient_offset", "proximal_mu", "momentum_buffers", "mix", "gradient_scale", "logit_scale", "logit_shift",
    "distillation", "suppression", "ascent", "contrast", "pull", "step_offset", "trained",
    "class_features",
})  # fmt: skip
"""The fields of LocalSettings and LocalPlan that the compiled trainer supports."""

TERMS = frozenset({"distillation", "suppression", "contrast", "pull"})
"""The loss terms of LocalPlan that the compiled trainer does not support in combination with the field ``mix``."""

RECEIVED = frozenset({"distillation", "contrast"})
"""The fields of LocalPlan whose loss terms need the outputs of another model.

The compiled trainer computes the other model's outputs once for all epochs. Image augmentation changes the inputs in
every epoch. So the compiled trainer does not combine these fields with image augmentation.
"""

_COUNTING, _REAL, _CHOICE = torch.int64, torch.float32, torch.bool

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_SPARE = 16  # zeros after the last parameter: the compiled code reads and writes up to 16 numbers at once


@dataclass(frozen=True)
class Draws:
    """The random choices in one client's training.

    ``order``: (passes, n), the permutation of the records in every epoch; training may use only a part of the last
    epoch. ``partners``: (steps,), the index of the averaged record in the mixing pool (``LocalPlan.mix``) that each
    step uses; empty if the plan has no mixing. ``moves``: (passes, n, 3), the result of ``Augment.draw`` (shifts and
    mirroring of images) for the records in the order of each epoch; empty without augmentation. ``masks``: the key of
    the random generator for dropout masks (dropout.h), from 0 to 2^63 - 1.
    """

    order: NDArray[np.int64]
    partners: NDArray[np.int64]
    moves: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0, 3), np.int64))
    masks: int = 0

    @classmethod
    def of(cls, task: LocalTask, plan: LocalPlan, count: int, generator: np.random.Generator) -> Self:
        """Return the random choices for training with ``count`` records.

        ``generator`` draws them in the same order as in ``training.loop.train``, so that the compiled trainer makes the
        same choices as that function. The key of the dropout masks is drawn last.
        """
        settings = task.settings
        passes, batches = settings.num_passes(count), settings.num_batches(count)
        order = np.empty((passes, count), np.int64)
        partners = np.empty(settings.num_steps(count) if plan.mix is not None else 0, np.int64)
        moves = np.empty((passes if settings.augment.moves else 0, count, 3), np.int64)
        for epoch in range(passes):
            order[epoch] = generator.permutation(count)
            if len(moves):
                moves[epoch] = settings.augment.draw(count, generator)
            for step in range(epoch * batches, min((epoch + 1) * batches, len(partners))):
                partners[step] = generator.integers(len(plan.mix.labels)) if plan.mix is not None else 0
        return cls(order, partners, moves, int(generator.integers(2**63)))


class KernelJob(NamedTuple):
    """The training of one client: the arguments of ``fl_sim.training.loop.train``, and all random choices (``draws``).

    ``inputs``: float32, (n, *input shape), n at least 1; ``labels``: int64, (n,).
    """

    task: LocalTask
    plan: LocalPlan
    inputs: torch.Tensor
    labels: torch.Tensor
    draws: Draws

    @property
    def has_momentum(self) -> bool:
        """Return True if the settings of local training have a momentum, or the local plan has momentum buffers."""
        return bool(self.task.settings.momentum or self.plan.momentum_buffers)


def unknown_settings(settings: LocalSettings) -> list[str]:
    """Return the fields of ``settings`` that differ from their defaults and are unknown to the compiled trainer."""
    return sorted(fields_in_use(settings) - TAKES)


class Distilled(ctypes.Structure):
    """The settings of the loss term for distillation: the C structure ``Distillation`` of distillation.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("classes", _POINTER), ("received", _POINTER), ("weight", _FLOAT), ("temperature", _FLOAT),
        ("exclude_true", _LONG),
    ]  # fmt: skip


class Suppressed(ctypes.Structure):
    """The settings of the loss term for suppression: the C structure ``Suppression`` of suppression.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("shares", _POINTER), ("weight", _FLOAT)]


class Contrasted(ctypes.Structure):
    """The settings of the contrastive loss term: the C structure ``Contrast`` of contrast.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("previous", _POINTER), ("leads", _POINTER), ("weight", _FLOAT), ("temperature", _FLOAT)
    ]  # fmt: skip


class Pulled(ctypes.Structure):
    """The settings of the loss term with prototypes: the C structure ``Pull`` of pull.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("prototypes", _POINTER), ("present", _POINTER), ("weight", _FLOAT)]


class LossTerms(ctypes.Structure):
    """The settings of all loss terms: the C structure ``Terms`` of terms.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("scale", _POINTER), ("shift", _POINTER), ("distillation", Distilled), ("suppression", Suppressed),
        ("contrast", Contrasted), ("pull", Pulled),
    ]  # fmt: skip


class Climbed(ctypes.Structure):
    """The settings of the ascent step of sharpness-aware minimisation: the C structure ``Ascent`` of ascent.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("radius", _FLOAT), ("share", _FLOAT), ("adaptive", _LONG)]


class Moved(ctypes.Structure):
    """The settings of image augmentation: the C structure ``Moves`` of moves.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("places", _POINTER), ("black", _POINTER), ("crop", _LONG)]


class Request(ctypes.Structure):
    """The C structure ``Request`` of kernel.cpp: the training or evaluation of one client."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("layers", _POINTER), ("num_layers", _LONG), ("input_shape", _POINTER), ("num_params", _LONG),
        ("params", _POINTER), ("buffers", _POINTER), ("anchor", _POINTER), ("warm", _POINTER), ("offset", _POINTER),
        ("drift", _POINTER), ("trained", _POINTER),
        ("inputs", _POINTER), ("labels", _POINTER), ("order", _POINTER),
        ("partner_inputs", _POINTER), ("partner_labels", _POINTER), ("partners", _POINTER), ("masks", _LONG),
        ("num_partners", _LONG),
        ("num_examples", _LONG), ("num_steps", _LONG), ("batch_size", _LONG), ("linearise", _LONG),
        ("adam", _LONG),
        ("learning_rate", _FLOAT), ("momentum", _FLOAT), ("weight_decay", _FLOAT), ("proximal_mu", _FLOAT),
        ("own_weight", _FLOAT), ("partner_weight", _FLOAT), ("gradient_scale", _FLOAT), ("clip_norm", _FLOAT),
        ("weight_kept", _FLOAT),
        ("terms", LossTerms), ("ascent", Climbed), ("moves", Moved),
    ]  # fmt: skip


class RequestBuffers:
    """The owner of all tensors that the compiled trainer reads during one call, for all clients of the call.

    A tensor that several clients use is stored once.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._padded: dict[int, torch.Tensor] = {}
        self._tensors: list[torch.Tensor] = []
        self._masks: dict[frozenset[str], torch.Tensor] = {}

    def request(self, job: KernelJob, params: torch.Tensor, buffers: torch.Tensor) -> Request:
        """Return the C request for one client's training. Training writes the trained parameters to ``params``.

        If the job uses momentum buffers, training writes them to ``buffers``.
        """
        check_job(self._stack, job)
        task, plan, inputs, labels, draws = job
        settings, stack = task.settings, self._stack
        records, targets = self._pointer(inputs), self._pointer(labels)
        request = Request(
            layers=stack.pointers[0], num_layers=len(stack.layers), input_shape=stack.pointers[1],
            num_params=num_in(stack.layout), params=params.data_ptr(),
            buffers=buffers.data_ptr() if job.has_momentum else None,
            anchor=self._vector("the weights", task.params),
            warm=self._vector("the momentum buffers", plan.momentum_buffers or None),
            offset=self._vector("the gradient offsets", plan.gradient_offset or None),
            drift=self._vector("the step offsets", plan.step_offset or None),
            trained=self._mask(plan.trained),
            inputs=records, labels=targets, order=self._pointer(draws.order), masks=draws.masks,
            num_examples=len(labels),
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
            black = None if augment.reflect else self._pointer(torch.tensor(augment.black, dtype=torch.float32))
            request.moves = Moved(self._pointer(draws.moves), black, augment.crop)
        if (mix := plan.mix) is not None:
            request.partner_inputs, request.partner_labels = self._pointer(mix.inputs), self._pointer(mix.labels)
            request.partners, request.num_partners = self._pointer(draws.partners), len(mix.labels)
            request.linearise = int(mix.linearise)
            request.own_weight, request.partner_weight = 1 - mix.weight, mix.weight
        return request

    def _terms(self, plan: LocalPlan) -> LossTerms:
        terms = LossTerms(scale=self._pointer(plan.logit_scale), shift=self._pointer(plan.logit_shift))
        if (distillation := plan.distillation) is not None:
            terms.distillation = Distilled(
                classes=self._pointer(distillation.classes), weight=distillation.weight,
                temperature=distillation.temperature, exclude_true=int(distillation.exclude_true),
            )  # fmt: skip
        if (suppression := plan.suppression) is not None:
            terms.suppression = Suppressed(self._pointer(suppression.shares), suppression.weight)
        if (contrast := plan.contrast) is not None:
            terms.contrast = Contrasted(
                previous=self._vector("the contrast's previous weights", contrast.previous),
                weight=contrast.weight, temperature=contrast.temperature,
            )  # fmt: skip
        if (pull := plan.pull) is not None:
            terms.pull = Pulled(self._pointer(pull.prototypes), self._pointer(pull.present), pull.weight)
        return terms

    def _pointer(self, values: torch.Tensor | NDArray[np.int64] | None) -> int | None:
        """Store ``values`` as a contiguous tensor, and return its memory address for the C code.

        If ``values`` is None, return None.
        """
        if values is None:
            return None
        self._tensors.append(torch.as_tensor(values).contiguous())
        return self._tensors[-1].data_ptr()

    def _mask(self, trained: frozenset[str] | None) -> int | None:
        """Store a mask of the model's parameters, 1 if trained and 0 if frozen; return its memory address.

        The mask is one padded vector with a number for each parameter. None (no mask) means: all parameters are
        trained.
        """
        if trained is None:
            return None
        if trained not in self._masks:
            rows = [torch.full((math.prod(shape),), float(name in trained)) for name, shape in self._stack.layout]
            self._masks[trained] = torch.cat(
                [*rows, torch.zeros(padded(num_in(self._stack.layout)) - num_in(self._stack.layout))]
            )
        return self._masks[trained].data_ptr()

    def _vector(self, what: str, params: Params | None) -> int | None:
        """Store ``params`` as one padded vector, in the order of the model's parameters; return its memory address.

        Raises ValueError if names, shapes, type or device differ from those of the model's parameters. ``what``: the
        name of ``params`` in the message.
        """
        if params is None:
            return None
        if id(params) not in self._padded:
            layout = self._stack.layout
            check_layout(what, params, layout)
            vector, size = vector_in(params, layout), num_in(layout)
            check_tensor(what, vector, _REAL, (size,))
            self._padded[id(params)] = torch.cat([vector, torch.zeros(padded(size) - size)])
        return self._padded[id(params)].data_ptr()


def padded(size: int) -> int:
    """Return the length in memory of a vector of ``size`` numbers, with padding for the compiled trainer.

    The length is a multiple of 16, and at least 16 more than ``size``. The next vector in memory is then aligned to the
    widest SIMD vectors of the compiled code.
    """
    return -(-size // _SPARE) * _SPARE + _SPARE


def check_job(stack: Stack, job: KernelJob) -> None:
    """Raise ValueError if the compiled trainer does not support a client's records, random choices or settings.

    ``stack``: the model. Raises UserError for momentum together with an optimizer other than SGD.
    """
    task, plan, inputs, labels, draws = job
    count, settings = len(labels), task.settings
    if unknown := sorted((fields_in_use(settings) | fields_in_use(plan)) - TAKES):
        raise ValueError(f"the compiled trainer does not support {', '.join(unknown)} of the settings or the plan")
    check_optimizer(plan, settings)
    if count < 1 or settings.batch_size < 1 or settings.num_steps(count) < 1:
        raise ValueError(
            "local training needs at least one record, one record per batch and one step, not "
            f"{count} records in batches of {settings.batch_size} for {settings.epochs} epochs"
        )
    check_records(stack, "the records", inputs, count)
    check_tensor("the labels", labels, _COUNTING, (count,))
    check_tensor(
        "the order of the records", torch.from_numpy(draws.order), _COUNTING, (settings.num_passes(count), count)
    )
    for what, values, dtype, shape in tensors_of(plan, stack):
        check_tensor(what, values, dtype, shape)
    if settings.augment.moves:
        _check_moves(stack, job)
    if plan.trained is not None and plan.ascent is not None:
        raise ValueError("the compiled trainer does not support an ascent step with frozen parameters")
    if (mix := plan.mix) is not None:
        if terms := sorted(fields_in_use(plan) & TERMS):
            raise ValueError(f"the compiled trainer does not support mixing together with {', '.join(terms)}")
        check_records(stack, "the mixing pool's records", mix.inputs, len(mix.inputs))
        check_tensor("the mixing pool's labels", mix.labels, _REAL, (len(mix.inputs), stack.num_classes))
        check_tensor("the mixing partners", torch.from_numpy(draws.partners), _COUNTING, (settings.num_steps(count),))


def tensors_of(plan: LocalPlan, stack: Stack) -> list[tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]]]:
    """Return (name, values, required type, required shape) for each tensor of the loss terms that the plan uses."""
    distillation, suppression, pull = plan.distillation, plan.suppression, plan.pull
    found = []
    for what, values, dtype, num_axes in (
        ("the scale of the logits", plan.logit_scale, _REAL, 1),
        ("the shift of the logits", plan.logit_shift, _REAL, 1),
        ("the distilled classes", None if distillation is None else distillation.classes, _CHOICE, 1),
        ("the shares of the classes", None if suppression is None else suppression.shares, _REAL, 1),
        ("the prototypes", None if pull is None else pull.prototypes, _REAL, 2),
        ("the present classes", None if pull is None else pull.present, _CHOICE, 1),
    ):
        if values is not None:
            found.append((what, values, dtype, (stack.num_classes, stack.num_features)[:num_axes]))
    return found


def check_records(stack: Stack, what: str, inputs: torch.Tensor, count: int) -> None:
    """Raise ValueError unless ``inputs`` are ``count`` records of the model's input shape.

    ``what``: the name of the records in the message, such as "the records".
    """
    shape = (*inputs.shape[1:], 1, 1)
    has_axes = inputs.ndim in {2, 4} and tuple(stack.input_shape.tolist()) == shape[:3]
    check_tensor(what, inputs, _REAL, (count, *(inputs.shape[1:] if has_axes else stack.input_shape.tolist())))


def check_tensor(what: str, values: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``values`` have the type ``dtype`` and this ``shape``, and are in main memory.

    ``what``: the name of the tensor in the message, such as "the labels".
    """
    is_plain = values.layout is torch.strided and values.device.type == "cpu" and values.dtype is dtype
    if is_plain and tuple(values.shape) == shape:
        return
    kind = "" if values.layout is torch.strided else f"{values.layout} ".removeprefix("torch.")
    raise ValueError(
        f"{what} have the shape {tuple(values.shape)} and the type {kind}{str(values.dtype).removeprefix('torch.')} on "
        f"{values.device}; the compiled trainer needs {shape} and {str(dtype).removeprefix('torch.')} in main memory"
    )


def _check_moves(stack: Stack, job: KernelJob) -> None:
    settings, count, channels = job.task.settings, len(job.labels), int(stack.input_shape[0])
    if compared := sorted(fields_in_use(job.plan) & RECEIVED):
        raise ValueError(f"the compiled trainer does not support augmentation together with {', '.join(compared)}")
    if job.inputs.ndim != 4 or len(settings.augment.black) != channels or settings.augment.crop < 0:
        raise ValueError(
            f"augmentation of images with {channels} channels needs one value of black for each channel and a crop of "
            f"at least 0, not records of shape {tuple(job.inputs.shape[1:])}, black {settings.augment.black} and crop "
            f"{settings.augment.crop}"
        )
    moves = torch.from_numpy(job.draws.moves)
    check_tensor("the moves of the images", moves, _COUNTING, (settings.num_passes(count), count, 3))
