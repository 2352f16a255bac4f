"""Clipping and noise in float64.

Noise comes from one ChaCha20 stream of random bits for each purpose and round. Sum and noise are rounded to the same
grid, the multiples of a power of two g.

Plain float64 noise has no privacy proof: the low bits of its numbers can distinguish sums (Mironov 2012, "On
significance of the least significant bits"). The rounding to a grid gives a proof. For a sum t on the grid,
t + g round(N / g) = g round((t + N) / g). So if the noise N is rounded *exactly*, the released number is the rounded
result of the exact Gaussian (or Laplace) mechanism on real numbers. Rounding uses nothing private, so the release is
as private as the exact mechanism, with nothing added to epsilon or delta. The proof needs two facts:

1. The sensitivity of the rounded sum is at most the clipping norm: ``clipping_norm_on_grid``.
2. round(N / g) is exact. N = Q(U), where Q is the quantile function of the noise, and U is uniform on (0, 1). First, 63
   binary digits of U are drawn, and float64 gives an approximation of N / g. The approximation is rounded correctly if
   its distance from the nearest boundary k + 1/2 (k: a whole number) exceeds ``TOLERANCE`` and U is not below
   ``DECIDED``. The further digits of such a U change N / g by less than TOLERANCE / 200. For all other numbers (about
   one in 44,000), the first 127 digits of U are compared with the probability of the boundary, which is computed to as
   many digits as needed. If 127 digits do not decide, further digits are drawn. Next to a boundary, the compiled code
   first compares 63 digits with this probability in float64. This comparison decides if the relative difference of U
   and the probability is more than ``CLOSE``.

Assumptions: ChaCha20 under a random key gives random bits. ``scipy.special.ndtri``, ``numpy.log`` and the compiled
quantile (``fl_sim/native/normals.h``) have errors below ``TOLERANCE`` grid steps. ``TOLERANCE`` is about 400 times the
documented error of these functions, and a test compares the functions with mpmath, including the tails. The C library's
``erfc`` has an error below ``CLOSE`` / 100, and the rounding of its argument changes the result by less than CLOSE /
20. mpmath is right to the requested number of digits.

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
"""The least uniform number U whose first 63 binary digits suffice to round a noise number to the grid.

The noise number is Q(U), and g is the grid step (see the module). |dQ/dU| is at most 1.3 / U. A standard deviation (the
scale of a Laplace distribution) is less than 2^21 g. Half a unit of the 63rd digit is 2^-64. So the error of
Q(U) / g is at most 1.3 x 2^-26.
"""
CLOSE: Final = 2.0**-43
"""Relative difference of U and a boundary's probability, above which float64 decides which of them is larger.

U is above ``DECIDED``, so the digits after its 63rd digit change U by a relative amount below 2^-46.
"""
_GRID_BITS: Final = 20  # a grid step is at most 2^-20 standard deviations of the noise
_GUARD: Final = 32  # a boundary's probability has this number of binary digits more than U
_BLOCK: Final = 2**15  # noise numbers are computed in blocks of this length, which fit into the processor's cache
_LEAST_NOISE: Final = 1e-6  # smallest noise multiplier; its epsilon is already above 10^11
_ZEROS: Final = memoryview(bytes(2**19))  # zero bytes: their ChaCha20 ciphertext is the random stream
_BLOCK_WORDS: Final = 8  # number of 64-bit words in a block of ChaCha20, whose counter counts such blocks
_STREAM_LIMIT: Final = 2**37  # maximum length of a key stream in bytes, half of what ChaCha20's counter allows


class Normals(Protocol):
    """A faster generator of normal numbers for ``Noise``. The numbers are the same up to float64 rounding.

    A number N is computed from two random words of 64 bits, in the arrays ``first`` and ``second``. The last bit of the
    first word is the sign of N. The other 63 bits of the first word, followed by the second word, are the binary digits
    of U. |N| is the quantile x at which the tail probability P(|N| > x) is U.
    """

    def draw(self, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return one N(0, 1) number for each pair of words in ``first`` and ``second``, in the shape of ``first``."""
        ...

    def rounded(self, first: NDArray[np.uint64], ratio: float, out: NDArray[np.float64]) -> NDArray[np.intp]:
        """Multiply the N(0, 1) numbers by ``ratio``, round the products to whole numbers, and write them to ``out``.

        Returns the indices of the numbers whose rounding also depends on the second word. The caller rounds these
        numbers.
        """
        ...


