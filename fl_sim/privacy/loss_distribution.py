"""Epsilon by the privacy loss distribution, PLD (Doroshenko et al. 2022, computed by dp_accounting).

dp_accounting rounds the privacy loss to a grid. The resulting epsilon is an upper bound for every grid spacing. The
spacing is chosen so large that a computation takes only seconds. The Fourier transforms that compose distributions have
rounding errors in both directions. For a small delta these errors would dominate the result. So epsilon is computed at
delta minus a bound on the errors. No PLD is computed if this bound is more than half of delta.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Final, TypeAlias

from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant

from fl_sim.privacy.events import BoundedRangeDpEvent

Steps: TypeAlias = tuple[tuple[dp_event.DpEvent, int], ...]
"""Pairs (event, number of its releases). No event is a ``SelfComposedDpEvent``."""

_INTERVAL: Final = 1e-4  # the default grid spacing of dp_accounting
_INTERVALS_PER_EPSILON: Final = 200_000
_MOST_INTERVALS: Final = 300_000  # maximum number of grid points for the privacy loss of one release
_MOST_STEPS: Final = 10**6
_MOST_NOISE: Final = 1e50  # maximum noise multiplier; the square of a larger one may overflow
_LEAST_RATE: Final = 1e-15  # minimum sampling rate; the inverse of a smaller one may overflow
_MOST_EPSILON: Final = 200.0
# bounds on rounding errors of delta: at least 20 times the largest errors that were measured in 1,568 compositions
_ERROR_OF_EVENT: Final = 2.0**-40
_ERROR_OF_RELEASE: Final = 2.0**-50
_may_begin: ContextVar[Callable[[], bool] | None] = ContextVar("may_begin", default=None)


class NoTimeError(Exception):
    """Raised if a forecast of a privacy cost has no time left to compute a PLD (privacy loss distribution)."""


@contextmanager
def begun_only_if(may_begin: Callable[[], bool]) -> Iterator[None]:
    """Limit the time spent on PLDs (privacy loss distributions) inside a ``with`` block.

    ``may_begin`` is called before each PLD that is not cached. If it returns False, ``epsilon`` raises NoTimeError.
    Only forecasts use this limit. So the entries of privacy ledgers and the privacy statements never depend on the
    computing time.
    """
    token = _may_begin.set(may_begin)
    try:
        yield
    finally:
        _may_begin.reset(token)


def supported(event: dp_event.DpEvent, relation: NeighboringRelation) -> bool:
    """Return True if the PLD accountant supports ``event``, which must not be a ``SelfComposedDpEvent``."""
    return bool(PLDAccountant(relation).supports(_known_to_pld(event)))


def rounding_error(steps: Steps) -> float:
    """Return an upper bound on the rounding error by which the computed delta of ``steps`` may be too small.

    The numbers of a Fourier transform have errors of about 2^-53. The transform of n releases of one event is the n-th
    power of such numbers, so the errors are n times as large. ``benchmarks/accounting_reference.py --sweep`` compares
    the bound with numerical integrals.
    """
    return math.fsum(_ERROR_OF_EVENT + count * _ERROR_OF_RELEASE for _, count in merged(steps))


def reason_against(steps: Steps, delta: float, by_rdp: float) -> str:
    """Return the reason why no PLD of the releases ``steps`` is computed, or "" if it is computed.

    ``by_rdp``: the epsilon of ``steps`` by the RDP accountant.
    """
    if (error := rounding_error(steps)) > delta / 2:
        return f"no PLD was computed, because its rounding errors, up to {error:.1g}, are too large for delta {delta:g}"
    if by_rdp > _MOST_EPSILON:
        return (
            f"no PLD was computed, because an epsilon above {_MOST_EPSILON:g} gives little protection, whatever the "
            "accountant"
        )
    if sum(count for _, count in merged(steps)) > _MOST_STEPS:
        return f"no PLD was computed, because the PLD of more than {_MOST_STEPS} sampled steps takes too long"
    return ""


@lru_cache(maxsize=256)
def epsilon(steps: Steps, relation: NeighboringRelation, delta: float, by_rdp: float) -> float:
    """Return the epsilon of the releases ``steps`` at ``delta`` by PLD; ``inf`` if the PLD proves no epsilon.

    ``reason_against`` must return "" for the same arguments. ``by_rdp``: the epsilon of ``steps`` by RDP. Raises
    NoTimeError if ``begun_only_if`` forbids the computation.
    """
    if (may_begin := _may_begin.get()) is not None and not may_begin():
        raise NoTimeError
    found = _epsilon(steps, relation, delta, by_rdp)
    if plain := _without_amplification(steps):
        found = min(found, _epsilon(plain, relation, delta, by_rdp))
    return found


def _epsilon(steps: Steps, relation: NeighboringRelation, delta: float, by_rdp: float) -> float:
    return float(composed(steps, relation, by_rdp).get_epsilon(delta - rounding_error(steps)))


def composed(steps: Steps, relation: NeighboringRelation, by_rdp: float) -> PLDAccountant:
    """Return dp_accounting's PLD accountant, after it has composed all releases ``steps``.

    ``by_rdp``: the epsilon of ``steps`` by RDP, from which the grid spacing is chosen.
    """
    few = merged(steps)
    widest = max((_widest_loss(event) for event, _ in few), default=0.0)
    known = by_rdp if math.isfinite(by_rdp) else 0.0
    interval = max(_INTERVAL, known / _INTERVALS_PER_EPSILON, widest / _MOST_INTERVALS)
    accountant = PLDAccountant(relation, interval)
    for event, count in few:
        accountant.compose(_known_to_pld(_computable(event)), count)
    return accountant


def merged(steps: Steps) -> Steps:
    """Return ``steps`` with all Gaussian releases without sampling merged into one Gaussian release, to save time.

    The merged release has exactly the same cost: the values 1 / z^2 of the noise multipliers z add up.
    """
    rest: Counter[dp_event.DpEvent] = Counter()
    precision: dict[dp_event.DpEvent, float] = {}
    for event, count in steps:
        if (unit := _with_noise(event, 1.0)) is None or not _noise(event) > 0:
            rest[event] += count
        else:
            precision[unit] = precision.get(unit, 0.0) + count / _noise(event) / _noise(event)
    together = [_with_noise(unit, total**-0.5) for unit, total in precision.items() if total > 0]
    return (*rest.items(), *((event, 1) for event in together if event is not None))


def _with_noise(event: dp_event.DpEvent, noise: float) -> dp_event.DpEvent | None:
    """Return a copy of ``event`` with the multiplier ``noise``; None unless it is Gaussian and without sampling."""
    match event:
        case dp_event.GaussianDpEvent():
            return dp_event.GaussianDpEvent(noise)
        case dp_event.TruncatedSubsampledGaussianDpEvent(dataset_size=size, truncated_batch_size=cohort):
            return dp_event.TruncatedSubsampledGaussianDpEvent(1, 1.0, 1, noise) if size == cohort else None
    return None


def _known_to_pld(event: dp_event.DpEvent) -> dp_event.DpEvent:
    """Return ``event``, or a replacement that dp_accounting's PLD supports and that costs at least as much.

    A bounded-range release is replaced by the geometric mechanism of the same epsilon. The privacy loss of the
    geometric mechanism is +epsilon or -epsilon, the largest loss of all mechanisms of this pure epsilon.
    """
    return dp_event.DiscreteLaplaceDpEvent(event.epsilon, 1) if isinstance(event, BoundedRangeDpEvent) else event


def _computable(event: dp_event.DpEvent) -> dp_event.DpEvent:
    """Return ``event`` with its parameters limited to the range in which the PLD's arithmetic works.

    The noise multiplier is never raised and the sampling rate is never lowered, so the privacy loss of the result is at
    least the privacy loss of ``event``.
    """
    match event:
        case dp_event.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
            return dp_event.PoissonSampledDpEvent(max(rate, _LEAST_RATE), _computable(inner))
        case dp_event.GaussianDpEvent(noise_multiplier=noise) | dp_event.LaplaceDpEvent(noise_multiplier=noise):
            return type(event)(min(noise, _MOST_NOISE))
        case dp_event.TruncatedSubsampledGaussianDpEvent(
            dataset_size=size, truncated_batch_size=cohort, noise_multiplier=noise
        ):
            return dp_event.TruncatedSubsampledGaussianDpEvent(size, 1.0, cohort, min(noise, _MOST_NOISE))
        case _:
            return event


def _noise(event: dp_event.DpEvent) -> float:
    inner = event.event if isinstance(event, dp_event.PoissonSampledDpEvent) else event
    return float(getattr(inner, "noise_multiplier", math.inf))


def _widest_loss(event: dp_event.DpEvent) -> float:
    """Return the approximate width of the privacy loss distribution of one release, for the choice of the grid spacing.

    Tails of probability 2^-60 are left out.
    """
    if isinstance(event, dp_event.LaplaceDpEvent | dp_event.DiscreteLaplaceDpEvent):
        return 0.0
    shift = (2 if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent) else 1) / max(_noise(event), 1e-9)
    return shift * (shift + 18)


def _without_amplification(steps: Steps) -> Steps | None:
    """Return ``steps`` with each fixed-size cohort replaced by the whole population; None if this cannot lower epsilon.

    For a cohort of a fixed size, two bounds hold: with and without amplification by sampling. Each bound compares the
    noisy sums on two adjacent data sets. Let q be the sampling rate and S the clipping norm. With much noise, the means
    of the two sums differ by 4 q S with amplification, and by 2 S without. If the cohort is smaller than half of the
    population, 4 q S is smaller than 2 S, so the bound with amplification is smaller.
    """
    plain: list[tuple[dp_event.DpEvent, int]] = []
    for event, count in steps:
        if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
            size = event.dataset_size
            if 2 * event.truncated_batch_size < size:
                return None
            plain.append((dp_event.TruncatedSubsampledGaussianDpEvent(size, 1.0, size, event.noise_multiplier), count))
    return tuple(plain) or None
