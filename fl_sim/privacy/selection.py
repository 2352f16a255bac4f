"""Private selection: the privacy cost of choosing the best of a random number of private runs.

To choose settings, a user repeats a private run with settings drawn at random from a fixed list, and publishes only the
best result. If the number of runs K is random and stays secret, this costs much less than the publication of all
results (Papernot and Steinke 2022, "Hyperparameter tuning with Renyi differential privacy"). The bounds have three
conditions. The distribution of K does not depend on the data. Each run has the same Renyi ``Curve``, whatever its
settings. The score that ranks the results is part of the private result, or is computed from public records only.

Let f(x) = E[x^K], and let q and p be the probabilities of one event under two adjacent data sets. The cost at order a
is at most the cost of one run plus log(f'(q)^a f'(p)^(1 - a)) / (a - 1) (lemma 7).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias

import numpy as np
from dp_accounting import dp_event
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq

from fl_sim.errors import UserError
from fl_sim.privacy.accounting import compose, epsilon_of_curve, least_noise
from fl_sim.privacy.renyi import ORDERS, Curve, checked

TrialsKind: TypeAlias = Literal["negative-binomial", "poisson"]

_ORDERS: Final = np.array(ORDERS)
_LESS: Final = _ORDERS - 1
_MOST_TRIALS: Final = 1e6


@dataclass(frozen=True)
class NegativeBinomialTrials:
    """A truncated negative binomial number of trials, at least 1 (Papernot and Steinke 2022, definition 1).

    P(K = k) is proportional to (1 - gamma)^k times the product of (l + eta) / (l + 1) over l = 0, ..., k - 1.

    ``mean``: the expected number of trials, 1 to 1e6. ``eta``: the shape, above -1. The shape 1 is the geometric
    distribution, and 0 is the logarithmic distribution. For runs with a pure epsilon, a smaller shape costs less, but
    very small and very large numbers of trials are more likely. Raises UserError for other values.
    """

    mean: float
    eta: float = 1.0

    def __post_init__(self) -> None:
        _check_mean(self.mean)
        if not -1 < self.eta <= 100:
            raise UserError(f"eta {self.eta:g} is not in (-1, 100]: choose 1 (geometric) or 0 (logarithmic)")

    @cached_property
    def gamma(self) -> float:
        """The parameter in (0, 1] with which the expected number of trials is ``mean``; 1 for exactly one trial."""
        if self.mean == 1:
            return 1.0
        lowest = -40.0
        while self._mean_at(lowest) < self.mean:
            lowest *= 2
        return math.exp(brentq(lambda log_gamma: self._mean_at(log_gamma) - self.mean, lowest, -1e-12, xtol=1e-15))

    def _mean_at(self, log_gamma: float) -> float:
        """Return the expected number of trials. ``log_gamma``: the logarithm of gamma, below 0."""
        odds = -math.expm1(log_gamma) * math.exp(-log_gamma)
        return odds / -log_gamma if self.eta == 0 else odds * self.eta / -math.expm1(self.eta * log_gamma)

    def probabilities(self, most: int) -> NDArray[np.float64]:
        """Return P(K = k) for k = 0, ..., ``most``: shape (most + 1,)."""
        steps = np.arange(1.0, most)
        ratios = (1 - self.gamma) * (steps + self.eta) / (steps + 1)
        less = -math.expm1(self.eta * math.log(self.gamma)) / self.eta if self.eta else -math.log(self.gamma)
        first = (1 - self.gamma) * self.gamma**self.eta / less if self.gamma < 1 else 1.0
        return np.concatenate([[0.0], first * np.cumprod(np.concatenate([[1.0], ratios]))])[: most + 1]

    def cost(self, run: Curve) -> Curve:
        """Return the selection's Renyi divergences at ``ORDERS``, by theorem 2 of Papernot and Steinke 2022.

        ``run``: the divergences of one run.
        """
        if self.mean == 1:
            return run
        spread = (1 - 1 / _ORDERS) * run + math.log(1 / self.gamma) / _ORDERS
        return np.asarray(run + (1 + self.eta) * spread.min() + math.log(self.mean) / _LESS)


@dataclass(frozen=True)
class PoissonTrials:
    """A Poisson number of trials. If this number is 0, the result is a fixed result that depends on no data.

    ``mean``: the expected number of trials, 1 to 1e6. Raises UserError for other values.
    """

    mean: float

    def __post_init__(self) -> None:
        _check_mean(self.mean)

    def probabilities(self, most: int) -> NDArray[np.float64]:
        """Return P(K = k) for k = 0, ..., ``most``: shape (most + 1,)."""
        return np.asarray(stats.poisson(self.mean).pmf(np.arange(most + 1)))

    def cost(self, run: Curve) -> Curve:
        """Return the selection's Renyi divergences at ``ORDERS``, by theorem 6 of Papernot and Steinke 2022.

        ``run``: the divergences of one run.

        At order a, one run must be (log(a / (a - 1)), delta)-private. This delta is computed from ``run``. Theorem 6
        leaves out the outcome "no trial", which has the same probability for all data. The cost here includes it.
        """
        allowed = -np.log1p(-1 / _ORDERS)
        logs = _LESS * (run - allowed[:, None] + np.log1p(-1 / _ORDERS)) - np.log(_ORDERS)
        deltas = np.exp(np.minimum(logs.min(axis=1), 0.0))
        trials = math.log(self.mean) + _LESS * (run + self.mean * deltas)
        return np.asarray(np.logaddexp(-self.mean, trials) / _LESS)


Trials: TypeAlias = NegativeBinomialTrials | PoissonTrials


def most_likely_at_most(trials: Trials, share: float) -> int:
    """Return the smallest number k with P(K <= k) >= ``share``, a number in (0, 1)."""
    most = 64
    while (total := np.cumsum(trials.probabilities(most)))[-1] < share:
        most *= 2
    return int(np.searchsorted(total, share))


def selection_curve(run: Curve, trials: Trials) -> Curve:
    """Return the Renyi divergences at ``ORDERS`` of publishing only the best result of ``trials`` runs.

    ``run``: the divergences of one run. The result is never below ``run``.
    """
    with np.errstate(over="ignore"):
        found = np.maximum(run, trials.cost(run))
    # The divergence never decreases with the order, so a bound at a higher order holds at all lower orders, too.
    return np.minimum.accumulate(checked(found)[::-1])[::-1]


def epsilon_of_selection(counts: Mapping[dp_event.DpEvent, int], trials: Trials, delta: float) -> float:
    """Return the RDP epsilon at ``delta`` of publishing only the best of ``trials`` runs.

    ``counts``: the releases of one run, {privacy event: number of its releases}.
    """
    return epsilon_of_curve(selection_curve(compose(counts), trials), delta)


def noise_of_selection(
    counts_of: Callable[[float], Mapping[dp_event.DpEvent, int]], trials: Trials, target_epsilon: float, delta: float
) -> float:
    """Return the smallest noise multiplier with which the selection costs at most ``target_epsilon`` at ``delta``.

    ``counts_of``: a function from a noise multiplier to the releases of one run, {privacy event: number}.
    """
    return least_noise(
        lambda noise, _: epsilon_of_selection(counts_of(noise), trials, delta), target_epsilon, accountant="rdp"
    )


def _check_mean(mean: float) -> None:
    if not 1 <= mean <= _MOST_TRIALS:
        raise UserError(f"{mean:g} trials on average: give a number from 1 to {_MOST_TRIALS:g}")
