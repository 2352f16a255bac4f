"""Calls of the compiled trainer for private steps (DP-SGD). The C++ code (private.h) draws batches and noise itself."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.clipping import Clipping
from fl_sim.local_plan import LocalPlan
from fl_sim.native.kernel import Kernel, failure, trained_of
from fl_sim.native.layers import KINDS, Stack, rows_of
from fl_sim.native.request import Draws, KernelJob, RequestBuffers, padded
from fl_sim.params import Layout, num_in
from fl_sim.types import LocalTask, Trained

_POINTER, _DOUBLE = ctypes.c_void_p, ctypes.c_double
_EXACTLY = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64, ctypes.c_int64)


class _Bounds(ctypes.Structure):
    """The bounds on the norm of a record's gradient: the C structure ``Bounds`` of private.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("limit", _DOUBLE), ("stability", _DOUBLE), ("of_layers", _POINTER)]


class _PrivateSteps(ctypes.Structure):
    """The input of private steps (DP-SGD): random keys, clipping bounds and noise scales.

    This is the C structure ``PrivateSteps`` of private.h.
    """

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("batch_keys", _POINTER), ("noise_keys", _POINTER), ("below", ctypes.c_uint64), ("everybody", ctypes.c_int64),
        ("bounds", _Bounds), *((name, _DOUBLE) for name in ("ratio", "spacing", "divisor")), ("exactly", _EXACTLY),
    ]  # fmt: skip


@dataclass(frozen=True)
class ClippingBounds:
    """The bounds on the norm of a record's gradient, for one of the clipping rules of the class ``Clipping``.

    ``limit``: the largest norm. ``stability``: the constant that automatic clipping adds to the norm of a gradient
    (``Clipping``); 0 for other clipping rules. ``of_layers``: if each layer is clipped separately, the largest norm for
    each layer with parameters, (layers,); else None.
    """

    limit: float
    stability: float = 0.0
    of_layers: NDArray[np.float64] | None = None

    @classmethod
    def of(cls, clipping: Clipping, limit: float, layout: Layout) -> Self:
        """Return the bounds on gradients that the rule ``clipping`` sets for a model.

        ``limit``: the largest norm of a record's gradient. ``layout``: names and shapes of the model's parameters.
        """
        shares = clipping.shares([name for name, _ in layout])
        return cls(limit, clipping.stability, limit * np.array(shares) if clipping.by_layer else None)

    def described(self, stack: Stack) -> _Bounds:
        """Return the bounds as a C structure. The structure is valid while this object exists.

        Raises ValueError if the number of bounds is not the number of linear and convolution layers in ``stack``.
        """
        layers = sum(KINDS[row["kind"]] in {"conv", "linear"} for row in rows_of(stack))
        if self.of_layers is not None and self.of_layers.shape != (layers,):
            raise ValueError(f"{layers} layers need one bound each, not {self.of_layers.shape}")
        return _Bounds(self.limit, self.stability, _address(self.of_layers))


@dataclass(frozen=True)
class PrivateDraws:
    """The random numbers, clipping bounds and scales of all private steps (DP-SGD) of one client.

    ``batch_keys``, ``noise_keys``: uint8, (steps, 32), the ChaCha20 keys of each step; ``noise_keys`` is None without
    noise. ``below``: a record joins a step if its random word of 64 bits is below this number, 0 to 2^64. ``bounds``:
    the bounds on a record's gradient. ``spacing``: the step of the rounding grid for the noise. ``ratio``: the noise's
    standard deviation in units of ``spacing``. ``divisor``: the divisor of the noisy sum. ``exactly(step, place)``: a
    function that returns the noise of a step at the index ``place``, in units of ``spacing``. The compiled code calls
    it for each number that it cannot round with certainty in float64.
    """

    batch_keys: NDArray[np.uint8]
    noise_keys: NDArray[np.uint8] | None
    below: int
    bounds: ClippingBounds
    ratio: float
    spacing: float
    divisor: float
    exactly: Callable[[int, int], float]


def is_supported(stack: Stack) -> bool:
    """Return True if the compiled trainer supports private steps of a model.

    The model must have no normalisation, no dropout, and no layers that multiply their output by a factor.
    """
    rows = rows_of(stack)
    return all(KINDS[row["kind"]] not in {"norm", "dropout"} and not row["dropout"] | row["factor"] for row in rows)


def train(kernel: Kernel, stack: Stack, job: KernelJob, draws: PrivateDraws) -> Trained:
    """Train the client of ``job`` by private steps (DP-SGD). The result has no loss, because a loss is not private.

    ``draws`` defines the private steps, so the field ``private`` in the plan of ``job`` must be None. Other Python
    threads can run during the call. Raises ValueError and IndexError as ``Kernel.train`` does, and the exceptions of
    ``draws.exactly``.
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
        _address(draws.batch_keys), _address(draws.noise_keys), draws.below % 2**64, draws.below == 2**64,
        draws.bounds.described(stack), draws.ratio, draws.spacing, draws.divisor, _EXACTLY(exactly),
    )  # fmt: skip
    failed = kernel.function("train_privately")(ctypes.byref(request), ctypes.byref(described))
    if errors:
        raise errors[0]
    if failed:
        raise failure(failed, stack, "private training")
    return trained_of(stack, job, params, buffers, None)


def job_without_order(task: LocalTask, plan: LocalPlan, inputs: torch.Tensor, labels: torch.Tensor) -> KernelJob:
    """Return a training job of a client without an order of its records.

    No order is needed, because private steps (DP-SGD) draw their batches themselves.
    """
    order = np.empty((task.settings.num_passes(len(labels)), len(labels)), np.int64)
    return KernelJob(task, replace(plan, private=None), inputs, labels, Draws(order, np.empty(0, np.int64)))


def clipped_sum(kernel: Kernel, stack: Stack, job: KernelJob, bounds: ClippingBounds) -> NDArray[np.float64]:
    """Return the sum of all records' clipped gradients at the weights that the client received, (parameters,).

    ``bounds``: the bounds on a record's gradient. A gradient that is not finite counts as zeros. Raises ValueError and
    IndexError as ``Kernel.train`` does.
    """
    held, total = RequestBuffers(stack), np.empty(num_in(stack.layout))
    request = held.request(job, *torch.empty(2, padded(len(total))))
    pointer = ctypes.c_void_p(total.ctypes.data)
    described = bounds.described(stack)
    if failed := kernel.function("private_sum")(ctypes.byref(request), ctypes.byref(described), pointer):
        raise failure(failed, stack, "clipped sums")
    return total


def _address(numbers: NDArray[Any] | None) -> int | None:
    return None if numbers is None else int(numbers.ctypes.data)
