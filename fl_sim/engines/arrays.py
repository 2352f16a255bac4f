"""Conversion between tensors and Flower's classes Array and ArrayRecord.

Inside one process an Array refers to its tensor without a copy. The functions that read a client's Flower records do
not trust the client. These functions raise Malformed for any unexpected content. The error messages may quote numbers,
but never a client's text.
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
    """A Flower Array that refers to a float32 tensor and serialises the tensor only on access to ``data``.

    Inside one process nothing reads ``data``. Flower's own runtime sends a TensorArray as a plain Array. Pickling for
    Ray keeps the class TensorArray, and passes the numbers as a buffer that need not be copied.
    """

    tensor: torch.Tensor

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float32, "only float32 tensors travel"
        values = {"dtype": "float32", "shape": tuple(tensor.shape), "stype": "numpy.ndarray", "tensor": tensor}
        self.__dict__.update(values)

    @property
    def data(self) -> bytes:  # type: ignore[override]  # a plain attribute in Flower's class
        """Return the tensor's bytes in the format of numpy.save."""
        return b"".join((_header(self.shape, "<f4"), self.tensor.contiguous().numpy(force=True).data))

    def deflate(self) -> bytes:
        """Serialise this array as a plain Flower Array, for receivers that do not have the class TensorArray."""
        return Array(self.dtype, self.shape, self.stype, self.data).deflate()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Return the pickled form of this array: its shape and a buffer of numbers.

        For a pickle protocol below 5, which has no buffers, return the pickled form of a plain Array.
        """
        if protocol.__index__() < 5:
            return Array, (self.dtype, self.shape, self.stype, self.data)
        return _arrived, (self.shape, PickleBuffer(self.tensor.contiguous().numpy(force=True).data))


def reuse_freed_memory() -> None:
    """Make glibc keep the freed memory of tensors up to 32 MB for later tensors.

    This function allocates and frees one block of nearly 32 MB. glibc then raises its threshold for direct requests to
    the kernel to the size of that block (mallopt(3), M_MMAP_THRESHOLD). Without this function, every tensor over 128 kB
    costs a system call and page faults. System calls and page faults would cost 15 to 30 % of a round's time.
    """
    torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)


def array_bytes(array: Array) -> int:
    """Return the serialised size of an array in bytes, without serialising a TensorArray."""
    if isinstance(array, TensorArray):
        return len(_header(array.shape, "<f4")) + 4 * array.tensor.numel()
    return len(array.data)


def float32_bytes(numbers: int) -> int:
    """Return the serialised size in bytes of an array of ``numbers`` float32 numbers, without allocating the array."""
    return array_bytes(TensorArray(torch.empty(numbers, device="meta")))


def tensor_in(array: object, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the content of an array as a float32 tensor. Raises Malformed for another number type or shape."""
    if isinstance(array, TensorArray):
        if tuple(array.tensor.shape) != shape:
            raise Malformed(f"sent an array of another shape than {shape}")
        return array.tensor
    # the numbers are copied, because the bytes of the array are read-only
    return torch.from_numpy(numbers_in(array, shape, "<f4").astype(np.float32))


def numbers_in(array: object, shape: tuple[int, ...], kind: str) -> NDArray[Any]:
    """Return the content of a Flower Array as a read-only NumPy array of shape ``shape``.

    ``kind``: the expected NumPy type, such as "<f4". The dtype and shape that the sender states are not trusted. Raises
    Malformed if the bytes do not have exactly this type, shape and size.
    """
    header = _header(shape, kind)
    data = array.data if isinstance(array, Array) else None
    if not isinstance(data, bytes) or len(data) != len(header) + prod(shape) * np.dtype(kind).itemsize:
        raise Malformed(f"sent an array whose size does not fit numbers of type {kind} and the shape {shape}")
    if not data.startswith(header):
        raise Malformed(f"sent an array of another type than {kind}, or another shape than {shape}")
    return np.frombuffer(data, kind, offset=len(header)).reshape(shape)


def num_bytes(content: RecordDict) -> int:
    """Return the total size in bytes of the arrays in a message, each in the format of numpy.save.

    A float32 number takes 4 bytes, and each array has a header of 128 bytes. Names, settings and the rest of Flower's
    message format are not counted.
    """
    return sum(sum(map(array_bytes, group.values())) for group in content.values() if isinstance(group, ArrayRecord))


def array_record(params: Params) -> ArrayRecord:
    """Return named tensors as an ArrayRecord with one array for each tensor, as Flower's own strategies expect."""
    record = ArrayRecord()  # the arrays are set one by one, because ArrayRecord({...}) would serialise every array
    for name, value in params.items():
        record[name] = TensorArray(value.detach())
    return record


