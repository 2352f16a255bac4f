"""Epsilon of a list of releases (RDP: Mironov et al. 2019; PLD, by dp_accounting: Doroshenko et al. 2022).

One convention everywhere: ``noise_multiplier`` is the standard deviation of the noise on the SUM divided by the
clipping norm S of ONE unit. The events handed round here follow it, and say their adjacency by their type:

* ``GaussianDpEvent(z)`` and ``PoissonSampledDpEvent(q, GaussianDpEvent(z))``: to add or remove one unit moves the sum
  by S.
* ``TruncatedSubsampledGaussianDpEvent(K, 1.0, m, z)``: a fixed m of K units without replacement, replace one unit. The
  sum moves by 2S; the event's accountant knows that, so the event still takes z, not z/2. (``RdpAccountant`` on a
  ``SampledWithoutReplacementDpEvent(GaussianDpEvent(z))`` is the wrong call: it takes z relative to the *sensitivity*.)
* ``LaplaceDpEvent(scale)``, ``DiscreteLaplaceDpEvent(epsilon, 1)`` and ``BoundedRangeDpEvent(epsilon)``: pure epsilon
  (1 / scale for the first) when one unit is added or removed.

``SelfComposedDpEvent(event, T)`` stands for T releases of ``event`` everywhere.

Epsilon is ``inf`` where there is no guarantee; it is never NaN, and never 0 because something went wrong.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, TypeAlias

import numpy as np
from dp_accounting import NeighboringRelation, dp_event

from fl_sim.errors import UserError
from fl_sim.privacy import loss_distribution
from fl_sim.privacy.pure import BoundedRangeDpEvent, pure_epsilon
from fl_sim.privacy.renyi import ORDERS, Curve, checked, epsilons_of_curves, rdp_curve, searching_curve
from fl_sim.privacy.rounding import rounded_up

Accountant: TypeAlias = Literal["rdp", "pld"]


class Adjacency(StrEnum):
    """Which two populations must be hard to tell apart; in words in ``fl_sim.privacy.statement``.

    Every mechanism at client level is held to it with both worlds run: tests/fl_sim/simulation/test_two_worlds.py.
    """

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"


_PLACES: Final = 2**20  # of which a sampled unit has its share, where that is accounted as drawing a fixed number

_RELATION: Final = {
    Adjacency.ADD_OR_REMOVE_ONE: NeighboringRelation.ADD_OR_REMOVE_ONE,
    Adjacency.REPLACE_ONE: NeighboringRelation.REPLACE_ONE,
}

_STATED_UNDER_ADD_OR_REMOVE: Final = (
    dp_event.GaussianDpEvent,
    dp_event.PoissonSampledDpEvent,
    dp_event.LaplaceDpEvent,
    dp_event.DiscreteLaplaceDpEvent,
    BoundedRangeDpEvent,
)


def amplify_poisson(event: dp_event.DpEvent, sampling_rate: float) -> dp_event.DpEvent:
    """Return ``event`` on a cohort that every unit joins independently with probability ``sampling_rate`` in (0, 1]."""
    if not 0 < sampling_rate <= 1:
        raise UserError(
            f"sampling rate {sampling_rate} is not in (0, 1]: give the chance that one unit takes part in a step"
        )
    if sampling_rate == 1 or not isinstance(event, dp_event.GaussianDpEvent):
        _only_gaussian(event, "poisson")
        return event
    return dp_event.PoissonSampledDpEvent(sampling_rate, event)


def amplify_fixed_size(event: dp_event.DpEvent, cohort: int, population: int) -> dp_event.DpEvent:
    """Return ``event`` on ``cohort`` of ``population`` units drawn without replacement, under replace-one adjacency."""
    if not 1 <= cohort <= population:
        raise UserError(f"a cohort of {cohort} does not fit a population of {population}: choose 1 to {population}")
    if isinstance(event, dp_event.GaussianDpEvent):
        return dp_event.TruncatedSubsampledGaussianDpEvent(population, 1.0, cohort, event.noise_multiplier)
    _only_gaussian(event, "fixed-size")
    return event


def under_replacement(event: dp_event.DpEvent) -> dp_event.DpEvent:
    """Return what ``event`` is where one unit is replaced by another instead of added or removed, or its data change.

    Such a unit's part of the sum moves by up to 2S, and it takes part in a step with the same probability as before;
    that is rounded up to a multiple of 2^-20.
    """
    step, times = unrolled(event)
    match step:
        case dp_event.GaussianDpEvent():
            step = amplify_fixed_size(step, 1, 1)
        case dp_event.PoissonSampledDpEvent(sampling_probability=rate, event=dp_event.GaussianDpEvent() as every):
            step = amplify_fixed_size(every, math.ceil(rate * _PLACES), _PLACES)
        case dp_event.TruncatedSubsampledGaussianDpEvent() | dp_event.NonPrivateDpEvent() | dp_event.NoOpDpEvent():
            pass
        case _:
            raise UserError(f"what {type(step).__name__} costs where a unit is replaced is not known")
    return step if times == 1 else dp_event.SelfComposedDpEvent(step, times)


def adjacency(event: dp_event.DpEvent) -> Adjacency | None:
    """Return the adjacency ``event`` is stated under; None where it holds under either (a zCDP bound, no guarantee)."""
    event, _ = unrolled(event)
    if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
        return Adjacency.REPLACE_ONE
    if isinstance(event, _STATED_UNDER_ADD_OR_REMOVE):
        return Adjacency.ADD_OR_REMOVE_ONE
    return None


def unrolled(event: dp_event.DpEvent) -> tuple[dp_event.DpEvent, int]:
    """Return (step, times): ``times`` releases of ``step`` are what ``event`` stands for, (event, 1) for most.

    Raises UserError for a negative number of times.
    """
    times = 1
    while isinstance(event, dp_event.SelfComposedDpEvent):
        if event.count < 0:
            raise UserError(f"{event.count} releases: give 0 or more")
        times, event = times * event.count, event.event
    return event, times


def single_steps(counts: Mapping[dp_event.DpEvent, int]) -> Counter[dp_event.DpEvent]:
    """Return ``counts`` with every repeated event counted as its steps."""
    steps: Counter[dp_event.DpEvent] = Counter()
    for event, count in counts.items():
        step, times = unrolled(event)
        if count * times:
            steps[step] += count * times
    return steps


def common_adjacency(events: Sequence[dp_event.DpEvent]) -> Adjacency:
    """Return the one adjacency of ``events`` (add-or-remove-one where any would do); mixing two raises UserError."""
    found = {relation for event in events if (relation := adjacency(event)) is not None}
    if len(found) > 1:
        raise UserError(
            "add-or-remove-one and replace-one releases cannot be added up: sample every step the same way "
            "(full participation under replace-one is fixed-size with m = K)"
        )
    return found.pop() if found else Adjacency.ADD_OR_REMOVE_ONE


def compose(counts: Mapping[dp_event.DpEvent, int]) -> Curve:
    """Return the Renyi curve of every event released as often as ``counts`` says: the sum of the curves."""
    total = np.zeros(len(ORDERS))
    with np.errstate(over="ignore"):  # beyond the largest number there is no guarantee
        for event, count in single_steps(counts).items():
            total += float(count) * rdp_curve(event)
    return checked(total)


def epsilon_of_curve(curve: Curve, delta: float) -> float:
    """Return the smallest epsilon that ``curve`` proves at ``delta``; ``inf`` where it proves none."""
    return float(epsilons_of_curves(checked(curve), valid_delta(delta)))


def epsilon(events: Sequence[dp_event.DpEvent], delta: float, *, accountant: Accountant = "rdp") -> float:
    """Return the epsilon of all ``events`` together at ``delta``; 0 for no events, ``inf`` for no guarantee.

    Raises UserError when ``events`` mix adjacencies, or when the PLD accountant is asked for an event it does not know.
    """
    return epsilon_of_counts(Counter(events), delta, accountant=accountant)


def searching_epsilon(event: dp_event.DpEvent, steps: int, delta: float) -> float:
    """Return the RDP accountant's epsilon of ``steps`` releases for a search: seldom more, never less, far sooner."""
    step, times = unrolled(event)
    if not isinstance(step, dp_event.PoissonSampledDpEvent):
        return epsilon_of_counts({event: steps}, delta)
    count = times * steps
    return epsilon_of_curve(count * searching_curve(step, count, valid_delta(delta)), delta)


