"""Wavelet scattering (Bruna and Mallat 2013): image features that are not learnt from any data set.

The transform has two scales (J = 2), eight orientations and orders 0 to 2. Its Morlet wavelets and its Gaussian filter
are the same as in the library Kymatio (Andreux et al. 2020). The maps of each record are normalised in 27 groups,
independent of other records, as in Tramer and Boneh (2021, section 2.2). A projection on random orthonormal directions,
with a public seed, then reduces the number of features to at most 1000.

Whitening also uses no data set. Privacy noise on released features has the same variance in all directions. It
therefore hides directions of low variance first, although they may separate classes well. Whitening gives all
directions about the same variance. Whitening needs a covariance matrix. The covariance of the records is private. So
this module uses the covariance of artificial images: it is public and similar enough. The artificial images have the
common statistics of photographs. Some are pink noise: the amplitude falls as a power of the frequency. Others are "dead
leaves": random discs and slabs that cover one another (Lee, Mumford and Huang 2001). Networks learn useful features
from such images (Baradad et al. 2021). The seed of the images is public, so all processes generate the same images.
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
"""The number of scattering maps per channel: 1 of order 0, 8 for each of 2 scales of order 1, and 64 of order 2."""

GROUPS: Final = 27

_STRIDE: Final = 4  # distance of neighbouring positions of a scattering map, in pixels: 2^J with J = 2
_LONGEST: Final = 7  # maximum number of positions along a side of a map; longer maps are averaged in blocks of 2 x 2
_SMALLEST, _LARGEST = 8, 128  # valid height and width of images, in pixels
_PADDING: Final = 2  # minimum number of mirrored pixels that are added at each edge of an image
_SEED: Final = 0  # seed of the projection's random directions
_BATCH: Final = 64  # number of image channels per batch; a batch of this size fits into the processor's cache
_EPSILON: Final = 1e-5  # added to the variance of a group of maps, to avoid a division by zero

_NUM_MADE: Final = 2500  # number of artificial images of each of the three kinds (see ``made_images``), for whitening
_MADE_SEED: Final = 0
_RIDGE: Final = 0.1  # ridge of the covariance in whitening, as a fraction of the mean variance
WITHIN: Final = 0.9  # whitened features are scaled so that this share of artificial images has norm at most 1
_ROWS: Final = 5000  # number of records that are whitened in one batch

_EXPONENTS: Final = (1.0, 1.5)  # exponents of two kinds of pink noise; photographs have an exponent of about 1
# A channel of a pink-noise image is the sum of two noises. One is the same for all channels, with standard deviation 1.
# The other is drawn for each channel, with this standard deviation.
_OWN: Final = 0.35
_CONTRAST, _BRIGHTNESS = (0.1, 0.3), (0.3, 0.7)  # ranges of a pink-noise image's std and mean

_LEAVES: Final = 200  # leaves per image
# The smallest radius of a leaf (a random disc or slab) in pixels. The largest radius of a leaf as a fraction of the
# image's longer side.
_LEAST_RADIUS, _LARGEST_RADIUS = 1.0, 0.7
# Three constants for "dead leaves" images (see ``dead_leaves``), in grey levels. The colour of a leaf differs between
# channels with the first standard deviation. Its brightness changes per pixel, and the second is the standard deviation
# of this change. The third is the maximum standard deviation of the noise that is added to an image.
_COLOUR_DEVIATION, _SLOPE_DEVIATION, _NOISE = 40.0, 1.5, 8.0
_LEAVES_AT_A_TIME: Final = 100  # images per batch


def dimension_of(shape: tuple[int, ...], *, mirrored: bool = False) -> int:
    """Return the number of features of an image of ``shape``, (channels, height, width).

    ``mirrored``: True for features that are means over an image and its mirror image (see ``normalised``).
    Raises UserError as ``check_shape`` does.
    """
    check_shape(shape)
    return min(DIMENSION, num_coefficients(shape, mirrored=mirrored))


def check_shape(shape: tuple[int, ...], features: str = "scattering") -> None:
    """Raise UserError for records that are not images, and for images that are too small or too large.

    ``features``: the name of the features, for the error message.
    """
    if len(shape) != 3:
        raise UserError(
            f"features={features} is for images, but these records are vectors of {math.prod(shape)} numbers: leave "
            "features out"
        )
    if not _SMALLEST <= min(shape[1:]) <= max(shape[1:]) <= _LARGEST:
        raise UserError(
            f"features={features} takes images from {_SMALLEST}x{_SMALLEST} to {_LARGEST}x{_LARGEST} pixels, but these "
            f"have {shape[1]}x{shape[2]}: leave features out, or scale the images"
        )


def num_coefficients(shape: tuple[int, ...], *, mirrored: bool = False) -> int:
    """Return the number of scattering coefficients of an image of ``shape``: the number of values in all its maps.

    ``mirrored``: True for mirrored maps, of which only the left half of the columns is used (see ``normalised``).
    """
    columns = _positions(shape[2])
    return shape[0] * NUM_MAPS * _positions(shape[1]) * (-(-columns // 2) if mirrored else columns)


def features_of(images: NDArray[np.uint8] | NDArray[np.float32], *, mirrored: bool = False) -> NDArray[np.float32]:
    """Return the scattering features of ``images`` (n, channels, height, width): (n, features), of L2 norm at most 1.

    The features of a record depend only on that record. They are computed by ``described`` from the record's bytes
    divided by 255, and scaled to norm 1 if their norm is larger. ``mirrored``: as in ``described``. Raises UserError
    for images of an unsuitable shape, as ``dimension_of`` does.
    """
    shape = images.shape[1:]
    size = dimension_of(shape, mirrored=mirrored)
    features = np.empty((len(images), size), dtype=np.float32)

    def fill(rows: slice) -> None:
        found = described(torch.from_numpy(images[rows].astype(np.float32)) / 255, mirrored=mirrored).numpy()
        features[rows] = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1)

    in_threads(fill, len(images), max(1, _BATCH // shape[0]))
    return features


def described(images: torch.Tensor, *, mirrored: bool = False) -> torch.Tensor:
    """Return the scattering features of ``images`` (n, channels, height, width) in [0, 1], without a limit on the norm.

    The steps are scattering, normalisation in groups, projection, and division by the square root of the number of
    features. ``mirrored``: the scattering is the mean over an image and its mirror image (see ``normalised``). The
    function is differentiable.
    """
    size = dimension_of(tuple(images.shape[1:]), mirrored=mirrored)
    maps = normalised(images, mirrored=mirrored)
    projected: torch.Tensor = _Projected.apply(maps.flatten(1), size)
    return projected / math.sqrt(size)


def normalised(images: torch.Tensor, *, mirrored: bool = False) -> torch.Tensor:
    """Return the scattering maps of ``images`` after group normalisation with 27 groups, (n, maps, rows, columns).

    ``mirrored``: if True, each map is the mean of a map of the image and the same map of its mirror image. So an image
    and its mirror image have bit-identical results. The right half of a mean map contains nearly the same numbers
    as the left half of another mean map. So only the left half of the columns is returned.
    """
    maps = in_groups(_scattered(images, mirrored=mirrored))
    return _left_half(maps) if mirrored else maps


def root_maps(images: torch.Tensor, *, mirrored: bool = False) -> torch.Tensor:
    """Return the square roots of the scattering maps of ``images``, (n, maps, rows, columns), not normalised.

    Scattering maps are averages of moduli. Their values have long tails, and grow in proportion to the contrast of the
    image. Square roots shorten the tails and reduce the influence of the contrast. Group normalisation would remove the
    contrast completely. A value below 0 (a rounding error) counts as 0. ``mirrored``: as in ``normalised``.
    """
    maps = _scattered(images, mirrored=mirrored).clamp(min=0).sqrt()
    return _left_half(maps) if mirrored else maps


def _scattered(images: torch.Tensor, *, mirrored: bool) -> torch.Tensor:
    return (scattered(images) + scattered(images.flip(-1))) / 2 if mirrored else scattered(images)


def _left_half(maps: torch.Tensor) -> torch.Tensor:
    return maps[..., : -(-maps.shape[3] // 2)]


def in_groups(maps: torch.Tensor) -> torch.Tensor:
    """Return ``maps`` (n, maps, rows, columns) after group normalisation of each record with 27 groups."""
    return torch.nn.functional.group_norm(maps, math.gcd(GROUPS, maps.shape[1]), eps=_EPSILON)


def scattered(images: torch.Tensor) -> torch.Tensor:
    """Return the scattering maps of ``images`` (n, channels, height, width): (n, 81 * channels, rows, columns).

    A channel has 81 maps, all smoothed. Order 0 is the image. Order 1 has the moduli of the image's convolutions with
    8 fine and 8 coarse wavelets. Order 2 has the moduli of the convolutions of each of the 8 fine maps of order 1 with
    8 coarse wavelets.
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
    """Return the real Fourier transforms of 8 fine and 8 coarse Morlet wavelets, each (8, height, width).

    ``height`` and ``width``: the size of the padded image.
    """
    angles = [(ORIENTATIONS // 2 - 1 - number) * math.pi / ORIENTATIONS for number in range(ORIENTATIONS)]
    fine, coarse = (
        np.stack([np.fft.fft2(_morlet(height, width, 2.0**scale, angle)).real for angle in angles]).astype(np.float32)
        for scale in (0, 1)
    )
    return fine, coarse


@dataclass(frozen=True, eq=False)
class Whitening:
    """A whitening transform: features x (n, d) become (x - ``centre``) @ ``matrix``.

    A result with an L2 norm above 1 is scaled down to norm 1. ``centre`` (d,) and ``matrix`` (d, d) are float64.
    """

    centre: torch.Tensor
    matrix: torch.Tensor

    def of(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the whitened ``features`` (n, d), of L2 norm at most 1.

        Each record is whitened independently of the others.
        """
        whitened = np.empty_like(features)

        def fill(rows: slice) -> None:
            whitened[rows] = self.applied(torch.from_numpy(features[rows])).float().numpy()

        in_threads(fill, len(features), _ROWS)
        norms = np.linalg.norm(whitened.astype(np.float64), axis=1, keepdims=True)
        shortened: NDArray[np.float32] = np.where(norms > 1, whitened * np.float32(1 - 2.0**-20), whitened)
        return shortened  # the factor is needed because rounding to float32 can make a norm slightly larger than 1

    def applied(self, features: torch.Tensor) -> torch.Tensor:
        """Return the whitened ``features`` as float64, of L2 norm at most 1. The method is differentiable."""
        made = (features.double() - self.centre) @ self.matrix
        shortened: torch.Tensor = made / made.norm(dim=1, keepdim=True).clamp(min=1)
        return shortened


@lru_cache(maxsize=2)
def whitening_of(shape: tuple[int, int, int], *, mirrored: bool = False) -> Whitening:
    """Return the ``Whitening`` of the scattering features of images of ``shape``, (channels, height, width).

    ``mirrored``: True for mirrored features. The computation takes seconds to a minute. The result is cached.
    """
    features = features_of(public_images(shape), mirrored=mirrored)
    # ``_whitening`` limits torch to one thread. This limit holds only in the new thread, not in the caller's thread.
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(_whitening, features).result()


def public_images(shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return the artificial images from which the whitening transform is computed.

    The seed of the images is public and fixed, so all processes compute the same images and the same transform.
    """
    return made_images(shape, _NUM_MADE, _MADE_SEED)


def made_images(shape: tuple[int, int, int], number: int, seed: int) -> NDArray[np.uint8]:
    """Generate ``number`` artificial images of each of three kinds: (3 * number, *shape).

    The kinds are pink noise with two exponents, and dead leaves.
    """
    generator = np.random.default_rng(seed)
    noise = [pink_noise(shape, number, exponent, generator) for exponent in _EXPONENTS]
    chunks = [min(_LEAVES_AT_A_TIME, number - start) for start in range(0, number, _LEAVES_AT_A_TIME)]
    return np.concatenate([*noise, *(dead_leaves(shape, chunk, generator) for chunk in chunks)])


def pink_noise(
    shape: tuple[int, int, int], number: int, exponent: float, generator: np.random.Generator
) -> NDArray[np.uint8]:
    """Generate ``number`` images of pink noise: the amplitude of a frequency f is f to the power of -``exponent``."""
    channels, height, width = shape
    frequencies = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width))
    frequencies[0, 0] = 1 / max(height, width)
    white = generator.standard_normal((number, channels + 1, height, width))
    fields = np.fft.ifft2(np.fft.fft2(white) * frequencies**-exponent).real
    values = fields[:, :1] + _OWN * fields[:, 1:]
    values -= values.mean(axis=(1, 2, 3), keepdims=True)
    values /= values.std(axis=(1, 2, 3), keepdims=True)
    contrast, brightness = (generator.uniform(*ends, (number, 1, 1, 1)) for ends in (_CONTRAST, _BRIGHTNESS))
    return _bytes(255 * (brightness + contrast * values))


def dead_leaves(shape: tuple[int, int, int], number: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Generate ``number`` "dead leaves" images: random discs and slabs that cover one another.

    The density of their radii r is proportional to r^-3, so shapes of all sizes occur, as in photographs.
    """
    channels, height, width = shape
    side, rows, columns = max(height, width), *np.mgrid[:height, :width]
    images, free = np.zeros((number, channels, height, width)), np.ones((number, height, width), dtype=bool)
    ground = generator.uniform(0, 255, (number, channels))
    for _ in range(_LEAVES):
        share = generator.random((number, 1, 1))
        radius = 1 / np.sqrt(share / _LEAST_RADIUS**2 + (1 - share) / (_LARGEST_RADIUS * side) ** 2)
        down = rows - generator.uniform(-radius, height + radius)
        right = columns - generator.uniform(-radius, width + radius)
        inside = free & _covered(down, right, radius, generator)
        colour = (
            ground / 2 + generator.uniform(0, 127.5, (number, 1)) + generator.normal(0, _COLOUR_DEVIATION, ground.shape)
        )
        slopes = generator.normal(0, _SLOPE_DEVIATION, (2, number, 1, 1))
        shade = slopes[0] * down + slopes[1] * right
        images += inside[:, None] * (colour.clip(0, 255)[:, :, None, None] + shade[:, None])
        free &= ~inside
    images += free[:, None] * ground[:, :, None, None]
    return _bytes(images + generator.standard_normal(images.shape) * generator.uniform(0, _NOISE, (number, 1, 1, 1)))


def in_threads(fill: Callable[[slice], None], count: int, step: int) -> None:
    """Process the rows 0 to ``count`` - 1 of an array in several threads, with ``step`` rows per call of ``fill``.

    ``fill``: a function that processes the rows in a slice. Each call of ``fill`` uses only one torch thread, so the
    results are bit-identical for any number of threads.
    """

    def fill_alone(start: int) -> None:
        torch.set_num_threads(1)
        fill(slice(start, min(start + step, count)))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(fill_alone, range(0, count, step)):
            pass


def _morlet(height: int, width: int, scale: float, angle: float) -> NDArray[np.complex128]:
    """Return a Morlet wavelet: a plane wave of frequency 3 pi / (4 ``scale``), multiplied by an elliptic Gaussian.

    A multiple of the Gaussian is subtracted, so that the sum of the wavelet is zero.
    """
    frequency = 3 / 4 * math.pi / scale * np.array([math.cos(angle), math.sin(angle)])
    wave, envelope = (_gabor(height, width, 0.8 * scale, angle, each) for each in (frequency, 0 * frequency))
    wave -= wave.sum() / envelope.sum() * envelope
    return wave


def _gabor(
    height: int, width: int, sigma: float, angle: float, frequency: NDArray[np.float64]
) -> NDArray[np.complex128]:
    """Return a Gabor function: the product of a plane wave and a Gaussian, with periodic boundaries.

    The Gaussian is narrow along the direction of the wave, and twice as wide at right angles to this direction.
    """
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
    """Filter images, keep every second row and column, and return the Fourier transforms of the smaller images.

    ``spectrum``: the Fourier transform of the images, (..., 1, height, width). ``filters``: the real Fourier transforms
    of the filters, (8, height, width). Filtering multiplies the two Fourier transforms. If every second row and column
    is kept, the Fourier transform becomes the mean of its four quarters (``_aliases``).
    """
    height, width = filters.shape[1] // 2, filters.shape[2] // 2
    # computed with pairs of real numbers, because products of complex numbers are slow
    parts = torch.view_as_real(_aliases(spectrum).contiguous()).flatten(-3)
    weights = _aliases(filters).flatten(-2).repeat_interleave(2, -1)
    total = parts[..., 0, :] * weights[:, 0]
    for alias in (1, 2, 3):
        total.addcmul_(parts[..., alias, :], weights[:, alias])
    return torch.view_as_complex(total.div_(4).view(*total.shape[:-1], height, width, 2))


def _aliases(values: torch.Tensor) -> torch.Tensor:
    """Split a Fourier transform (..., height, width) into its four quarters: (..., 4, height / 2, width / 2).

    If only every second row and column of an image is kept, its Fourier transform is the mean of the four quarters.
    """
    down, across = values.shape[-2] // 2, values.shape[-1] // 2
    return values.reshape(*values.shape[:-2], 2, down, 2, across).transpose(-3, -2).flatten(-4, -3)


class _Modulus(torch.autograd.Function):
    """The modulus of complex numbers, with the gradient 0 at the number 0.

    The modulus is a square root, and torch's gradient of the square root at 0 is infinite.
    """

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
    """Smooth ``maps`` with a Gaussian, and return the smoothed values at few positions, at most 7 x 7.

    ``maps`` contain only every ``spacing``-th pixel of the padded images, in both directions. ``height`` and ``width``:
    the size of the images without padding.
    """
    down, across = (torch.from_numpy(_smoothing(side, spacing)) for side in (height, width))
    return down @ (maps @ across.T)


@lru_cache(maxsize=16)
def _smoothing(side: int, spacing: int) -> NDArray[np.float32]:
    """Return the matrix that smooths one axis of an image, shape (positions, padded side / spacing).

    ``side``: the length of the axis in pixels, without padding. The matrix is multiplied by the padded axis. Each row
    is a Gaussian with standard deviation 1.6 pixels, centred on a block of 4 pixels. If the matrix has more than 7
    rows, neighbouring rows are averaged in pairs until at most 7 are left.
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
    """Project ``vectors`` (n, coefficients) on ``size`` random orthonormal directions.

    Coefficients get random signs; then ``size`` random coefficients of their cosine transform are kept. If ``size`` is
    the number of coefficients, ``vectors`` are returned unchanged.
    """
    coefficients = vectors.shape[1]
    if coefficients == size:
        return vectors
    from scipy.fft import dct  # noqa: PLC0415 (scipy loads slowly, and a plain run needs none of it)

    signs, directions = _directions(coefficients, size)
    projected: NDArray[np.float32] = dct(vectors * signs, axis=1, norm="ortho", overwrite_x=True)[:, directions]
    return projected


class _Projected(torch.autograd.Function):
    """Makes the function ``_projected`` differentiable for torch.

    The projection is linear, so its transpose (``_projected_back``) computes gradients.
    """

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, size: int) -> torch.Tensor:
        ctx.coefficients = vectors.shape[1]
        return torch.from_numpy(_projected(vectors.detach().numpy(), size))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.from_numpy(_projected_back(gradient.numpy(), ctx.coefficients)), None


def _projected_back(vectors: NDArray[np.float32], coefficients: int) -> NDArray[np.float32]:
    """Apply the transpose of the projection ``_projected``: (n, size) becomes (n, coefficients)."""
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
    torch.set_num_threads(1)  # torch uses one thread, for bit-identical results
    made = torch.from_numpy(features).double()
    centre, matrix = inverse_root(made)
    lengths = ((made - centre) @ matrix).norm(dim=1)
    return Whitening(centre, matrix / lengths.quantile(WITHIN))


def inverse_root(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean (d,) and the whitening matrix (d, d) of ``rows`` (n, d).

    The whitening matrix is the inverse square root of the covariance of ``rows`` plus a ridge.
    """
    values, vectors = torch.linalg.eigh(torch.cov(rows.T))
    values = values.clamp(min=0) + _RIDGE * values.mean()
    return rows.mean(dim=0), vectors * values.rsqrt() @ vectors.T


def _covered(
    down: NDArray[np.float64], right: NDArray[np.float64], radius: NDArray[np.float64], generator: np.random.Generator
) -> NDArray[np.bool_]:
    """Draw a random leaf for each image, and return masks of the pixels that the leaves cover.

    A leaf is a disc with probability 1/2, else a rotated rectangle.

    ``down`` and ``right``: each pixel's vertical and horizontal distance from the leaf's centre.
    """
    angle, flatness = generator.uniform(0, np.pi, radius.shape), generator.uniform(0.3, 1, radius.shape)
    along, across = np.cos(angle) * right + np.sin(angle) * down, np.cos(angle) * down - np.sin(angle) * right
    slab = (np.abs(along) < radius) & (np.abs(across) < flatness * radius)
    covered: NDArray[np.bool_] = np.where(generator.random(radius.shape) < 0.5, down**2 + right**2 < radius**2, slab)
    return covered


def _bytes(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    return values.clip(0, 255).astype(np.uint8)
