"""Tensors in Arrays and records of Flower, by reference inside one process, and readers that do not trust the sender.

Readers raise Malformed for any content but the expected one. The reasons quote numbers at most, never a client's text.
"""

import json
import math
import sys
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from math import prod
from pickle import PickleBuffer
from typing import Any, Final, SupportsIndex

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

from fl_sim.errors import Malformed
from fl_sim.params import FlatParams, Layout, flattened, is_finite, num_in
from fl_sim.types import Packed, Params, Size

_NUMBERS: Final = "numbers"
_BITS: Final = "bits"


class TensorArray(Array):
    """Flower's Array of a float32 tensor by reference: its bytes are made whenever somebody asks for them.

    Inside one process nobody does. What leaves it through Flower's own runtime is a plain Array; what is pickled for
    Ray stays one of these, and its numbers a buffer that need not be copied.
    """

    tensor: torch.Tensor

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float32, "only float32 tensors travel"
        values = {"dtype": "float32", "shape": tuple(tensor.shape), "stype": "numpy.ndarray", "tensor": tensor}
        self.__dict__.update(values)

    @property
    def data(self) -> bytes:  # type: ignore[override]  # a plain attribute in Flower's class
        """Return the tensor as numpy.save writes it."""
        return b"".join((_header(self.shape, "<f4"), self.tensor.contiguous().numpy(force=True).data))

    def deflate(self) -> bytes:
        """Name the type that the other side knows: Flower's own runtime sends what this returns."""
        return Array(self.dtype, self.shape, self.stype, self.data).deflate()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle as shape and numbers; by old protocols, which know no buffers, as the Array that it stands for."""
        if protocol.__index__() < 5:
            return Array, (self.dtype, self.shape, self.stype, self.data)
        return _arrived, (self.shape, PickleBuffer(self.tensor.contiguous().numpy(force=True).data))


def reuse_freed_memory() -> None:
    """Let glibc keep the memory of tensors up to 32 MB for the next one instead of asking the kernel each time.

    Its threshold grows to the largest block ever given back (mallopt(3), M_MMAP_THRESHOLD), so one block is enough.
    Without it every tensor over 128 kB costs a system call and its page faults, 15 to 30 % of a round.
    """
    torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)


def array_bytes(array: Array) -> int:
    """Return the size of an array in a message, in bytes, without making them."""
    if isinstance(array, TensorArray):
        return len(_header(array.shape, "<f4")) + 4 * array.tensor.numel()
    return len(array.data)


def float32_bytes(numbers: int) -> int:
    """Return the size in a message of an array of so many float32 numbers, in bytes, without making one."""
    return array_bytes(TensorArray(torch.empty(numbers, device="meta")))


def tensor_in(array: object, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the float32 tensor of ``shape`` that an array holds. Raises Malformed where it holds anything else."""
    if isinstance(array, TensorArray):
        if tuple(array.tensor.shape) != shape:
            raise Malformed(f"sent an array of another shape than {shape}")
        return array.tensor
    return torch.from_numpy(numbers_in(array, shape, "<f4").astype(np.float32))  # a copy: bytes are read-only


def numbers_in(array: object, shape: tuple[int, ...], kind: str) -> NDArray[Any]:
    """Return the numbers that an array's bytes hold, read-only: of numpy's type ``kind``, such as "<f4".

    The array's own description is not trusted. Raises Malformed where its bytes are not exactly such numbers.
    """
    header = _header(shape, kind)
    data = array.data if isinstance(array, Array) else None
    if not isinstance(data, bytes) or len(data) != len(header) + prod(shape) * np.dtype(kind).itemsize:
        raise Malformed(f"sent an array of another size than numbers of type {kind} in the shape {shape} have")
    if not data.startswith(header):
        raise Malformed(f"sent an array of another type than {kind}, or another shape than {shape}")
    return np.frombuffer(data, kind, offset=len(header)).reshape(shape)


def num_bytes(content: RecordDict) -> int:
    """Return the size of the arrays of a message, each as numpy.save writes it, in bytes.

    That is 4 a number and 128 before each group of tensors; names, settings and Flower's own frame are not counted.
    """
    return sum(sum(map(array_bytes, group.values())) for group in content.values() if isinstance(group, ArrayRecord))


