"""MNIST's idx files (LeCun, Cortes, Burges), memory-mapped after a look at the header and the file's size."""

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.naming import KnownSet
from fl_sim.errors import UserError
from fl_sim.types import Examples


def read(root: Path, known: KnownSet) -> tuple[Examples, Examples]:
    """Return (training, test) records; images stay on disk until they are used."""
    train_images, train_labels, test_images, test_labels = (root / file for file in known.files)
    return _examples(train_images, train_labels), _examples(test_images, test_labels)


def _examples(images: Path, labels: Path) -> Examples:
    return Examples(_map(images, 3)[:, np.newaxis], _map(labels, 1).astype(np.int64))


def _map(path: Path, num_dimensions: int) -> NDArray[np.uint8]:
    """Map an idx file of bytes: 0, 0, 8, the number of dimensions, each as a big-endian uint32, then the data."""
    header_size = 4 + 4 * num_dimensions
    with path.open("rb") as file:
        header = file.read(header_size)
    if header[:4] != bytes((0, 0, 8, num_dimensions)):
        raise UserError(
            f"{path} is no idx file of bytes in {num_dimensions} dimensions (it starts with 0x{header[:4].hex()}, "
            f"not 0x000008{num_dimensions:02x}); delete it and fetch it again"
        )
    if len(header) < header_size:
        raise _wrong_size(path, header_size)
    shape = struct.unpack(f">{num_dimensions}I", header[4:])
    expected = header_size + math.prod(shape)
    if path.stat().st_size != expected:
        raise _wrong_size(path, expected)
    if 0 in shape:
        raise UserError(f"{path} holds no records (shape {shape}); delete it and fetch it again")
    return np.memmap(path, np.uint8, "r", header_size, shape).view(np.ndarray)


def _wrong_size(path: Path, expected: int) -> UserError:
    actual = path.stat().st_size
    state = "truncated" if actual < expected else "too long"
    return UserError(f"{path} is {state}: {actual} bytes, expected {expected}; delete it and fetch it again")
