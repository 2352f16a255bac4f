"""Whitened scattering maps of an image, without a projection: all features whose names end in ``scattering-maps``.

Tramer and Boneh (2021) train linear models with DP-SGD on all scattering coefficients. A projection to fewer numbers
would reduce the accuracy of these models. However, the maps are correlated, and some directions have a far
larger variance than others. So this module whitens the vector of all maps at each image position, with one matrix for
all positions. The matrix is small, because its rows and columns are the maps, not all coefficients. It is computed from
the maps of artificial images (``fl_sim.data.scattering``). Matrix and images depend on no data set, so both are public.

The features ``mirrored-scattering-maps`` are the mean of the maps of an image and of its mirror image, with half as
many numbers. A linear model on these features predicts the same class for both images, and DP-SGD adds noise to half as
many parameters. A mirrored photograph has the same class; a mirrored digit or letter does not. Each record has norm 1.

The features ``root-scattering-maps`` and ``mirrored-root-scattering-maps`` are the square roots of the maps, without
the normalisation in groups. Square roots of histogram-like features are common in computer vision (Perronnin, Sanchez
and Mensink 2010; Arandjelovic and Zisserman 2012). Each record has norm 1.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.data.scattering import (
    NUM_MAPS,
    WITHIN,
    dimension_of,
    in_threads,
    inverse_root,
    normalised,
    num_coefficients,
    public_images,
    root_maps,
)

_IMAGES: Final = 20  # images per batch


def num_numbers(shape: tuple[int, ...], *, mirrored: bool = False) -> int:
    """Return the number of features of an image of ``shape``. Raises UserError as ``dimension_of`` does.

    ``mirrored``: True for features that are means over an image and its mirror image.
    """
    dimension_of(shape, mirrored=mirrored)
    return num_coefficients(shape, mirrored=mirrored)


def maps_of(
    images: NDArray[np.uint8] | NDArray[np.float32], *, mirrored: bool = False, root: bool = False
) -> NDArray[np.float32]:
    """Return the whitened maps of ``images`` (n, channels, height, width): (n, numbers), of L2 norm at most 1.

    ``mirrored``: True to use the mean of the maps of an image and of its mirror image. ``root``: True to use the square
    roots of maps, without normalisation in groups. With either, the result is scaled to norm 1. The features of a
    record depend only on that record. Raises UserError for images of an unsuitable shape.
    """
    channels, height, width = images.shape[1:]
    num_numbers((channels, height, width))
    centre, matrix = mixing_of((channels, height, width), mirrored=mirrored, root=root)
    found = _coefficients(images, mirrored=mirrored, root=root)
    num_positions = found.shape[1] // len(centre)
    # mirrored maps and roots are also scaled up to norm 1; 1e-12 prevents a division by 0
    shortest = 1e-12 if mirrored or root else 1.0

    def fill(rows: slice) -> None:
        maps = torch.from_numpy(found[rows]).double().reshape(-1, len(centre), num_positions)
        mixed = torch.einsum("nmp,mk->nkp", maps - centre[:, None], matrix).flatten(1)
        longer = mixed.norm(dim=1, keepdim=True).clamp(min=shortest)
        # the factor 1 - 2^-20 keeps the norm at most 1 after rounding to float32
        found[rows] = (mixed / longer * (1 - 2.0**-20)).float().numpy()

    in_threads(fill, len(found), _IMAGES)
    return found


@lru_cache(maxsize=2)
def mixing_of(
    shape: tuple[int, int, int], *, mirrored: bool = False, root: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the centre (maps,) and the matrix (maps, maps) that whiten the maps of images of ``shape``, as float64."""
    found = _coefficients(public_images(shape), mirrored=mirrored, root=root)
    # ``_mixing`` limits torch to one thread. This limit holds only in the new thread, not in the caller's thread.
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(_mixing, found, shape[0] * NUM_MAPS).result()


def _mixing(found: NDArray[np.float32], num_maps: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.set_num_threads(1)  # torch uses one thread, for bit-identical results
    rows = torch.from_numpy(found).double().reshape(len(found), num_maps, -1).transpose(1, 2)
    centre, matrix = inverse_root(rows.flatten(0, 1))
    lengths = ((rows - centre) @ matrix).flatten(1).norm(dim=1)
    return centre, matrix / lengths.quantile(WITHIN)


def _coefficients(
    images: NDArray[np.uint8] | NDArray[np.float32], *, mirrored: bool, root: bool
) -> NDArray[np.float32]:
    """Return the maps of each image as one vector, (n, numbers), before whitening."""
    found = np.empty((len(images), num_coefficients(images.shape[1:], mirrored=mirrored)), dtype=np.float32)
    transform = root_maps if root else normalised

    def fill(rows: slice) -> None:
        given = torch.from_numpy(images[rows].astype(np.float32)) / 255
        found[rows] = transform(given, mirrored=mirrored).flatten(1).numpy()

    in_threads(fill, len(images), _IMAGES)
    return found
