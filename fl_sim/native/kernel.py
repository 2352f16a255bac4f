"""Call the compiled trainer, where there is one for this processor."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.local_plan import LocalPlan
from fl_sim.native.checks import check_lesson, check_records, vector_of
from fl_sim.native.compiling import NEEDED, find_library, processor
from fl_sim.native.layers import FIELDS, Stack
from fl_sim.params import FlatParams, num_in
from fl_sim.types import LocalTask, Params, Trained

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_TOGETHER = 64  # records that go through the network together where nothing is trained: they share the weights' way

_SPARE = 16  # numbers behind the last parameter that the kernel reads and writes back: its widest vectors


class _Request(ctypes.Structure):
    """``Request`` of kernel.cpp."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("layers", _POINTER), ("num_layers", _LONG), ("input_shape", _POINTER), ("num_params", _LONG),
        ("params", _POINTER), ("buffers", _POINTER), ("anchor", _POINTER), ("warm", _POINTER), ("offset", _POINTER),
        ("inputs", _POINTER), ("labels", _POINTER), ("order", _POINTER),
        ("partner_inputs", _POINTER), ("partner_labels", _POINTER), ("partners", _POINTER), ("num_partners", _LONG),
        ("num_examples", _LONG), ("epochs", _LONG), ("batch_size", _LONG), ("linearise", _LONG),
        ("learning_rate", _FLOAT), ("momentum", _FLOAT), ("weight_decay", _FLOAT), ("proximal_mu", _FLOAT),
        ("own_weight", _FLOAT), ("partner_weight", _FLOAT),
    ]  # fmt: skip


_VERSION = 4  # of the library's functions
_LAYOUT = _VERSION * 1_000_000 + 1000 * ctypes.sizeof(_Request) + len(FIELDS)
"""What a library of the same version calls fl_sim_layout."""


