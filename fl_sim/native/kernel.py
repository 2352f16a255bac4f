"""Call the compiled trainer, where there is one for this processor."""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.native.compiling import LIBRARY, NEEDED, processor
from fl_sim.native.layers import FIELDS, Stack
from fl_sim.params import FlatParams, vector_in
from fl_sim.types import LocalPlan, LocalTask, Mix, Params, Trained

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_TOGETHER = 64  # records that go through the network together where nothing is trained: they share the weights' way

_SPARE = 16  # numbers behind the last parameter that the kernel reads and writes back: its vectors' width


class _Request(ctypes.Structure):
    """``Request`` of kernel.cpp."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("layers", _POINTER), ("num_layers", _LONG), ("input_shape", _POINTER), ("num_params", _LONG),
        ("params", _POINTER), ("buffers", _POINTER), ("anchor", _POINTER), ("offset", _POINTER),
        ("inputs", _POINTER), ("labels", _POINTER), ("order", _POINTER),
        ("partner_inputs", _POINTER), ("partner_labels", _POINTER), ("partners", _POINTER),
        ("num_examples", _LONG), ("epochs", _LONG), ("batch_size", _LONG), ("linearise", _LONG),
        ("learning_rate", _FLOAT), ("momentum", _FLOAT), ("weight_decay", _FLOAT), ("proximal_mu", _FLOAT),
        ("own_weight", _FLOAT), ("partner_weight", _FLOAT),
    ]  # fmt: skip


_VERSION = 2  # of the library's functions
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
        """Draw from ``generator`` as ``fl_sim.learning.train`` does for ``count`` records."""
        settings = task.settings
        batches = -(-count // settings.batch_size) if plan.mix is not None else 0
        order, partners = np.empty((settings.epochs, count), np.int64), np.empty((settings.epochs, batches), np.int64)
        for epoch in range(settings.epochs):
            order[epoch] = generator.permutation(count)
            for batch in range(batches):
                partners[epoch, batch] = generator.integers(len(plan.mix.labels)) if plan.mix is not None else 0
        return cls(order, partners.reshape(-1))


@dataclass(frozen=True)
class Kernel:
    """The loaded library."""

    library: ctypes.CDLL

    def train(
        self,
        stack: Stack,
        task: LocalTask,
        plan: LocalPlan,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        draws: Draws,
    ) -> Trained:
        """Train one client as ``fl_sim.learning.train`` does, but for float32 rounding; other threads run meanwhile.

        ``inputs``: float32, (n, *input shape), n at least 1; ``labels``: int64, (n,). Raises IndexError for a label
        outside the model's classes.
        """
        settings = task.settings
        anchor = _flat(task.params, stack)
        params = anchor.clone()
        warm = plan.momentum_buffers
        buffers = _flat(warm, stack) if warm else torch.zeros_like(params)
        offset = _flat(plan.gradient_offset, stack) if plan.gradient_offset else None
        records, targets = inputs.contiguous(), labels.contiguous()  # held until the call is over
        request = _Request(
            layers=stack.pointers[0], num_layers=len(stack.layers), input_shape=stack.pointers[1],
            num_params=len(params) - _SPARE, params=params.data_ptr(), buffers=buffers.data_ptr(),
            anchor=anchor.data_ptr(), offset=None if offset is None else offset.data_ptr(), inputs=records.data_ptr(),
            labels=targets.data_ptr(), order=draws.order.ctypes.data, num_examples=len(targets),
            epochs=settings.epochs, batch_size=settings.batch_size, learning_rate=settings.learning_rate,
            momentum=settings.momentum, weight_decay=settings.weight_decay, proximal_mu=plan.proximal_mu,
        )  # fmt: skip
        pool = _mix_into(request, plan.mix, draws)
        loss = ctypes.c_double()
        failed = self.library.fl_sim_train(ctypes.byref(request), ctypes.byref(loss))
        del pool
        if failed == 3:
            raise IndexError(f"a label is outside of the model's {stack.num_classes} classes")
        if failed:
            raise MemoryError("no memory for local training") if failed == 2 else AssertionError("shapes disagree")
        return Trained(
            params=_named(params, stack),
            momentum_buffers=_named(buffers, stack) if settings.momentum or warm else {},
            num_steps=settings.num_steps(len(targets)),
            loss=loss.value,
        )

    def infer(self, stack: Stack, params: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, (n, classes), as the model does but for float32 rounding; other threads run meanwhile.

        ``params``: float32, as one vector in the stack's layout; ``inputs``: float32, (n, *input shape). A record's
        logits have the same bits whatever records it is in company with.
        """
        weights, records = params.contiguous(), inputs.contiguous()  # held until the call is over
        logits = torch.empty(len(records), stack.num_classes)
        request = _Request(
            layers=stack.pointers[0], num_layers=len(stack.layers), input_shape=stack.pointers[1],
            num_params=len(weights), params=weights.data_ptr(), inputs=records.data_ptr(), num_examples=len(records),
            batch_size=_TOGETHER,
        )  # fmt: skip
        failed = self.library.fl_sim_infer(ctypes.byref(request), _POINTER(logits.data_ptr()))
        if failed:
            raise MemoryError("no memory for evaluation") if failed == 2 else AssertionError("shapes disagree")
        return logits


@lru_cache(maxsize=1)
def load_kernel(path: Path = LIBRARY) -> tuple[Kernel | None, str]:
    """Return (the kernel, nothing), or (None, why there is none here)."""
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
    if NEEDED not in needed:
        return None, f"{path} was compiled without 512-bit vectors ({NEEDED}), and would be slower than PyTorch"
    return Kernel(library), ""


def _mix_into(request: _Request, mix: Mix | None, draws: Draws) -> list[torch.Tensor]:
    """Tell the kernel how to mix; return what must live until it is done."""
    if mix is None:
        return []
    inputs, proportions = mix.inputs.contiguous(), mix.labels.contiguous()
    request.partner_inputs, request.partner_labels = inputs.data_ptr(), proportions.data_ptr()
    request.partners = draws.partners.ctypes.data
    request.linearise = int(mix.linearise)
    request.own_weight, request.partner_weight = 1 - mix.weight, mix.weight
    return [inputs, proportions]


def _flat(params: Params, stack: Stack) -> torch.Tensor:
    return torch.cat([vector_in(params, stack.layout), torch.zeros(_SPARE)])


def _named(flat: torch.Tensor, stack: Stack) -> Params:
    return FlatParams(flat[:-_SPARE], stack.layout)
