"""Call the compiled trainer, where there is one for this processor."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.native.compiling import AMX, BFLOAT16, SOURCES_DIGEST, find_library, lanes_of, missing_in, processor
from fl_sim.native.layers import FIELDS, Stack
from fl_sim.native.request import KernelJob, Request, RequestBuffers, check_records, check_tensor, padded
from fl_sim.params import FlatParams, num_in
from fl_sim.types import Precision, Trained

Rows: TypeAlias = Literal["logits", "features"]

_TOGETHER = 64  # records that go through the network together where nothing is trained: they share the weights' way

_LAYOUT = 1000 * ctypes.sizeof(Request) + len(FIELDS)
"""The result of fl_sim_layout in a library that has the same fields of a request."""

_LONG, _DOUBLE = ctypes.c_int64, ctypes.c_double


@dataclass(frozen=True)
class PreparedTraining:
    """Clients whose training is laid out for one call of the library. ``params``, ``buffers``: where results go.

    ``held``: what the ``requests`` point to.
    """

    stack: Stack
    jobs: Sequence[KernelJob]
    params: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    held: RequestBuffers
    requests: ctypes.Array[Request]
    function: Callable[..., int]

    def train(self) -> list[Trained]:
        """Train them, as ``Kernel.train`` does. Other threads run meanwhile."""
        losses = (ctypes.c_double * len(self.jobs))()
        if failed := self.function(self.requests, ctypes.c_int64(len(self.jobs)), losses):
            raise _failure(failed, self.stack, "local training")
        return [
            Trained(
                params=FlatParams(params, self.stack.layout),
                momentum_buffers=FlatParams(buffers, self.stack.layout) if job.has_momentum else {},
                num_steps=job.task.settings.num_steps(len(job.labels)),
                loss=loss,
            )
            for job, params, buffers, loss in zip(self.jobs, self.params, self.buffers, losses, strict=True)
        ]


@dataclass(frozen=True)
class Kernel:
    """The loaded library, and how many numbers its vectors hold on this processor: a key of ``compiling.WIDTHS``.

    ``has_bfloat16``: whether the processor has products of bfloat16 numbers; ``has_amx``: whether it has AMX for them,
    and the system and the library let this process use it.
    """

    library: ctypes.CDLL
    lanes: int
    has_bfloat16: bool = False
    has_amx: bool = False

    def train(self, stack: Stack, jobs: Sequence[KernelJob], precision: Precision = "float32") -> list[Trained]:
        """Train clients, one after another, each as ``fl_sim.training.loop.train`` does but for float32 rounding.

        With ``precision`` "bfloat16", which needs ``has_bfloat16``, the factors of products are rounded to 8 bits, and
        their sums are float32: in linear layers, and in convolutions on the way forward and back to their input.
        Exact are the way back through pooling, the gradient of a convolution's weights unless it reads the records and
        pools, and convolutions of 3 x 3 pixels of 8 channels or more, most of which go by Winograd's algorithm. With
        ``has_amx`` all these products are rounded, too.
        Other threads run meanwhile. Raises IndexError for a label outside the model's classes, and ValueError for
        tensors of other lengths or types than the model and the task ask for, and a precision that is not here.
        """
        return self.prepare(stack, jobs, precision).train()

    def prepare(self, stack: Stack, jobs: Sequence[KernelJob], precision: Precision = "float32") -> "PreparedTraining":
        """Return the rest of ``train`` after the jobs are checked and laid out in memory: little in Python.

        Raises ValueError as ``train`` does.
        """
        if precision == "bfloat16" and not self.has_bfloat16:
            raise ValueError("this processor has no products of bfloat16 numbers")
        size = num_in(stack.layout)
        params, buffers = (torch.empty(len(jobs), padded(size))[:, :size].unbind() for _ in range(2))
        held = RequestBuffers(stack)
        requests = (Request * len(jobs))(*map(held.request, jobs, params, buffers))
        return PreparedTraining(stack, jobs, params, buffers, held, requests, self.function("train", precision))

    def infer(self, stack: Stack, params: torch.Tensor, inputs: torch.Tensor, what: Rows = "logits") -> torch.Tensor:
        """Return the logits, (n, classes), as the model does but for float32 rounding; other threads run meanwhile.

        Or the features, (n, d): what enters the last layer.
        ``params``: float32, as one vector in the stack's layout; ``inputs``: float32, (n, *input shape). The same bits
        for the same records in the same order; last bits of a record's logits depend on who it goes through with.
        Raises ValueError as ``train`` does.
        """
        check_tensor("the model's weights", params, torch.float32, (num_in(stack.layout),))
        check_records(stack, "the records", inputs, len(inputs))
        weights, records = params.contiguous(), inputs.contiguous()  # both are held until the call is over
        rows = torch.empty(len(records), stack.num_classes if what == "logits" else stack.num_features)
        if not len(records):
            return rows
        request = Request(
            layers=stack.pointers[0], num_layers=len(stack.layers), input_shape=stack.pointers[1],
            num_params=len(weights), params=weights.data_ptr(), inputs=records.data_ptr(), num_examples=len(records),
            batch_size=_TOGETHER,
        )  # fmt: skip
        failed = self.function("infer")(
            ctypes.byref(request), ctypes.c_int64(what == "features"), ctypes.c_void_p(rows.data_ptr())
        )
        if failed:
            raise _failure(failed, stack, "evaluation")
        return rows

    def weighted_sum(self, vectors: Sequence[torch.Tensor], factors: Sequence[float]) -> torch.Tensor:
        """Return sum_i factors_i * vectors_i, (n,), in float64 as ``fl_sim.native.mean.weighted_mean`` defines it.

        ``vectors``: at least one, float32, (n,) each. Raises ValueError for others.
        """
        size, held, pointers = vectors[0].numel(), [], (ctypes.c_void_p * len(vectors))()
        for place, vector in enumerate(vectors):
            check_tensor("a vector of the sum", vector, torch.float32, (size,))
            held.append(vector.contiguous())  # until the call is over
            pointers[place] = held[-1].data_ptr()
        numbers, total = (ctypes.c_double * len(held))(*factors), torch.empty(size)
        self.function("weighted_sum")(
            pointers, numbers, ctypes.c_int64(len(held)), ctypes.c_int64(size), ctypes.c_void_p(total.data_ptr())
        )
        return total

    def is_this_versions(self) -> bool:
        """Return True if the library is of this version's sources, and has the same fields of a request."""
        try:
            sources, layout = self.function("sources"), self.function("layout")
        except AttributeError:
            return False
        sources.restype = ctypes.c_char_p
        return bool(sources() == SOURCES_DIGEST.encode() and layout() == _LAYOUT)

    def function(self, name: str, precision: Precision = "float32") -> Any:
        """Return the function ``fl_sim_NAME`` of C, compiled for this processor's vectors and for ``precision``."""
        halves = "_amx" if self.has_amx else "_bfloat16"
        return getattr(self.library, f"fl_sim_{name}_{self.lanes}{halves if precision == 'bfloat16' else ''}")