def pack(params: Params) -> ArrayRecord:
    """Return named tensors as an ArrayRecord with one flat array. The array's key is the names and shapes as JSON."""
    group, record = flattened(params), ArrayRecord()
    record[_write_layout(group.layout)] = TensorArray(group.flat)
    return record


def unpack(record: Any) -> Params:
    """Return the tensors in an ArrayRecord that ``pack`` made. Clients trust the server: shapes are not checked."""
    ((text, array),) = record.items()
    layout = _read_layout(text)
    return FlatParams(tensor_in(array, (num_in(layout),)), layout)


def read_group(record: object, layout: Layout) -> Params:
    """Return the tensors in a client's ArrayRecord. ``layout``: the expected names and shapes.

    Raises Malformed if the names, the shapes or the order of the tensors differ from ``layout``.
    """
    if not isinstance(record, ArrayRecord) or set(record) != {_write_layout(layout)}:
        raise Malformed("sent tensors whose names, shapes or order differ from the payload template")
    return FlatParams(tensor_in(record[_write_layout(layout)], (num_in(layout),)), layout)


def packed_record(packed: Packed) -> ArrayRecord:
    """Convert a compressed group of tensors to an ArrayRecord: one array of float32 numbers, and one of packed bits.

    An empty array is left out.
    """
    record = ArrayRecord()
    if len(packed.numbers):
        record[_NUMBERS] = TensorArray(packed.numbers)
    if len(packed.bits):
        record[_BITS] = Array(packed.bits)
    return record


def read_packed(record: object, size: Size) -> Packed:
    """Return the compressed group of tensors in an ArrayRecord.

    ``size``: the expected numbers of float32 numbers and of bytes. Raises Malformed for arrays of another size.
    """
    names = {name for name, count in ((_NUMBERS, size.numbers), (_BITS, size.bits)) if count}
    if not isinstance(record, ArrayRecord) or set(record) != names:
        raise Malformed("sent a compressed update with other arrays than expected")
    numbers = tensor_in(record[_NUMBERS], (size.numbers,)) if size.numbers else torch.zeros(0)
    bits = numbers_in(record[_BITS], (size.bits,), "|u1") if size.bits else np.zeros(0, np.uint8)
    return Packed(numbers, bits)


def read_rows(record: object, shapes: Mapping[str, tuple[int, ...]], most_rows: int) -> Params:
    """Return the tensors in an ArrayRecord, {name: tensor}. A tensor has the shape (rows, *shape of one row).

    ``shapes``: {name: shape of one row of the tensor}. The number of rows follows from the size of the array. Raises
    Malformed for more than ``most_rows`` rows, for other names or shapes, or for numbers that are not finite.
    """
    array = next(iter(record.values()), None) if isinstance(record, ArrayRecord) else None
    size = array.shape[0] if isinstance(array, Array) and len(array.shape) == 1 else -1
    rows, left = divmod(size, sum(map(math.prod, shapes.values())))
    if left or not 0 <= rows <= most_rows:
        raise Malformed(f"sent tensors with different numbers of rows, or with more than {most_rows} rows")
    params = read_group(record, tuple((name, (rows, *shape)) for name, shape in shapes.items()))
    if not is_finite({"rows": params}):
        raise Malformed("sent numbers that are not finite")
    return params


def check_names(content: RecordDict, names: set[str]) -> None:
    """Raise Malformed if the names of the Flower records in a message differ from ``names``."""
    if set(content) != names:
        raise Malformed(f"sent Flower records with other names than {', '.join(sorted(names))}")


def whole_number(value: object, largest: int, what: str) -> int:
    """Return ``value`` if it is an integer from 0 to ``largest``; else raise Malformed.

    ``what``: a name of the value, for the error message.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise Malformed(
            f"sent {what} that is not a whole number from 0" + (f" to {largest}" if largest < sys.maxsize else " on")
        )
    return value


def _arrived(shape: tuple[int, ...], numbers: bytes | bytearray | NDArray[Any]) -> TensorArray:
    """Rebuild a pickled TensorArray. Read-only numbers, such as those in Ray's memory, are copied."""
    values = np.frombuffer(numbers, np.float32).reshape(shape)
    return TensorArray(torch.from_numpy(values if values.flags.writeable else values.copy()))


@lru_cache(maxsize=64)
def _header(shape: tuple[int, ...], kind: str) -> bytes:
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": kind, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def _record(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    record = ArrayRecord()  # the arrays are set one by one, because ArrayRecord({...}) would serialise every array
    for name, tensor in tensors.items():
        record[name] = TensorArray(tensor)
    return record


@lru_cache(maxsize=64)
def _write_layout(layout: Layout) -> str:
    return json.dumps(layout)


@lru_cache(maxsize=64)
def _read_layout(text: str) -> Layout:
    return tuple((str(name), tuple(int(side) for side in shape)) for name, shape in json.loads(text))
