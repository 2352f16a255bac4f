"""Clipping and Gaussian noise: float64, a cryptographic stream per purpose and round, a common grid for sum and noise.

The grid closes the side channel of Mironov 2012 ("On significance of the least significant bits"): the low bits of a
floating-point sum can give away what was added. Sum and noise are both rounded to multiples of one power of two, so
their sum is exact and its low bits tell nothing. Adaptive clipping: Andrew et al. 2021, algorithm 1.
"""

import hashlib
import math
import os
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray
from scipy.special import ndtri

from fl_sim.types import UserError

_GRID_BITS: Final = 20  # the grid is at most 2^-20 standard deviations wide
_STREAM_LIMIT: Final = 2**37  # bytes; half of what a ChaCha20 counter can address


@dataclass(frozen=True)
class Noise:
    """A source of standard normal numbers: one independent ChaCha20 stream per (purpose, round) from one 32-byte key.

    The key is a secret: whoever has it can take the noise off again. It is in no representation, log or result.
    ``simulation_only`` says that the key can be guessed (it comes from a seed), so no real person is protected.
    """

    key: bytes = field(repr=False)
    simulation_only: bool

    @classmethod
    def secret(cls) -> "Noise":
        """Return a source with a fresh key from the operating system: the real thing; no two runs agree."""
        return cls(os.urandom(32), simulation_only=False)

    @classmethod
    def seeded(cls, seed: int) -> "Noise":
        """Return a source that ``seed`` determines: repeatable, and a simulation only."""
        return cls(hashlib.sha256(f"simulated privacy noise {seed}".encode()).digest(), simulation_only=True)

    @property
    def identity(self) -> str:
        """Return a name for the key that does not give it away: the same key, the same name."""
        return hashlib.sha256(b"identity" + self.key).hexdigest()[:16]

    def standard_normal(self, count: int, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return ``count`` independent N(0, 1) numbers; the same arguments give the same numbers."""
        negative, tail = self._signs_and_tails(count, purpose, server_round)
        normal: NDArray[np.float64] = ndtri(tail / 2)
        np.negative(normal, where=~negative, out=normal)
        return normal

    def standard_laplace(self, count: int, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return ``count`` independent Laplace numbers of scale 1; the same arguments give the same numbers."""
        negative, tail = self._signs_and_tails(count, purpose, server_round)
        laplace: NDArray[np.float64] = np.log(tail)
        np.negative(laplace, where=~negative, out=laplace)
        return laplace

    def uniform(self, count: int, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return ``count`` independent numbers in [0, 1): secret Poisson sampling needs secret coins."""
        words = self._words(count, purpose, server_round)
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _signs_and_tails(
        self, count: int, purpose: str, server_round: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Return fair signs, and uniform numbers in (0, 1]: how much of a symmetric distribution lies further out."""
        words = self._words(2 * count, purpose, server_round)
        first, second = words[:count], words[count:]
        # 63 random bits make u in (0, 1]; where u is so small that it has fewer than 53 significant bits, the second
        # word supplies the rest, so that the tail is as finely resolved as the middle and does not end at 9 sigma.
        tail = (first >> np.uint64(1)).astype(np.float64)
        small = np.flatnonzero(tail < 2.0**53)
        tail[small] += (second[small] >> np.uint64(11)) * 2.0**-53 + 2.0**-54
        return (first & np.uint64(1)).astype(bool), tail * 2.0**-63

    def _words(self, count: int, purpose: str, server_round: int) -> NDArray[np.uint64]:
        assert 8 * count < _STREAM_LIMIT
        stream_key = hashlib.blake2b(f"{server_round}:{purpose}".encode(), key=self.key, digest_size=32).digest()
        encryptor = Cipher(algorithms.ChaCha20(stream_key, bytes(16)), mode=None).encryptor()
        return np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8")


def takes_part(coins: NDArray[np.float64], sampling_rate: float) -> NDArray[np.bool_]:
    """Return who is sampled by Poisson sampling, given a ``uniform`` number each: never more often than at the rate.

    The numbers are multiples of 2^-53, so the rate is rounded down to one: a rate between two of them would be rounded
    up, and a unit would take part more often than its accountant was told.
    """
    return coins < math.floor(math.ldexp(sampling_rate, 53)) * 2.0**-53


def clip_factor(norm: float, clipping_norm: float) -> float:
    """Return the factor that brings a vector of ``norm`` down to ``clipping_norm``.

    1 for a zero vector, 0 for a vector that is not finite: it counts as the zero vector, and its term must be left out
    of the sum, not multiplied (0 * nan is nan).
    """
    if not math.isfinite(norm):
        return 0.0
    return 1.0 if norm <= clipping_norm else clipping_norm / norm


def grid_spacing(std: float) -> float:
    """Return the power of two to whose multiples a sum and its noise of standard deviation ``std`` > 0 are rounded."""
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _GRID_BITS)


def clipping_norm_on_grid(clipping_norm: float, std: float, dimension: int) -> float:
    """Return the norm to clip to so that a sum *rounded to the grid* still moves by at most ``clipping_norm``.

    Rounding two sums moves their difference by at most one spacing per coordinate; one more spacing per coordinate is
    left for the rounding errors of float64. Raises UserError where nothing would remain.
    """
    if std == 0:
        return clipping_norm
    remaining = clipping_norm - 2 * grid_spacing(std) * math.sqrt(dimension)
    if remaining <= clipping_norm / 2:
        raise UserError(
            f"noise of {std / clipping_norm:g} clipping norms is too coarse for {dimension} parameters: "
            "use a smaller noise_multiplier or model"
        )
    return remaining


def add_noise(total: NDArray[np.float64], std: float, standard_normal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``total`` + ``std`` * ``standard_normal``, both rounded to the common grid; their sum is exact."""
    if std == 0:
        return total
    spacing = grid_spacing(std)
    return (np.rint(total / spacing) + np.rint(standard_normal * (std / spacing))) * spacing


def update_noise_multiplier(noise_multiplier: float, count_std: float) -> float:
    """Return z_delta = (z^-2 - (2 sigma_b)^-2)^-1/2: the updates' noise when counts are paid from the same z.

    ``count_std`` is sigma_b, the standard deviation on the sum of (b_i - 1/2), which one client moves by 1/2. Raises
    UserError where the counts alone would cost more than z allows.
    """
    if not 2 * count_std > noise_multiplier > 0:
        raise UserError(
            f"adaptive clipping with count_noise {count_std:g} leaves nothing of noise_multiplier "
            f"{noise_multiplier:g}: choose a positive noise_multiplier and count_noise above half of it"
        )
    return float((noise_multiplier**-2 - (2 * count_std) ** -2) ** -0.5)


def next_clipping_norm(
    clipping_norm: float, noisy_share: float, *, target_quantile: float, learning_rate: float
) -> float:
    """Return S exp(-eta (b~ - gamma)): S falls when more than the target share of updates is within it."""
    return clipping_norm * math.exp(-learning_rate * (noisy_share - target_quantile))
