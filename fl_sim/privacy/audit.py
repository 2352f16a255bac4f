"""Audits of mechanisms: lower bounds on epsilon from many runs on two neighbouring data sets, or from one run.

Privacy-profile audit: the two data sets are called worlds. World 1 contains the audited unit (a worst case), world 0
does not. P0 and P1 are the probabilities of outputs in world 0 and world 1. A claim (epsilon, delta(epsilon))
is refuted if the audit proves, at its confidence, P1(E) - e^epsilon P0(E) > delta(epsilon) for a set E of outputs. E is
found on one half of the runs and tested on the other half (Clopper-Pearson intervals, Bonferroni correction over all
sets). If the outputs are likelihood ratios, the sets are fixed, and all runs test these sets.
Noise calibration: tests whether the noise in every coordinate has the distribution N(0, std^2).

Audit of one run with canaries (Steinke, Nasr, Jagielski 2023, algorithm 1, theorem 5.2): each of m records or clients,
the canaries, takes part with probability 1/2, independently. The auditor sees all outputs that the run publishes. For
some canaries, the auditor guesses whether they took part. Too many correct guesses refute (epsilon, delta). A single
run can prove only a limited epsilon: about ln(m / ln(1 / p)) if all guesses are correct, where p is the error
probability of the audit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

World: TypeAlias = Literal[0, 1]
"""The world of a run: 0 without the audited unit, 1 with this unit."""

Mechanism: TypeAlias = Callable[[World, int], NDArray[np.float64]]
"""A function (world, index of the run) -> released vector, shape (coordinates,). Runs are independent."""

EPSILONS: Final = (0.0, 0.5, 1.0, 2.0)
CONFIDENCE: Final = 0.95
SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
"""Shares of the canaries that are guessed as "in"; the same share is guessed as "out".

All shares are fixed in advance. Each share gives a bound, so the bounds need a Bonferroni correction.
"""


@dataclass(frozen=True)
class ProfileAudit:
    """The result of a privacy-profile audit: at each epsilon, the claimed delta and a proven lower bound on delta.

    ``epsilons``: the audited epsilons. ``claimed``: the claimed delta at each of these epsilons. ``lower_bounds``:
    proven lower bounds on delta, jointly valid at the confidence of the audit. ``estimates``: estimated deltas,
    without confidence. ``epsilon_lower_bound``: a lower bound on epsilon at the delta of the audit, proven at the same
    confidence; 0 if nothing is proven.
    """

    epsilons: tuple[float, ...]
    claimed: tuple[float, ...]
    lower_bounds: tuple[float, ...]
    estimates: tuple[float, ...]
    epsilon_lower_bound: float

    @property
    def refuted(self) -> bool:
        """Return True if the audit proves, at its confidence, that the claim is false: a claimed delta is too small."""
        return any(bound > claim for bound, claim in zip(self.lower_bounds, self.claimed, strict=True))

    @property
    def power(self) -> float:
        """Return the estimated delta at epsilon 0, divided by the claimed delta at epsilon 0.

        A ratio near 1 means that the audit detects the whole claimed privacy loss. A small ratio means a weak audit.
        """
        return self.estimates[0] / self.claimed[0]


def run_mechanism(mechanism: Mechanism, num_runs: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the outputs of a mechanism in world 0 (without the audited unit) and in world 1 (with it).

    In each world there are ``num_runs`` runs. Both arrays have the shape (num_runs, coordinates).
    """
    without = np.stack([mechanism(0, run) for run in range(num_runs)])
    return without, np.stack([mechanism(1, run) for run in range(num_runs, 2 * num_runs)])


def audit_profile(
    without: NDArray[np.float64],
    with_unit: NDArray[np.float64],
    claimed: Sequence[float],
    *,
    epsilons: Sequence[float] = EPSILONS,
    delta: float = 1e-5,
    confidence: float = 0.95,
) -> ProfileAudit:
    """Test a privacy claim about a mechanism by its outputs without and with the audited unit.

    ``without``, ``with_unit``: the outputs in world 0 and in world 1, shape (runs, coordinates). ``claimed``: the
    claimed delta for each of ``epsilons``.

    The score of an output is its likelihood ratio under two Gaussians, which are fitted to the first half of the
    runs. Such a score detects a shift, a wrong scale, and coordinates without noise. ``delta``: the delta of the
    lower bound on epsilon.
    """
    half = len(without) // 2
    score = _likelihood_ratio(without[:half], with_unit[:half])
    fit, judge = (score(without[:half]), score(with_unit[:half])), (score(without[half:]), score(with_unit[half:]))
    # Bonferroni correction. For each epsilon, 4 probabilities get a confidence bound: P0 and P1, for high and for low
    # scores. The lower bound on epsilon needs 4 further bounds.
    level = (1 - confidence) / (4 * (len(epsilons) + 1))
    bounds, estimates = [], []
    for epsilon in epsilons:
        sides = [_judge(fit, judge, epsilon, level), _judge(_mirrored(fit), _mirrored(judge), epsilon, level)]
        bounds.append(max(low - math.exp(epsilon) * high for low, high, _ in sides))
        estimates.append(max(estimate for _, _, estimate in sides))
    proven = [
        _proven_epsilon(fit, judge, delta, level),
        _proven_epsilon(_mirrored(fit), _mirrored(judge), delta, level),
    ]
    return ProfileAudit(tuple(epsilons), tuple(claimed), tuple(bounds), tuple(estimates), max(proven))


