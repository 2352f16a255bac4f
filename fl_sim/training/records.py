"""Records on a device: the shards of clients as ranges of one source, augmentation, and the precision of products."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.types import Augment, Dataset, Precision


@dataclass(frozen=True, eq=False)
class Scale:
    """The public constants that normalise inputs x, (x - ``offset``) / ``divisor``: tensors of (1, channels, 1, 1)."""

    offset: torch.Tensor
    divisor: torch.Tensor

    @classmethod
    def of(cls, dataset: Dataset, dtype: np.dtype[np.generic], ndim: int) -> Self:
        """Return the data set's for arrays of ``dtype`` with ``ndim`` axes: bytes count in 255ths, floats in units."""
        unit, shape = (255.0 if dtype == np.uint8 else 1.0), (1, -1) + (1,) * (ndim - 2)
        mean, std = (torch.tensor(part, dtype=torch.float32).reshape(shape) for part in (dataset.mean, dataset.std))
        return cls(mean * unit, std * unit)

    def to(self, device: torch.device) -> "Scale":
        """Return the same on ``device``; there, too, as tensors: PyTorch multiplies by a number's reciprocal."""
        return Scale(self.offset.to(device), self.divisor.to(device))

    def normalise_(self, values: torch.Tensor) -> torch.Tensor:
        """Normalise float32 ``values``, (..., channels, height, width), where they are."""
        return values.sub_(self.offset).div_(self.divisor)


@dataclass(frozen=True, eq=False)
class Source:
    """Records on a device, of one client or of all, to which nobody writes.

    ``inputs``: (n, *input shape), normalised float32; or bytes, a quarter of the memory, with the ``scale`` that
    normalises them to the same bits. ``labels``: (n,) int64.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    scale: Scale | None = None

    def normalised(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return some of ``self.inputs``, in any arrangement of the records, as networks take them."""
        return inputs if self.scale is None else self.scale.normalise_(inputs.to(torch.float32))

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.labels)

    def whole(self) -> "Records":
        """Return all records."""
        return Records(((self, range(len(self))),))


@dataclass(frozen=True, eq=False)
class Records:
    """The training records of one client: ranges of one source or of several."""

    parts: tuple[tuple[Source, range], ...]

    @classmethod
    def of(cls, inputs: torch.Tensor, labels: torch.Tensor) -> "Records":
        """Return normalised ``inputs`` (n, *input shape) and ``labels`` (n,) as they are."""
        return Source(inputs, labels).whole()

    def __len__(self) -> int:
        """Return the number of records."""
        return sum(len(rows) for _, rows in self.parts)

    def __add__(self, other: "Records") -> "Records":
        """Return these records and then ``other``."""
        return Records(self.parts + other.parts)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Return the shape of one record."""
        return tuple(self.parts[0][0].inputs.shape[1:])

    @property
    def device(self) -> torch.device:
        """Return the device of the records."""
        return self.parts[0][0].inputs.device

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normalised float32 inputs, labels): without a copy where one source holds them so."""
        inputs, labels = [], []
        for source, rows in self.parts:
            inputs.append(source.normalised(source.inputs[rows.start : rows.stop]))
            labels.append(source.labels[rows.start : rows.stop])
        return (inputs[0], labels[0]) if len(self.parts) == 1 else (torch.cat(inputs), torch.cat(labels))

    def class_counts(self, num_classes: int) -> tuple[int, ...]:
        """Return the number of records of each class."""
        labels = torch.cat([source.labels[rows.start : rows.stop] for source, rows in self.parts])
        return tuple(torch.bincount(labels, minlength=num_classes).tolist())

    def rows(self, first_of: dict[Source, int]) -> NDArray[np.int64]:
        """Return these records' places in the sources laid end to end, the first row of each in ``first_of``."""
        return np.concatenate([first_of[source] + np.arange(rows.start, rows.stop) for source, rows in self.parts])


def merged(sources: list[Source]) -> Source:
    """Return ``sources``, all bytes or all normalised, laid end to end; a single one is not copied."""
    first = sources[0]
    if len(sources) == 1:
        return first
    assert len({source.scale is None for source in sources}) == 1
    inputs, labels = (torch.cat([getattr(source, name) for source in sources]) for name in ("inputs", "labels"))
    return Source(inputs, labels, first.scale)


def black_of(augment: Augment, device: torch.device) -> torch.Tensor:
    """Return the value of pixels beyond an image's edge, (channels, 1, 1)."""
    return torch.tensor(augment.black, dtype=torch.float32, device=device).reshape(-1, 1, 1)


def moved(images: torch.Tensor, moves: torch.Tensor, augment: Augment, black: torch.Tensor) -> torch.Tensor:
    """Return ``images``, (..., channels, height, width), normalised, each moved as its row of ``moves`` says.

    ``moves``: (..., 3), drawn by ``augment``; ``black``: see ``black_of``. Where nothing moves, records may have any
    shape.
    """
    if not augment.moves:
        return images
    height, width = images.shape[-2:]
    down, right, is_mirrored = moves.unsqueeze(-1).unbind(-2)
    rows, columns = (torch.arange(size, device=images.device) for size in (height, width))
    columns = torch.where(is_mirrored == 1, width - 1 - columns, columns)
    rows, columns = (rows + down - augment.crop).unsqueeze(-1), (columns + right - augment.crop).unsqueeze(-2)
    if augment.reflect:
        rows, columns = _reflected(rows, height), _reflected(columns, width)
    is_inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    places = (rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)).flatten(-2)
    found = images.flatten(-2).gather(-1, places.unsqueeze(-2).expand(*images.shape[:-2], -1)).view_as(images)
    return torch.where(is_inside.unsqueeze(-3), found, black)


@contextmanager
def arithmetic(device: torch.device, precision: Precision = "float32") -> Iterator[None]:
    """Compute with ``precision`` in this block, and put PyTorch's settings back.

    On a GPU "float32" means all 24 bits, in convolutions too, where PyTorch by itself takes TF32. "tf32" rounds the
    factors of products to 11 bits; "bfloat16" rounds to 8 what PyTorch's autocast does, forward and backward. Weights
    and their steps stay float32. On a CPU "float32" and "tf32" change nothing (and threads may be in here at once).
    """
    if device.type == "cpu" and precision != "bfloat16":
        yield
        return
    before = [getattr(place, _NAME) for place in _PLACES]
    _set([_TF32 if precision == "tf32" else _IEEE] * len(_PLACES))
    try:
        # The cache of weights cast once is of no use where each is used once, and not allowed in CUDA graphs.
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False):
            yield
    finally:
        _set(before)


_LEGACY = not hasattr(torch.backends.cudnn, "conv")
"""True for PyTorch before 2.9; a newer one does not let the old settings be read beside the new ones."""
_NAME, _TF32, _IEEE = ("allow_tf32", True, False) if _LEGACY else ("fp32_precision", "tf32", "ieee")
_PLACES = (torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv", torch.backends.cudnn))


def _reflected(places: torch.Tensor, size: int) -> torch.Tensor:
    """Return the pixels whose values stand at ``places`` beyond the edges."""
    return ((size - 1) - ((size - 1) - places.abs()).abs()).clamp(min=0)


def _set(values: Sequence[object]) -> None:
    for place, value in zip(_PLACES, values, strict=True):
        setattr(place, _NAME, value)
