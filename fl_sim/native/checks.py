"""What the compiled trainer is given, held against the model before a pointer is passed: it reads where it is told."""

from typing import TYPE_CHECKING

import torch

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
