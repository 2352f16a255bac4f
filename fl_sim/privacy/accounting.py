"""Epsilon of a list of releases, by dp_accounting (RDP: Mironov et al. 2019; PLD: Doroshenko et al. 2022).

One convention everywhere: ``noise_multiplier`` is the standard deviation of the noise on the SUM divided by the
clipping norm S of ONE unit. The events handed round here follow it, and say their adjacency by their type:

* ``GaussianDpEvent(z)`` and ``PoissonSampledDpEvent(q, GaussianDpEvent(z))``: to add or remove one unit moves the sum
  by S.
* ``TruncatedSubsampledGaussianDpEvent(K, 1.0, m, z)``: a fixed m of K units without replacement, replace one unit. The
  sum moves by 2S; the event's accountant knows that, so the event still takes z, not z/2. (``RdpAccountant`` on a
  ``SampledWithoutReplacementDpEvent(GaussianDpEvent(z))`` is the wrong call: it takes z relative to the *sensitivity*.)
* ``DiscreteLaplaceDpEvent(epsilon, 1)`` and ``BoundedRangeDpEvent(epsilon)``: pure epsilon when one unit is added or
  removed.

``SelfComposedDpEvent(event, T)`` stands for T releases of ``event`` everywhere.

Epsilon is ``inf`` where there is no guarantee; it is never NaN, and never 0 because something went wrong.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final, Literal, TypeAlias

import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from numpy.typing import NDArray
from scipy.special import logsumexp

from fl_sim.privacy.pure import BoundedRangeDpEvent, bounded_loss_curve, pure_epsilon, with_the_same_loss
from fl_sim.privacy.rounding import rounded_up
from fl_sim.types import UserError

Accountant: TypeAlias = Literal["rdp", "pld"]
Curve: TypeAlias = NDArray[np.float64]
"""Renyi divergences at ``ORDERS``; curves of independent releases add."""

ORDERS: Final = (
    1.01,
    *(1 + fortieth / 40 for fortieth in range(1, 20)),
    *(1 + tenth / 10 for tenth in range(5, 100)),
    *range(11, 128),
    *range(128, 256, 8),
    *range(256, 1025, 64),
)

_PLD_INTERVAL: Final = 1e-4  # dp_accounting's default; its estimates stay above the truth at any interval
_PLD_INTERVALS_PER_EPSILON: Final = 2_000_000  # caps memory: beyond epsilon 200 the interval grows with epsilon
_MOST_POINTS: Final = 2_000_000


class Adjacency(StrEnum):
    """Which two populations must be hard to tell apart."""

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"


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


@lru_cache(maxsize=512)
def rdp_curve(event: dp_event.DpEvent) -> Curve:
    """Return the Renyi divergences of one release at ``ORDERS``; ``inf`` where there is no bound. Read-only."""
    if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
        curve = _fixed_size_curve(event)
    elif math.isfinite(pure_epsilon(event)):
        curve = bounded_loss_curve(event, np.array(ORDERS))
    else:
        with _quiet_excluded_orders(), np.errstate(divide="ignore"):
            curve = RdpAccountant(ORDERS).compose(event).rdp
    curve = _checked(curve)
    curve.setflags(write=False)
    return curve


def compose(counts: Mapping[dp_event.DpEvent, int]) -> Curve:
    """Return the Renyi curve of every event released as often as ``counts`` says: the sum of the curves."""
    total = np.zeros(len(ORDERS))
    for event, count in single_steps(counts).items():
        total += count * rdp_curve(event)
    return _checked(total)


def epsilon_of_curve(curve: Curve, delta: float) -> float:
    """Return the smallest epsilon that ``curve`` proves at ``delta``; ``inf`` where it proves none."""
    finite = np.isfinite(_checked(curve))
    if not finite.any():
        return math.inf
    return float(compute_epsilon(np.array(ORDERS)[finite], curve[finite], valid_delta(delta))[0])


def epsilon(events: Sequence[dp_event.DpEvent], delta: float, *, accountant: Accountant = "rdp") -> float:
    """Return the epsilon of all ``events`` together at ``delta``; 0 for no events, ``inf`` for no guarantee.

    Raises UserError when ``events`` mix adjacencies, or when the PLD accountant is asked for an event it does not know.
    """
    return epsilon_of_counts(Counter(events), delta, accountant=accountant)


def epsilon_of_counts(counts: Mapping[dp_event.DpEvent, int], delta: float, *, accountant: Accountant = "rdp") -> float:
    """Return ``epsilon`` of a multiset of events, given as event -> number of releases."""
    relation, counts = common_adjacency(list(counts)), single_steps(counts)
    by_rdp = epsilon_of_curve(compose(counts), delta)
    # Pure releases among themselves simply add up, which is the Renyi bound at the order infinity.
    plain_sum = sum(count * pure_epsilon(event) for event, count in counts.items())
    by_rdp = min(by_rdp, plain_sum)
    if accountant == "rdp" or not counts or math.isinf(by_rdp):
        return by_rdp
    return min(_epsilon_by_pld(tuple(counts.items()), relation, by_rdp, delta), plain_sum)


@dataclass(frozen=True)
class Bounds:
    """Epsilon of the same releases by both accountants. Both are upper bounds, so the smaller one holds.

    ``pld`` is None where the PLD accountant does not know all of the releases.
    """

    rdp: float
    pld: float | None

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
            return "This is the bound of the RDP accountant; the PLD accountant does not know all of these releases"
        return (
            f"This is the smaller of two sound bounds: {rounded_up(self.rdp)} by the RDP accountant, "
            f"{rounded_up(self.pld)} by the PLD accountant"
        )


def bounds(counts: Mapping[dp_event.DpEvent, int], delta: float) -> Bounds:
    """Return the epsilon of a multiset of events by both accountants. Takes seconds: the PLD is computed here."""
    by_rdp = epsilon_of_counts(counts, delta)
    known = all(supports_pld(event) for event in counts)
    return Bounds(by_rdp, epsilon_of_counts(counts, delta, accountant="pld") if known else None)


def none_if_infinite(epsilon: float) -> float | None:
    """Return ``epsilon`` as results and logs hold it: None stands for no guarantee."""
    assert not math.isnan(epsilon)
    return None if math.isinf(epsilon) else epsilon


def supports_pld(event: dp_event.DpEvent) -> bool:
    """Return whether the PLD accountant knows ``event``."""
    relation = _RELATION[adjacency(event) or Adjacency.ADD_OR_REMOVE_ONE]
    return bool(PLDAccountant(relation).supports(with_the_same_loss(unrolled(event)[0])))


def delta_profile(events: Sequence[dp_event.DpEvent], epsilons: Sequence[float]) -> list[float]:
    """Return the smallest delta that holds at each of ``epsilons``, by PLD: the claim that an audit tests."""
    counts = single_steps(Counter(events))
    accountant = _pld(counts, common_adjacency(events), math.inf, 1e-12)
    return [float(accountant.get_delta(value)) for value in epsilons]


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


def _fixed_size_curve(event: dp_event.TruncatedSubsampledGaussianDpEvent) -> Curve:
    """Bound the Renyi divergence by the pair that dominates sampling without replacement, or by no amplification.

    The sampled unit displaces another one: the sum moves by at most 2S either way, hence the pair
    (1-q) N(0, z^2) + q N(+2, z^2) against (1-q) N(0, z^2) + q N(-2, z^2), whose divergence is the same both ways round.
    Without amplification replacing one unit moves the sum by 2S: divergence 2 a / z^2. Both hold, so does the smaller.
    """
    if event.sampling_probability != 1:
        raise UserError(
            "only cohorts of a fixed size are accounted for: the sampling probability before truncation must be 1"
        )
    noise, rate = event.noise_multiplier, event.truncated_batch_size / event.dataset_size
    if noise == 0:
        return np.full(len(ORDERS), math.inf)
    orders = np.array(ORDERS)
    plain: Curve = 2 * orders / noise**2
    if rate == 1:
        return plain
    return np.minimum(plain, [_mixture_divergence(order, rate, 2 / noise) for order in ORDERS])


def _mixture_divergence(order: float, rate: float, shift: float) -> float:
    """Return D_order((1-q) N(0,1) + q N(s,1) || (1-q) N(0,1) + q N(-s,1)) by the trapezoid rule.

    The integrand has Gaussian tails and is analytic in a strip of half-width pi/s about the real line (where the second
    density has its zeros), so the error falls as exp(-2 pi (pi/s) / step): only rounding at the step chosen here.
    """
    reach = shift * (2 * order - 1)  # where the farthest bump of p^a q^(1-a) lies
    num_points = int(16 * max(1.0, shift) * (reach + shift + 24)) + 1
    if num_points > _MOST_POINTS:
        return math.inf
    points = np.linspace(-shift - 12, reach + 12, num_points)
    base = math.log1p(-rate) - points**2 / 2
    towards = np.logaddexp(base, math.log(rate) - (points - shift) ** 2 / 2)
    away = np.logaddexp(base, math.log(rate) - (points + shift) ** 2 / 2)
    step = points[1] - points[0]
    log_integral = logsumexp(order * towards - (order - 1) * away) + math.log(step / math.sqrt(2 * math.pi))
    return float(log_integral / (order - 1))


@lru_cache(maxsize=256)
def _epsilon_by_pld(
    steps: tuple[tuple[dp_event.DpEvent, int], ...], relation: Adjacency, by_rdp: float, delta: float
) -> float:
    counts = dict(steps)
    by_pld = _pld(counts, relation, by_rdp, delta).get_epsilon(delta)
    if plain := _without_amplification(counts):
        by_pld = min(by_pld, _pld(plain, relation, by_rdp, delta).get_epsilon(delta))
    return float(by_pld)


def _pld(counts: Mapping[dp_event.DpEvent, int], relation: Adjacency, by_rdp: float, delta: float) -> PLDAccountant:
    valid_delta(delta)
    interval = max(_PLD_INTERVAL, by_rdp / _PLD_INTERVALS_PER_EPSILON) if math.isfinite(by_rdp) else _PLD_INTERVAL
    accountant = PLDAccountant(_RELATION[relation], interval)
    for event, count in counts.items():
        known = with_the_same_loss(event)
        if not accountant.supports(known):
            raise UserError(f"the PLD accountant does not know {type(event).__name__}: use the RDP accountant")
        accountant.compose(known, count)
    return accountant


def _without_amplification(counts: Mapping[dp_event.DpEvent, int]) -> dict[dp_event.DpEvent, int] | None:
    """Return ``counts`` with everyone in every cohort where that bound may be the smaller one, None where it is not.

    Of a fixed-size cohort both bounds are sound. With much noise the amplified pair stands 4 q S apart and the plain
    one 2 S, so the plain one can only win from half of the population on.
    """
    plain: Counter[dp_event.DpEvent] = Counter()
    for event, count in counts.items():
        if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
            size = event.dataset_size
            if 2 * event.truncated_batch_size < size:
                return None
            plain[dp_event.TruncatedSubsampledGaussianDpEvent(size, 1.0, size, event.noise_multiplier)] += count
    return dict(plain) or None


def _checked(curve: Curve) -> Curve:
    """Refuse NaN, which dp_accounting would turn into epsilon 0; lift rounding below zero to zero."""
    if np.isnan(curve).any() or (curve < -1e-9).any():
        raise ArithmeticError(
            "a Renyi divergence came out as NaN or negative: the accountant failed, no epsilon is known"
        )
    return np.maximum(curve, 0.0)


@contextmanager
def _quiet_excluded_orders() -> Iterator[None]:
    """Silence the accountant's notice that a fractional order did not converge: it is left out, which is sound."""
    logger = logging.getLogger("absl")
    logger.addFilter(_not_about_orders)
    try:
        yield
    finally:
        logger.removeFilter(_not_about_orders)


def _not_about_orders(record: logging.LogRecord) -> bool:
    return "Excluding this order" not in str(record.msg)
