"""Epsilon of a list of releases (published noisy results), and the noise or number of steps for a target epsilon.

The RDP accountant (Renyi differential privacy) follows Mironov et al. 2019. The PLD accountant (privacy loss
distributions) is from the library dp_accounting (Doroshenko et al. 2022). ``fl_sim.privacy.events`` states the
conventions of events. An epsilon of ``inf`` means that there is no guarantee. An epsilon is never NaN, and a failed
computation never gives 0.

The choice of a release may depend on the results of earlier releases. Then the Renyi order with the smallest epsilon
also depends on these results, so the epsilon at this order is not proven. A Renyi filter gives a proof (Feldman and
Zrnic 2021). The filter adds up the Renyi divergences at a single order (``epsilon_at``). This order is fixed before the
first release (``fixed_order``).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from scipy.optimize import brentq

from fl_sim.errors import UserError
from fl_sim.privacy import loss_distribution
from fl_sim.privacy.events import adjacency, amplify_poisson, common_adjacency, pure_epsilon, single_steps, unrolled
from fl_sim.privacy.renyi import ORDERS, Curve, checked, epsilons_of_curves, prices, rdp_curve, searching_curve
from fl_sim.privacy.terms import Accountant, Adjacency, rounded_up, valid_delta

_RELATION: Final = {
    Adjacency.ADD_OR_REMOVE_ONE: NeighboringRelation.ADD_OR_REMOVE_ONE,
    Adjacency.REPLACE_ONE: NeighboringRelation.REPLACE_ONE,
}
_TOLERANCE: Final = 1e-4
_MOST_NOISE: Final = 1e7
_LEAST_NOISE: Final = 1e-2
_MOST_STEPS: Final = 10**8


def epsilon(events: Sequence[dp_event.DpEvent], delta: float, *, accountant: Accountant = "rdp") -> float:
    """Return the joint epsilon at ``delta`` of all releases: 0 without releases, ``inf`` without a guarantee.

    ``events``: the privacy event of each release.

    Raises UserError if ``events`` have different adjacencies, or if the PLD accountant does not support an
    event.
    """
    return epsilon_of_counts(Counter(events), delta, accountant=accountant)


def epsilon_of_counts(counts: Mapping[dp_event.DpEvent, int], delta: float, *, accountant: Accountant = "rdp") -> float:
    """Return the joint epsilon at ``delta`` of several releases. ``counts``: {privacy event: number of its releases}.

    With ``accountant`` "pld" the result is the smaller of the PLD epsilon and the RDP epsilon. If no PLD is computed
    (``loss_distribution.reason_against``), the result is the RDP epsilon.
    """
    by_rdp = _by_rdp(counts, delta)
    if accountant == "rdp" or math.isinf(by_rdp):
        return by_rdp
    if unknown := _unknown_to_pld(counts):
        raise UserError(f"the PLD accountant does not support {unknown}: use the RDP accountant")
    return bounds(counts, delta).least


def searching_epsilon(event: dp_event.DpEvent, steps: int, delta: float) -> float:
    """Return a fast upper bound on the RDP epsilon at ``delta`` of ``steps`` releases with the privacy event ``event``.

    The search for a noise multiplier calls this function many times; the function ``epsilon`` would be too slow. The
    bound is usually equal to the exact RDP epsilon.
    """
    step, times = unrolled(event)
    if not isinstance(step, dp_event.PoissonSampledDpEvent):
        return epsilon_of_counts({event: steps}, delta)
    count = times * steps
    return epsilon_of_curve(count * searching_curve(step, count, valid_delta(delta)), delta)


@dataclass(frozen=True)
class Bounds:
    """The epsilons of some releases by the RDP and the PLD accountant: two upper bounds, so the smaller one is valid.

    ``rdp``: the epsilon of the RDP accountant. ``pld``: the epsilon of the PLD accountant, None if no PLD was
    computed. ``reason``: the reason why no PLD was computed.
    """

    rdp: float
    pld: float | None
    reason: str = ""

    @property
    def least(self) -> float:
        """Return the smaller of the RDP epsilon and the PLD epsilon; ``inf`` for no guarantee."""
        return self.rdp if self.pld is None else min(self.rdp, self.pld)

    @property
    def accountant(self) -> Accountant:
        """Return the name of the accountant that has the smaller of the two epsilons, "rdp" or "pld"."""
        return "rdp" if self.least == self.rdp else "pld"

    def in_words(self) -> str:
        """Return a sentence for privacy statements: the two epsilons, or the reason why no PLD was computed."""
        if self.pld is None:
            return f"Epsilon is the bound of the RDP accountant; {self.reason}"
        return (
            f"Epsilon is the smaller of two sound bounds: {rounded_up(self.rdp)} by the RDP accountant, "
            f"{rounded_up(self.pld)} by the PLD accountant"
        )


def bounds(counts: Mapping[dp_event.DpEvent, int], delta: float) -> Bounds:
    """Return two joint epsilons of several releases: by the RDP accountant and by the PLD accountant.

    ``counts``: {privacy event: number of its releases}. The PLD accountant takes seconds.
    """
    by_rdp = _by_rdp(counts, delta)
    if unknown := _unknown_to_pld(counts):
        return Bounds(by_rdp, None, f"the PLD accountant does not support {unknown}")
    if by_rdp == 0 or math.isinf(by_rdp):
        return Bounds(by_rdp, by_rdp)
    steps = tuple(single_steps(counts).items())
    if reason := loss_distribution.reason_against(steps, delta, by_rdp):
        return Bounds(by_rdp, None, reason)
    relation = _RELATION[common_adjacency(list(counts))]
    return Bounds(by_rdp, min(loss_distribution.epsilon(steps, relation, delta, by_rdp), by_rdp))


def compose(counts: Mapping[dp_event.DpEvent, int]) -> Curve:
    """Return the joint Renyi curve of several releases: at each order in ``ORDERS``, the sum of their divergences."""
    total = np.zeros(len(ORDERS))
    with np.errstate(over="ignore"):  # a divergence that overflows becomes ``inf``, which means no guarantee
        for event, count in single_steps(counts).items():
            total += float(count) * rdp_curve(event)
    return checked(total)


def epsilon_of_curve(curve: Curve, delta: float) -> float:
    """Return the smallest epsilon at ``delta`` that the Renyi ``curve`` proves; ``inf`` if it proves none."""
    return float(epsilons_of_curves(checked(curve), valid_delta(delta)))


def supports_pld(event: dp_event.DpEvent) -> bool:
    """Return True if the PLD accountant supports the privacy event ``event``."""
    return loss_distribution.supported(unrolled(event)[0], _RELATION[adjacency(event) or Adjacency.ADD_OR_REMOVE_ONE])


def delta_profile(events: Sequence[dp_event.DpEvent], epsilons: Sequence[float]) -> list[float]:
    """Return the joint delta of all releases ``events`` for each epsilon in ``epsilons``, by the PLD accountant.

    The releases are jointly (epsilon, delta)-differentially private for each such pair. Audits test this claim.
    """
    steps, relation = tuple(single_steps(Counter(events)).items()), _RELATION[common_adjacency(events)]
    accountant, error = loss_distribution.composed(steps, relation, math.inf), loss_distribution.rounding_error(steps)
    return [float(accountant.get_delta(value)) + error for value in epsilons]


def fixed_order(first: Mapping[dp_event.DpEvent, int], epsilon: float, delta: float) -> float:
    """Return the Renyi order at which a privacy filter adds up divergences.

    A privacy filter limits releases that are chosen one after another. ``first``: the releases that are planned before
    the first output. The result is the order at which the budget, ``epsilon`` at ``delta``, allows the most repetitions
    of ``first``. The order depends only on the arguments. The result is infinite if ``first`` fits into the budget only
    by adding up pure epsilons (epsilons at delta 0).
    """
    curve, room = compose(first), epsilon - prices(valid_delta(delta))
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(room > 0, room / curve, 0.0)
    best = int(np.argmax(np.where(np.isnan(times), 0.0, times)))
    return ORDERS[best] if times[best] >= 1 or _pure_sum(first) > epsilon else math.inf


def epsilon_at(order: float, counts: Mapping[dp_event.DpEvent, int], delta: float) -> float:
    """Return the epsilon at ``delta`` of a sequence of releases, computed at a single Renyi order.

    ``order``: a Renyi order that was fixed before the first release (see ``fixed_order``). The epsilon is then also
    valid if each release is chosen after the results of earlier releases.
    """
    common_adjacency(list(counts))
    if math.isinf(order):
        return _pure_sum(counts)
    place = ORDERS.index(order)
    return max(0.0, float(compose(counts)[place] + prices(valid_delta(delta))[place]))


def noise_multiplier(
    amplify: Callable[[dp_event.DpEvent], dp_event.DpEvent],
    steps: int,
    target_epsilon: float,
    delta: float,
    *,
    accountant: Accountant = "rdp",
) -> float:
    """Return the smallest noise multiplier with which ``steps`` releases cost at most ``target_epsilon`` at ``delta``.

    ``amplify``: a function that converts the privacy event of the Gaussian mechanism to the event of this mechanism on
    a sampled cohort. An example is ``partial(amplify_poisson, sampling_rate=0.1)``. The result exceeds the exact
    minimum by at most 0.01 %. The result is never below 0.01.
    """
    if steps < 1:
        raise UserError(f"{steps} steps: give at least 1")

    def spent(noise: float, by: Accountant) -> float:
        event = amplify(dp_event.GaussianDpEvent(noise))
        if by == "rdp":
            return searching_epsilon(event, steps, delta)
        return epsilon_of_counts({event: steps}, delta, accountant=by)

    found = least_noise(spent, target_epsilon, accountant)
    event = amplify(dp_event.GaussianDpEvent(found))
    assert epsilon_of_counts({event: steps}, delta, accountant=accountant) <= target_epsilon
    return found


@lru_cache(maxsize=256)
def poisson_noise_multiplier(sampling_rate: float, steps: int, target_epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier for Poisson sampling (see ``noise_multiplier``). The result is cached."""
    amplify = partial(amplify_poisson, sampling_rate=sampling_rate)
    return noise_multiplier(amplify, steps, target_epsilon, delta)