def epsilon_of_counts(counts: Mapping[dp_event.DpEvent, int], delta: float, *, accountant: Accountant = "rdp") -> float:
    """Return ``epsilon`` of a multiset of events, given as event -> number of releases.

    By the PLD accountant it is never above that of the RDP accountant, which stands in for it where a PLD would take
    too long, or leaves out more probability than delta.
    """
    by_rdp = _by_rdp(counts, delta)
    if accountant == "rdp" or math.isinf(by_rdp):
        return by_rdp
    if unknown := _unknown_to_pld(counts):
        raise UserError(f"the PLD accountant does not know {unknown}: use the RDP accountant")
    return bounds(counts, delta).least


@dataclass(frozen=True)
class Bounds:
    """Epsilon of the same releases by both accountants. Both are upper bounds, so the smaller one holds.

    ``pld`` is None where it was not computed, for the ``reason`` said.
    """

    rdp: float
    pld: float | None
    reason: str = ""

    @property
    def least(self) -> float:
        """Return the smaller one; ``inf`` for no guarantee."""
        return self.rdp if self.pld is None else min(self.rdp, self.pld)

    @property
    def accountant(self) -> Accountant:
        """Return whose bound is the smaller one."""
        return "rdp" if self.least == self.rdp else "pld"

    def in_words(self) -> str:
        """Say where the figure comes from."""
        if self.pld is None:
            return f"This is the bound of the RDP accountant; {self.reason}"
        return (
            f"This is the smaller of two sound bounds: {rounded_up(self.rdp)} by the RDP accountant, "
            f"{rounded_up(self.pld)} by the PLD accountant"
        )


