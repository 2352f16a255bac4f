"""Approximately inverts ``features=scattering``: finds an image for a feature vector, to show synthetic records.

With ``features=scattering`` a synthetic record is a vector, not an image. Gradient descent finds an image with similar
features, as Mahendran and Vedaldi (2015) do for networks. Many images have nearly the same features. Three public
assumptions about images select one of them. First, the search starts at the image that ridge regression predicts; the
regression is fitted on artificial images (``made_images``). Second, the steps of gradient descent are scaled to the
spectrum of pink noise, so that coarse shapes appear before fine shapes. Third, images with a small total variation are
preferred.

The only inputs are the vectors, the shape of the images and the public transform. If the vectors were released under
differential privacy, the images are post-processing of the released vectors and have no further privacy cost.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.data.features import Features, Vectors, vectors_of
from fl_sim.data.scattering import Whitening, described, dimension_of, made_images, whitening_of

Shape = tuple[int, int, int]

STEPS: Final = 150
"""The number of steps of gradient descent (Adam) for each image."""

_AT_A_TIME: Final = 20  # images per batch
_RATE: Final = 0.1  # Adam's learning rate at the start; a cosine schedule reduces it to 0
_BETAS: Final = (0.9, 0.99)
_VARIATION: Final = 0.1  # weight of the total variation (mean difference of neighbouring pixels) in the loss

# The noise in a channel of an image is the sum of two noises. The first noise is the same for all channels, with
# standard deviation 1. The second noise differs between channels, and has this standard deviation.
_OWN: Final = 0.35

_MADE: Final = 300  # number of artificial images of each of the three kinds (see ``made_images``), for the regression
_SEED: Final = 1  # seed of the artificial images for the regression; images for whitening are made with another seed
_RIDGE: Final = 0.1  # ridge penalty of the regression, relative to the mean squared length of the feature vectors
_BRIGHTNESS, _CONTRAST = 0.5, 0.15  # mean and standard deviation of the image at which a search starts
_DARKEST: Final = 0.02  # pixels of the start image are in 0.02 .. 0.98, because logit(0) and logit(1) are infinite


def images_of(
    vectors: Vectors, shape: Shape, features: Features, tell: Callable[[float], None] = lambda _: None
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Find an image for each of the ``vectors`` (n, numbers), so that its features are close to the vector.

    Returns uint8 images (n, *shape), and the relative errors (n,): the distance between a vector and the features of
    its image, divided by the length of the vector. ``shape``: channels, height and width. ``tell``: a callback for a
    progress bar; its argument is the finished fraction of the work, from 0 to 1. The same vectors always give the same
    images. Raises UserError if no features exist for images of ``shape``, ValueError if ``vectors`` are not features
    of images of this shape.
    """
    if vectors.ndim != 2 or vectors.shape[1] != dimension_of(shape):
        raise ValueError(
            f"vectors of shape {vectors.shape[1:]} are no features of such images: an image of shape {shape} has "
            f"{dimension_of(shape)} features"
        )
    if not np.isfinite(vectors).all():
        raise ValueError("some of the vectors contain numbers that are not finite")
    images = np.empty((len(vectors), *shape), dtype=np.uint8)
    if not len(vectors):
        return images, np.empty(0, dtype=np.float32)
    regression = _regression(shape, features)
    whitening = None if features == "scattering" else whitening_of(shape)
    for start in range(0, len(vectors), _AT_A_TIME):
        rows = slice(start, min(start + _AT_A_TIME, len(vectors)))

        def tell_of(share: float, rows: slice = rows) -> None:
            tell((rows.start + share * (rows.stop - rows.start)) / len(vectors))

        with _one_thread():
            targets = torch.from_numpy(np.ascontiguousarray(vectors[rows], dtype=np.float32))
            found = _descended(targets, regression(targets), whitening, tell_of)
        images[rows] = (255 * found).round().to(torch.uint8).numpy()
    lengths = np.maximum(np.linalg.norm(vectors, axis=1), np.finfo(np.float32).tiny)
    return images, (np.linalg.norm(vectors_of(images, features) - vectors, axis=1) / lengths).astype(np.float32)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread within a ``with`` block, so that results do not depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=2)
