"""Clipping and noise: float64, one cryptographic stream per purpose and round, a common grid for sum and noise.

Noise is rounded to the grid exactly, so that a release is computed from the exact mechanism's result, at no loss of
privacy. A float64 generator alone has no proof: the low bits of its numbers can distinguish sums (Mironov 2012, "On
significance of the least significant bits"). Here sum and noise are rounded to multiples of one power of two, g. For a
sum t on the grid, t + g round(N / g) = g round((t + N) / g): if the noise is rounded *exactly*, the released number is
the Gaussian (or Laplace) mechanism's real-valued result, rounded. Rounding uses nothing private, so the release is
as private as the exact mechanism on real numbers, with nothing added to epsilon or delta. What is left to show:

1. The rounded sum moves by no more than the clipping norm: ``clipping_norm_on_grid``.
2. round(N / g) is exact. N = Q(U), where U is uniform on (0, 1) and known by its first 63 binary digits. float64 gives
   an approximation of N / g; where that is further than ``TOLERANCE`` from the next boundary k + 1/2, it is rounded the
   right way. The digits behind those 63 move N / g by less than TOLERANCE / 200, unless U is below ``DECIDED``. There,
   and next to a boundary (about one number in 44,000), the boundary's probability is compared with the first 127 digits
   of U in as many digits as it takes, and where 127 do not decide, further ones are drawn.

Assumptions: that ChaCha20 under a random key gives random bits; that ``scipy.special.ndtri``,
``numpy.log`` and the compiled quantile (``fl_sim/native/normals.h``) are right to ``TOLERANCE`` grid steps, some 400
times the error that is documented for them (a test compares them with mpmath, tails included); and that mpmath is right
to the digits it was asked for.

Adaptive clipping: Andrew et al. 2021, algorithm 1.
"""

import hashlib
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fl_sim.errors import UserError

TOLERANCE: Final = 2.0**-17
DECIDED: Final = 2.0**-17
"""The least U for which 63 digits suffice: |dQ/dU| is at most 1.3 / U, a standard deviation (the scale of a Laplace
distribution) is less than 2^21 g, and half a unit of the 63rd digit is 2^-64; so Q(U) / g is known to 1.3 x 2^-26."""
_GRID_BITS: Final = 20  # the grid is at most 2^-20 standard deviations wide
_GUARD: Final = 32  # binary digits by which a boundary is known better than U
_BLOCK: Final = 2**15  # numbers that are made at a time: they stay in the processor's cache
_LEAST_NOISE: Final = 1e-6  # clipping norms; epsilon is beyond 10^11 there
_ZEROS: Final = memoryview(bytes(2**19))  # what is encrypted: the stream itself
_BLOCK_WORDS: Final = 8  # of ChaCha20, whose counter says with which block a stream begins
_STREAM_LIMIT: Final = 2**37  # bytes; half of what a ChaCha20 counter can address