def bounds(counts: Mapping[dp_event.DpEvent, int], delta: float) -> Bounds:
    """Return the epsilon of a multiset of events by both accountants. Takes seconds: the PLD is computed here.

    Nowhere else is a PLD asked for an epsilon.
    """
    by_rdp = _by_rdp(counts, delta)
    if unknown := _unknown_to_pld(counts):
        return Bounds(by_rdp, None, f"the PLD accountant does not know {unknown}")
    if by_rdp == 0 or math.isinf(by_rdp):
        return Bounds(by_rdp, by_rdp)
    steps = tuple(single_steps(counts).items())
    if reason := loss_distribution.why_not(steps, delta, by_rdp):
        return Bounds(by_rdp, None, reason)
    relation = _RELATION[common_adjacency(list(counts))]
    return Bounds(by_rdp, min(loss_distribution.epsilon(steps, relation, delta, by_rdp), by_rdp))


def _by_rdp(counts: Mapping[dp_event.DpEvent, int], delta: float) -> float:
    common_adjacency(list(counts))
    counts = single_steps(counts)
    # Pure releases among themselves simply add up, which is the Renyi bound at the order infinity.
    plain_sum = sum(count * pure_epsilon(event) for event, count in counts.items())
    return min(epsilon_of_curve(compose(counts), delta), plain_sum)


def _unknown_to_pld(counts: Mapping[dp_event.DpEvent, int]) -> str:
    """Return the kind of an event that the PLD accountant does not know; "" where it knows all."""
    unknown = (type(event).__name__ for event in single_steps(counts) if not supports_pld(event))
    return next(unknown, "")


def none_if_infinite(epsilon: float) -> float | None:
    """Return ``epsilon`` as results and logs hold it: None stands for no guarantee."""
    assert not math.isnan(epsilon)
    return None if math.isinf(epsilon) else epsilon


def supports_pld(event: dp_event.DpEvent) -> bool:
    """Return whether the PLD accountant knows ``event``."""
    return loss_distribution.supported(unrolled(event)[0], _RELATION[adjacency(event) or Adjacency.ADD_OR_REMOVE_ONE])


def delta_profile(events: Sequence[dp_event.DpEvent], epsilons: Sequence[float]) -> list[float]:
    """Return a delta that holds at each of ``epsilons``, by PLD: the claim that an audit tests."""
    steps, relation = tuple(single_steps(Counter(events)).items()), _RELATION[common_adjacency(events)]
    accountant, error = loss_distribution.composed(steps, relation, math.inf), loss_distribution.rounding_error(steps)
    return [float(accountant.get_delta(value)) + error for value in epsilons]


def valid_delta(delta: float) -> float:
    """Return ``delta``. Raises UserError where it is not in (0, 1)."""
    if not 0 < delta < 1:
        raise UserError(
            f"delta {delta} is not in (0, 1): choose one well below 1 / number of protected units, such as 1e-5"
        )
    return delta


def _only_gaussian(event: dp_event.DpEvent, sampling: str) -> None:
    if not isinstance(event, dp_event.GaussianDpEvent | dp_event.NonPrivateDpEvent | dp_event.NoOpDpEvent):
        raise UserError(
            f"{sampling} sampling is accounted for the Gaussian mechanism only, not for {type(event).__name__}"
        )
