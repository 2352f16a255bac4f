"""Means over seeds, how far they scatter, and whether one row is better than another on the same seeds.

The ± of every table and the band of every curve is the sample standard deviation (ddof = 1) over seeds.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

FEWEST = 3
"""With fewer seeds no interval is given: the t interval of two differences is 25 standard errors wide."""

ENOUGH = 20
"""From as many seeds on the interval is a bootstrap's, below Student's t.

The bootstrap of n differences never leaves the smallest and the largest of them and is too narrow by about
sqrt((n - 1) / n) * z / t (Hesterberg 2015, "What Teachers Should Know About the Bootstrap"): of three seeds it holds
the truth in 75 % of all cases in place of 95 %, of ten in 90 % (benchmarks/interval_coverage.py). Of normal
differences t is exact for any number.
"""

LEVEL: Final = 0.95
_RESAMPLES: Final = 10_000
_SEED: Final = 20_150_903
"""The resamples are the same in every process: the same values have the same interval."""


@dataclass(frozen=True)
class Difference:
    """How far a row lies from another one, paired by seed: the mean, and its 95 % interval from ``low`` to ``high``."""

    seeds: int
    mean: float
    low: float
    high: float
    method: Literal["t", "bootstrap"]

    @property
    def is_significant(self) -> bool:
        """Return whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and the sample standard deviation (ddof = 1), None where there are too few values."""
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def difference(pairs: Sequence[tuple[float, float]]) -> Difference | None:
    """Return the first's difference to the second of each pair, None for fewer than three pairs.

    The interval is Student's t for fewer than 20 pairs, else the bias-corrected and accelerated bootstrap (BCa) of the
    mean difference (Efron 1987), 10,000 resamples of pairs. It is not corrected for how many rows are compared.
    """
    differences = np.array([one - other for one, other in pairs])
    if len(differences) < FEWEST:
        return None
    mean = float(differences.mean())
    if np.ptp(differences) == 0:
        return Difference(len(differences), mean, mean, mean, "t")
    if len(differences) < ENOUGH:
        return Difference(len(differences), mean, *_student(differences), "t")
    return Difference(len(differences), mean, *_bootstrap(differences), "bootstrap")


def _student(values: NDArray[np.float64]) -> tuple[float, float]:
    from scipy.special import stdtrit  # noqa: PLC0415 (half a second to import, and one seed needs none)

    n = len(values)
    reach = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * float(values.std(ddof=1)) / n**0.5
    return float(values.mean()) - reach, float(values.mean()) + reach


def _bootstrap(values: NDArray[np.float64]) -> tuple[float, float]:
    from scipy.special import ndtr, ndtri  # noqa: PLC0415

    n, mean = len(values), values.mean()
    draws = np.random.default_rng(_SEED).integers(n, size=(_RESAMPLES, n))
    means = values[draws].mean(axis=1)
    below = ((means < mean).sum() + (means == mean).sum() / 2) / _RESAMPLES
    bias = ndtri(np.clip(below, 1 / _RESAMPLES, 1 - 1 / _RESAMPLES))
    left_out = (values.sum() - values) / (n - 1)
    pull = left_out.mean() - left_out
    acceleration = (pull**3).sum() / (6 * (pull**2).sum() ** 1.5)
    tails = bias + ndtri(np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    low, high = np.quantile(means, ndtr(bias + tails / (1 - acceleration * tails)))
    return float(low), float(high)