class Normals(Protocol):
    """A faster source of the same N(0, 1) numbers as ``Noise`` makes, up to float64's rounding.

    The last bit of each word ``first`` is a number's sign; first >> 1, then ``second``, are the binary digits of U.
    """

    def draw(self, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return the N(0, 1) numbers, in the shape of ``first``."""
        ...

    def rounded(self, first: NDArray[np.uint64], ratio: float, out: NDArray[np.float64]) -> NDArray[np.intp]:
        """Write the numbers times ``ratio``, rounded, to ``out``; return the indices that need the second word."""
        ...


@dataclass(frozen=True)
class Law:
    """A symmetric distribution of scale 1, described by P(|N| > x).

    ``quantile`` overwrites each float64 probability p with an approximation of the x for which P(|N| > x) = p, up to
    the sign of x. ``beyond`` returns P(|N| > b / ratio), times 2^digits, rounded to an integer with an error up to 1.
    """

    quantile: Callable[[NDArray[np.float64]], None]
    beyond: Callable[[float, float, int], int]


@dataclass(frozen=True)
class Noise:
    """A source of random numbers: one independent ChaCha20 stream per (purpose, round) from one 32-byte key.

    The key is a secret: its owner can subtract the noise. No representation, log or result contains the key.
    ``simulation_only``: the key can be guessed (it comes from a seed), so no real person is protected. ``normals``: a
    faster source of normal numbers; rounded to the grid they are exactly the same numbers.
    """

    key: bytes = field(repr=False)
    simulation_only: bool
    normals: Normals | None = field(default=None, repr=False, compare=False)

    @classmethod
    def secret(cls) -> "Noise":
        """Return a source of secret noise; every call takes a fresh key from the operating system."""
        return cls(os.urandom(32), simulation_only=False)

    @classmethod
    def seeded(cls, seed: int) -> "Noise":
        """Return a source of seeded noise, which is repeatable and for simulations only."""
        return cls(hashlib.sha256(f"simulated privacy noise {seed}".encode()).digest(), simulation_only=True)

    @property
    def identity(self) -> str:
        """Return a name of the key that does not reveal the key; equal keys have equal names."""
        return hashlib.sha256(b"identity" + self.key).hexdigest()[:16]

    def gaussian(self, count: int, std: float, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return ``count`` independent N(0, std^2) numbers in grid steps, each rounded exactly to a whole number.

        ``std`` > 0; a grid step is ``grid_spacing(std)``. The same arguments give the same numbers.
        """
        return self._steps(GAUSSIAN, count, std, purpose, server_round)

    def laplace(self, count: int, scale: float, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return Laplace numbers in the form of ``gaussian``, with a density proportional to exp(-|x| / scale)."""
        return self._steps(LAPLACE, count, scale, purpose, server_round)

    def standard_normal(self, count: int, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return ``count`` independent N(0, 1) numbers in float64, for sums without private numbers."""
        first, second = self._words(2 * count, purpose, server_round).reshape(2, count)
        if self.normals:
            return self.normals.draw(first, second)
        # Where the 63 digits begin with so many zeros that fewer than 53 significant ones are left, the second word
        # adds the rest, so that the tail is as finely resolved as the middle and does not end at 9 sigma.
        normal = (first >> np.uint64(1)).astype(np.float64)
        small = np.flatnonzero(normal < 2.0**53)
        normal[small] += (second[small] >> np.uint64(11)) * 2.0**-53 + 2.0**-54
        normal *= 2.0**-63
        GAUSSIAN.quantile(normal)
        return _with_signs(normal, first)

    def uniform(self, count: int, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return ``count`` independent uniform numbers in [0, 1), such as those that secret Poisson sampling needs."""
        words = self._words(count, purpose, server_round)
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def taking_part(self, count: int, sampling_rate: float, *, purpose: str, server_round: int) -> NDArray[np.bool_]:
        """Return the mask of sampled units, (count,): the same as ``takes_part`` of ``count`` ``uniform`` numbers."""
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
                # Behind the words of all numbers lie their second ones, which few numbers need.
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
        """Return ``count`` words of a stream, after its first ``behind`` words."""
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
    """Return the mask of units that Poisson sampling draws; ``coins`` are ``uniform`` numbers, one for each unit.

    The numbers are multiples of 2^-53, so the rate is rounded down to such a multiple. A rate between two multiples
    would otherwise be rounded up, and a unit would take part more often than its accountant assumes.
    """
    return coins < _limit(sampling_rate) * 2.0**-53


def _limit(sampling_rate: float) -> int:
    return math.floor(math.ldexp(sampling_rate, 53))


def grid_spacing(std: float) -> float:
    """Return the grid step, a power of two: a sum and its noise (std ``std`` > 0) are rounded to its multiples."""
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _GRID_BITS)


def clip_factor(norm: float, clipping_norm: float) -> float:
    """Return the factor that brings a vector of ``norm`` down to ``clipping_norm``.

    The factor is 1 for a zero vector, and 0 for a vector that is not finite. Such a vector counts as the zero vector,
    and must be left out of the sum, not multiplied by the factor (0 * nan is nan).
    """
    if not math.isfinite(norm):
        return 0.0
    return 1.0 if norm <= clipping_norm else clipping_norm / norm


def clipping_norm_on_grid(clipping_norm: float, std: float, dimension: int, *, summands: int) -> float:
    """Return the norm L to clip to so that a sum *rounded to the grid* still moves by at most ``clipping_norm``.

    The sum has ``dimension`` numbers and at most ``summands`` clipped vectors (a public number). Rounding to the grid
    moves the difference of two sums by at most one spacing per number. The rest is float64, with u = 2^-53: a norm is
    too small by at most (dimension / 2 + 4) u L, its factor and the products included; and a sum is off by at most u
    times the norms of all its partial sums and products, (n^2 / 2 + n) u L, in either of two neighbouring worlds. Twice
    all that is set aside, for the terms quadratic in u. Raises UserError where nothing would remain.
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

    float64 rounds the exact sum of both, so the result depends on nothing else. With ``std`` 0 there is neither grid
    nor noise, and ``total`` is returned as given.
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
    """Return z_delta = (z^-2 - (2 sigma_b)^-2)^-1/2, the updates' multiplier: counts and updates together cost z.

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
    """Return the next clipping norm, S exp(-eta (b~ - gamma)).

    The norm S falls when the norms of more than the target share of updates are at most S.
    """
    return clipping_norm * math.exp(-learning_rate * (noisy_share - target_quantile))


def _rounded(law: Law, words: NDArray[np.uint64], ratio: float, out: NDArray[np.float64]) -> NDArray[np.intp]:
    """Write the numbers, rounded to whole steps, into ``out``; return the indices where float64 is undecided."""
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


def _with_signs(numbers: NDArray[np.float64], words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return ``numbers``, overwritten with the sign in the last bit of each word, 1 for minus."""
    np.copysign(numbers, 0.5 - (words & np.uint64(1)), out=numbers)
    return numbers


def exact_step(law: Law, ratio: float, digits: int, num_digits: int, more: Callable[[], int]) -> int:
    """Return |N| in grid steps, rounded exactly to a whole number, where N is ``ratio`` times a draw of ``law``.

    P(|N| > x) = U at the x that is returned; ``digits`` are the first ``num_digits`` binary digits of U, and ``more``
    draws 64 further ones.
    """
    while True:
        if digits.bit_length() >= 64:  # else U is not known well enough to say near which boundary it lies
            probability = np.array([digits / (1 << num_digits)])
            law.quantile(probability)
            below = math.floor(abs(float(probability[0])) * ratio)
            boundary = law.beyond(below + 0.5, ratio, num_digits + _GUARD)
            if (digits << _GUARD) > boundary + 1:
                return below
            if ((digits + 1) << _GUARD) < boundary - 1:
                return below + 1
        digits, num_digits = digits << 64 | more(), num_digits + 64


def _gaussian_quantile(probabilities: NDArray[np.float64]) -> None:
    from scipy.special import ndtri  # noqa: PLC0415 (slow, and a run without noise does not need it)

    probabilities *= 0.5
    ndtri(probabilities, out=probabilities)


def _laplace_quantile(probabilities: NDArray[np.float64]) -> None:
    np.log(probabilities, out=probabilities)


def _gaussian_tail(boundary: Any, precision: int) -> Any:
    """Return erfc(x / sqrt 2)."""
    from mpmath import libmp  # noqa: PLC0415 (as above)

    root = libmp.mpf_sqrt(libmp.from_int(2), precision)
    return libmp.mpf_erfc(libmp.mpf_div(boundary, root, precision), precision)


def _laplace_tail(boundary: Any, precision: int) -> Any:
    from mpmath import libmp  # noqa: PLC0415 (as above)

    return libmp.mpf_exp(libmp.mpf_neg(boundary), precision)


def _beyond(tail: Callable[[Any, int], Any], boundary: float, ratio: float, digits: int) -> int:
    from mpmath import libmp  # noqa: PLC0415 (as above)

    precision = digits + 64
    quotient = libmp.mpf_div(libmp.from_float(boundary), libmp.from_float(ratio), precision)
    return int(libmp.to_int(libmp.mpf_shift(tail(quotient, precision), digits)))


GAUSSIAN: Final = Law(_gaussian_quantile, partial(_beyond, _gaussian_tail))
LAPLACE: Final = Law(_laplace_quantile, partial(_beyond, _laplace_tail))
