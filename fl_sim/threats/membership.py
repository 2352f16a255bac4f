"""Membership inference by a threshold on the loss (Yeom et al. 2018): members have smaller losses than non-members."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_sim.threats.finished import Judged

_NORMAL_95 = 1.959963984540054


@dataclass(frozen=True)
class Area:
    """The area under the ROC curve of a membership test, and its 95 % confidence interval.

    ``area``: the probability that a member has a smaller loss than a non-member of the same classes; 0.5 is chance.
    ``low``, ``high``: the limits of the confidence interval (Hanley and McNeil 1982, equation 2).
    """

    area: float
    low: float
    high: float


def area_by_loss(members: Judged, others: Judged) -> Area | None:
    """Return the area under the ROC curve of a membership test by the loss.

    ``members``: the predictions on members. ``others``: the predictions on non-members. Returns None if no class has
    both members and non-members.

    The members may have few classes, for example if they belong to one client. So the non-members get weights w, which
    give them the class proportions of the members. Members of classes without non-members are left out. The interval
    uses the effective sample size of the weights, (sum w)^2 / sum w^2, as the number of non-members.
    """
    size = 1 + int(max(members.labels.max(initial=0), others.labels.max(initial=0)))
    wanted, there = (np.bincount(one.labels, minlength=size) for one in (members, others))
    wanted = np.where(there > 0, wanted, 0)
    weights = (wanted / np.maximum(there, 1))[others.labels]
    chosen = members.losses[(there > 0)[members.labels]]
    if not len(chosen) or not weights.any():
        return None
    area = _weighted_area(chosen, others.losses, weights)
    effective = weights.sum() ** 2 / (weights**2).sum()
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (len(chosen) - 1) * (first - area**2) + (effective - 1) * (second - area**2)
    half = _NORMAL_95 * math.sqrt(max(0.0, spread) / (len(chosen) * effective))
    return Area(area, max(0.0, area - half), min(1.0, area + half))


def _weighted_area(small: NDArray[np.float64], large: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Return the weighted probability that a number in ``small`` is below a number in ``large``; ties count 1/2."""
    order = np.argsort(large)
    total = np.concatenate([[0.0], np.cumsum(weights[order])])
    below, upto = (np.searchsorted(large[order], small, side) for side in ("left", "right"))
    return float((1 - (total[below] + total[upto]) / (2 * total[-1])).mean())


@dataclass(frozen=True)
class Rate:
    """The true-positive rate of a membership test at a false-positive rate, with its 95 % confidence interval.

    ``false_positives``: the largest allowed false-positive rate. ``rate``: the true-positive rate. ``low``, ``high``:
    the limits of the confidence interval by Clopper and Pearson. They ignore that the threshold of the test depends on
    the sample of non-members.
    """

    false_positives: float
    rate: float
    low: float
    high: float


def rate_at(members: Judged, others: Judged, false_positives: float) -> Rate | None:
    """Return the true-positive rate of the test "the loss is below a threshold"; None for too few records.

    ``false_positives``: the largest allowed false-positive rate, in (0, 1). At least 1 / ``false_positives``
    non-members (``others``) are needed. The threshold is the largest loss of a non-member at which the false-positive
    rate is at most ``false_positives``.
    """
    allowed = int(false_positives * len(others.losses))
    if not allowed or not len(members.losses):
        return None
    hits, count = int((members.losses < np.sort(others.losses)[allowed]).sum()), len(members.losses)
    return Rate(false_positives, hits / count, *share_interval(hits, count))


def share_interval(hits: int, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval by Clopper and Pearson, after ``hits`` successes in ``count`` trials."""
    from scipy.stats import beta  # noqa: PLC0415 (the import takes half a second)

    low = float(beta.ppf(0.025, hits, count - hits + 1)) if hits else 0.0
    high = float(beta.ppf(0.975, hits + 1, count - hits)) if hits < count else 1.0
    return low, high


def most_allowed(epsilon: float | None, delta: float, false_positives: float) -> float:
    """Return an upper bound on the true-positive rate of any membership test, if a record has differential privacy.

    ``epsilon``, ``delta``: the differential privacy of the record. The bound is min(1, e^epsilon FPR + delta, 1 -
    e^-epsilon (1 - delta - FPR)) by Kairouz et al. 2015, theorem 2.1, where FPR is the false-positive rate. The bound
    is 1 if ``epsilon`` is None (no guarantee).
    """
    if epsilon is None or epsilon > _LARGEST_EPSILON:
        return 1.0
    rest = 1 - math.exp(-epsilon) * (1 - delta - false_positives)
    return min(1.0, math.exp(epsilon) * false_positives + delta, rest)


_LARGEST_EPSILON = 700.0
