"""Flower's Arrays as we use them: a tensor by reference inside one process, bytes of numpy.save's format outside it."""

from functools import lru_cache
from io import BytesIO
from math import prod
from pickle import PickleBuffer
from typing import Any, SupportsIndex

import numpy as np
import torch
from flwr.app import Array
from numpy.typing import NDArray

from fl_sim.errors import Malformed


class TensorArray(Array):
    """Flower's Array of a float32 tensor by reference: its bytes are made whenever somebody asks for them.

    Inside one process nobody does. What leaves it through Flower's own runtime is a plain Array; what is pickled for
    Ray stays one of these, and its numbers a buffer that need not be copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float32, "only float32 tensors travel"
        values = {"dtype": "float32", "shape": tuple(tensor.shape), "stype": "numpy.ndarray", "tensor": tensor}
        self.__dict__.update(values)

    @property
    def data(self) -> bytes:  # type: ignore[override]  # a plain attribute in Flower's class
        """Return the tensor as numpy.save writes it."""
        return b"".join((_header(self.shape, "<f4"), self.tensor.contiguous().numpy(force=True).data))

    @property
    def tensor(self) -> torch.Tensor:
        """Return the tensor itself."""
        tensor: torch.Tensor = self.__dict__["tensor"]
        return tensor

    def deflate(self) -> bytes:
        """Name the type that the other side knows: Flower's own runtime sends what this returns."""
        return Array(self.dtype, self.shape, self.stype, self.data).deflate()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle as shape and numbers; by old protocols, which know no buffers, as the Array that it stands for."""
        if protocol.__index__() < 5:
            return Array, (self.dtype, self.shape, self.stype, self.data)
        return _arrived, (self.shape, PickleBuffer(self.tensor.contiguous().numpy(force=True).data))


def _arrived(shape: tuple[int, ...], numbers: bytes | bytearray | NDArray[Any]) -> TensorArray:
    """Return the tensor of a pickled one, which may be written to: what lies in Ray's memory is copied."""
    values = np.frombuffer(numbers, np.float32).reshape(shape)
    return TensorArray(torch.from_numpy(values if values.flags.writeable else values.copy()))


def reuse_freed_memory() -> None:
    """Let glibc keep the memory of tensors up to 32 MB for the next one instead of asking the kernel each time.

    Its threshold grows to the largest block ever given back (mallopt(3), M_MMAP_THRESHOLD), so one block is enough.
    Without it every tensor over 128 kB costs a system call and its page faults, 15 to 30 % of a round.
    """
    torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)


def num_bytes(array: Array) -> int:
    """Return how many bytes an array has on its way, without making them."""
    if isinstance(array, TensorArray):
        return len(_header(array.shape, "<f4")) + 4 * array.tensor.numel()
    return len(array.data)


def float32_bytes(numbers: int) -> int:
    """Return how many bytes an array of so many float32 numbers has on its way, without making one."""
    return num_bytes(TensorArray(torch.empty(numbers, device="meta")))


def tensor_in(array: object, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the float32 tensor of ``shape`` that an array holds. Raises Malformed where it holds anything else."""
    if isinstance(array, TensorArray):
        if tuple(array.tensor.shape) != shape:
            raise Malformed(f"sent an array of another shape than {shape}")
        return array.tensor
    return torch.from_numpy(numbers_in(array, shape, "<f4").astype(np.float32))  # a copy: bytes are read-only


def numbers_in(array: object, shape: tuple[int, ...], kind: str) -> NDArray[Any]:
    """Return the numbers that an array's bytes hold, read-only: of numpy's type ``kind``, such as "<f4".

    Nothing that the array says of itself is believed. Raises Malformed where its bytes are not exactly such numbers.
    """
    header = _header(shape, kind)
    data = array.data if isinstance(array, Array) else None
    if not isinstance(data, bytes) or len(data) != len(header) + prod(shape) * np.dtype(kind).itemsize:
        raise Malformed(f"sent an array of another size than numbers of type {kind} in the shape {shape} have")
    if not data.startswith(header):
        raise Malformed(f"sent an array of another type than {kind}, or another shape than {shape}")
    return np.frombuffer(data, kind, offset=len(header)).reshape(shape)


@lru_cache(maxsize=64)
def _header(shape: tuple[int, ...], kind: str) -> bytes:
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": kind, "fortran_order": False, "shape": shape})
    return buffer.getvalue()
