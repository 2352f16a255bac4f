"""Delta of composed releases, by integrals of their own: no PLD grid, no FFT noise, nothing of dp_accounting.

With K(s) = log E[e^(s L)] of one release's loss L under the first of two neighbours,

    delta(epsilon) = 1 / (2 pi i) integral over Re s = c of exp(T K(s) - s epsilon) / (s (s + 1)) ds    for any c > 0,

the inverse Laplace transform of E[(1 - e^(epsilon - L))+]. At the saddle point the integrand is real and falls about as
a Gaussian does, so the sum over points of a line is right to a small part of delta however small that is.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Losses:
    """The loss of one release under one neighbour: its values, and the logarithms of their probabilities."""

    values: Array
    logs: Array

    def log_moment(self, order: float) -> float:
        """Return K(order)."""
        terms = self.logs + order * self.values
        most = float(terms.max())
        return most + math.log(float(np.exp(terms - most).sum()))

    def tilted(self, order: float) -> Array:
        """Return the probabilities under which K'(order) is the mean."""
        found: Array = np.exp(self.logs + order * self.values - self.log_moment(order))
        return found


def poisson_gaussian(rate: float, noise: float, *, fineness: int = 40, reach: float = 60.0) -> tuple[Losses, Losses]:
    """Return the losses of the sampled Gaussian mechanism where a unit is removed, and where it is added."""
    step = noise / fineness
    points = np.arange(-14 * noise - 1 - reach, 14 * noise + 1 + reach, step)
    plain = -((points / noise) ** 2) / 2 - math.log(noise * math.sqrt(2 * math.pi)) + math.log(step)
    loss = np.logaddexp(math.log1p(-rate) if rate < 1 else -np.inf, math.log(rate) + (2 * points - 1) / (2 * noise**2))
    return Losses(loss, plain + loss), Losses(-loss, plain)


def laplace(epsilon: float, *, num_points: int = 2000) -> tuple[Losses]:
    """Return the losses of the Laplace mechanism, which are the same both ways round."""
    points = (np.arange(num_points) + 0.5) / num_points
    middle = math.log(epsilon / 2 / num_points) - epsilon * points
    values = np.concatenate([[epsilon, -epsilon], epsilon * (1 - 2 * points)])
    return (Losses(values, np.concatenate([[math.log(0.5), math.log(0.5) - epsilon], middle])),)


def randomised_response_delta(epsilon: float, times: int, at: float) -> float:
    """Return delta at ``at`` of randomised response, which the geometric mechanism equals: a sum over a binomial."""
    from scipy.stats import binom

    told = np.arange(times + 1)
    loss = epsilon * (2 * told - times)
    chances = binom.logpmf(told, times, 1 / (1 + math.exp(-epsilon)))
    above = loss > at
    return math.fsum(np.exp(chances[above]) * -np.expm1(at - loss[above]))


def delta_of(losses: Losses, times: int, epsilon: float) -> float:
    """Return delta at ``epsilon`` of ``times`` releases."""

    def slope(order: float) -> float:
        mean = float(losses.tilted(order) @ losses.values)
        return times * mean - epsilon - 1 / order - 1 / (order + 1)

    high = 1.0
    while slope(high) < 0:
        high *= 2
        if high > 1e7:
            return 0.0
    order = brentq(slope, 1e-9, high, xtol=1e-9, rtol=1e-9)
    weights = losses.tilted(order)
    keep = weights > 1e-24
    weights, values = weights[keep], losses.values[keep]
    mean = float(weights @ values)
    spread = times * float(weights @ (values - mean) ** 2) + order**-2 + (order + 1) ** -2
    step, total, start = 1 / math.sqrt(spread) / 6, 0.0, 0
    while True:
        at = np.arange(start, start + 64) * step
        moments = np.exp(1j * np.outer(at, values - mean)) @ weights
        points = order + 1j * at
        with np.errstate(divide="ignore"):
            found = np.exp(times * np.log(moments) + 1j * at * (times * mean - epsilon)) / (points * (points + 1))
        total += float(found.real.sum()) - (float(found[0].real) / 2 if start == 0 else 0.0)
        if np.abs(found[-8:]).max() < 1e-10 * abs(total):
            return math.exp(times * losses.log_moment(order) - order * epsilon) * total * step / math.pi
        start += 64
        if start > 40_000:
            raise ArithmeticError("the integrand does not fall: the loss has atoms, or its grid is too coarse")


def larger_delta(pair: tuple[Losses, ...], times: int, epsilon: float) -> float:
    """Return the delta that holds at ``epsilon`` both ways round."""
    return max(delta_of(losses, times, epsilon) for losses in pair)
