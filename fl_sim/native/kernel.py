"""Call the compiled trainer, where there is one for this processor."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.native.compiling import LIBRARY, processor
from fl_sim.native.layers import Stack
from fl_sim.types import LocalPlan, LocalTask, Params, Trained

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: list[Any] = [
    _POINTER, ctypes.c_int, _POINTER, _LONG, *[_POINTER] * 4, *[ctypes.c_float] * 4, *[_POINTER] * 3, *[_LONG] * 3,
    _POINTER,
]  # fmt: skip

_SPARE = 16  # numbers behind the last parameter that the kernel reads and writes back: its vectors' width


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
        order: NDArray[np.int64],
    ) -> Trained:
        """Train one client as ``fl_sim.learning.train`` does, but for float32 rounding; other threads run meanwhile.

        ``inputs``: float32, (n, *input shape), n at least 1; ``labels``: int64, (n,). ``order``: (epochs, n), the
        permutation of every epoch. Raises IndexError for a label outside the model's classes.
        """
        settings = task.settings
        anchor = _flat(task.params, stack)
        params = anchor.clone()
        warm = plan.momentum_buffers
        buffers = _flat(warm, stack) if warm else torch.zeros_like(params)
        offset = _flat(plan.gradient_offset, stack) if plan.gradient_offset else None
        records, targets = inputs.contiguous(), labels.contiguous()  # held until the call is over
        loss = ctypes.c_double()
        failed = self.library.fl_sim_train(
            stack.pointers[0], len(stack.layers), stack.pointers[1], len(params) - _SPARE, params.data_ptr(),
            buffers.data_ptr(), anchor.data_ptr(), None if offset is None else offset.data_ptr(),
            settings.learning_rate, settings.momentum, settings.weight_decay, plan.proximal_mu, records.data_ptr(),
            targets.data_ptr(), order.ctypes, len(targets), settings.epochs, settings.batch_size, ctypes.byref(loss),
        )  # fmt: skip
        if failed == 3:
            raise IndexError(f"a label is outside of the model's {stack.shapes[-1][1][0]} classes")
        if failed:
            raise MemoryError("no memory for local training") if failed == 2 else AssertionError("shapes disagree")
        return Trained(
            params=_named(params, stack),
            momentum_buffers=_named(buffers, stack) if settings.momentum or warm else {},
            num_steps=settings.num_steps(len(targets)),
            loss=loss.value,
        )


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
    library.fl_sim_train.argtypes = _ARGUMENTS
    return Kernel(library), ""


def _flat(params: Mapping[str, torch.Tensor], stack: Stack) -> torch.Tensor:
    return torch.cat([*(params[name].detach().reshape(-1) for name, _ in stack.shapes), torch.zeros(_SPARE)])


def _named(flat: torch.Tensor, stack: Stack) -> Params:
    parts = torch.split(flat[:-_SPARE], stack.sizes)
    return {name: part.view(shape) for (name, shape), part in zip(stack.shapes, parts, strict=True)}
