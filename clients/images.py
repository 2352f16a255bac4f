"""Images as low frequencies in the cosine basis, normal distributions that outlast clamping, and random warps.

All of it is public: no record has a say in the basis, in the spectrum of images at large, or in the warps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clients.moments import Array
from fl_sim.importing import torch

_CORNER: Final = 2.0  # half periods per image below which the public spectrum is flat
_COLOUR: Final = 3  # half periods per image that a step among the frequencies of channels counts for

_TURN: Final = math.radians(10)
_STRETCH: Final = 0.1  # of a side's length
_MOVE: Final = 0.05  # of a side's length
_AT_A_TIME: Final = 1000  # images


def lowest_frequencies(shape: tuple[int, ...], number: int) -> tuple[NDArray[np.intp], Array]:
    """Return the flat positions of the ``number`` lowest frequencies (all, where there are fewer) of ``shape``.

    And the variances that they have in images at large, falling with the square of the frequency, which add up to 1.
    The differences between an image's channels, its colours, count as coarse: few classes differ by grey alone.
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
    """Return the images with these coefficients and no others, clamped to [-1, 1]."""
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


def before_clamping(mean: Array, root: Array, clamp: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Return mean (d,) and root (d, d) of N(mean, root root^T) whose draws have the given moments once clamped.

    Images that are drawn from a normal distribution and then clamped have other moments than it has: backgrounds are
    too light, and strokes too pale. The distribution to draw from is found by trial: what clamping takes from the mean
    is added to it, and what it takes from the covariance is put back by the linear map that moves the one to the other
    with the least effort (Olkin and Pukelsheim 1982), half of both in every iteration.

    ``clamp``: draws (n, d) -> the same draws clamped. If no normal distribution has such moments, one that comes near.
    More than 400 numbers a draw, which would take minutes, and draws that are all alike stay as they are.
    """
    wanted, size = root @ root.T, len(mean)
    variance = float(np.trace(wanted)) / size
    if variance <= 0 or size > 400:
        return mean, root
    least = 1e-4 * variance * np.eye(size)  # some directions may have no variance at all
    target = _power(wanted + least, 0.5)
    draws = np.random.default_rng(0).standard_normal((max(1000, 4 * size), size))
    # Draws whose own mean is 0 and whose own covariance is the identity: chance must not look like a moment.
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
    """Return ``images`` (n, channels, height, width), each turned, stretched and moved at random: its class stays.

    A warp of ``strength`` 1 turns by up to 10 degrees, makes each side longer or shorter by up to about a tenth, and
    moves by up to a twentieth of each side; of 2, by twice that. Pixels are mixed of their neighbours, and an edge
    continues beyond itself. 0 returns the images as they are.
    """
    if not strength or not len(images):
        return images
    height, width = images.shape[2:]
    coins = strength * generator.uniform(-1, 1, (5, len(images)))
    turn, wide, tall = _TURN * coins[0], 1 + _STRETCH * coins[1], 1 + _STRETCH * coins[2]
    cosine, sine, shape = np.cos(turn), np.sin(turn), height / width
    # From where, in an image that reaches from -1 to 1 both ways, a pixel comes: right and down.
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
    """Return a positive definite matrix to the power, with factors between 1 / ``most`` and ``most``."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    factors = np.maximum(values, 1e-12 * values[-1]) ** exponent
    raised: Array = (vectors * np.clip(factors, 1 / most, most)) @ vectors.T
    return raised