@dataclass(frozen=True)
class Draws:
    """What chance decides in one client's training.

    ``order``: (epochs, n), the permutation of every epoch; ``partners``: (steps,), records of the mixing pool, empty
    where the plan does not mix.
    """

    order: NDArray[np.int64]
    partners: NDArray[np.int64]

    @classmethod
    def of(cls, task: LocalTask, plan: LocalPlan, count: int, generator: np.random.Generator) -> Self:
        """Draw from ``generator`` as ``fl_sim.training.loop.train`` does for ``count`` records."""
        settings = task.settings
        batches = -(-count // settings.batch_size) if plan.mix is not None else 0
        order, partners = np.empty((settings.epochs, count), np.int64), np.empty((settings.epochs, batches), np.int64)
        for epoch in range(settings.epochs):
            order[epoch] = generator.permutation(count)
            for batch in range(batches):
                partners[epoch, batch] = generator.integers(len(plan.mix.labels)) if plan.mix is not None else 0
        return cls(order, partners.reshape(-1))


class Lesson(NamedTuple):
    """One client's training: what ``fl_sim.training.loop.train`` takes, with what chance decides already decided.

    ``inputs``: float32, (n, *input shape), n at least 1; ``labels``: int64, (n,).
    """

    task: LocalTask
    plan: LocalPlan
    inputs: torch.Tensor
    labels: torch.Tensor
    draws: Draws


@dataclass(frozen=True)
class Kernel:
    """The loaded library."""

    library: ctypes.CDLL

    def train(self, stack: Stack, lessons: Sequence[Lesson]) -> list[Trained]:
        """Train clients, one after another, each as ``fl_sim.training.loop.train`` does but for float32 rounding.

        Other threads run meanwhile. Raises IndexError for a label outside the model's classes, and ValueError for
        tensors of other lengths or types than the model and the task ask for.
        """
        size = num_in(stack.layout)
        params, buffers = (torch.empty(len(lessons), _padded(size)) for _ in range(2))
        results = list(zip(lessons, params.unbind(), buffers.unbind(), strict=True))
        held = _Held(stack)
        requests = (_Request * len(lessons))(*(held.request(*result) for result in results))
        losses = (ctypes.c_double * len(lessons))()
        failed = self.library.fl_sim_train(requests, _LONG(len(lessons)), losses)
        if failed:
            raise _failure(failed, stack, "local training")
        return [
            Trained(
                params=FlatParams(own_params[:size], stack.layout),
                momentum_buffers=FlatParams(own_buffers[:size], stack.layout) if _has_momentum(lesson) else {},
                num_steps=lesson.task.settings.num_steps(len(lesson.labels)),
                loss=loss,
            )
            for (lesson, own_params, own_buffers), loss in zip(results, losses, strict=True)
        ]

    def infer(self, stack: Stack, params: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, (n, classes), as the model does but for float32 rounding; other threads run meanwhile.

        ``params``: float32, as one vector in the stack's layout; ``inputs``: float32, (n, *input shape). The same bits
        for the same records in the same order; last bits of a record's logits depend on who it goes through with.
        Raises ValueError as ``train`` does.
        """
        weights = vector_of("the model's weights", FlatParams(params, stack.layout), stack.layout)
        check_records(stack, "the records", inputs, len(inputs))
        records = inputs.contiguous()  # both are held until the call is over
        logits = torch.empty(len(records), stack.num_classes)
        if not len(records):
            return logits
        request = _Request(
            layers=stack.pointers[0], num_layers=len(stack.layers), input_shape=stack.pointers[1],
            num_params=len(weights), params=weights.data_ptr(), inputs=records.data_ptr(), num_examples=len(records),
            batch_size=_TOGETHER,
        )  # fmt: skip
        failed = self.library.fl_sim_infer(ctypes.byref(request), _POINTER(logits.data_ptr()))
        if failed:
            raise _failure(failed, stack, "evaluation")
        return logits


@lru_cache(maxsize=1)
def load_kernel(path: Path | None = None) -> tuple[Kernel | None, str]:
    """Return (the kernel, nothing), or (None, why there is none here). ``path``: unless given, ``find_library``'s."""
    path = path or find_library()
    if not path.exists():
        return None, "it was not compiled (python -m fl_sim.native does that)"
    try:
        library = ctypes.CDLL(str(path))
        library.fl_sim_processor.restype = ctypes.c_char_p
        needed = library.fl_sim_processor().decode("ascii").split()
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded: {error}"
    if missing := set(needed) - set(processor().split()):
        return None, f"{path} was compiled for another processor, with {', '.join(sorted(missing))}"
    if not hasattr(library, "fl_sim_layout") or library.fl_sim_layout() != _LAYOUT:
        return None, f"{path} is of another version of fl-sim (python -m fl_sim.native compiles this one's)"
    if not NEEDED.issubset(needed):
        return None, f"{path} was compiled without {', '.join(sorted(NEEDED))}, and would be slower than PyTorch"
    return Kernel(library), ""


class _Held:
    """Holds what the kernel reads until the call is over; what clients share, such as the model, is there once."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._padded: dict[int, torch.Tensor] = {}
        self._tensors: list[torch.Tensor] = []

    def request(self, lesson: Lesson, params: torch.Tensor, buffers: torch.Tensor) -> _Request:
        """Ask for one client's training, whose results go to ``params`` and, with momentum, ``buffers``."""
        check_lesson(self._stack, lesson)
        task, plan, inputs, labels, draws = lesson
        settings, stack = task.settings, self._stack
        records, targets = self._whole(inputs), self._whole(labels)
        request = _Request(
            layers=stack.pointers[0], num_layers=len(stack.layers), input_shape=stack.pointers[1],
            num_params=num_in(stack.layout), params=params.data_ptr(),
            buffers=buffers.data_ptr() if _has_momentum(lesson) else None,
            anchor=self._vector("the weights", task.params),
            warm=self._vector("the momentum buffers", plan.momentum_buffers or None),
            offset=self._vector("the gradient offsets", plan.gradient_offset or None),
            inputs=records, labels=targets, order=self._array(draws.order), num_examples=len(labels),
            epochs=settings.epochs, batch_size=min(settings.batch_size, len(labels)),
            learning_rate=settings.learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay,
            proximal_mu=plan.proximal_mu,
        )  # fmt: skip
        if (mix := plan.mix) is not None:
            request.partner_inputs, request.partner_labels = self._whole(mix.inputs), self._whole(mix.labels)
            request.partners, request.num_partners = self._array(draws.partners), len(mix.labels)
            request.linearise = int(mix.linearise)
            request.own_weight, request.partner_weight = 1 - mix.weight, mix.weight
        return request

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
            self._padded[id(params)] = torch.cat([vector, torch.zeros(_padded(len(vector)) - len(vector))])
        return self._padded[id(params)].data_ptr()


def _failure(code: int, stack: Stack, what: str) -> Exception:
    """Return what the library's ``code`` means."""
    if code == 2:
        return MemoryError(f"no memory for {what}: take a smaller local.batch_size, or fewer clients at a time")
    if code == 3:
        return IndexError(f"a label is outside of the model's {stack.num_classes} classes")
    if code == 4:
        return IndexError("the order of the records or the mixing partners name records that are not there")
    if code == 1:
        shape = tuple(stack.input_shape.tolist())
        return ValueError(f"the model's layers are unknown, or do not fit each other or records of shape {shape}")
    return RuntimeError(f"the compiled trainer failed in {what} with the code {code}, which this version does not know")


def _has_momentum(lesson: Lesson) -> bool:
    return bool(lesson.task.settings.momentum or lesson.plan.momentum_buffers)


def _padded(size: int) -> int:
    """Return how many numbers a vector of ``size`` takes: the next one begins where the kernel's vectors do."""
    return -(-size // _SPARE) * _SPARE + _SPARE
