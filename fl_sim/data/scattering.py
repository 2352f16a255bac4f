"""Wavelet scattering of images: a public representation that depends on no data set (Bruna and Mallat 2013).

The transform has two scales (J = 2), eight orientations and orders 0 to 2, with the Morlet wavelets and the Gaussian of
Kymatio (Andreux et al. 2020). Each record's maps are normalised in 27 groups, without other records, as in the private
learning of Tramer and Boneh (2021, section 2.2). Projection on random orthonormal directions, whose seed is public,
then reduces the number of features.

Whitening depends on no data set either. The noise of a release is equal in all directions, so directions with little
variance are lost first, although they separate classes as well as others do. Whitening gives all directions about the
same length. The covariance of the records would be private. That of synthetic images is public, and close enough. These
images have the common statistics of photographs: pink noise, whose amplitude falls as a power of the frequency, and
dead leaves, discs and slabs that cover one another (Lee, Mumford and Huang 2001). Networks learn useful features from
such images (Baradad et al. 2021); here they only determine the directions of large variance. Their seed is public: all
processes make the same images.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.errors import UserError

DIMENSION: Final = 1000
"""The maximum number of features of a record."""

ORIENTATIONS: Final = 8
NUM_MAPS: Final = 1 + 2 * ORIENTATIONS + ORIENTATIONS**2
"""The number of maps per channel: 1 of the Gaussian; 8 of each of 2 scales; 64 of coarse wavelets on fine moduli."""

GROUPS: Final = 27

_STRIDE: Final = 4  # 2^J: pixels from one position of a map to the next
_LONGEST: Final = 7  # positions along a side; longer maps are averaged in blocks of 2 x 2
_SMALLEST, _LARGEST = 8, 128  # pixels along a side
_PADDING: Final = 2  # the least number of pixels mirrored at each edge
_SEED: Final = 0  # of the projection
_BATCH: Final = 64  # channels of images per batch: they stay in the processor's cache
_EPSILON: Final = 1e-5  # added to the variance of a group

_NUM_MADE: Final = 2500  # made-up images of each sort
_MADE_SEED: Final = 0
_RIDGE: Final = 0.1  # added to every variance, in units of their mean
_WITHIN: Final = 0.9  # of the made-up images end within length 1
_ROWS: Final = 5000  # whitened at a time

_EXPONENTS: Final = (1.0, 1.5)  # photographs have about 1
_OWN: Final = 0.35  # the own part of a channel beside the brightness that all share
_CONTRAST, _BRIGHTNESS = (0.1, 0.3), (0.3, 0.7)  # deviation and mean over an image, in units of 255

_LEAVES: Final = 200  # on an image, at most
_LEAST_RADIUS, _LARGEST_RADIUS = 1.0, 0.7  # pixels; sides of the image
_COLOUR_DEVIATION, _SLOPE_DEVIATION, _NOISE = 40.0, 1.5, 8.0  # in units of 1, of 1 a pixel, and of 1
_LEAVES_AT_A_TIME: Final = 100


def dimension_of(shape: tuple[int, ...]) -> int:
    """Return the number of features of an image of ``shape``, (channels, height, width).

    Raises UserError for records that are not images, and for images that are too small or too large.
    """
    if len(shape) != 3:
        raise UserError(
            f"features=scattering is for images, and these records are vectors of {math.prod(shape)} numbers: leave "
            "features out"
        )
    if not _SMALLEST <= min(shape[1:]) <= max(shape[1:]) <= _LARGEST:
        raise UserError(
            f"features=scattering takes images from {_SMALLEST}x{_SMALLEST} to {_LARGEST}x{_LARGEST} pixels, and these "
            f"have {shape[1]}x{shape[2]}: leave features out, or give other images"
        )
    return min(DIMENSION, shape[0] * NUM_MAPS * _positions(shape[1]) * _positions(shape[2]))


def features_of(images: NDArray[np.uint8] | NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the features (n, dimension_of(shape)), of norm at most 1, of ``images`` (n, channels, height, width).

    The features of a record depend on that record alone: its bytes / 255 are transformed by ``described``, and scaled
    to length 1 if the result is longer. Raises UserError as ``dimension_of`` does.
    """
    shape = images.shape[1:]
    size = dimension_of(shape)
    features = np.empty((len(images), size), dtype=np.float32)

    def fill(rows: slice) -> None:
        found = described(torch.from_numpy(images[rows].astype(np.float32)) / 255).numpy()
        features[rows] = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1)

    _in_threads(fill, len(images), max(1, _BATCH // shape[0]))
    return features


def described(images: torch.Tensor) -> torch.Tensor:
    """Return the features of ``images`` (n, channels, height, width) in [0, 1], before the limit on their norm.

    The steps are: scattering, normalisation in groups, projection, and division by the square root of the number of
    features. The function is differentiable.
    """
    groups = math.gcd(GROUPS, images.shape[1] * NUM_MAPS)
    normal = torch.nn.functional.group_norm(scattered(images), groups, eps=_EPSILON)
    size = dimension_of(tuple(images.shape[1:]))
    projected: torch.Tensor = _Projected.apply(normal.flatten(1), size)
    return projected / math.sqrt(size)


def scattered(images: torch.Tensor) -> torch.Tensor:
    """Return the scattering maps of ``images`` (n, channels, height, width): (n, 81 channels, positions, positions).

    Each channel has these maps, all smoothed: the image; the moduli of 8 fine and of 8 coarse wavelets; and, for each
    fine wavelet, the moduli of 8 coarse wavelets applied to its modulus.
    """
    count, channels, height, width = images.shape
    padded = _padded(images.reshape(count * channels, height, width))
    fine, coarse = (torch.from_numpy(one) for one in wavelets(*padded.shape[1:]))
    spectrum = torch.fft.fft2(padded)
    first = _Modulus.apply(torch.fft.ifft2(spectrum[:, None] * fine))
    second = _Modulus.apply(torch.fft.ifft2(_every_other(spectrum[:, None], coarse)))
    deep = _Modulus.apply(torch.fft.ifft2(_every_other(torch.fft.fft2(first)[:, :, None], coarse))).flatten(1, 2)
    maps = [
        _smoothed(padded[:, None], height, width, 1), _smoothed(first, height, width, 1),
        _smoothed(second, height, width, 2), _smoothed(deep, height, width, 2),
    ]  # fmt: skip
    positions = _positions(height), _positions(width)
    return torch.cat(maps, dim=1).reshape(count, channels * NUM_MAPS, *positions)


@lru_cache(maxsize=4)
def wavelets(height: int, width: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the Fourier transforms of the fine and the coarse wavelets, each (8, height, width) and real."""
    angles = [(ORIENTATIONS // 2 - 1 - number) * math.pi / ORIENTATIONS for number in range(ORIENTATIONS)]
    fine, coarse = (
        np.stack([np.fft.fft2(_morlet(height, width, 2.0**scale, angle)).real for angle in angles]).astype(np.float32)
        for scale in (0, 1)
    )
    return fine, coarse


@dataclass(frozen=True, eq=False)
class Whitening:
    """A whitening: features x (n, d) become (x - ``centre``) ``matrix``, scaled to length 1 if they are longer.

    ``centre`` and ``matrix`` are float64.
    """

    centre: torch.Tensor
    matrix: torch.Tensor

    def of(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the whitened ``features`` (n, d), of norm at most 1; each record is computed alone."""
        whitened = np.empty_like(features)

        def fill(rows: slice) -> None:
            whitened[rows] = self.applied(torch.from_numpy(features[rows])).float().numpy()

        _in_threads(fill, len(features), _ROWS)
        norms = np.linalg.norm(whitened.astype(np.float64), axis=1, keepdims=True)
        shortened: NDArray[np.float32] = np.where(norms > 1, whitened * np.float32(1 - 2.0**-20), whitened)
        return shortened  # rounding to float32 had left some longer than 1

    def applied(self, features: torch.Tensor) -> torch.Tensor:
        """Return the whitened ``features`` as float64, of norm at most 1. The function is differentiable."""
        made = (features.double() - self.centre) @ self.matrix
        shortened: torch.Tensor = made / made.norm(dim=1, keepdim=True).clamp(min=1)
        return shortened


@lru_cache(maxsize=2)
def whitening_of(shape: tuple[int, int, int]) -> Whitening:
    """Return the whitening for images of ``shape``, (channels, height, width). It takes seconds to a minute."""
    features = features_of(made_images(shape, _NUM_MADE, _MADE_SEED))
    with ThreadPoolExecutor(1) as alone:  # a thread of its own: ``_whitening`` sets its number of threads
        return alone.submit(_whitening, features).result()


def made_images(shape: tuple[int, int, int], number: int, seed: int) -> NDArray[np.uint8]:
    """Return ``number`` synthetic images of each of three kinds: (3 number, *shape)."""
    coins = np.random.default_rng(seed)
    noise = [pink_noise(shape, number, exponent, coins) for exponent in _EXPONENTS]
    chunks = [min(_LEAVES_AT_A_TIME, number - start) for start in range(0, number, _LEAVES_AT_A_TIME)]
    return np.concatenate([*noise, *(dead_leaves(shape, chunk, coins) for chunk in chunks)])


def pink_noise(
    shape: tuple[int, int, int], number: int, exponent: float, coins: np.random.Generator
) -> NDArray[np.uint8]:
    """Return ``number`` noise images in which the amplitude of a frequency f is f to the power of -``exponent``."""
    channels, height, width = shape
    frequencies = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width))
    frequencies[0, 0] = 1 / max(height, width)
    white = coins.standard_normal((number, channels + 1, height, width))
    fields = np.fft.ifft2(np.fft.fft2(white) * frequencies**-exponent).real
    values = fields[:, :1] + _OWN * fields[:, 1:]
    values -= values.mean(axis=(1, 2, 3), keepdims=True)
    values /= values.std(axis=(1, 2, 3), keepdims=True)
    contrast, brightness = (coins.uniform(*ends, (number, 1, 1, 1)) for ends in (_CONTRAST, _BRIGHTNESS))
    return _bytes(255 * (brightness + contrast * values))


def dead_leaves(shape: tuple[int, int, int], number: int, coins: np.random.Generator) -> NDArray[np.uint8]:
    """Return ``number`` images of random shapes (leaves) that cover one another; radii r have a density of r^-3."""
    channels, height, width = shape
    side, rows, columns = max(height, width), *np.mgrid[:height, :width]
    images, free = np.zeros((number, channels, height, width)), np.ones((number, height, width), dtype=bool)
    ground = coins.uniform(0, 255, (number, channels))
    for _ in range(_LEAVES):
        share = coins.random((number, 1, 1))
        radius = 1 / np.sqrt(share / _LEAST_RADIUS**2 + (1 - share) / (_LARGEST_RADIUS * side) ** 2)
        down = rows - coins.uniform(-radius, height + radius)
        right = columns - coins.uniform(-radius, width + radius)
        inside = free & _covered(down, right, radius, coins)
        colour = ground / 2 + coins.uniform(0, 127.5, (number, 1)) + coins.normal(0, _COLOUR_DEVIATION, ground.shape)
        slopes = coins.normal(0, _SLOPE_DEVIATION, (2, number, 1, 1))
        shade = slopes[0] * down + slopes[1] * right
        images += inside[:, None] * (colour.clip(0, 255)[:, :, None, None] + shade[:, None])
        free &= ~inside
    images += free[:, None] * ground[:, :, None, None]
    return _bytes(images + coins.standard_normal(images.shape) * coins.uniform(0, _NOISE, (number, 1, 1, 1)))


def _in_threads(fill: Callable[[slice], None], count: int, step: int) -> None:
    """Call ``fill`` for batches of ``step`` rows in several threads; in each of them torch uses one thread."""

    def fill_alone(start: int) -> None:
        torch.set_num_threads(1)  # of the calling thread: the bits do not depend on the number of threads
        fill(slice(start, min(start + step, count)))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(fill_alone, range(0, count, step)):
            pass


def _morlet(height: int, width: int, scale: float, angle: float) -> NDArray[np.complex128]:
    """Return a Morlet wavelet: a wave of frequency 3 pi / (4 scale) under an elliptic Gaussian, with sum zero."""
    frequency = 3 / 4 * math.pi / scale * np.array([math.cos(angle), math.sin(angle)])
    wave, envelope = (_gabor(height, width, 0.8 * scale, angle, each) for each in (frequency, 0 * frequency))
    wave -= wave.sum() / envelope.sum() * envelope
    return wave


def _gabor(
    height: int, width: int, sigma: float, angle: float, frequency: NDArray[np.float64]
) -> NDArray[np.complex128]:
    """Return a wave under a Gaussian on a torus; across the wave the Gaussian has twice the width as along it."""
    slant = 4 / ORIENTATIONS
    total = np.zeros((height, width), dtype=np.complex128)
    for down in range(-2, 3):
        for right in range(-2, 3):
            y, x = np.mgrid[down * height : (down + 1) * height, right * width : (right + 1) * width]
            along, across = y * math.cos(angle) + x * math.sin(angle), x * math.cos(angle) - y * math.sin(angle)
            exponent = -(along**2 + (slant * across) ** 2) / (2 * sigma**2)
            total += np.exp(exponent + 1j * (y * frequency[0] + x * frequency[1]))
    total *= slant / (2 * math.pi * sigma**2)
    return total


def _every_other(spectrum: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """Return the spectrum of a filtered image that is subsampled by 2 in both directions: a sum over four aliases.

    ``spectrum``: (..., 1, height, width); ``filters``: (8, height, width), real.
    """
    height, width = filters.shape[1] // 2, filters.shape[2] // 2
    parts = torch.view_as_real(_aliases(spectrum).contiguous()).flatten(-3)  # as pairs, as complex products are slow
    weights = _aliases(filters).flatten(-2).repeat_interleave(2, -1)
    total = parts[..., 0, :] * weights[:, 0]
    for alias in (1, 2, 3):
        total.addcmul_(parts[..., alias, :], weights[:, alias])
    return torch.view_as_complex(total.div_(4).view(*total.shape[:-1], height, width, 2))


def _aliases(values: torch.Tensor) -> torch.Tensor:
    """Return the four quarters of (..., height, width), which subsampling adds: (..., 4, height / 2, width / 2)."""
    down, across = values.shape[-2] // 2, values.shape[-1] // 2
    return values.reshape(*values.shape[:-2], 2, down, 2, across).transpose(-3, -2).flatten(-4, -3)


class _Modulus(torch.autograd.Function):
    """The modulus of complex numbers. Its gradient at 0 is 0, while the gradient of a square root is infinite there."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_real(values)  # torch's own abs of complex numbers takes three times as long
        modulus = pairs[..., 0].square().addcmul_(pairs[..., 1], pairs[..., 1]).sqrt_()
        ctx.save_for_backward(values, modulus)
        return modulus

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        values, modulus = ctx.saved_tensors
        weights = torch.where(modulus > 0, gradient / modulus, 0)
        return torch.view_as_complex(torch.view_as_real(values) * weights[..., None])


def _smoothed(maps: torch.Tensor, height: int, width: int, spacing: int) -> torch.Tensor:
    """Return ``maps``, a padded grid of every ``spacing``-th pixel, after Gaussian smoothing, at output positions."""
    down, across = (torch.from_numpy(_smoothing(side, spacing)) for side in (height, width))
    return down @ (maps @ across.T)


@lru_cache(maxsize=16)
def _smoothing(side: int, spacing: int) -> NDArray[np.float32]:
    """Return the smoothing matrix, (positions, padded side / spacing).

    Each row is a Gaussian of 1.6 pixels around the middle of 4 pixels. If there are too many rows, neighbours are
    averaged.
    """
    padded = _padded_side(side)
    before = (padded - side) // 2
    places = np.arange(0, padded, spacing)
    middles = before + np.arange(side // _STRIDE) * _STRIDE + (_STRIDE - 1) / 2
    distances = np.abs(places - middles[:, None])
    weights = np.exp(-(np.minimum(distances, padded - distances) ** 2) / (2 * 1.6**2))
    weights /= weights.sum(axis=1, keepdims=True)
    while len(weights) > _LONGEST:
        weights = np.stack([block.mean(axis=0) for block in np.array_split(weights, -(-len(weights) // 2))])
    smoothing: NDArray[np.float32] = weights.astype(np.float32)
    return smoothing


def _padded(images: torch.Tensor) -> torch.Tensor:
    """Return ``images`` (n, height, width), padded by mirroring at their edges."""
    sides = []
    for side in reversed(images.shape[1:]):
        more = _padded_side(side) - side
        sides += [more // 2, more - more // 2]
    return torch.nn.functional.pad(images[:, None], sides, mode="reflect")[:, 0]


def _padded_side(side: int) -> int:
    return -(-(side + 2 * _PADDING) // _STRIDE) * _STRIDE


def _positions(side: int) -> int:
    return len(_smoothing(side, 1))


def _projected(vectors: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Return the projections of ``vectors`` (n, coefficients) on ``size`` random orthonormal directions.

    The directions are a random part of the cosine transform after random changes of sign. If ``size`` is the number of
    coefficients, ``vectors`` are returned unchanged.
    """
    coefficients = vectors.shape[1]
    if coefficients == size:
        return vectors
    from scipy.fft import dct  # noqa: PLC0415 (scipy loads slowly, and a plain run needs none of it)

    signs, directions = _directions(coefficients, size)
    projected: NDArray[np.float32] = dct(vectors * signs, axis=1, norm="ortho", overwrite_x=True)[:, directions]
    return projected


class _Projected(torch.autograd.Function):
    """The function ``_projected`` for tensors with gradients. It is linear, so its gradient is the transposed map."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, size: int) -> torch.Tensor:
        ctx.coefficients = vectors.shape[1]
        return torch.from_numpy(_projected(vectors.detach().numpy(), size))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.from_numpy(_projected_back(gradient.numpy(), ctx.coefficients)), None


def _projected_back(vectors: NDArray[np.float32], coefficients: int) -> NDArray[np.float32]:
    """Return the transposed map of ``_projected``, from projections to vectors with ``coefficients`` numbers."""
    count, size = vectors.shape
    if coefficients == size:
        return vectors
    from scipy.fft import idct  # noqa: PLC0415 (as above)

    signs, directions = _directions(coefficients, size)
    chosen = np.zeros((count, coefficients), dtype=np.float32)
    chosen[:, directions] = vectors
    back: NDArray[np.float32] = idct(chosen, axis=1, norm="ortho", overwrite_x=True) * signs
    return back


@lru_cache(maxsize=4)
def _directions(coefficients: int, size: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    generator = np.random.default_rng(_SEED)
    signs = generator.choice(np.array([-1, 1], dtype=np.float32), coefficients)
    return signs, np.sort(generator.permutation(coefficients)[:size])


def _whitening(features: NDArray[np.float32]) -> Whitening:
    torch.set_num_threads(1)  # as above
    made = torch.from_numpy(features).double()
    centre = made.mean(dim=0)
    values, vectors = torch.linalg.eigh(torch.cov(made.T))
    values = values.clamp(min=0) + _RIDGE * values.mean()
    matrix = vectors * values.rsqrt() @ vectors.T
    lengths = ((made - centre) @ matrix).norm(dim=1)
    return Whitening(centre, matrix / lengths.quantile(_WITHIN))


def _covered(
    down: NDArray[np.float64], right: NDArray[np.float64], radius: NDArray[np.float64], coins: np.random.Generator
) -> NDArray[np.bool_]:
    """Return the mask of one leaf per image: with probability 1/2 a disc, else a slab of random angle and flatness."""
    angle, flatness = coins.uniform(0, np.pi, radius.shape), coins.uniform(0.3, 1, radius.shape)
    along, across = np.cos(angle) * right + np.sin(angle) * down, np.cos(angle) * down - np.sin(angle) * right
    slab = (np.abs(along) < radius) & (np.abs(across) < flatness * radius)
    covered: NDArray[np.bool_] = np.where(coins.random(radius.shape) < 0.5, down**2 + right**2 < radius**2, slab)
    return covered


def _bytes(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    return values.clip(0, 255).astype(np.uint8)
