"""Private steps (DP-SGD) by the compiled trainer: private.h, which draws batches and noise itself."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.local_plan import LocalPlan
from fl_sim.native.kernel import Kernel, failure, trained_of
from fl_sim.native.layers import KINDS, Stack, rows_of
from fl_sim.native.request import Draws, KernelJob, RequestBuffers, padded
from fl_sim.params import num_in
from fl_sim.types import LocalTask, Trained

_POINTER, _DOUBLE = ctypes.c_void_p, ctypes.c_double
_EXACTLY = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64, ctypes.c_int64)


class _PrivateSteps(ctypes.Structure):
    """The C structure ``PrivateSteps`` of private.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("batch_keys", _POINTER), ("noise_keys", _POINTER), ("below", ctypes.c_uint64),
        ("everybody", ctypes.c_int64), *((name, _DOUBLE) for name in ("limit", "ratio", "spacing", "divisor")),
        ("exactly", _EXACTLY),
    ]  # fmt: skip


@dataclass(frozen=True)
class PrivateDraws:
    """The random numbers of private steps, and the numbers that turn a sum of clipped gradients into a gradient.

    ``batch_keys``, ``noise_keys``: uint8, (steps, 32), the ChaCha20 keys of each step; ``noise_keys`` is None without
    noise. ``below``: a record joins a step if its random word of 64 bits is below this number, 0 to 2^64. ``limit``:
    the largest norm of a record's gradient. ``ratio``: the noise's standard deviation in grid steps. ``spacing``: the
    grid step. ``divisor``: the divisor of the noisy sum. ``exactly(step, place)``: the function that returns a number
    of the noise whose rounding the compiled code cannot decide, in grid steps.
    """

    batch_keys: NDArray[np.uint8]
    noise_keys: NDArray[np.uint8] | None
    below: int
    limit: float
    ratio: float
    spacing: float
    divisor: float
    exactly: Callable[[int, int], float]


def is_supported(stack: Stack) -> bool:
    """Return True if the compiled trainer has private steps for a model: one without normalisation and dropout."""
    return all(KINDS[row["kind"]] not in {"norm", "dropout"} and not row["dropout"] for row in rows_of(stack))


def train(kernel: Kernel, stack: Stack, job: KernelJob, draws: PrivateDraws) -> Trained:
    """Train the client of ``job`` by private steps, and return the result, without a loss.

    The plan of ``job`` has no ``private``. Other Python threads can run meanwhile. Raises ValueError and IndexError as
    ``Kernel.train`` does, and the exceptions of ``draws.exactly``.
    """
    size, steps = num_in(stack.layout), job.task.settings.num_steps(len(job.labels))
    for keys in (draws.batch_keys, draws.noise_keys):
        if keys is not None and (keys.dtype != np.uint8 or keys.shape != (steps, 32) or not keys.flags.c_contiguous):
            raise ValueError(f"{steps} private steps need one key of 32 bytes each, not {keys.dtype} {keys.shape}")
    params, buffers = (torch.empty(padded(size))[:size] for _ in range(2))
    held, errors = RequestBuffers(stack), list[BaseException]()
    request = held.request(job, params, buffers)

    def exactly(step: int, place: int) -> float:
        try:
            return draws.exactly(step, place)
        except BaseException as error:  # noqa: BLE001 (no exception may pass through C; it is raised below)
            errors.append(error)
            return float("nan")

    described = _PrivateSteps(
        _address(draws.batch_keys), _address(draws.noise_keys), draws.below % 2**64,
        draws.below == 2**64, draws.limit, draws.ratio, draws.spacing, draws.divisor, _EXACTLY(exactly),
    )  # fmt: skip
    failed = kernel.function("train_privately")(ctypes.byref(request), ctypes.byref(described))
    if errors:
        raise errors[0]
    if failed:
        raise failure(failed, stack, "private training")
    return trained_of(stack, job, params, buffers, None)


def job_without_order(task: LocalTask, plan: LocalPlan, inputs: torch.Tensor, labels: torch.Tensor) -> KernelJob:
    """Return a job for private steps, whose batches are drawn later: the order of its records is not initialised."""
    order = np.empty((task.settings.num_passes(len(labels)), len(labels)), np.int64)
    return KernelJob(task, replace(plan, private=None), inputs, labels, Draws(order, np.empty(0, np.int64)))


def clipped_sum(kernel: Kernel, stack: Stack, job: KernelJob, limit: float) -> NDArray[np.float64]:
    """Return the sum of the clipped gradients of all records at the received weights, (parameters,), in float64.

    ``limit``: the largest norm of a record's gradient. A gradient that is not finite counts as zeros. Raises ValueError
    and IndexError as ``Kernel.train`` does.
    """
    held, total = RequestBuffers(stack), np.empty(num_in(stack.layout))
    request = held.request(job, *torch.empty(2, padded(len(total))))
    pointer = ctypes.c_void_p(total.ctypes.data)
    if failed := kernel.function("private_sum")(ctypes.byref(request), _DOUBLE(limit), pointer):
        raise failure(failed, stack, "clipped sums")
    return total


def _address(keys: NDArray[np.uint8] | None) -> int | None:
    return None if keys is None else int(keys.ctypes.data)