@lru_cache(maxsize=1)
def load_kernel(path: Path | None = None) -> tuple[Kernel | None, str]:
    """Return (the kernel, nothing), or (None, why there is none here). ``path``: unless given, ``find_library``'s.

    The kernel is that of the widest vectors that this processor has.
    """
    path, features = path or find_library(), processor()
    lanes = lanes_of(features)
    if not lanes:
        return None, f"this processor has no {missing_in(features)}"
    if not path.exists():
        return None, "it was not compiled (python -m fl_sim.native does that)"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path} cannot be loaded: {error}"
    has_bfloat16 = lanes == 16 and BFLOAT16 in features
    kernel = Kernel(library, lanes, has_bfloat16, has_bfloat16 and AMX in features and _may_use_amx(library))
    if not kernel.is_this_versions():
        return None, f"{path} is of another version of fl-sim (python -m fl_sim.native compiles this one's)"
    return kernel, ""


@dataclass(frozen=True)
class CompiledNormals:
    """The normal numbers of normals.h; other threads run while they are made."""

    kernel: Kernel

    def draw(self, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return one N(0, 1) number for each pair of words. Raises ValueError where they are none."""
        count, made = len(first), np.empty(len(first))
        words = _row(first, np.uint64, count), _row(second, np.uint64, count)
        self.kernel.function("normals")(*words, _LONG(count), _row(made, np.float64, count))
        return made

    def rounded(self, first: NDArray[np.uint64], ratio: float, out: NDArray[np.float64]) -> NDArray[np.intp]:
        """Write the numbers times ``ratio``, rounded to whole ones, into ``out``, and return the places to decide.

        They are where ``first`` and float64 do not tell which way to round. Raises ValueError where there are not as
        many words as numbers.
        """
        count, undecided, number = len(first), np.empty(len(first), np.int64), _LONG()
        places = _row(undecided, np.int64, count), ctypes.byref(number)
        words, made = _row(first, np.uint64, count), _row(out, np.float64, count)
        self.kernel.function("rounded_normals")(words, _LONG(count), _DOUBLE(ratio), made, *places)
        return undecided[: number.value]


def _may_use_amx(library: ctypes.CDLL) -> bool:
    """Ask the system for AMX's registers, which are large, so that processes must ask for them."""
    return bool(library.fl_sim_may_use_16_amx()) if hasattr(library, "fl_sim_may_use_16_amx") else False


def _failure(code: int, stack: Stack, what: str) -> Exception:
    """Return the error for the library's ``code``."""
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


def _row(numbers: NDArray[Any], kind: type[np.generic], count: int) -> ctypes.c_void_p:
    if numbers.dtype != kind or numbers.shape != (count,) or not numbers.flags.c_contiguous:
        raise ValueError(f"{count} normal numbers are made of as many pairs of 64-bit words, in one row")
    return ctypes.c_void_p(numbers.ctypes.data)
