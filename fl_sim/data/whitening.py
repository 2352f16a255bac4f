"""Whitening that no data set had a say in: by how the scattering features of made-up images vary.

Where a release has the same noise in every direction, directions in which records hardly vary are lost in it first, and
they tell classes apart as well as others do. Whitening makes all of them about as long. The covariance of the records
themselves would be private; that of made-up images (``fl_sim.data.made_images``) is nobody's, and close enough.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.data.made_images import made_images
from fl_sim.data.scattering import features_of

_NUMBER: Final = 2500  # made-up images of each sort
_SEED: Final = 0
_RIDGE: Final = 0.1  # added to every variance, in units of their mean
_WITHIN: Final = 0.9  # of the made-up images end within length 1
_ROWS: Final = 5000  # at a time


@dataclass(frozen=True, eq=False)
class Whitening:
    """Features (n, d) become (x - ``centre``) ``matrix``, shortened to length 1; both are float64."""

    centre: torch.Tensor
    matrix: torch.Tensor

    def of(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the whitened ``features`` (n, d), of norm 1 at most; each record's depend on that record alone."""
        whitened = np.empty_like(features)

        def fill(start: int) -> None:
            torch.set_num_threads(1)  # holds for the thread that calls it: the bits do not depend on how many there are
            rows = slice(start, start + _ROWS)
            whitened[rows] = self.applied(torch.from_numpy(features[rows])).float().numpy()

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _ in pool.map(fill, range(0, len(features), _ROWS)):
                pass
        return _shortened(whitened)

    def applied(self, features: torch.Tensor) -> torch.Tensor:
        """Return the whitened ``features`` in float64, of norm 1 at most. It can be differentiated."""
        made = (features.double() - self.centre) @ self.matrix
        shortened: torch.Tensor = made / made.norm(dim=1, keepdim=True).clamp(min=1)
        return shortened


@lru_cache(maxsize=2)
def whitening_of(shape: tuple[int, int, int]) -> Whitening:
    """Return the whitening for the features of images of ``shape``, (channels, height, width): seconds to a minute."""
    features = features_of(made_images(shape, _NUMBER, _SEED))
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(_whitening, features).result()


def _whitening(features: NDArray[np.float32]) -> Whitening:
    torch.set_num_threads(1)  # as above
    made = torch.from_numpy(features).double()
    centre = made.mean(dim=0)
    values, vectors = torch.linalg.eigh(torch.cov(made.T))
    values = values.clamp(min=0) + _RIDGE * values.mean()
    matrix = vectors * values.rsqrt() @ vectors.T
    lengths = ((made - centre) @ matrix).norm(dim=1)
    return Whitening(centre, matrix / lengths.quantile(_WITHIN))


def _shortened(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return features of which rounding to float32 has left none longer than 1."""
    norms = np.linalg.norm(features.astype(np.float64), axis=1, keepdims=True)
    longer = norms > 1
    shorter: NDArray[np.float32] = np.where(longer, features * np.float32(1 - 2.0**-20), features)
    return shorter
