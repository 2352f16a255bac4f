"""How groups of tensors stand in Flower's records, and how they are read by one who does not trust the sender.

Raises Malformed for anything else than what the reader says it must be. The reasons quote numbers at most, never a
client's text.
"""

import json
import math
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict

from fl_sim.engines.arrays import TensorArray, numbers_in, tensor_in
from fl_sim.engines.arrays import num_bytes as array_bytes
from fl_sim.errors import Malformed
from fl_sim.params import FlatParams, Layout, flattened, is_finite, num_in
from fl_sim.types import Packed, Params, Size

_NUMBERS: Final = "numbers"
_BITS: Final = "bits"


def num_bytes(content: RecordDict) -> int:
    """Return how many bytes the arrays of a message have on their way, each as numpy.save writes it.

    That is 4 a number and 128 before each group of tensors; names, settings and Flower's own frame are not counted.
    """
    groups = (record for record in content.values() if isinstance(record, ArrayRecord))
    return sum(array_bytes(array) for group in groups for array in group.values())


def to_arrays(params: Params) -> ArrayRecord:
    """Return named tensors as the record that Flower's own strategies exchange: one array a tensor."""
    return _record({name: value.detach() for name, value in params.items()})


def pack(params: Params) -> ArrayRecord:
    """Return a group of tensors as one array, named by its layout."""
    group = flattened(params)
    return _record({_write_layout(group.layout): group.flat})


def _record(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    record = ArrayRecord()  # ArrayRecord({...}) would ask every array for its bytes
    for name, tensor in tensors.items():
        record[name] = TensorArray(tensor)
    return record


def unpack(record: Any) -> Params:
    """Unpack what a server sent, which clients trust."""
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


def read_json(text: str) -> object:
    """Return what a client says of its records."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed("says of its records what is not JSON") from error


def exactly(content: RecordDict, names: set[str]) -> None:
    """Raise Malformed for a content of other records than these."""
    if set(content) != names:
        raise Malformed(f"sent other records than {', '.join(sorted(names))}")


def whole(value: object, largest: int, what: str) -> int:
    """Return ``value``, which must be a whole number from 0 to ``largest``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise Malformed(
            f"sent {what} that is not a whole number from 0" + (f" to {largest}" if largest < sys.maxsize else " on")
        )
    return value


@lru_cache(maxsize=64)
def _write_layout(layout: Layout) -> str:
    return json.dumps(layout)


@lru_cache(maxsize=64)
def _read_layout(text: str) -> Layout:
    return tuple((str(name), tuple(int(side) for side in shape)) for name, shape in json.loads(text))
