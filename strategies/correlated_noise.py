"""Noise that is correlated over rounds: later rounds subtract a part of the noise that earlier rounds added.

The method is banded matrix factorisation. x_t is the sum of the clipped updates of round t. Round t releases a_t, where

    C a = C x + Z,      so that a_t = x_t + (C^-1 Z)_t.

Z is fresh Gaussian noise, and C is a lower-triangular Toeplitz matrix of b bands. The coefficients of C are the first b
coefficients of the square root of the matrix that computes prefix sums: c_0 = 1 and c_k = c_{k-1} (2k - 1) / 2k. All
coefficients are divided by their norm (Kalinin and Lampert 2024, "Banded square root matrix factorization for
differentially private model training"). The model is a prefix sum of the a_t. The noise of this prefix sum is smaller
than with independent noise of the same size in every round.

Privacy (Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization"): the noise Z hides C x. In each round in
which a client takes part, its update changes C x by a column of C times the update. Columns have norm 1, and two
columns that are b or more rounds apart have no common nonzero row. So if a client takes part at most once in any b
consecutive rounds, the privacy cost of each of its rounds is that of one Gaussian mechanism, as with independent noise.
If, in addition, a secret random draw of probability p decides on its participation, the Gaussian mechanism has the
sampling rate p.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fl_sim.privacy.mechanisms import add_noise


def coefficients(bands: int) -> NDArray[np.float64]:
    """Return the coefficients c_0 .. c_{bands-1} of the correlation matrix C, shape (bands,), of L2 norm 1."""
    k = np.arange(1, bands)
    raw = np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])
    unit: NDArray[np.float64] = raw / np.linalg.norm(raw)
    return unit


@dataclass
class CorrelatedNoise:
    """Stores the sums of earlier rounds, from which correlated noise is computed. With one band no sums are stored.

    SENSITIVE: ``sums`` are the clipped sums without noise of the last ``bands`` - 1 rounds, newest first. Together with
    the ``released`` sums they reveal the noise. The sums are kept only in memory, so a resumed run starts without them.
    This reduces the accuracy, but not the privacy: the rounds before and after the interruption then belong to two
    separate mechanisms.
    """

    bands: int
    sums: deque[NDArray[np.float64]] = field(init=False, repr=False)
    released: deque[NDArray[np.float64]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.sums, self.released = deque(maxlen=self.bands - 1), deque(maxlen=self.bands - 1)

    def release(self, total: NDArray[np.float64], std: float, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``total``, the clipped sum of a round, with correlated noise.

        ``std``: standard deviation of the fresh noise. ``steps``: the fresh noise, as whole numbers of steps of the
        rounding grid. The Gaussian mechanism releases the noisy (C x)_t, rounded to this grid. All further computations
        are post-processing.
        """
        if self.bands == 1:
            return add_noise(total, std, steps)
        now, *earlier = coefficients(self.bands)
        mixed = now * total
        for coefficient, before in zip(earlier, self.sums, strict=False):
            mixed += coefficient * before
        noised = add_noise(mixed, std, steps)
        for coefficient, before in zip(earlier, self.released, strict=False):
            noised -= coefficient * before
        noised /= now
        self.sums.appendleft(total)
        self.released.appendleft(noised)
        return noised
