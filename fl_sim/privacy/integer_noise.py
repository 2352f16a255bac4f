"""Integer noise for sums of whole numbers, drawn from secret random words.

* Skellam noise is the difference of two independent Poisson variables of the same mean. A sum of Skellam variables is
  Skellam again (Agarwal, Kairouz, Liu 2021, "The Skellam mechanism for differentially private federated learning").
* A discrete Gaussian variable of parameter s^2 has the value k with a probability proportional to
  exp(-k^2 / (2 s^2)). See Canonne, Kamath, Steinke 2020. A sum of such variables is only approximately a discrete
  Gaussian. See Kairouz, Liu, Steinke 2021, "The distributed discrete Gaussian mechanism for federated learning with
  secure aggregation".

A number is drawn by comparing the binary digits of a uniform number with a table of the distribution function. The
entries of the table have 127 digits, and the table ends where the tail is below 2^-130. So the distribution of a drawn
number and the exact distribution have a total variation distance of at most 2^-104. If 2^10 clients draw 2^22 numbers
each in 2^10 rounds, the sum of the distances is 2^-62. The aggregator ``distributed-dp`` refuses a delta below 1e-12,
which is far above this sum. So the distances are negligible.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.privacy.mechanisms import Noise

Mechanism: TypeAlias = Literal["skellam", "discrete-gaussian"]

VARIANCE_STEPS: Final = 2**10
"""Variances are multiples of 1 / ``VARIANCE_STEPS``, so that they are exact fractions."""

_DIGITS: Final = 127  # number of binary digits of a probability in a ``NoiseTable``
_WORKING: Final = 320  # number of binary digits of the arithmetic that computes a ``NoiseTable``
_MASK: Final = 2**64 - 1
_TAIL: Final = 100.0  # the probability of numbers beyond the table is below 2 exp(-_TAIL) < 2^-130


def drawn(
    mechanism: Mechanism, variance: float, noise: Noise, count: int, *, purpose: str, server_round: int
) -> NDArray[np.int64]:
    """Return ``count`` independent noise numbers (integers), drawn from the stream (purpose, round) of ``noise``.

    ``variance``: the variance of a Skellam number, or the parameter s^2 of a discrete Gaussian number. ``variance``
    must be a multiple of 1 / ``VARIANCE_STEPS``. A variance of 0 gives zeros.
    """
    if variance == 0:
        return np.zeros(count, np.int64)
    table = table_of(mechanism, variance)
    words = noise.words(count, purpose=purpose, server_round=server_round)
    digits = words >> np.uint64(1)
    found = table.num_below(digits)
    for place in np.flatnonzero((found > 0) & (table.high[found - 1] == digits)).tolist():
        # Here the first 63 digits of the uniform number equal those of a table entry. So the next 64 digits are
        # compared.
        [second] = noise.words(1, purpose=purpose, server_round=server_round, behind=count + place)
        first = int(np.searchsorted(table.high, digits[place], side="left"))
        found[place] = first + int(np.searchsorted(table.low[first : found[place]], second, side="right"))
    magnitude = np.minimum(found, len(table.high) - 1).astype(np.int64)
    return np.where(words & np.uint64(1), -magnitude, magnitude)


@dataclass(frozen=True)
class NoiseTable:
    """A table of the distribution function of |N|, the absolute value of a noise number N.

    Entry k is P(|N| <= k) times 2^127, rounded down: ``high`` is the first 63 binary digits, ``low`` the last 64.
    """

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]

    def num_below(self, digits: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return, for each number in ``digits`` (63 bits), the number of entries of ``high`` that are not larger.

        For most numbers, the first 16 bits determine the result. The results for all 2^16 values of these bits are
        cached in an array.
        """
        found: NDArray[np.int64] = self._by_first_bits[digits >> np.uint64(47)]
        rest = np.flatnonzero(self.high[found] <= digits)
        found[rest] = np.searchsorted(self.high, digits[rest], side="right")
        return found

    @cached_property
    def _by_first_bits(self) -> NDArray[np.int64]:
        return np.searchsorted(self.high, np.arange(2**16, dtype=np.uint64) << np.uint64(47), side="right")


@lru_cache(maxsize=4)
def table_of(mechanism: Mechanism, variance: float) -> NoiseTable:
    """Return the table of a noise distribution. For a standard deviation of 40,000 grid steps, this takes a second."""
    numerator = round(variance * VARIANCE_STEPS)
    assert numerator > 0
    assert numerator == variance * VARIANCE_STEPS
    # by Bernstein's inequality, the tail beyond the entry ``last`` has a probability below 2 exp(-_TAIL)
    last = math.ceil(_TAIL / 3 + math.sqrt((_TAIL / 3) ** 2 + 2 * _TAIL * variance)) + 1
    weights = (_skellam_weights if mechanism == "skellam" else _gaussian_weights)(numerator, last)
    total, cumulative = weights[0] + 2 * sum(weights[1:]), -weights[0]
    high, low = np.empty(last + 1, np.uint64), np.empty(last + 1, np.uint64)
    for k, weight in enumerate(weights):
        cumulative += 2 * weight
        threshold = min((cumulative << _DIGITS) // total, (1 << _DIGITS) - 1)
        high[k], low[k] = threshold >> 64, threshold & _MASK
    return NoiseTable(high, low)


def _skellam_weights(numerator: int, last: int) -> list[int]:
    """Return numbers in proportion to the probabilities of 0, ..., ``last``: the Bessel functions I_k(variance).

    The recurrence I_(k-1) = I_(k+1) + (2 k / variance) I_k is numerically stable for decreasing k (Miller's algorithm).
    """
    weights = [0, 1 << (_WORKING // 2)]
    for k in range(last, 0, -1):
        weights.append(weights[-2] + 2 * k * VARIANCE_STEPS * weights[-1] // numerator)
    return weights[:0:-1]


def _gaussian_weights(numerator: int, last: int) -> list[int]:
    """Return numbers in proportion to the probabilities of 0, ..., ``last``: exp(-k^2 / (2 variance))."""
    from mpmath import libmp  # noqa: PLC0415 (slow, and a run without noise does not need it)

    exponent = libmp.from_rational(-VARIANCE_STEPS, 2 * numerator, _WORKING + 64)
    ratio = int(libmp.to_int(libmp.mpf_shift(libmp.mpf_exp(exponent, _WORKING + 64), _WORKING)))
    step = ratio * ratio >> _WORKING
    weights = [1 << _WORKING]
    for _ in range(last):
        weights.append(weights[-1] * ratio >> _WORKING)
        ratio = ratio * step >> _WORKING
    return weights