def audit_ratios(
    without: NDArray[np.float64],
    with_unit: NDArray[np.float64],
    claimed: Sequence[float],
    *,
    epsilons: Sequence[float] = EPSILONS,
    delta: float = 1e-5,
    confidence: float = 0.95,
) -> ProfileAudit:
    """Test a privacy claim about a mechanism by the log likelihood ratios of its outputs (see ``audit_profile``).

    ``without``, ``with_unit``: the ratios in world 0 and in world 1, shape (runs,).

    The caller computes the ratio of each output by a formula. So the sets of outputs are fixed, and no run is needed to
    choose them. For each epsilon there are two sets: the outputs with a ratio above epsilon, and the outputs with a
    ratio below minus epsilon. A formula for a different mechanism would give weaker bounds, but no false bounds.
    """
    level = (1 - confidence) / (4 * len(epsilons))  # Bonferroni: bounds on P0 and P1, for 2 sets per epsilon
    bounds, estimates, epsilon_bounds = [], [], [0.0]
    for epsilon in epsilons:
        found = []
        for there, away in ((with_unit, without), (-without, -with_unit)):
            hits, errors, factor = int((there > epsilon).sum()), int((away > epsilon).sum()), math.exp(epsilon)
            low, high = _lower(hits, len(there), level), _upper(errors, len(away), level)
            found.append((low - factor * high, hits / len(there) - factor * errors / len(away)))
            if low > delta:
                epsilon_bounds.append(math.log((low - delta) / high))
        bounds.append(max(bound for bound, _ in found))
        estimates.append(max(estimate for _, estimate in found))
    return ProfileAudit(tuple(epsilons), tuple(claimed), tuple(bounds), tuple(estimates), max(epsilon_bounds))


def least_refuted(audit: ProfileAudit, claims: Callable[[float], Sequence[float]], noise_multiplier: float) -> float:
    """Return the smallest noise multiplier, within 1 %, that the audit proves to be too large for the mechanism.

    ``claims`` maps a noise multiplier to the claims of the same mechanism with this noise: a delta for each of
    ``audit.epsilons``. A noise multiplier is too large if the audit refutes its claims. So the audited mechanism
    protects at most as well as one with the returned noise multiplier. An accountant turns this noise multiplier into a
    lower bound on epsilon. Nasr et al. 2023 fit a mechanism's trade-off curve in the same way.

    The search begins at ``noise_multiplier``, the noise multiplier of the audited mechanism. Returns infinity if the
    audit does not refute the claim for 100 times this noise multiplier. Returns a quarter of this noise multiplier if
    the audit refutes the claim for this quarter.
    """

    def is_refuted(noise: float) -> bool:
        return any(bound > claim for bound, claim in zip(audit.lower_bounds, claims(noise), strict=True))

    kept, refuted = noise_multiplier / 4, noise_multiplier
    if is_refuted(kept):
        return kept
    while not is_refuted(refuted):
        if refuted >= 100 * noise_multiplier:
            return math.inf
        kept, refuted = refuted, 2 * refuted
    while refuted > 1.01 * kept:
        middle = math.sqrt(kept * refuted)
        kept, refuted = (kept, middle) if is_refuted(middle) else (middle, refuted)
    return refuted


