"""Images that are made up: nobody's records, and yet with the statistics that photographs have in common.

Pink noise, whose amplitude falls as a power of the frequency, and dead leaves, discs and slabs that cover one another
(Lee, Mumford and Huang 2001). Networks learn useful features from such images (Baradad et al. 2021); here they only say
which directions of a feature space vary much. The same images in every process: their seed is public.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_EXPONENTS: Final = (1.0, 1.5)  # photographs have about 1
_OWN: Final = 0.35  # what a channel has for itself, beside the brightness that all of them share
_CONTRAST, _BRIGHTNESS = (0.1, 0.3), (0.3, 0.7)  # deviation and mean over an image, in units of 255

_LEAVES: Final = 200  # on an image, at most
_LEAST_RADIUS, _LARGEST_RADIUS = 1.0, 0.7  # pixels; sides of the image
_COLOUR_DEVIATION, _SLOPE_DEVIATION, _NOISE = 40.0, 1.5, 8.0  # in units of 1, of 1 a pixel, and of 1
_AT_A_TIME: Final = 100


def made_images(shape: tuple[int, int, int], number: int, seed: int) -> NDArray[np.uint8]:
    """Return ``number`` images of each of three sorts, (3 number, channels, height, width), for such a ``shape``."""
    coins = np.random.default_rng(seed)
    noise = [pink_noise(shape, number, exponent, coins) for exponent in _EXPONENTS]
    chunks = [min(_AT_A_TIME, number - start) for start in range(0, number, _AT_A_TIME)]
    return np.concatenate([*noise, *(dead_leaves(shape, chunk, coins) for chunk in chunks)])


def pink_noise(
    shape: tuple[int, int, int], number: int, exponent: float, coins: np.random.Generator
) -> NDArray[np.uint8]:
    """Return ``number`` images whose amplitude at frequency f is f to the minus ``exponent``."""
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
    """Return ``number`` images of leaves, the first on top, whose radii r have a density of r^-3."""
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


def _covered(
    down: NDArray[np.float64], right: NDArray[np.float64], radius: NDArray[np.float64], coins: np.random.Generator
) -> NDArray[np.bool_]:
    """Say which pixels a leaf covers: half of the leaves are discs, half slabs of any angle and flatness."""
    angle, flatness = coins.uniform(0, np.pi, radius.shape), coins.uniform(0.3, 1, radius.shape)
    along, across = np.cos(angle) * right + np.sin(angle) * down, np.cos(angle) * down - np.sin(angle) * right
    slab = (np.abs(along) < radius) & (np.abs(across) < flatness * radius)
    covered: NDArray[np.bool_] = np.where(coins.random(radius.shape) < 0.5, down**2 + right**2 < radius**2, slab)
    return covered


def _bytes(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    return values.clip(0, 255).astype(np.uint8)