def array_record(params: Params) -> ArrayRecord:
    """Return named tensors as the record that Flower's own strategies exchange: one array a tensor."""
    record = ArrayRecord()  # ArrayRecord({...}) would ask every array for its bytes
    for name, value in params.items():
        record[name] = TensorArray(value.detach())
    return record


def pack(params: Params) -> ArrayRecord:
    """Return a group of tensors as one array, named by its layout."""
    group, record = flattened(params), ArrayRecord()
    record[_write_layout(group.layout)] = TensorArray(group.flat)
    return record


def unpack(record: Any) -> Params:
    """Unpack a group of tensors from the server, which clients trust."""
    ((text, array),) = record.items()
    layout = _read_layout(text)
    return FlatParams(tensor_in(array, (num_in(layout),)), layout)


def read_group(record: object, layout: Layout) -> Params:
    """Unpack a group of tensors that must have these names, shapes and order."""
    if not isinstance(record, ArrayRecord) or set(record) != {_write_layout(layout)}:
        raise Malformed("sent tensors of other names, shapes or order than are exchanged")
    return FlatParams(tensor_in(record[_write_layout(layout)], (num_in(layout),)), layout)


def packed_record(packed: Packed) -> ArrayRecord:
    """Return a compressed group as its numbers and its bits, where it has any."""
    record = ArrayRecord()
    if len(packed.numbers):
        record[_NUMBERS] = TensorArray(packed.numbers)
    if len(packed.bits):
        record[_BITS] = Array(packed.bits)
    return record


def read_packed(record: object, size: Size) -> Packed:
    """Unpack a compressed group that must have this size."""
    names = {name for name, count in ((_NUMBERS, size.numbers), (_BITS, size.bits)) if count}
    if not isinstance(record, ArrayRecord) or set(record) != names:
        raise Malformed("sent a compressed update of other parts than the others have")
    numbers = tensor_in(record[_NUMBERS], (size.numbers,)) if size.numbers else torch.zeros(0)
    bits = numbers_in(record[_BITS], (size.bits,), "|u1") if size.bits else np.zeros(0, np.uint8)
    return Packed(numbers, bits)


def read_rows(record: object, shapes: Mapping[str, tuple[int, ...]], most_rows: int) -> Params:
    """Unpack tensors of these names and shapes, each with as many rows before it as the array has numbers for."""
    array = next(iter(record.values()), None) if isinstance(record, ArrayRecord) else None
    size = array.shape[0] if isinstance(array, Array) and len(array.shape) == 1 else -1
    rows, left = divmod(size, sum(map(math.prod, shapes.values())))
    if left or not 0 <= rows <= most_rows:
        raise Malformed(f"sent tensors that do not all have the same number of rows, from 0 to {most_rows}")
    params = read_group(record, tuple((name, (rows, *shape)) for name, shape in shapes.items()))
    if not is_finite({"rows": params}):
        raise Malformed("sent numbers that are not finite")
    return params


def check_names(content: RecordDict, names: set[str]) -> None:
    """Raise Malformed for a content of other records than these."""
    if set(content) != names:
        raise Malformed(f"sent other records than {', '.join(sorted(names))}")


def whole_number(value: object, largest: int, what: str) -> int:
    """Return ``value``, which must be a whole number from 0 to ``largest``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise Malformed(
            f"sent {what} that is not a whole number from 0" + (f" to {largest}" if largest < sys.maxsize else " on")
        )
    return value


def _arrived(shape: tuple[int, ...], numbers: bytes | bytearray | NDArray[Any]) -> TensorArray:
    """Return the array of a pickled one. Its tensor may be written to: numbers in Ray's memory are copied."""
    values = np.frombuffer(numbers, np.float32).reshape(shape)
    return TensorArray(torch.from_numpy(values if values.flags.writeable else values.copy()))


@lru_cache(maxsize=64)
def _header(shape: tuple[int, ...], kind: str) -> bytes:
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": kind, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def _record(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    record = ArrayRecord()  # ArrayRecord({...}) would ask every array for its bytes
    for name, tensor in tensors.items():
        record[name] = TensorArray(tensor)
    return record


@lru_cache(maxsize=64)
def _write_layout(layout: Layout) -> str:
    return json.dumps(layout)


@lru_cache(maxsize=64)
def _read_layout(text: str) -> Layout:
    return tuple((str(name), tuple(int(side) for side in shape)) for name, shape in json.loads(text))
