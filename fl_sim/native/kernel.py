"""Call the compiled trainer, where there is one for this processor."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.native.compiling import LIBRARY, processor
from fl_sim.native.layers import Stack
from fl_sim.types import LocalPlan, LocalTask, Params, Trained

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
        classes = stack.shapes[-1][1][0]
        if int(labels.min()) < 0 or int(labels.max()) >= classes:
            raise IndexError(f"a label is outside of the model's {classes} classes")
        params, anchor = _flat(task.params, stack), _flat(task.params, stack)
        warm = plan.momentum_buffers
        buffers = _flat(warm, stack) if warm else np.zeros_like(params)
        offset = _flat(plan.gradient_offset, stack) if plan.gradient_offset else None
        rates = np.array(
            [settings.learning_rate, settings.momentum, settings.weight_decay, plan.proximal_mu], dtype=np.float32
        )
        records, targets = inputs.contiguous().numpy(), labels.contiguous().numpy()
        loss = ctypes.c_double()
        failed = self.library.fl_sim_train(
            _pointer(stack.layers), len(stack.layers), _pointer(stack.input_shape),
            ctypes.c_int64(len(params) - _SPARE), _pointer(params), _pointer(buffers), _pointer(anchor),
            _pointer(offset), _pointer(rates), _pointer(records), _pointer(targets), _pointer(order),
            ctypes.c_int64(len(targets)), ctypes.c_int64(settings.epochs), ctypes.c_int64(settings.batch_size),
            ctypes.byref(loss),
        )  # fmt: skip
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
    return Kernel(library), ""


def _flat(params: Mapping[str, torch.Tensor], stack: Stack) -> NDArray[np.float32]:
    parts = [params[name].detach().reshape(-1) for name, _ in stack.shapes]
    return torch.cat([*parts, torch.zeros(_SPARE)]).numpy()


def _named(flat: NDArray[np.float32], stack: Stack) -> Params:
    parts = torch.split(torch.from_numpy(flat[:-_SPARE]), [shape.numel() for _, shape in stack.shapes])
    return {name: part.reshape(shape) for (name, shape), part in zip(stack.shapes, parts, strict=True)}


def _pointer(array: NDArray[np.generic] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)
