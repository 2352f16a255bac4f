"""Images as their lowest frequencies in the cosine basis, which nobody's data had a say in, and back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from clients.symmetric import Array

if TYPE_CHECKING:
    import torch

_CORNER: Final = 2.0  # half periods per image below which the public spectrum is flat
_COLOUR: Final = 3  # half periods per image that a step among the frequencies of channels is worth


def lowest_frequencies(shape: tuple[int, ...], number: int) -> tuple[NDArray[np.intp], Array]:
    """Return the flat positions of the ``number`` lowest frequencies (all, where there are fewer) of ``shape``.

    And the variances that they have in images at large, falling with the square of the frequency, which add up to 1.
    How an image's channels differ from each other, its colours, counts as coarse: few classes are told apart by grey.
    """
    indices = list(np.meshgrid(*(np.arange(size) for size in shape), indexing="ij"))
    sizes = shape
    if len(shape) == 3:
        indices[0], sizes = _COLOUR * indices[0], (max(shape[1:]), *shape[1:])
    heights = np.sum([(index / size) ** 2 for index, size in zip(indices, sizes, strict=True)], axis=0)
    order = np.argsort(heights, axis=None, kind="stable")[:number]
    spectrum = 1 / (_CORNER**2 + np.sum([index.ravel()[order] ** 2.0 for index in indices], axis=0))
    return order, spectrum / spectrum.sum()


def frequencies_of(inputs: torch.Tensor, order: NDArray[np.intp]) -> Array:
    """Return the cosine coefficients at ``order`` of each record, (n, len(order)), in an orthonormal basis.

    All NaN where the record is not finite.
    """
    from scipy.fft import dctn  # noqa: PLC0415 (most runs need no generator)

    values = inputs.numpy().astype(np.float64)
    axes = tuple(range(1, values.ndim))
    finite = np.isfinite(values).all(axis=axes)
    values[~finite] = 0
    chosen: Array = dctn(values, axes=axes, norm="ortho").reshape(len(values), math.prod(values.shape[1:]))[:, order]
    chosen[~finite] = math.nan
    return chosen


def images_of(coefficients: Array, order: NDArray[np.intp], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the records with these coefficients and no others, clamped to [-1, 1]."""
    from scipy.fft import idctn  # noqa: PLC0415 (most runs need no generator)

    full = np.zeros((len(coefficients), math.prod(shape)))
    full[:, order] = coefficients
    images = idctn(full.reshape(-1, *shape), axes=tuple(range(1, len(shape) + 1)), norm="ortho")
    found: NDArray[np.float32] = np.clip(images, -1, 1).astype(np.float32)
    return found


def clamped(basis: Array, coefficients: Array) -> Array:
    """Return the coefficients (n, d) in ``basis`` (d, pixels) of the images with these ones, clamped to [-1, 1].

    As ``frequencies_of`` of ``images_of``, which transform whole images: of few frequencies products are much faster.
    """
    found: Array = np.clip(coefficients @ basis, -1, 1) @ basis.T
    return found