def noise_calibration(residuals: NDArray[np.float64]) -> dict[str, float]:
    """Return {test: p-value} for the hypothesis that ``residuals`` are independent N(0, 1) numbers.

    ``residuals``: shape (runs, coordinates), in claimed standard deviations. Each p-value is two-sided and corrected
    for the number of its coordinates. A tiny p-value means that the noise is wrong. Each test is named after the
    property that it tests, such as "mean" or "independence of runs".
    """
    runs, coordinates = residuals.shape
    squares = residuals**2
    per_coordinate = [_chi_square(float(column), runs) for column in squares.sum(axis=0)]
    next_run = float((residuals[1:] * residuals[:-1]).sum()) / math.sqrt((runs - 1) * coordinates)
    next_coordinate = float((residuals[:, 1:] * residuals[:, :-1]).sum()) / math.sqrt(runs * max(coordinates - 1, 1))
    return {
        "variance": _chi_square(float(squares.sum()), residuals.size),
        "variance of the worst coordinate": min(1.0, coordinates * min(per_coordinate)),
        "mean": _two_sided(float(residuals.sum()) / math.sqrt(residuals.size)),
        "shape": float(stats.kstest(residuals.ravel(), "norm").pvalue),
        "independence of runs": _two_sided(next_run),
        "independence of coordinates": _two_sided(next_coordinate),
    }


@dataclass(frozen=True)
class Guess:
    """The result of an audit with canaries: numbers of guesses and correct guesses, and a lower bound on epsilon."""

    guesses: int
    correct: int
    epsilon_lower_bound: float


def guess(
    scores: NDArray[np.float64], taking_part: NDArray[np.bool_], delta: float, *, confidence: float = CONFIDENCE
) -> tuple[Guess, ...]:
    """Guess "in" for the canaries with the highest scores, and "out" for the same number with the lowest scores.

    ``scores``: (canaries,). ``taking_part``: (canaries,), True for canaries that took part in the run. Equal scores are
    ranked by their index, so the order of the canaries must not depend on ``taking_part``. Returns one ``Guess`` for
    each share of guessed canaries in ``SHARES``. The lower bounds of all shares are jointly valid at ``confidence``.
    """
    order = np.argsort(scores, kind="stable")
    found = []
    for share in SHARES:
        side = max(1, int(share * len(scores)))
        correct = int((~taking_part[order[:side]]).sum() + taking_part[order[-side:]].sum())
        bound = epsilon_lower_bound(len(scores), 2 * side, correct, delta, (1 - confidence) / len(SHARES))
        found.append(Guess(2 * side, correct, bound))
    return tuple(found)


def epsilon_lower_bound(num_canaries: int, guesses: int, correct: int, delta: float, level: float) -> float:
    """Return the largest epsilon that the canaries' guesses refute at ``delta``; 0 if none is refuted.

    ``guesses``: the number of guesses. ``correct``: the number of correct guesses. An epsilon is refuted if an
    (epsilon, delta)-DP run has at least ``correct`` correct guesses with a probability below ``level``.

    ``level``: the probability of a false refutation.
    """

    def gap(epsilon: float) -> float:
        return p_value(num_canaries, guesses, correct, epsilon, delta) - level

    if gap(0.0) >= 0:
        return 0.0
    # The guesses refute all epsilons below the root of ``gap``. Because of rounding errors, a slightly smaller epsilon
    # is returned.
    return float(optimize.bisect(gap, 0.0, 30.0, xtol=1e-4)) - 1e-4


