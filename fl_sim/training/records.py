"""Training records on a device, image augmentation, and the precision of matrix products."""

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
    """The public constants that normalise inputs: x becomes (x - ``offset``) / ``divisor``.

    For images, ``offset`` and ``divisor`` are tensors of shape (1, channels, 1, 1).
    """

    offset: torch.Tensor
    divisor: torch.Tensor

    @classmethod
    def of(cls, dataset: Dataset, dtype: np.dtype[np.generic], ndim: int) -> Self:
        """Return the constants that normalise a data set's inputs, for input arrays of ``dtype`` with ``ndim`` axes.

        The constants include the division of bytes by 255.
        """
        unit, shape = (255.0 if dtype == np.uint8 else 1.0), (1, -1) + (1,) * (ndim - 2)
        mean, std = (torch.tensor(part, dtype=torch.float32).reshape(shape) for part in (dataset.mean, dataset.std))
        return cls(mean * unit, std * unit)

    def to(self, device: torch.device) -> "Scale":
        """Return the same normalising constants on ``device``.

        The constants stay tensors, because PyTorch replaces a division by a Python number by a multiplication with the
        reciprocal. The rounding of the result would differ.
        """
        return Scale(self.offset.to(device), self.divisor.to(device))

    def normalise_(self, values: torch.Tensor) -> torch.Tensor:
        """Normalise float32 ``values``, (..., channels, height, width), in place, and return them."""
        return values.sub_(self.offset).div_(self.divisor)


@dataclass(frozen=True, eq=False)
class Source:
    """Read-only records on a device, of one client or of all clients.

    ``inputs``: (n, *input shape). The inputs are normalised float32, or bytes, which need a quarter of the memory.
    ``labels``: (n,), int64. ``scale``: the constants that normalise inputs of bytes; None if the inputs are normalised.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    scale: Scale | None = None

    def normalised(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return inputs of this source, (..., *input shape), as normalised float32."""
        return inputs if self.scale is None else self.scale.normalise_(inputs.to(torch.float32))

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.labels)

    def whole(self) -> "Records":
        """Return all records of this source."""
        return Records(((self, range(len(self))),))


@dataclass(frozen=True, eq=False)
class Records:
    """The training records of one client: pairs (source, range of the indices of the client's rows in this source)."""

    parts: tuple[tuple[Source, range], ...]

    @classmethod
    def of(cls, inputs: torch.Tensor, labels: torch.Tensor) -> "Records":
        """Return the ``Records`` with normalised ``inputs`` (n, *input shape) and ``labels`` (n,), without a copy."""
        return Source(inputs, labels).whole()

    def __len__(self) -> int:
        """Return the number of records."""
        return sum(len(rows) for _, rows in self.parts)

    def __add__(self, other: "Records") -> "Records":
        """Return these records followed by the records of ``other``."""
        return Records(self.parts + other.parts)

    def none(self) -> "Records":
        """Return an empty ``Records`` with the same sources."""
        return Records(tuple((source, rows[:0]) for source, rows in self.parts))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Return the shape of one record."""
        return tuple(self.parts[0][0].inputs.shape[1:])

    @property
    def device(self) -> torch.device:
        """Return the device of the records."""
        return self.parts[0][0].inputs.device

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normalised float32 inputs, labels), without a copy if there is one source with float32 inputs."""
        inputs, labels = [], []
        for source, rows in self.parts:
            inputs.append(source.normalised(source.inputs[rows.start : rows.stop]))
            labels.append(source.labels[rows.start : rows.stop])
        return (inputs[0], labels[0]) if len(self.parts) == 1 else (torch.cat(inputs), torch.cat(labels))

    def class_counts(self, num_classes: int) -> tuple[int, ...]:
        """Return the number of this client's records of each class."""
        labels = torch.cat([source.labels[rows.start : rows.stop] for source, rows in self.parts])
        return tuple(torch.bincount(labels, minlength=num_classes).tolist())

    def rows(self, first_of: dict[Source, int]) -> NDArray[np.int64]:
        """Return the row indices of these records in one tensor that concatenates several ``Source`` objects.

        ``first_of``: {source: the index of its first row in this tensor}.
        """
        return np.concatenate([first_of[source] + np.arange(rows.start, rows.stop) for source, rows in self.parts])


def merged(sources: list[Source]) -> Source:
    """Return the concatenation of ``sources``, without a copy if there is only one.

    Either all sources have inputs of bytes, or all have normalised inputs.
    """
    first = sources[0]
    if len(sources) == 1:
        return first
    assert len({source.scale is None for source in sources}) == 1
    inputs, labels = (torch.cat([getattr(source, name) for source in sources]) for name in ("inputs", "labels"))
    return Source(inputs, labels, first.scale)


def black_of(augment: Augment, device: torch.device) -> torch.Tensor:
    """Return the normalised value of a black pixel, (channels, 1, 1).

    Augmentation may add black pixels around an image.
    """
    return torch.tensor(augment.black, dtype=torch.float32, device=device).reshape(-1, 1, 1)


def moved(images: torch.Tensor, moves: torch.Tensor, augment: Augment, black: torch.Tensor) -> torch.Tensor:
    """Return augmented ``images``: each image is cropped and mirrored by its own row of ``moves``.

    ``images``: (..., channels, height, width), normalised. ``moves``: (..., 3), drawn by ``augment``: the offsets of
    the cropping window down and to the right, and 1 for mirroring. ``black``: see ``black_of``. Without augmentation,
    inputs may have any shape and are returned unchanged.
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
    """Set PyTorch's ``precision`` of matrix products in the ``with`` block, and restore the settings afterwards.

    On a GPU "float32" means all 24 bits, even in convolutions (PyTorch's default for convolutions is TF32). "tf32"
    rounds the factors of products to 11 bits. "bfloat16" uses PyTorch's autocast, which rounds to 8 bits in forward and
    backward passes. Weights and optimizer steps stay float32. On a CPU, "float32" and "tf32" change no settings of
    PyTorch, so several threads may use this function at the same time.
    """
    if device.type == "cpu" and precision != "bfloat16":
        yield
        return
    before = [getattr(place, _NAME) for place in _PLACES]
    _set([_TF32 if precision == "tf32" else _IEEE] * len(_PLACES))
    try:
        # Autocast's cache of converted weights is off: each weight is used once, and CUDA graphs forbid the cache.
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False):
            yield
    finally:
        _set(before)


_LEGACY = not hasattr(torch.backends.cudnn, "conv")
"""True for PyTorch before 2.9. Newer versions have new settings of precision, which exclude the old settings."""
_NAME, _TF32, _IEEE = ("allow_tf32", True, False) if _LEGACY else ("fp32_precision", "tf32", "ieee")
_PLACES = (torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv", torch.backends.cudnn))


def _reflected(places: torch.Tensor, size: int) -> torch.Tensor:
    """Reflect the pixel indices ``places`` at the edges of an image, into the range from 0 to ``size`` - 1.

    ``size``: the number of pixels along this axis of the image.
    """
    return ((size - 1) - ((size - 1) - places.abs()).abs()).clamp(min=0)


def _set(values: Sequence[object]) -> None:
    for place, value in zip(_PLACES, values, strict=True):
        setattr(place, _NAME, value)