def least_noise(spent: Callable[[float, Accountant], float], target_epsilon: float, accountant: Accountant) -> float:
    """Return the smallest noise multiplier with which all releases together cost at most ``target_epsilon``.

    ``spent(noise, accountant)``: a function that returns the epsilon of all releases with noise multiplier ``noise``.

    The search uses the RDP accountant. With ``accountant`` "pld" a second search by the PLD accountant refines the
    result.
    """
    _check_target(target_epsilon)
    found = _least(lambda noise: spent(noise, "rdp"), target_epsilon, start=1.0)
    if accountant == "pld":
        found = _least(lambda noise: spent(noise, "pld"), target_epsilon, start=found)
    return found


def noise_beyond(target_epsilon: float, delta: float, *, accountant: Accountant = "rdp") -> float:
    """Return the noise multiplier of one Gaussian release that costs slightly more than ``target_epsilon``.

    The single release is an upper bound: if several Gaussian releases without sampling jointly cost at most
    ``target_epsilon``, their joint cost is less than the cost of this release.
    """
    found = noise_multiplier(lambda event: event, 1, target_epsilon, delta, accountant=accountant)
    while True:
        found *= 1 - _TOLERANCE * 10
        if epsilon_of_counts({dp_event.GaussianDpEvent(found): 1}, delta, accountant=accountant) > target_epsilon:
            return found


