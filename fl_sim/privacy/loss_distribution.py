"""Epsilon by the privacy loss distribution, PLD (Doroshenko et al. 2022, by dp_accounting), where it can be computed.

The estimates are upper bounds on any grid, so the grid is as coarse as a computation within seconds requires. The
rounding errors of the Fourier transforms that compose distributions are not on the safe side: at small delta they are
most of the result. So epsilon is computed at delta minus a bound on these errors, and no PLD is computed where the
bound is most of delta.
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
"""(event, number of its releases) for each event; none is a repeated event."""

_INTERVAL: Final = 1e-4  # dp_accounting's default
_INTERVALS_PER_EPSILON: Final = 200_000
_MOST_INTERVALS: Final = 300_000  # between the losses of one release
_MOST_STEPS: Final = 10**6
_MOST_NOISE: Final = 1e50  # its square is a number,
_LEAST_RATE: Final = 1e-15  # and the inverse of this
_MOST_EPSILON: Final = 200.0
_ERROR_OF_EVENT: Final = 2.0**-40  # what rounding takes off delta, for each kind of event,
_ERROR_OF_RELEASE: Final = 2.0**-50  # and for each release: 20 times and more of what was found in 1,568 compositions


_may_begin: ContextVar[Callable[[], bool] | None] = ContextVar("may_begin", default=None)


class NoTimeError(Exception):
    """A PLD was not begun: the time that a forecast allows for PLDs is up."""


@contextmanager
def begun_only_if(may_begin: Callable[[], bool]) -> Iterator[None]:
    """Limit PLDs in this context: one that is not cached begins only where ``may_begin`` returns True.

    Otherwise ``epsilon`` raises NoTimeError. Only forecasts use this: no charge and no statement depends on the time.
    """
    token = _may_begin.set(may_begin)
    try:
        yield
    finally:
        _may_begin.reset(token)


def supported(event: dp_event.DpEvent, relation: NeighboringRelation) -> bool:
    """Return True if the PLD accountant knows ``event``, which must not be a repeated event."""
    return bool(PLDAccountant(relation).supports(_known_to_pld(event)))


def rounding_error(steps: Steps) -> float:
    """Return a bound on the amount by which rounding makes a computed delta too small.

    The numbers of a Fourier transform have errors of about 2^-53. The transform of ``count`` releases is a power of
    them, with errors ``count`` times as large. ``benchmarks/accounting_reference.py --sweep`` compares the bound with
    integrals.
    """
    return math.fsum(_ERROR_OF_EVENT + count * _ERROR_OF_RELEASE for _, count in merged(steps))


def why_not(steps: Steps, delta: float, by_rdp: float) -> str:
    """Return the reason not to compute the PLD of ``steps``, "" for none. ``by_rdp``: their epsilon by RDP."""
    if (error := rounding_error(steps)) > delta / 2:
        return f"no PLD was computed, because its rounding errors, up to {error:.1g}, are too large for delta {delta:g}"
    if by_rdp > _MOST_EPSILON:
        return f"no PLD was computed, because an epsilon above {_MOST_EPSILON:g} says little either way"
    if sum(count for _, count in merged(steps)) > _MOST_STEPS:
        return f"no PLD was computed, because that of more than {_MOST_STEPS} sampled steps takes too long"
    return ""


@lru_cache(maxsize=256)
def epsilon(steps: Steps, relation: NeighboringRelation, delta: float, by_rdp: float) -> float:
    """Return the epsilon of ``steps`` at ``delta``; ``inf`` where the grid proves none.

    Only for releases for which ``why_not`` returns "". Raises NoTimeError, see ``begun_only_if``.
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
    """Return a PLD accountant with all ``steps`` composed; ``by_rdp``, their epsilon by RDP, sets its grid."""
    few = merged(steps)
    widest = max((_widest_loss(event) for event, _ in few), default=0.0)
    known = by_rdp if math.isfinite(by_rdp) else 0.0
    interval = max(_INTERVAL, known / _INTERVALS_PER_EPSILON, widest / _MOST_INTERVALS)
    accountant = PLDAccountant(relation, interval)
    for event, count in few:
        accountant.compose(_known_to_pld(_computable(event)), count)
    return accountant


def merged(steps: Steps) -> Steps:
    """Return ``steps`` with all unsampled Gaussian releases merged into one: their 1 / z^2 add up, exactly."""
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
    """Return an unsampled Gaussian mechanism with ``noise`` instead of its own; None for other events."""
    match event:
        case dp_event.GaussianDpEvent():
            return dp_event.GaussianDpEvent(noise)
        case dp_event.TruncatedSubsampledGaussianDpEvent(dataset_size=size, truncated_batch_size=cohort):
            return dp_event.TruncatedSubsampledGaussianDpEvent(1, 1.0, 1, noise) if size == cohort else None
    return None


def _known_to_pld(event: dp_event.DpEvent) -> dp_event.DpEvent:
    """Return an event that dp_accounting's PLD knows, with at least the privacy loss of ``event``.

    The geometric mechanism's loss is +epsilon or -epsilon, the largest loss of all mechanisms of pure epsilon.
    """
    return dp_event.DiscreteLaplaceDpEvent(event.epsilon, 1) if isinstance(event, BoundedRangeDpEvent) else event


def _computable(event: dp_event.DpEvent) -> dp_event.DpEvent:
    """Return ``event`` within the PLD's arithmetic: with no more noise and no lower rate, so with no less loss."""
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
    """Return the approximate width of the range of privacy losses of one release, without tails of 2^-60."""
    if isinstance(event, dp_event.LaplaceDpEvent | dp_event.DiscreteLaplaceDpEvent):
        return 0.0
    shift = (2 if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent) else 1) / max(_noise(event), 1e-9)
    return shift * (shift + 18)


def _without_amplification(steps: Steps) -> Steps | None:
    """Return ``steps`` without amplification, everyone in every cohort; None where that bound cannot be smaller.

    For a cohort of a fixed size the bounds with and without amplification are both sound. With much noise the means of
    the amplified pair of distributions differ by 4 q S and those of the plain pair by 2 S, so the plain bound can be
    smaller only for cohorts of at least half of the population.
    """
    plain: list[tuple[dp_event.DpEvent, int]] = []
    for event, count in steps:
        if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
            size = event.dataset_size
            if 2 * event.truncated_batch_size < size:
                return None
            plain.append((dp_event.TruncatedSubsampledGaussianDpEvent(size, 1.0, size, event.noise_multiplier), count))
    return tuple(plain) or None