def p_value(num_canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return an upper bound on the probability of ``correct`` or more correct guesses in an (epsilon, delta)-DP run.

    The bound is theorem 5.2 of Steinke et al. 2023. ``guesses``: the number of guesses.

    At delta 0 each guess is correct with probability at most p = e^epsilon / (1 + e^epsilon), whatever the other
    guesses are. For a positive delta, a term is added: 2 m delta times the largest P(correct > W >= correct - i) / i
    over i = 1, 2, .... m is the number of canaries. W is binomial: ``guesses`` trials with probability p.
    """
    law = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    below = np.cumsum(law.pmf(np.arange(correct - 1, -1, -1))) / np.arange(1, correct + 1)
    extra = 2 * num_canaries * delta * float(below.max(initial=0.0))
    return min(1.0, float(law.sf(correct - 1)) + extra)


def power_limit(num_canaries: int, delta: float) -> float:
    """Return the largest epsilon that an audit of one run with canaries can refute.

    The audit refutes this epsilon if all guesses are correct.
    """
    perfect = np.arange(num_canaries, dtype=np.float64)
    return max(one.epsilon_lower_bound for one in guess(perfect, perfect >= num_canaries // 2, delta))


def epsilon_estimate(scores: NDArray[np.float64], taking_part: NDArray[np.bool_], delta: float) -> float:
    """Return an estimate of epsilon at ``delta``, which is no proven bound (Andrew et al. 2024).

    The canaries that took part in the run and the other canaries are two groups. The estimate is the epsilon of two
    Gaussians that are as far apart as the scores of the two groups. ``scores``, ``taking_part``: shape (canaries,).
    Returns 0 if the canaries in the run have no higher scores than the others, and infinity for an estimate above 500.
    """
    members, others = scores[taking_part], scores[~taking_part]
    shift, spread = float(members.mean() - others.mean()), float(max(members.std(ddof=1), others.std(ddof=1)))
    if shift <= 0:
        return 0.0
    if spread * 500 <= shift:  # comparing products avoids a division by 0
        return math.inf
    distance = shift / spread

    def excess(epsilon: float) -> float:
        upper = stats.norm.cdf(distance / 2 - epsilon / distance)
        return float(upper - math.exp(epsilon) * stats.norm.cdf(-distance / 2 - epsilon / distance)) - delta

    # The formula is corollary 2.13 of Dong, Roth, Su 2022. Above an epsilon of 500, e^epsilon may overflow; such a
    # large epsilon is no protection, and counts as infinite.
    return float(optimize.brentq(excess, 0.0, 500.0)) if excess(0.0) > 0 > excess(500.0) else math.inf


_Scores: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]


def _likelihood_ratio(
    without: NDArray[np.float64], with_unit: NDArray[np.float64]
) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    means = without.mean(axis=0), with_unit.mean(axis=0)
    # The smallest variance that is used for a coordinate. It keeps the likelihood ratio finite if a coordinate has no
    # noise.
    floor = 1e-12 * float(np.concatenate([without, with_unit]).var(axis=0).max()) + 1e-300
    variances = np.maximum(without.var(axis=0), floor), np.maximum(with_unit.var(axis=0), floor)

    def score(outputs: NDArray[np.float64]) -> NDArray[np.float64]:
        logs = [((outputs - m) ** 2 / v + np.log(v)).sum(axis=1) for m, v in zip(means, variances, strict=True)]
        ratio: NDArray[np.float64] = (logs[0] - logs[1]) / 2
        return ratio

    return score


def _judge(fit: _Scores, judge: _Scores, epsilon: float, level: float) -> tuple[float, float, float]:
    """Test the claim at one ``epsilon`` on a set of outputs E: return (lower bound on P1, upper bound on P0, estimate).

    ``estimate``: an estimate of delta, P1 - e^epsilon P0, without a confidence bound.

    E is the set of outputs whose score exceeds a threshold, which is chosen on the scores ``fit`` of one half of the
    runs. P0 and P1 are the probabilities of E in world 0 and world 1. The bounds on P0 and P1 come from the scores
    ``judge`` of the other half. ``level``: the error probability of each bound.
    """
    threshold = _best_threshold(fit, lambda p1, p0: p1 - math.exp(epsilon) * p0)
    hits0, hits1 = (int((scores > threshold).sum()) for scores in judge)
    low, high = _lower(hits1, len(judge[1]), level), _upper(hits0, len(judge[0]), level)
    return low, high, hits1 / len(judge[1]) - math.exp(epsilon) * hits0 / len(judge[0])


def _proven_epsilon(fit: _Scores, judge: _Scores, delta: float, level: float) -> float:
    count = len(fit[0])
    # Choose the set of outputs with the largest lower bound on epsilon. For speed, 3 / count and 7 / count stand for
    # the widths of the confidence intervals.
    threshold = _best_threshold(fit, lambda p1, p0: np.maximum(p1 - delta - 3 / count, 1e-12) / (p0 + 7 / count))
    hits0, hits1 = (int((scores > threshold).sum()) for scores in judge)
    low, high = _lower(hits1, len(judge[1]), level) - delta, _upper(hits0, len(judge[0]), level)
    return max(0.0, math.log(low / high)) if low > 0 else 0.0


def _best_threshold(
    fit: _Scores, gain: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]
) -> float:
    candidates = np.sort(np.concatenate(fit))
    p0, p1 = (1 - np.searchsorted(np.sort(scores), candidates, side="right") / len(scores) for scores in fit)
    return float(candidates[int(np.argmax(gain(p1, p0)))])


def _mirrored(scores: _Scores) -> _Scores:
    return -scores[1], -scores[0]


def _lower(hits: int, runs: int, level: float) -> float:
    return float(stats.beta.ppf(level, hits, runs - hits + 1)) if hits else 0.0


def _upper(hits: int, runs: int, level: float) -> float:
    return float(stats.beta.ppf(1 - level, hits + 1, runs - hits)) if hits < runs else 1.0


def _chi_square(total: float, degrees: int) -> float:
    return min(1.0, 2 * min(float(stats.chi2.cdf(total, degrees)), float(stats.chi2.sf(total, degrees))))


def _two_sided(normal: float) -> float:
    return 2 * float(stats.norm.sf(abs(normal)))