def steps_that_fit(
    event: dp_event.DpEvent, target_epsilon: float, delta: float, *, accountant: Accountant = "rdp"
) -> int:
    """Return the largest number of releases that jointly cost at most ``target_epsilon``.

    ``event``: the privacy event of each release. Return 0 if even one release costs more.
    """
    return most_that_fit(lambda steps: {event: steps}, target_epsilon, delta, accountant=accountant)


def most_that_fit(
    charges: Callable[[int], Mapping[dp_event.DpEvent, int]],
    target_epsilon: float,
    delta: float,
    *,
    accountant: Accountant = "rdp",
) -> int:
    """Return the largest number n for which the releases ``charges(n)`` jointly cost at most ``target_epsilon``.

    ``charges``: a function that returns all releases for n, such as the releases of n rounds, as {event: number of
    releases}. ``charges(0)`` must cost at most ``target_epsilon``.
    """
    _check_target(target_epsilon)
    fits = _most(lambda number: epsilon_of_counts(charges(number), delta), target_epsilon, start=0)
    if accountant == "pld":
        # The PLD epsilon is never above the RDP epsilon, so releases that fit by RDP also fit by PLD.
        fits = _most(
            lambda number: epsilon_of_counts(charges(number), delta, accountant="pld"), target_epsilon, start=fits
        )
    return fits


