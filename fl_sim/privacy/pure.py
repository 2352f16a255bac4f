"""Releases whose privacy loss is bounded: pure differential privacy, and the tighter bounded range.

No mechanism of pure epsilon loses more than randomised response does (Kairouz, Oh, Viswanath 2015), which the geometric
mechanism equals: its loss is +epsilon or -epsilon, nothing else. A loss that stays within a range of width epsilon, as
the exponential mechanism's does, costs at most epsilon^2 / 8 in zCDP (Cesar, Rogers 2021), a quarter of that.
"""

import math
from dataclasses import dataclass

import numpy as np
from dp_accounting import dp_event
from numpy.typing import NDArray
from scipy.special import log_expit


@dataclass(frozen=True)
class BoundedRangeDpEvent(dp_event.DpEvent):  # type: ignore[misc] # comes without types
    """A release that is ``epsilon``-bounded-range, hence ``epsilon``-DP, when one unit is added or removed.

    The exponential mechanism with weights exp(epsilon u / (2 sensitivity of u)) is one.
    """

    epsilon: float


def pure_epsilon(event: dp_event.DpEvent) -> float:
    """Return the epsilon that holds at delta 0; ``inf`` where none is known."""
    match event:
        case BoundedRangeDpEvent(epsilon=epsilon):
            return epsilon
        case dp_event.DiscreteLaplaceDpEvent(noise_parameter=parameter, sensitivity=sensitivity):
            return float(parameter * sensitivity)
        case dp_event.LaplaceDpEvent(noise_multiplier=scale):
            return 1 / scale if scale > 0 else math.inf
        case _:
            return math.inf


def bounded_loss_curve(event: dp_event.DpEvent, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Renyi divergences of a release with a ``pure_epsilon`` at ``orders`` > 1."""
    epsilon = pure_epsilon(event)
    curve = _randomised_response(epsilon, orders)
    if isinstance(event, BoundedRangeDpEvent):
        curve = np.minimum(curve, epsilon**2 / 8 * orders)
    return curve


def with_the_same_loss(event: dp_event.DpEvent) -> dp_event.DpEvent:
    """Return an event that loses at least as much as ``event``, in terms that dp_accounting's PLD knows."""
    if isinstance(event, BoundedRangeDpEvent):
        return dp_event.DiscreteLaplaceDpEvent(event.epsilon, 1)
    return event


def _randomised_response(epsilon: float, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log(p e^x + (1 - p) e^-x) / (a - 1) at x = (a - 1) epsilon and p = 1 / (1 + e^-epsilon)."""
    exponent = (orders - 1) * epsilon
    # Written so that nothing cancels where epsilon is small, and nothing overflows where it is large.
    few = np.minimum(exponent, 1.0)
    small = np.log1p(2 * np.sinh(few / 2) ** 2 + math.tanh(epsilon / 2) * np.sinh(few))
    large = np.logaddexp(log_expit(epsilon) + exponent, log_expit(-epsilon) - exponent)
    curve: NDArray[np.float64] = np.where(exponent < 1.0, small, large) / (orders - 1)
    return curve
