"""Clipping and noise: float64, a cryptographic stream per purpose and round, a common grid for sum and noise.

The grid closes the side channel of floating-point noise; the proof is in ``fl_sim.privacy.grid``. Adaptive clipping:
Andrew et al. 2021, algorithm 1.
"""

import hashlib
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.privacy.grid import DECIDED, GAUSSIAN, LAPLACE, TOLERANCE, Law, exact_step, grid_spacing

_BLOCK: Final = 2**15  # numbers that are made at a time: they stay in the processor's cache
_LEAST_NOISE: Final = 1e-6  # clipping norms; epsilon is beyond 10^11 there
_ZEROS: Final = memoryview(bytes(2**19))  # what is encrypted: the stream itself
_BLOCK_WORDS: Final = 8  # of ChaCha20, whose counter says with which block a stream begins
_STREAM_LIMIT: Final = 2**37  # bytes; half of what a ChaCha20 counter can address


class Normals(Protocol):
    """What makes N(0, 1) numbers of words faster than this file, and the same ones but for float64's rounding.

    The last bit of each ``first`` is a number's sign; first >> 1, then ``second``, are the binary digits of U.
    """

    def draw(self, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return the numbers."""
        ...

    def rounded(self, first: NDArray[np.uint64], ratio: float, out: NDArray[np.float64]) -> NDArray[np.intp]:
        """Write the numbers times ``ratio``, rounded to whole ones; return where the second word has to decide."""
        ...


@dataclass(frozen=True)
class Noise:
    """A source of random numbers: one independent ChaCha20 stream per (purpose, round) from one 32-byte key.

    The key is a secret: whoever has it can take the noise off again. It is in no representation, log or result.
    ``simulation_only`` says that the key can be guessed (it comes from a seed), so no real person is protected.
    ``normals``, if given, makes normal numbers: on the grid the very same ones.
    """

    key: bytes = field(repr=False)
    simulation_only: bool
    normals: Normals | None = field(default=None, repr=False, compare=False)

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

    def gaussian(self, count: int, std: float, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return ``count`` independent N(0, std^2) numbers in steps of the grid, rounded exactly to whole ones.

        ``std`` > 0; a step is ``grid_spacing(std)``. The same arguments give the same numbers.
        """
        return self._steps(GAUSSIAN, count, std, purpose, server_round)

    def laplace(self, count: int, scale: float, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return the same of the Laplace distribution with density proportional to exp(-|x| / scale)."""
        return self._steps(LAPLACE, count, scale, purpose, server_round)

    def standard_normal(self, count: int, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return ``count`` independent N(0, 1) numbers in float64, for whatever is not added to private numbers."""
        words = self._words(2 * count, purpose, server_round)
        if self.normals:
            return self.normals.draw(words[:count], words[count:])
        normal = _tails(words[:count], words[count:])
        GAUSSIAN.quantile(normal)
        return _with_signs(normal, words[:count])

    def uniform(self, count: int, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return ``count`` independent numbers in [0, 1): secret Poisson sampling needs secret coins."""
        words = self._words(count, purpose, server_round)
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def taking_part(self, count: int, sampling_rate: float, *, purpose: str, server_round: int) -> NDArray[np.bool_]:
        """Return who of ``count`` is sampled: ``takes_part`` of ``uniform`` numbers, told from their bits."""
        limit = _limit(sampling_rate)
        if limit == 1 << 53:
            return np.ones(count, np.bool_)
        return self._words(count, purpose, server_round) < np.uint64(limit << 11)

    def _steps(self, law: Law, count: int, scale: float, purpose: str, server_round: int) -> NDArray[np.float64]:
        words = self._words(count, purpose, server_round)
        ratio = scale / grid_spacing(scale)
        rounded = self.normals.rounded if self.normals and law is GAUSSIAN else partial(_rounded, law)
        steps = np.empty(count)
        for start in range(0, count, _BLOCK):
            block = slice(start, min(start + _BLOCK, count))
            for place in start + rounded(words[block], ratio, out=steps[block]):
                # Behind the words of all numbers lie their second ones, which hardly any needs.
                [second] = self._words(1, purpose, server_round, behind=count + int(place))
                digits = int(words[place]) >> 1 << 64 | int(second)
                more = self._further(f"{purpose}: digits of number {place}", server_round)
                magnitude = exact_step(law, ratio, digits, 127, more)
                steps[place] = -magnitude if words[place] & np.uint64(1) else magnitude
        return steps

    def _further(self, purpose: str, server_round: int) -> Callable[[], int]:
        draws = itertools.count(1)
        return lambda: int(self._words(next(draws), purpose, server_round)[-1])

    def _words(self, count: int, purpose: str, server_round: int, *, behind: int = 0) -> NDArray[np.uint64]:
        """Return ``count`` words of a stream, those that follow its first ``behind``."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms  # noqa: PLC0415 (settings need no noise)

        assert 8 * (behind + count) < _STREAM_LIMIT
        stream_key = hashlib.blake2b(f"{server_round}:{purpose}".encode(), key=self.key, digest_size=32).digest()
        block, skipped = divmod(behind, _BLOCK_WORDS)
        counter = block.to_bytes(4, "little") + bytes(12)
        encryptor = Cipher(algorithms.ChaCha20(stream_key, counter), mode=None).encryptor()
        words = np.empty(skipped + count, dtype="<u8")
        room = words.view(np.uint8).data
        for start in range(0, len(room), len(_ZEROS)):
            part = room[start : start + len(_ZEROS)]
            encryptor.update_into(_ZEROS[: len(part)], part)
        return words[skipped:]


def takes_part(coins: NDArray[np.float64], sampling_rate: float) -> NDArray[np.bool_]:
    """Return who is sampled by Poisson sampling, given a ``uniform`` number each: never more often than at the rate.

    The numbers are multiples of 2^-53, so the rate is rounded down to one: a rate between two of them would be rounded
    up, and a unit would take part more often than its accountant was told.
    """
    return coins < _limit(sampling_rate) * 2.0**-53


def _limit(sampling_rate: float) -> int:
    return math.floor(math.ldexp(sampling_rate, 53))


def clip_factor(norm: float, clipping_norm: float) -> float:
    """Return the factor that brings a vector of ``norm`` down to ``clipping_norm``.

    1 for a zero vector, 0 for a vector that is not finite: it counts as the zero vector, and its term must be left out
    of the sum, not multiplied (0 * nan is nan).
    """
    if not math.isfinite(norm):
        return 0.0
    return 1.0 if norm <= clipping_norm else clipping_norm / norm


def clipping_norm_on_grid(clipping_norm: float, std: float, dimension: int, *, summands: int) -> float:
    """Return the norm L to clip to so that a sum *rounded to the grid* still moves by at most ``clipping_norm``.

    Of ``dimension`` numbers, the sum of at most ``summands`` clipped vectors (a public number). Rounding to the grid
    moves the difference of two sums by at most one spacing per number. The rest is float64, with u = 2^-53: a norm is
    too small by at most (dimension / 2 + 4) u L, its factor and the products included; and a sum is off by at most u
    times the norms of all its partial sums and products, (n^2 / 2 + n) u L, in either of two neighbouring worlds. Twice
    all that is left, for what is quadratic in u. Raises UserError where nothing would remain.
    """
    if std == 0:
        return clipping_norm
    if std < _LEAST_NOISE * clipping_norm:
        raise UserError(
            f"noise of {std / clipping_norm:g} clipping norms hides nothing: choose a noise_multiplier of at least "
            f"{_LEAST_NOISE:g}, or 0 to go without noise and without a guarantee"
        )
    rounding = (summands * (summands + 2) + dimension + 8) * 2.0**-52
    remaining = clipping_norm * (1 - rounding) - grid_spacing(std) * math.sqrt(dimension)
    if remaining <= clipping_norm / 2:
        raise UserError(
            f"noise of {std / clipping_norm:g} clipping norms is too coarse for sums of {summands} vectors of "
            f"{dimension} numbers: use a smaller noise_multiplier, a smaller model, or fewer vectors"
        )
    return remaining


def add_noise(total: NDArray[np.float64], std: float, steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``total``, rounded to the grid, plus noise of standard deviation ``std`` given in ``steps`` of the grid.

    float64 rounds their exact sum, which looks at nothing else. With ``std`` 0 there is no grid, and no noise.
    """
    if std == 0:
        return total
    spacing = grid_spacing(std)
    released = total / spacing
    np.rint(released, out=released)
    released += steps
    released *= spacing
    return released


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


def _rounded(law: Law, words: NDArray[np.uint64], ratio: float, out: NDArray[np.float64]) -> NDArray[np.intp]:
    """Write the numbers, rounded to whole steps, into ``out``; return where float64 does not decide."""
    found = (words >> np.uint64(1)).astype(np.float64)
    found += 0.5
    found *= 2.0**-63
    is_small = found < DECIDED
    law.quantile(found)
    np.abs(found, out=found)
    found *= ratio
    np.rint(found, out=out)
    found -= out
    np.abs(found, out=found)
    _with_signs(out, words)
    # Next to a boundary float64 may round the wrong way; and of a small U the first digits do not say enough.
    return np.flatnonzero((found > 0.5 - TOLERANCE) | is_small)


def _tails(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return float64 approximations of the uniform numbers whose binary digits are first >> 1, then second."""
    # Where the 63 digits begin with so many zeros that fewer than 53 significant ones are left, the second word adds
    # the rest, so that the tail is as finely resolved as the middle and does not end at 9 sigma.
    tails = (first >> np.uint64(1)).astype(np.float64)
    small = np.flatnonzero(tails < 2.0**53)
    tails[small] += (second[small] >> np.uint64(11)) * 2.0**-53 + 2.0**-54
    tails *= 2.0**-63
    return tails


def _with_signs(numbers: NDArray[np.float64], words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return ``numbers`` with the sign that the last bit of each word says, 1 for minus; overwrites them."""
    np.copysign(numbers, 0.5 - (words & np.uint64(1)), out=numbers)
    return numbers
