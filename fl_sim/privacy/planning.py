"""Planning a budget: noise from epsilon, steps that fit, and whether delta is small enough."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final

from dp_accounting import dp_event
from scipy.optimize import brentq

from fl_sim.errors import UserError
from fl_sim.privacy.accounting import Accountant, amplify_poisson, epsilon_of_counts, searching_epsilon

_TOLERANCE: Final = 1e-4
_MOST_NOISE: Final = 1e7
_LEAST_NOISE: Final = 1e-2
_MOST_STEPS: Final = 10**8


def noise_multiplier(
    amplify: Callable[[dp_event.DpEvent], dp_event.DpEvent],
    steps: int,
    target_epsilon: float,
    delta: float,
    *,
    accountant: Accountant = "rdp",
) -> float:
    """Return the least noise multiplier at which ``steps`` releases cost at most ``target_epsilon``.

    ``amplify`` turns the Gaussian event into the sampled one, such as ``partial(amplify_poisson, sampling_rate=0.1)``.
    Found by RDP, then refined by PLD where that is asked for; at most 1e-4 (relative) too high, and never below 0.01.
    """
    if steps < 1:
        raise UserError(f"{steps} steps: give at least 1")
    _check_target(target_epsilon)

    def spent(noise: float, by: Accountant) -> float:
        return epsilon_of_counts({amplify(dp_event.GaussianDpEvent(noise)): steps}, delta, accountant=by)

    def roughly(noise: float) -> float:
        return searching_epsilon(amplify(dp_event.GaussianDpEvent(noise)), steps, delta)

    found = _least(roughly, target_epsilon, start=1.0)
    if accountant == "pld":
        found = _least(lambda noise: spent(noise, "pld"), target_epsilon, start=found)
    assert spent(found, accountant) <= target_epsilon
    return found


@lru_cache(maxsize=256)
def poisson_noise_multiplier(sampling_rate: float, steps: int, target_epsilon: float, delta: float) -> float:
    """Return ``noise_multiplier`` under Poisson sampling. Clients that hold equally many records need one search."""
    amplify = partial(amplify_poisson, sampling_rate=sampling_rate)
    return noise_multiplier(amplify, steps, target_epsilon, delta)


def least_noise(spent: Callable[[float, Accountant], float], target_epsilon: float, accountant: Accountant) -> float:
    """Return the least noise multiplier at which ``spent(noise, accountant)`` is at most ``target_epsilon``.

    Found by RDP, then refined by PLD where that is asked for.
    """
    _check_target(target_epsilon)
    found = _least(lambda noise: spent(noise, "rdp"), target_epsilon, start=1.0)
    if accountant == "pld":
        found = _least(lambda noise: spent(noise, "pld"), target_epsilon, start=found)
    return found


def noise_beyond(target_epsilon: float, delta: float, *, accountant: Accountant = "rdp") -> float:
    """Return the noise multiplier of a Gaussian release that ``target_epsilon`` does not afford, by little.

    All Gaussian releases that it affords together are less.
    """
    found = noise_multiplier(lambda event: event, 1, target_epsilon, delta, accountant=accountant)
    while True:
        found *= 1 - _TOLERANCE * 10
        if epsilon_of_counts({dp_event.GaussianDpEvent(found): 1}, delta, accountant=accountant) > target_epsilon:
            return found


def steps_that_fit(
    event: dp_event.DpEvent, target_epsilon: float, delta: float, *, accountant: Accountant = "rdp"
) -> int:
    """Return how often ``event`` can be released within ``target_epsilon``: never one too many, 0 if not once."""
    _check_target(target_epsilon)
    fits = _most(lambda steps: epsilon_of_counts({event: steps}, delta), target_epsilon, start=0)
    if accountant == "pld":
        # PLD is never above RDP, so what fits by RDP fits.
        fits = _most(
            lambda steps: epsilon_of_counts({event: steps}, delta, accountant="pld"), target_epsilon, start=fits
        )
    return fits


def delta_advice(delta: float, units: float) -> str | None:
    """Return a warning where ``delta`` is too large for ``units`` protected units, else None.

    At 1/units and above, publishing one unit's data whole, chosen at random, would satisfy the definition.
    """
    advice = f"use delta <= {1 / (10 * units):.1g}, that is 1 / (10 x {units:g})"
    if delta >= 1 / units:
        return (
            f"delta {delta:g} is not below 1 / {units:g}: publishing one unit's data whole would satisfy it; {advice}"
        )
    if delta > 1 / (10 * units):
        return f"delta {delta:g} is large for {units:g} protected units; {advice}"
    return None


def _least(spent: Callable[[float], float], target: float, start: float) -> float:
    """Return the least x with ``spent(x) <= target``, from above; ``spent`` falls about as a power of x."""
    high = start
    while spent(high) > target:
        high *= 2
        if high > _MOST_NOISE:
            raise UserError(f"epsilon {target:g} is out of reach at this delta: no noise multiplier up to 1e7 gives it")
    low = high
    while spent(low) <= target:
        if low <= _LEAST_NOISE:
            return _LEAST_NOISE
        low = max(0.8 * low, _LEAST_NOISE)

    def gap(log_noise: float) -> float:
        return math.log(min(max(spent(math.exp(log_noise)), 1e-12), 1e12) / target)

    found = math.exp(brentq(gap, math.log(low), math.log(high), xtol=_TOLERANCE / 4) + _TOLERANCE / 4)
    while spent(found) > target:
        found *= 1 + _TOLERANCE / 4
    return min(found, high)


def _most(spent: Callable[[int], float], target: float, start: int) -> int:
    """Return the largest n with ``spent(n) <= target``, given that ``start`` fits."""
    fits, stride = start, max(1, start // 16)
    while spent(fits + stride) <= target:
        fits, stride = fits + stride, 2 * stride
        if fits > _MOST_STEPS:
            raise UserError(f"more than {_MOST_STEPS} steps fit epsilon {target:g}: set the number of steps instead")
    too_many = fits + stride
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if spent(middle) <= target else (fits, middle)
    return fits


def _check_target(target: float) -> None:
    if not 0 < target < math.inf:
        raise UserError(f"target epsilon {target} is not a positive number: choose one such as 8")
