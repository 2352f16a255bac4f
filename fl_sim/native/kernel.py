"""Calls of the compiled trainer (the kernel), if there is one for this processor."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
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

_TOGETHER = 64  # records per forward pass of ``Kernel.infer``: a pass loads the weights once for all these records

_LAYOUT = 1000 * ctypes.sizeof(Request) + len(FIELDS)
"""The expected result of the C function fl_sim_layout. A different result means a different structure ``Request``."""

_LONG, _DOUBLE = ctypes.c_int64, ctypes.c_double


@dataclass(frozen=True)
class PreparedTraining:
    """The training of several clients, prepared in memory for one call of the library.

    ``params``, ``buffers``: the tensors that receive the trained parameters and momentum buffers of each client.
    ``held``: the object that owns the memory to which ``requests`` point. ``function``: the C function to call.
    """

    stack: Stack
    jobs: Sequence[KernelJob]
    params: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    held: RequestBuffers
    requests: ctypes.Array[Request]
    function: Callable[..., int]

    def train(self) -> list[Trained]:
        """Train all prepared clients, and return their results, as ``Kernel.train`` does.

        Other Python threads can run during the training.
        """
        losses = (ctypes.c_double * len(self.jobs))()
        if failed := self.function(self.requests, ctypes.c_int64(len(self.jobs)), losses):
            raise failure(failed, self.stack, "local training")
        rows = zip(self.jobs, self.params, self.buffers, losses, strict=True)
        return [trained_of(self.stack, job, params, buffers, loss) for job, params, buffers, loss in rows]


def trained_of(
    stack: Stack, job: KernelJob, params: torch.Tensor, buffers: torch.Tensor, loss: float | None
) -> Trained:
    """Return the result of one client's training.

    The result contains the client's trained parameters and momentum buffers, which the library wrote as vectors.
    """
    return Trained(
        params=FlatParams(params, stack.layout),
        momentum_buffers=_buffers_of(job, FlatParams(buffers, stack.layout)),
        num_steps=job.task.settings.num_steps(len(job.labels)),
        loss=loss,
    )


def _buffers_of(job: KernelJob, buffers: FlatParams) -> Mapping[str, torch.Tensor]:
    """Return the momentum buffers of all trained parameters after a client's training.

    Buffers of frozen parameters are included only if the client started with momentum buffers.
    """
    if not job.has_momentum:
        return {}
    if (trained := job.plan.trained) is None or job.plan.momentum_buffers:
        return buffers
    return {name: value for name, value in buffers.items() if name in trained}


@dataclass(frozen=True)
class Kernel:
    """The compiled trainer: a C++ library that is loaded into this process.

    ``lanes``: the number of float32 numbers per vector on this processor, a key of ``compiling.WIDTHS``.
    ``has_bfloat16``: True if the processor can multiply bfloat16 numbers. ``has_amx``: True if processor, operating
    system and library support AMX, Intel's instructions for matrices of bfloat16 numbers.
    """

    library: ctypes.CDLL
    lanes: int
    has_bfloat16: bool = False
    has_amx: bool = False

    def train(self, stack: Stack, jobs: Sequence[KernelJob], precision: Precision = "float32") -> list[Trained]:
        """Train clients one after another, and return the results of ``fl_sim.training.loop.train``.

        The results equal those of PyTorch up to float32 rounding. ``precision``: "bfloat16" needs ``has_bfloat16``. The
        factors of products are then rounded to 8 bits, and the products are added in float32. This applies to linear
        layers, and in convolutions to the output and to the gradient of the input. Without AMX, three kinds of products
        are not rounded: (1) the backward pass through pooling; (2) the gradient of a convolution's weights, unless the
        convolution is the model's first layer, with pooling; (3) convolutions with kernels of 3 x 3 pixels and 8 or
        more channels, most of which use Winograd's algorithm. With ``has_amx`` these products are rounded, too.

        Other Python threads can run meanwhile. Raises IndexError for a label outside of the model's classes. Raises
        ValueError for tensors of wrong length or type, and for an unsupported precision.
        """
        return self.prepare(stack, jobs, precision).train()

    def prepare(self, stack: Stack, jobs: Sequence[KernelJob], precision: Precision = "float32") -> "PreparedTraining":
        """Copy the training jobs ``jobs``, one per client, to C structures. Return an object that trains all clients.

        Raises ValueError as ``train`` does.
        """
        if precision == "bfloat16" and not self.has_bfloat16:
            raise ValueError("this processor has no products of bfloat16 numbers; use the precision float32")
        size = num_in(stack.layout)
        params, buffers = (torch.empty(len(jobs), padded(size))[:, :size].unbind() for _ in range(2))
        held = RequestBuffers(stack)
        requests = (Request * len(jobs))(*map(held.request, jobs, params, buffers))
        return PreparedTraining(stack, jobs, params, buffers, held, requests, self.function("train", precision))

    def infer(self, stack: Stack, params: torch.Tensor, inputs: torch.Tensor, what: Rows = "logits") -> torch.Tensor:
        """Return the logits, (n, classes), or the features, (n, d), of records.

        The results equal PyTorch's results up to rounding. ``params``: float32, one vector with the parameters in the
        order of ``stack.layout``. ``inputs``: float32, (n, *input shape). ``what``: "logits" or "features". Features
        are the inputs of the last layer. The same records in the same order give the same bits. With other records in
        its batch, a record's logits may differ in the last bits. Other Python threads can run meanwhile. Raises
        ValueError as ``train`` does.
        """
        check_tensor("the model's weights", params, torch.float32, (num_in(stack.layout),))
        check_records(stack, "the records", inputs, len(inputs))
        # these variables keep the arrays in memory while the C++ code reads them
        weights, records = params.contiguous(), inputs.contiguous()
        rows = torch.empty(len(records), stack.num_classes if what == "logits" else stack.num_features)
        if not len(records):
            return rows
        request = _pass_over(stack, weights, records)
        failed = self.function("infer")(
            ctypes.byref(request), ctypes.c_int64(what == "features"), ctypes.c_void_p(rows.data_ptr())
        )
        if failed:
            raise failure(failed, stack, "evaluation")
        return rows

    def backward(
        self, stack: Stack, params: torch.Tensor, inputs: torch.Tensor, slopes: torch.Tensor, *, to_inputs: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradients of sum(``slopes`` * logits) with respect to the parameters and to the records.

        ``params``, ``inputs``: as for ``infer``. ``slopes``: float32, (n, classes). ``to_inputs``: if False, the second
        gradient is None. The gradients equal PyTorch's up to rounding. Other Python threads can run meanwhile. Raises
        ValueError as ``train`` does, and for models with dropout.
        """
        check_tensor("the gradient by the logits", slopes, torch.float32, (len(inputs), stack.num_classes))
        return self._backward(stack, params, inputs, slopes.contiguous(), None, to_inputs=to_inputs)

    def input_slopes(
        self, stack: Stack, params: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of each record's cross-entropy with respect to the record, in the shape of ``inputs``.

        ``params``, ``inputs``: as for ``infer``. ``labels``: int64, (n,). Raises IndexError for a label outside of the
        model's classes, and ValueError as ``backward`` does.
        """
        check_tensor("the labels", labels, torch.int64, (len(inputs),))
        found = self._backward(stack, params, inputs, None, labels.contiguous(), to_inputs=True)[1]
        assert found is not None
        return found

    def _backward(
        self,
        stack: Stack,
        params: torch.Tensor,
        inputs: torch.Tensor,
        slopes: torch.Tensor | None,
        labels: torch.Tensor | None,
        *,
        to_inputs: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        size = num_in(stack.layout)
        check_tensor("the model's weights", params, torch.float32, (size,))
        check_records(stack, "the records", inputs, len(inputs))
        weights = torch.cat([params, params.new_zeros(padded(size) - size)])  # zeros: C++ code reads beyond the end
        records = inputs.contiguous()
        by_params, by_inputs = torch.zeros(size), torch.empty_like(records) if to_inputs else None
        if not len(records):
            return by_params, by_inputs
        request = _pass_over(stack, weights, records)
        request.labels = None if labels is None else labels.data_ptr()
        failed = self.function("backward")(
            ctypes.byref(request),
            *(ctypes.c_void_p(None if one is None else one.data_ptr()) for one in (slopes, by_params, by_inputs)),
        )
        if failed:
            raise failure(failed, stack, "the backward pass")
        return by_params, by_inputs

    def weighted_sum(self, vectors: Sequence[torch.Tensor], factors: Sequence[float]) -> torch.Tensor:
        """Return the sum of factors_i * vectors_i over all i, (n,), added in float64 in the order of the vectors.

        ``vectors``: at least one vector, each float32 of shape (n,). Raises ValueError for other types or
        shapes.
        """
        size, held, pointers = vectors[0].numel(), [], (ctypes.c_void_p * len(vectors))()
        for place, vector in enumerate(vectors):
            check_tensor("a vector of the sum", vector, torch.float32, (size,))
            held.append(vector.contiguous())  # this list keeps the vectors in memory until the C++ code has returned
            pointers[place] = held[-1].data_ptr()
        numbers, total = (ctypes.c_double * len(held))(*factors), torch.empty(size)
        self.function("weighted_sum")(
            pointers, numbers, ctypes.c_int64(len(held)), ctypes.c_int64(size), ctypes.c_void_p(total.data_ptr())
        )
        return total

    def is_this_versions(self) -> bool:
        """Return True if the loaded library was compiled for this version of fl-sim.

        The library must have this version's C++ sources and its layout of the C structure ``Request``.
        """
        try:
            sources, layout = self.function("sources"), self.function("layout")
        except AttributeError:
            return False
        sources.restype = ctypes.c_char_p
        return bool(sources() == SOURCES_DIGEST.encode() and layout() == _LAYOUT)

    def function(self, name: str, precision: Precision = "float32") -> Any:
        """Return the C function ``fl_sim_NAME`` that was compiled for this processor's vectors and ``precision``."""
        halves = "_amx" if self.has_amx else "_bfloat16"
        return getattr(self.library, f"fl_sim_{name}_{self.lanes}{halves if precision == 'bfloat16' else ''}")


@lru_cache(maxsize=1)
def load_kernel(path: Path | None = None) -> tuple[Kernel | None, str]:
    """Load the compiled trainer. Return (kernel, ""), or (None, reason) if this machine cannot use the trainer.

    ``path``: the library file; None means the result of ``find_library``. The kernel uses the widest vectors that this
    processor has.
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
        return None, f"{path} is from another version of fl-sim (python -m fl_sim.native compiles it for this version)"
    return kernel, ""


@dataclass(frozen=True)
class CompiledNormals:
    """A compiled ``mechanisms.Normals``: it computes normal random numbers by C++ code (normals.h).

    Other Python threads can run meanwhile.
    """

    kernel: Kernel

    def draw(self, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return one N(0, 1) number for each pair of 64-bit random words (first_i, second_i), shape (n,).

        Raises ValueError for arrays of wrong type or of different lengths.
        """
        count, made = len(first), np.empty(len(first))
        words = _row(first, np.uint64, count), _row(second, np.uint64, count)
        self.kernel.function("normals")(*words, _LONG(count), _row(made, np.float64, count))
        return made

    def rounded(self, first: NDArray[np.uint64], ratio: float, out: NDArray[np.float64]) -> NDArray[np.intp]:
        """Fill ``out`` with normal random numbers times ``ratio``, rounded to integers; return uncertain indices.

        Two random words define each number, but this method reads only the first word, in ``first``, and computes in
        float64. If this is not enough to decide between rounding up and rounding down, the number is uncertain: the
        caller must compute it exactly. Raises ValueError if ``first`` and ``out`` differ in length or have wrong types.
        """
        count, undecided, number = len(first), np.empty(len(first), np.int64), _LONG()
        places = _row(undecided, np.int64, count), ctypes.byref(number)
        words, made = _row(first, np.uint64, count), _row(out, np.float64, count)
        self.kernel.function("rounded_normals")(words, _LONG(count), _DOUBLE(ratio), made, *places)
        return undecided[: number.value]


def _may_use_amx(library: ctypes.CDLL) -> bool:
    """Request the operating system's permission to use AMX (matrix instructions); return True if it was granted."""
    return bool(library.fl_sim_may_use_16_amx()) if hasattr(library, "fl_sim_may_use_16_amx") else False


def _pass_over(stack: Stack, weights: torch.Tensor, records: torch.Tensor) -> Request:
    """Return the request for a pass over all ``records``. The caller keeps all tensors in memory."""
    return Request(
        layers=stack.pointers[0], num_layers=len(stack.layers), input_shape=stack.pointers[1],
        num_params=num_in(stack.layout), params=weights.data_ptr(), inputs=records.data_ptr(),
        num_examples=len(records), batch_size=_TOGETHER,
    )  # fmt: skip


def failure(code: int, stack: Stack, what: str) -> Exception:
    """Return the Python exception for an error ``code`` that a C function of the library returned.

    ``what``: the failed computation, such as "local training", for the message.
    """
    if code == 2:
        return MemoryError(f"no memory for {what}: choose a smaller local.batch_size, or fewer clients at a time")
    if code == 3:
        return IndexError(f"a label is outside of the model's {stack.num_classes} classes")
    if code == 4:
        return IndexError("the order of the records or the mixing partners have indices of records that do not exist")
    if code == 1:
        shape = tuple(stack.input_shape.tolist())
        return ValueError(
            f"the model's layers are not supported, or do not fit each other, or do not fit records of shape {shape}"
        )
    return RuntimeError(f"the compiled trainer failed in {what} with the code {code}, which this version does not know")


def _row(numbers: NDArray[Any], kind: type[np.generic], count: int) -> ctypes.c_void_p:
    if numbers.dtype != kind or numbers.shape != (count,) or not numbers.flags.c_contiguous:
        raise ValueError(f"{count} normal numbers need {count} pairs of 64-bit words, in contiguous arrays")
    return ctypes.c_void_p(numbers.ctypes.data)