def _by_rdp(counts: Mapping[dp_event.DpEvent, int], delta: float) -> float:
    common_adjacency(list(counts))
    # Both values are upper bounds on the joint epsilon. The second bound is the sum of all releases' pure epsilons.
    return min(epsilon_of_curve(compose(counts), delta), _pure_sum(counts))


def _pure_sum(counts: Mapping[dp_event.DpEvent, int]) -> float:
    return sum(count * pure_epsilon(event) for event, count in single_steps(counts).items())


def _unknown_to_pld(counts: Mapping[dp_event.DpEvent, int]) -> str:
    """Return the type name of the first event in ``counts`` that the PLD accountant does not support.

    Return "" if the PLD accountant supports all events.
    """
    return next((type(event).__name__ for event in single_steps(counts) if not supports_pld(event)), "")


def _least(spent: Callable[[float], float], target: float, start: float) -> float:
    """Return the smallest noise multiplier x with a cost ``spent(x) <= target``.

    The result is at most 0.01 % too large, and never too small.

    The function ``spent`` must decrease roughly as a power of x.
    """
    high = start
    while spent(high) > target:
        high *= 2
        if high > _MOST_NOISE:
            raise UserError(
                f"epsilon {target:g} is out of reach at this delta: no noise multiplier up to 1e7 gives it; choose "
                "a larger epsilon"
            )
    low = high
    while spent(low) <= target:
        if low <= _LEAST_NOISE:
            return _LEAST_NOISE
        low = max(0.8 * low, _LEAST_NOISE)

    def gap(log_noise: float) -> float:
        return math.log(min(max(spent(math.exp(log_noise)), 1e-12), 1e12) / target)

    # The noise ``high`` meets the target. But exp(log(high)) is rounded: it may be slightly smaller than ``high``, and
    # miss the target.
    if gap(math.log(high)) >= 0:
        return high
    found = math.exp(brentq(gap, math.log(low), math.log(high), xtol=_TOLERANCE / 4) + _TOLERANCE / 4)
    while spent(found) > target:
        found *= 1 + _TOLERANCE / 4
    return min(found, high)


def _most(spent: Callable[[int], float], target: float, start: int) -> int:
    """Return the largest number n of releases with a cost ``spent(n) <= target``.

    The caller guarantees ``spent(start) <= target``.
    """
    fits, stride = start, max(1, start // 16)
    while spent(fits + stride) <= target:
        fits, stride = fits + stride, 2 * stride
        if fits > _MOST_STEPS:
            raise UserError(
                f"more than {_MOST_STEPS} steps cost at most epsilon {target:g}: set the number of steps instead"
            )
    too_many = fits + stride
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if spent(middle) <= target else (fits, middle)
    return fits


def _check_target(target: float) -> None:
    if not 0 < target < math.inf:
        raise UserError(f"target epsilon {target} is not a positive number: choose one such as 8")
