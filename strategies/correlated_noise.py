"""Noise that is correlated over rounds: later rounds take off again what earlier ones added, in part.

Banded matrix factorisation: with x_t the sum of the clipped updates of round t, what is released is a_t, where

    C a = C x + Z,      so that a_t = x_t + (C^-1 Z)_t,

with fresh Gaussian noise Z and a lower-triangular Toeplitz matrix C of b bands. Its coefficients are those of the
square root of the matrix of prefix sums, c_0 = 1, c_k = c_{k-1} (2k - 1) / 2k, cut off after b of them (Kalinin and
Lampert 2024, "Banded square root matrix factorization for differentially private model training"), and divided by
their norm. The model is a prefix sum of the a_t: its noise is less than by as much noise that is independent from
round to round.

Privacy (Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization"): what the noise hides is C x, and a
client moves it, for each round that it takes part in, by a column of C times its update. Columns have norm 1, and two
of them that lie b or more rounds apart have no round in common. So a client that takes part at most once in any b
rounds in a row pays one Gaussian mechanism for each of its rounds, as under independent noise, although more is hidden
of it; and where it takes part by a secret coin of probability p, one Gaussian mechanism sampled at p.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fl_sim.privacy.mechanisms import add_noise


def coefficients(bands: int) -> NDArray[np.float64]:
    """Return c_0 .. c_{bands-1}, of norm 1."""
    k = np.arange(1, bands)
    raw = np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])
    unit: NDArray[np.float64] = raw / np.linalg.norm(raw)
    return unit


@dataclass
class CorrelatedNoise:
    """The noise of earlier rounds that the next rounds subtract. With one band: none.

    SENSITIVE: ``sums`` are the clipped sums without noise, of the last ``bands`` - 1 rounds, newest first; beside what
    was ``released`` of them they tell the noise. They are kept in memory alone: a run that goes on after a stop begins
    here anew, which costs accuracy and no privacy (two such mechanisms, one after the other).
    """

    bands: int
    sums: deque[NDArray[np.float64]] = field(init=False, repr=False)
    released: deque[NDArray[np.float64]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.sums, self.released = deque(maxlen=self.bands - 1), deque(maxlen=self.bands - 1)

    def release(self, total: NDArray[np.float64], std: float, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``total``, a round's clipped sum, with noise of which ``std`` is the fresh part, in grid ``steps``.

        The Gaussian mechanism is on (C x)_t, on the grid; what follows from its result is post-processing.
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