def _regression(shape: Shape, features: Features) -> Callable[[torch.Tensor], torch.Tensor]:
    """Fit a ridge regression that predicts images (n, *shape) from features. Return its prediction function.

    The regression is fitted on artificial images. Each predicted image is scaled to mean 0 and standard deviation
    1, because features hardly depend on brightness and contrast.
    """
    made = made_images(shape, _MADE, _SEED)
    inputs, images = (torch.from_numpy(one).double() for one in (vectors_of(made, features), made.astype(np.float64)))
    outputs = _standardised(images).flatten(1)
    with _one_thread():
        centre, middle = inputs.mean(dim=0), outputs.mean(dim=0)
        inputs = inputs - centre
        products = inputs @ inputs.T
        ridge = _RIDGE * products.trace() / len(products) * torch.eye(len(products), dtype=products.dtype)
        matrix = inputs.T @ torch.linalg.solve(products + ridge, outputs - middle)

    def images_for(vectors: torch.Tensor) -> torch.Tensor:
        return _standardised((middle + (vectors.double() - centre) @ matrix).reshape(-1, *shape)).float()

    return images_for


def _standardised(images: torch.Tensor) -> torch.Tensor:
    centred = images - images.mean(dim=(1, 2, 3), keepdim=True)
    deviations = centred.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
    return centred / deviations.clamp(min=torch.finfo(images.dtype).eps)


def _descended(
    targets: torch.Tensor, start: torch.Tensor, whitening: Whitening | None, tell: Callable[[float], None]
) -> torch.Tensor:
    """Return images in [0, 1] with features near ``targets``, found by Adam from the images ``start``.

    Each image of ``start`` has mean 0 and standard deviation 1. Adam does not optimise pixels, but white noise, which
    the inner function ``image`` filters to the spectrum of pink noise.
    """
    channels, height, width = start.shape[1:]
    spectrum, mixture = _pink(height, width), _mixture(channels)

    def filtered(noise: torch.Tensor, amplitudes: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        waves = torch.einsum("nchw,cd->ndhw", torch.fft.rfft2(noise), mixed.to(torch.complex64)) * amplitudes
        pixels: torch.Tensor = torch.fft.irfft2(waves, s=(height, width))
        return pixels

    def image(noise: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(filtered(noise, spectrum, mixture))

    grey = (_BRIGHTNESS + _CONTRAST * start).clamp(_DARKEST, 1 - _DARKEST)
    noise = filtered(torch.logit(grey), 1 / spectrum, torch.linalg.inv(mixture)).requires_grad_()
    adam = torch.optim.Adam([noise], lr=_RATE, betas=_BETAS)
    for step in range(STEPS):
        adam.param_groups[0]["lr"] = _RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
        images = image(noise)
        found = described(images)
        found = found / found.norm(dim=1, keepdim=True).clamp(min=1)
        distances = ((found if whitening is None else whitening.applied(found)) - targets).square().sum()
        neighbours = (images.diff(dim=dim).abs().mean(dim=(1, 2, 3)) for dim in (2, 3))  # vertical, horizontal
        variations = sum(neighbours, torch.zeros(len(images)))
        (noise.grad,) = torch.autograd.grad(distances + _VARIATION * variations.sum(), noise)
        adam.step()
        tell((step + 1) / STEPS)
    with torch.no_grad():
        return image(noise)


def _pink(height: int, width: int) -> torch.Tensor:
    """Return the amplitude of pink noise at each frequency f of ``rfft2``: 1 / f, scaled to a mean square of 1."""
    frequencies = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequencies[0, 0] = 1 / max(height, width)
    amplitudes = 1 / frequencies
    return torch.from_numpy((amplitudes / np.sqrt(np.mean(amplitudes**2))).astype(np.float32))


def _mixture(channels: int) -> torch.Tensor:
    """Return a symmetric matrix M, (channels, channels), that mixes noise channels into colours as in photographs.

    Independent noise that is multiplied by M has the covariance M squared. The result is noise that all channels share,
    plus weaker independent noise (``_OWN``) in each channel.
    """
    common = math.sqrt(channels + _OWN**2)
    shared = torch.full((channels, channels), 1 / channels)
    return (common * shared + _OWN * (torch.eye(channels) - shared)) / math.sqrt(1 + _OWN**2)