@dataclass(frozen=True)
class Law:
    """A symmetric distribution of scale 1, described by the tail probability P(|N| > x).

    N is a random number with this distribution. ``quantile(p)`` replaces each probability p in an array, in place, by
    the x with P(|N| > x) = p. The x is approximate, and its sign is undefined. ``beyond(b, ratio, digits)`` returns
    P(|N| > b / ratio) times 2^digits, as an integer with an error of at most 1.
    """

    quantile: Callable[[NDArray[np.float64]], None]
    beyond: Callable[[float, float, int], int]


@dataclass(frozen=True)
class Noise:
    """A source of random numbers: one independent ChaCha20 stream per (purpose, round), all from one 32-byte key.

    The key is a secret: its owner can subtract the noise. No text form of this object, no log and no result contains
    the key. ``simulation_only``: True if the key comes from a seed and can be guessed, so that no real person is
    protected. ``normals``: a faster generator of normal numbers, or None. Numbers that are rounded to the grid are
    exactly the same with and without this generator.
    """

    key: bytes = field(repr=False)
    simulation_only: bool
    normals: Normals | None = field(default=None, repr=False, compare=False)

    @classmethod
    def secret(cls) -> "Noise":
        """Return a source of secret noise; every call gets a new key from the operating system."""
        return cls(os.urandom(32), simulation_only=False)

    @classmethod
    def seeded(cls, seed: int) -> "Noise":
        """Return a source of seeded noise, which is repeatable and for simulations only."""
        return cls(hashlib.sha256(f"simulated privacy noise {seed}".encode()).digest(), simulation_only=True)

    @property
    def identity(self) -> str:
        """Return a digest of the secret key. It identifies the key, but does not reveal it."""
        return hashlib.sha256(b"identity" + self.key).hexdigest()[:16]

    def gaussian(self, count: int, std: float, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return ``count`` independent N(0, std^2) numbers in grid steps, each rounded exactly to a whole number.

        A grid step is ``grid_spacing(std)``; ``std`` must be positive. The same arguments give the same
        numbers.
        """
        return self._steps(GAUSSIAN, count, std, purpose, server_round)

    def laplace(self, count: int, scale: float, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return ``count`` independent Laplace numbers in grid steps, each rounded exactly to a whole number.

        Their density is proportional to exp(-|x| / scale). A grid step is ``grid_spacing(scale)``.
        """
        return self._steps(LAPLACE, count, scale, purpose, server_round)

    def standard_normal(self, count: int, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return ``count`` independent N(0, 1) numbers in float64, which are not rounded to a grid.

        Do not use them as noise on private sums: such noise needs ``gaussian``.
        """
        first, second = self._words(2 * count, purpose, server_round).reshape(2, count)
        if self.normals:
            return self.normals.draw(first, second)
        # A small uniform number U begins with zeros, so its 63 digits have fewer than 53 significant digits.
        # The digits of the second word are added. Without them, the tail would be coarse and end at 9 sigma.
        normal = (first >> np.uint64(1)).astype(np.float64)
        small = np.flatnonzero(normal < 2.0**53)
        normal[small] += (second[small] >> np.uint64(11)) * 2.0**-53 + 2.0**-54
        normal *= 2.0**-63
        GAUSSIAN.quantile(normal)
        return _with_signs(normal, first)

    def uniform(self, count: int, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        """Return ``count`` independent uniform numbers in [0, 1), for example for secret Poisson sampling."""
        words = self._words(count, purpose, server_round)
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def taking_part(self, count: int, sampling_rate: float, *, purpose: str, server_round: int) -> NDArray[np.bool_]:
        """Return the mask of the units that Poisson sampling draws, shape (count,).

        The mask equals the result of ``takes_part`` for ``count`` numbers from ``uniform``, but is computed faster.
        """
        if (below := words_below(sampling_rate)) == 1 << 64:
            return np.ones(count, np.bool_)
        return self._words(count, purpose, server_round) < np.uint64(below)

    def gaussian_number(self, place: int, count: int, std: float, *, purpose: str, server_round: int) -> float:
        """Return one number of the array that ``gaussian`` returns for the same arguments; no other is computed.

        ``place``: the index of this number in the array.
        """
        [word] = self._words(1, purpose, server_round, behind=place)
        return self._exactly(GAUSSIAN, std / grid_spacing(std), (place, int(word), count), purpose, server_round)

    def words(self, count: int, *, purpose: str, server_round: int, behind: int = 0) -> NDArray[np.uint64]:
        """Return ``count`` random 64-bit words of the stream (purpose, round), after its first ``behind`` words."""
        return self._words(count, purpose, server_round, behind=behind)

    def stream_key(self, *, purpose: str, server_round: int) -> bytes:
        """Return the ChaCha20 key, 32 bytes, of the stream (purpose, round). Keep it as secret as the source's key.

        The stream begins at block 0, with a nonce of zeros.
        """
        return self._key(purpose, server_round)

    def _key(self, purpose: str, server_round: int) -> bytes:
        return hashlib.blake2b(f"{server_round}:{purpose}".encode(), key=self.key, digest_size=32).digest()

    def _steps(self, law: Law, count: int, scale: float, purpose: str, server_round: int) -> NDArray[np.float64]:
        words = self._words(count, purpose, server_round)
        ratio = scale / grid_spacing(scale)
        rounded = self.normals.rounded if self.normals and law is GAUSSIAN else partial(_rounded, law)
        steps = np.empty(count)
        for start in range(0, count, _BLOCK):
            block = slice(start, min(start + _BLOCK, count))
            for place in start + rounded(words[block], ratio, out=steps[block]):
                number = int(place), int(words[place]), count
                steps[place] = self._exactly(law, ratio, number, purpose, server_round)
        return steps

    def _exactly(self, law: Law, ratio: float, number: tuple[int, int, int], purpose: str, server_round: int) -> float:
        """Return one noise number of a random stream in grid steps, rounded exactly to a whole number.

        ``number``: (index of the number in the stream, first of its two random words, count of all numbers).
        """
        place, word, count = number
        # Each number is computed from two random words. The stream holds the first words of all numbers, followed by
        # the second words of all numbers, which are seldom needed.
        [second] = self._words(1, purpose, server_round, behind=count + place)
        more = self._further(f"{purpose}: digits of number {place}", server_round)
        magnitude = exact_step(law, ratio, word >> 1 << 64 | int(second), 127, more)
        return -float(magnitude) if word & 1 else float(magnitude)

    def _further(self, purpose: str, server_round: int) -> Callable[[], int]:
        draws = itertools.count(1)
        return lambda: int(self._words(next(draws), purpose, server_round)[-1])

    def _words(self, count: int, purpose: str, server_round: int, *, behind: int = 0) -> NDArray[np.uint64]:
        """Return ``count`` random 64-bit words of the stream (purpose, round), after its first ``behind`` words."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms  # noqa: PLC0415 (settings need no noise)

        assert 8 * (behind + count) < _STREAM_LIMIT
        stream_key = self._key(purpose, server_round)
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
    """Return the mask of the units that Poisson sampling draws; ``coins`` has one ``uniform`` number for each unit.

    The numbers in ``coins`` are multiples of 2^-53, so the rate is rounded down to such a multiple. If the rate were
    not rounded down, a unit could take part slightly more often than the privacy accountant assumes.
    """
    return coins < _limit(sampling_rate) * 2.0**-53


def words_below(sampling_rate: float) -> int:
    """Return the limit L, 0 to 2^64: in Poisson sampling, a unit takes part if its random 64-bit word is below L."""
    return _limit(sampling_rate) << 11


def _limit(sampling_rate: float) -> int:
    return math.floor(math.ldexp(sampling_rate, 53))


def grid_spacing(std: float) -> float:
    """Return the grid step, a power of two, for noise with standard deviation ``std`` > 0.

    The noise and the sum to which it is added are rounded to multiples of this step.
    """
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _GRID_BITS)


def clip_factor(norm: float, clipping_norm: float) -> float:
    """Return the factor that scales a vector of ``norm`` down to ``clipping_norm``; 1 if its norm is not larger.

    The factor is 0 for a vector that is not finite, which counts as the zero vector. The caller must leave this vector
    out of the sum. A multiplication by 0 would not work, because 0 * nan is nan.
    """
    if not math.isfinite(norm):
        return 0.0
    return 1.0 if norm <= clipping_norm else clipping_norm / norm


def clipping_norm_on_grid(clipping_norm: float, std: float, dimension: int, *, summands: int) -> float:
    """Return the norm L for clipping, so that a sum *rounded to the grid* has the sensitivity ``clipping_norm``.

    The sum has ``dimension`` numbers and at most ``summands`` clipped vectors (a public number n). L is smaller than
    ``clipping_norm``, to make up for two kinds of errors. First, rounding to the grid changes the difference of two
    sums by at most one grid step in each number. Second, float64 rounds; let u = 2^-53. A norm is too small by at most
    (dimension / 2 + 4) u L, including the errors of the clipping factor and of the products. A sum is wrong by at most
    u times the norms of all its partial sums and products, that is (n^2 / 2 + n) u L, on each of two adjacent data
    sets. Twice the float64 error is subtracted, to cover the terms quadratic in u. Raises UserError if L would be at
    most half of ``clipping_norm``.
    """
    if std == 0:
        return clipping_norm
    if std < _LEAST_NOISE * clipping_norm:
        raise UserError(
            f"noise of {std / clipping_norm:g} clipping norms hides nothing: choose a noise_multiplier of at least "
            f"{_LEAST_NOISE:g}, or 0 for no noise and no guarantee"
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
    """Return ``total``, rounded to the grid, plus the noise ``steps`` (whole grid steps) of standard deviation ``std``.

    The result is the exact sum of the rounded total and the noise, rounded to float64. So the result reveals nothing
    but this sum. If ``std`` is 0, there is no grid and no noise: ``total`` is returned unchanged.
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
    """Return z_delta = (z^-2 - (2 sigma_b)^-2)^-1/2, the noise multiplier of the updates under adaptive clipping.

    With this noise multiplier, the noisy updates and the noisy clipping counts together cost as much as one release
    with noise multiplier z. ``count_std`` is sigma_b, the standard deviation of the noise on the sum of (b_i - 1/2),
    whose sensitivity is 1/2. Raises UserError if the noisy counts alone would cost more than a release with noise
    multiplier z.
    """
    if not 2 * count_std > noise_multiplier > 0:
        raise UserError(
            f"adaptive clipping with count_noise {count_std:g} leaves no privacy budget for the updates at "
            f"noise_multiplier {noise_multiplier:g}: choose a positive noise_multiplier, and count_noise larger than "
            "noise_multiplier / 2"
        )
    return float((noise_multiplier**-2 - (2 * count_std) ** -2) ** -0.5)


def next_clipping_norm(
    clipping_norm: float, noisy_share: float, *, target_quantile: float, learning_rate: float
) -> float:
    """Return the clipping norm of the next round, S exp(-eta (b~ - gamma)).

    S is the ``clipping_norm`` of this round, and eta is the ``learning_rate``. ``noisy_share`` is b~, the noisy share
    of updates with a norm of at most S. ``target_quantile`` is gamma. If b~ is above gamma, S decreases.
    """
    return clipping_norm * math.exp(-learning_rate * (noisy_share - target_quantile))


def _rounded(law: Law, words: NDArray[np.uint64], ratio: float, out: NDArray[np.float64]) -> NDArray[np.intp]:
    """Compute a noise number from each random word in ``words``, and write it, in whole grid steps, to ``out``.

    Return the indices of the numbers whose rounding may be wrong. The caller must compute these numbers exactly.
    """
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
    # Two kinds of numbers need exact rounding: numbers near a boundary k + 1/2, and numbers with a U so small that 63
    # binary digits do not suffice.
    return np.flatnonzero((found > 0.5 - TOLERANCE) | is_small)


def _with_signs(numbers: NDArray[np.float64], words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Set the sign of each number in ``numbers`` in place, and return ``numbers``.

    The sign of ``numbers[i]`` is the last bit of the random integer ``words[i]``: 1 for minus, 0 for plus.
    """
    np.copysign(numbers, 0.5 - (words & np.uint64(1)), out=numbers)
    return numbers


def exact_step(law: Law, ratio: float, digits: int, num_digits: int, more: Callable[[], int]) -> int:
    """Return |N| in grid steps, rounded exactly to a whole number, where N is ``ratio`` times a draw of ``law``.

    A draw of ``law`` has the absolute value x with P(|draw| > x) = U, where U is uniform on (0, 1). ``digits`` are the
    first ``num_digits`` binary digits of U. ``more()`` returns the next 64 digits.
    """
    while True:
        if digits.bit_length() >= 64:  # otherwise U has too few digits to round the number
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
