"""Tools for private synthetic images: low frequencies in the cosine basis, clamping to [-1, 1], and random warps.

The basis, the average spectrum of images and the warps are public: they do not depend on any record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clients.moments import Array
from fl_sim.importing import torch

# below this frequency, the public spectrum is nearly flat; the unit is half periods per image side
_CORNER: Final = 2.0
_COLOUR: Final = 3  # the frequency of one step along the channel axis (colour), in half periods per image side

_TURN: Final = math.radians(10)
_STRETCH: Final = 0.1  # the largest scaling, as a fraction of a side's length
_MOVE: Final = 0.05  # the largest shift, as a fraction of a side's length
_AT_A_TIME: Final = 1000  # the number of images that are processed at a time


def lowest_frequencies(shape: tuple[int, ...], number: int) -> tuple[NDArray[np.intp], Array]:
    """Return (positions, public variances) of the ``number`` lowest frequencies of records of ``shape``.

    If a record has fewer frequencies, return all of them. Positions are indices into the flattened cosine transform.
    The variances are those of typical images: they fall with the square of the frequency, and they add up to 1.
    Differences between the channels of an image (its colours) are treated as low frequencies, because brightness alone
    distinguishes few classes.
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
    """Return the cosine coefficients of each record at the positions ``order``, shape (n, len(order)).

    The basis is orthonormal. For a record that is not finite, all coefficients are NaN.
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
    """Return the images with ``coefficients`` (n, d) at the positions ``order`` and zeros elsewhere.

    The images have shape (n, *shape), and are clamped to [-1, 1].
    """
    from scipy.fft import idctn  # noqa: PLC0415 (most runs need no generator)

    full = np.zeros((len(coefficients), math.prod(shape)))
    full[:, order] = coefficients
    images = idctn(full.reshape(-1, *shape), axes=tuple(range(1, len(shape) + 1)), norm="ortho")
    found: NDArray[np.float32] = np.clip(images, -1, 1).astype(np.float32)
    return found


def clamped(basis: Array, coefficients: Array) -> Array:
    """Return the cosine coefficients (n, d) of images after their pixels are clamped to [-1, 1].

    ``coefficients``: the cosine coefficients before clamping, (n, d). The function transforms the coefficients to
    images, clamps the pixels, and transforms back. ``images_of`` and then ``frequencies_of`` give the same result. For
    few frequencies, this function's matrix products are much faster than transforms of whole images. ``basis``: the
    images of the d unit coefficients, (d, pixels).
    """
    found: Array = np.clip(coefficients @ basis, -1, 1) @ basis.T
    return found


def before_clamping(mean: Array, root: Array, clamp: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Return (mean', root') such that draws from N(mean', root' root'^T) have the wanted moments after clamping.

    ``mean`` (d,), ``root`` (d, d): the wanted moments are the moments of N(mean, root root^T). ``clamp``: a function
    from draws (n, d) to the clamped draws. Clamping pixels to [-1, 1] changes the moments of the drawn images.
    Backgrounds become too light, and strokes too pale. The function finds the distribution by iteration on fixed draws.
    Every iteration adds half of the mean's error to the mean. It corrects half of the covariance's error by the optimal
    transport map between two normal distributions (Olkin and Pukelsheim 1982).

    If no normal distribution has the wanted moments after clamping, the result is an approximation. ``mean`` and
    ``root`` are returned unchanged if the variance is zero, or if d is more than 400, because the iteration would then
    take minutes.
    """
    wanted, size = root @ root.T, len(mean)
    variance = float(np.trace(wanted)) / size
    if variance <= 0 or size > 400:
        return mean, root
    least = 1e-4 * variance * np.eye(size)  # added to covariances, because some variances may be zero
    target = _power(wanted + least, 0.5)
    draws = np.random.default_rng(0).standard_normal((max(1000, 4 * size), size))
    # With sample mean 0 and sample covariance identity, the draws add no random error to the moments.
    centered = draws - draws.mean(axis=0)
    lower = np.linalg.cholesky(np.cov(centered.T).reshape(size, size))
    tries = np.linalg.solve(lower, centered.T).T
    center, spread = mean, target
    for _ in range(12):
        seen = clamp(center + tries @ spread.T)
        inner = target @ (np.cov(seen.T).reshape(size, size) + least) @ target
        spread = _power(target @ _power(inner, -0.5) @ target, 0.5, most=1.4) @ spread
        center = center + 0.5 * (mean - seen.mean(axis=0))
    return center, spread


def warped(images: NDArray[np.float32], strength: float, generator: np.random.Generator) -> NDArray[np.float32]:
    """Return ``images`` (n, channels, height, width), each randomly rotated, scaled and shifted as data augmentation.

    ``strength`` 1 rotates by up to 10 degrees, scales each side by up to about a tenth, and shifts by up to a twentieth
    of each side; ``strength`` 2 doubles these limits; 0 returns the images unchanged. Pixels are interpolated, and
    pixels outside the image repeat its border.
    """
    if not strength or not len(images):
        return images
    height, width = images.shape[2:]
    coins = strength * generator.uniform(-1, 1, (5, len(images)))
    turn, wide, tall = _TURN * coins[0], 1 + _STRETCH * coins[1], 1 + _STRETCH * coins[2]
    cosine, sine, shape = np.cos(turn), np.sin(turn), height / width
    # Affine maps from a pixel of the result to its source, in coordinates from -1 to 1 (right, down).
    matrices = np.array([[cosine * wide, -sine * tall * shape], [sine * wide / shape, cosine * tall]])
    moves = -np.einsum("rcn,cn->rn", matrices, 2 * _MOVE * coins[3:])
    whole = np.concatenate([matrices, moves[:, None]], axis=1).transpose(2, 0, 1).astype(np.float32)
    made = np.empty_like(images)
    for start in range(0, len(images), _AT_A_TIME):
        part = slice(start, start + _AT_A_TIME)
        before = torch.from_numpy(images[part])
        grid = torch.nn.functional.affine_grid(torch.from_numpy(whole[part]), list(before.shape), align_corners=False)
        after = torch.nn.functional.grid_sample(before, grid, padding_mode="border", align_corners=False)
        made[part] = after.clamp(-1, 1).numpy()
    return made


def _power(matrix: Array, exponent: float, most: float = np.inf) -> Array:
    """Return the positive definite ``matrix`` raised to the power ``exponent``.

    The eigenvalues of the result are clipped to the range from 1 / ``most`` to ``most``.
    """
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    factors = np.maximum(values, 1e-12 * values[-1]) ** exponent
    raised: Array = (vectors * np.clip(factors, 1 / most, most)) @ vectors.T
    return raised
