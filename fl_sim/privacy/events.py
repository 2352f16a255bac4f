"""Privacy events of dp_accounting, which describe mechanisms: sampling, adjacency, pure epsilon, JSON form, words.

One convention holds everywhere: ``noise_multiplier`` is the standard deviation of the noise on the SUM divided by the
clipping norm S of ONE unit. The type of an event determines its adjacency (z: the noise multiplier, q: the sampling
rate):

* ``GaussianDpEvent(z)`` and ``PoissonSampledDpEvent(q, GaussianDpEvent(z))``: one unit is added or removed. The
  sensitivity of the sum is S.
* ``TruncatedSubsampledGaussianDpEvent(K, 1.0, m, z)``: m of K units are drawn without replacement, and one unit is
  replaced. The sensitivity is 2S. Accountants of this event include the factor 2, so the event has z, not z/2.
  (``SampledWithoutReplacementDpEvent(GaussianDpEvent(z))`` would be wrong: its z is relative to the *sensitivity*.)
* ``SkellamDpEvent`` and ``DiscreteGaussiansDpEvent``: integer noise; their field ``vectors`` determines the adjacency.
* ``LaplaceDpEvent(scale)``, ``DiscreteLaplaceDpEvent(epsilon, 1)`` and ``BoundedRangeDpEvent(epsilon)``: pure epsilon
  (1 / scale for ``LaplaceDpEvent``) when one unit is added or removed.

``SelfComposedDpEvent(event, T)`` means T releases of ``event``.
"""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from dp_accounting import dp_event

from fl_sim.errors import RunError, UserError
from fl_sim.privacy.terms import Adjacency

_PLACES: Final = 2**20  # the function ``under_replacement`` rounds a sampling rate up to a multiple of 2^-20


@dataclass(frozen=True)
class BoundedRangeDpEvent(dp_event.DpEvent):  # type: ignore[misc] # comes without types
    """The event of an ``epsilon``-bounded-range mechanism, which is ``epsilon``-DP when one unit is added or removed.

    Its privacy loss lies in a range of width epsilon. So it costs at most epsilon^2 / 8 in zCDP, zero-concentrated
    differential privacy (Cesar, Rogers 2021). This cost is a quarter of the bound for an arbitrary mechanism with the
    same pure epsilon. An example is the exponential mechanism: it chooses a result of utility u with a probability in
    proportion to exp(epsilon u / (2 sensitivity of u)).
    """

    epsilon: float


@dataclass(frozen=True)
class IntegerNoiseDpEvent(dp_event.DpEvent):  # type: ignore[misc] # comes without types
    """The event of a sum of integer vectors plus integer noise: base class for Skellam and discrete Gaussian noise.

    ``variance``: the variance of the noise on each number of the sum. ``l1`` and ``l2``: the largest L1 norm and L2
    norm of the vector of one unit. ``vectors``: 1 under add-or-remove-one adjacency, where the sum changes by one
    vector; 2 under replace-one, where the sum changes by the difference of two vectors.
    """

    variance: float
    l1: float
    l2: float
    vectors: int = 1


@dataclass(frozen=True)
class SkellamDpEvent(IntegerNoiseDpEvent):
    """The event of a sum of integer vectors plus Skellam noise (``IntegerNoiseDpEvent``)."""


@dataclass(frozen=True)
class DiscreteGaussiansDpEvent(IntegerNoiseDpEvent):
    """The event of a sum of integer vectors plus the sum of discrete Gaussian noises (``IntegerNoiseDpEvent``).

    ``shares``: the number of independent noise vectors, such as one for each client. Each has the variance
    ``variance`` / ``shares``. ``dimension``: the length of a vector.
    """

    shares: int = 1
    dimension: int = 1


_INTEGER_NOISE: Final = {name: name for name in ("variance", "l1", "l2", "vectors")}

_PLAIN: Final[dict[str, tuple[type, dict[str, str]]]] = {
    "gaussian": (dp_event.GaussianDpEvent, {"noise_multiplier": "noise_multiplier"}),
    "laplace": (dp_event.LaplaceDpEvent, {"noise_multiplier": "noise_multiplier"}),
    "geometric": (dp_event.DiscreteLaplaceDpEvent, {"parameter": "noise_parameter", "sensitivity": "sensitivity"}),
    "bounded-range": (BoundedRangeDpEvent, {"epsilon": "epsilon"}),
    "zcdp": (dp_event.ZCDpEvent, {"rho": "rho", "xi": "xi"}),
    "skellam": (SkellamDpEvent, _INTEGER_NOISE),
    "discrete-gaussians": (
        DiscreteGaussiansDpEvent,
        {**_INTEGER_NOISE, "shares": "shares", "dimension": "dimension"},
    ),
    "none": (dp_event.NonPrivateDpEvent, {}),
}
"""{kind in JSON: (event class, {JSON key: field of the event})} for the events without inner events."""


def amplify_poisson(event: dp_event.DpEvent, sampling_rate: float) -> dp_event.DpEvent:
    """Return the privacy event of the mechanism ``event`` on a Poisson-sampled cohort.

    Every unit joins the cohort independently with probability ``sampling_rate`` in (0, 1].
    """
    if not 0 < sampling_rate <= 1:
        raise UserError(
            f"sampling rate {sampling_rate} is not in (0, 1]: give the probability that one unit takes part in a step"
        )
    if sampling_rate == 1 or not isinstance(event, dp_event.GaussianDpEvent):
        _check_gaussian(event, "poisson")
        return event
    return dp_event.PoissonSampledDpEvent(sampling_rate, event)


def amplify_fixed_size(event: dp_event.DpEvent, cohort: int, population: int) -> dp_event.DpEvent:
    """Return the event of the mechanism ``event`` on a cohort of a fixed size, drawn without replacement.

    ``cohort``: the number of units in the cohort. ``population``: the number of all units.

    The returned event holds under replace-one adjacency.
    """
    if not 1 <= cohort <= population:
        raise UserError(f"a cohort of {cohort} does not fit a population of {population}: choose 1 to {population}")
    if isinstance(event, dp_event.GaussianDpEvent):
        return dp_event.TruncatedSubsampledGaussianDpEvent(population, 1.0, cohort, event.noise_multiplier)
    _check_gaussian(event, "fixed-size")
    return event


def _check_gaussian(event: dp_event.DpEvent, sampling: str) -> None:
    if not isinstance(event, dp_event.GaussianDpEvent | dp_event.NonPrivateDpEvent | dp_event.NoOpDpEvent):
        raise UserError(
            f"{sampling} sampling is accounted for the Gaussian mechanism only, not for {type(event).__name__}"
        )


def under_replacement(event: dp_event.DpEvent) -> dp_event.DpEvent:
    """Return ``event`` under replace-one adjacency: one unit is replaced, or its data change.

    The sensitivity becomes 2S, where S is the clipping norm of one unit. The sampling rate stays the same, rounded up
    to a multiple of 2^-20.
    """
    step, times = unrolled(event)
    match step:
        case dp_event.GaussianDpEvent():
            step = amplify_fixed_size(step, 1, 1)
        case dp_event.PoissonSampledDpEvent(sampling_probability=rate, event=dp_event.GaussianDpEvent() as every):
            step = amplify_fixed_size(every, math.ceil(rate * _PLACES), _PLACES)
        case IntegerNoiseDpEvent():
            step = replace(step, vectors=2)
        case dp_event.TruncatedSubsampledGaussianDpEvent() | dp_event.NonPrivateDpEvent() | dp_event.NoOpDpEvent():
            pass
        case _:
            raise UserError(f"the privacy cost of {type(step).__name__} under replace-one adjacency is not known")
    return step if times == 1 else dp_event.SelfComposedDpEvent(step, times)


def adjacency(event: dp_event.DpEvent) -> Adjacency | None:
    """Return the adjacency under which the privacy event ``event`` states a cost.

    The result is None if the event is valid under both adjacencies: a zCDP bound, or an event without guarantee.
    """
    match unrolled(event)[0]:
        case dp_event.TruncatedSubsampledGaussianDpEvent():
            return Adjacency.REPLACE_ONE
        case IntegerNoiseDpEvent(vectors=vectors):
            return Adjacency.ADD_OR_REMOVE_ONE if vectors == 1 else Adjacency.REPLACE_ONE
        case dp_event.GaussianDpEvent() | dp_event.PoissonSampledDpEvent() | dp_event.LaplaceDpEvent():
            return Adjacency.ADD_OR_REMOVE_ONE
        case dp_event.DiscreteLaplaceDpEvent() | BoundedRangeDpEvent():
            return Adjacency.ADD_OR_REMOVE_ONE
    return None


def common_adjacency(events: Sequence[dp_event.DpEvent]) -> Adjacency:
    """Return the common adjacency of ``events``. Raises UserError if two events have different adjacencies.

    If all events are valid under both adjacencies, the result is add-or-remove-one.
    """
    found = {relation for event in events if (relation := adjacency(event)) is not None}
    if len(found) > 1:
        raise UserError(
            "costs under add-or-remove-one and under replace-one cannot be added up: sample every step the same way "
            "(full participation under replace-one is fixed-size sampling with m = K)"
        )
    return found.pop() if found else Adjacency.ADD_OR_REMOVE_ONE


def unrolled(event: dp_event.DpEvent) -> tuple[dp_event.DpEvent, int]:
    """Split a repeated event into (step, times): ``event`` means ``times`` releases, each with the event ``step``.

    Raises UserError for a negative number of releases.
    """
    times = 1
    while isinstance(event, dp_event.SelfComposedDpEvent):
        if event.count < 0:
            raise UserError(f"{event.count} releases: give 0 or more")
        times, event = times * event.count, event.event
    return event, times


def single_steps(counts: Mapping[dp_event.DpEvent, int]) -> Counter[dp_event.DpEvent]:
    """Return ``counts``, {event: number of releases}, without repeated events (``SelfComposedDpEvent``).

    Each repeated event is converted to the event of a single release and the number of its repetitions.
    """
    steps: Counter[dp_event.DpEvent] = Counter()
    for event, count in counts.items():
        step, times = unrolled(event)
        if count * times:
            steps[step] += count * times
    return steps


def pure_epsilon(event: dp_event.DpEvent) -> float:
    """Return the epsilon of the privacy event ``event`` at delta 0; ``inf`` if no such epsilon is known."""
    match event:
        case BoundedRangeDpEvent(epsilon=epsilon):
            return epsilon
        case dp_event.DiscreteLaplaceDpEvent(noise_parameter=parameter, sensitivity=sensitivity):
            return float(parameter * sensitivity)
        case dp_event.LaplaceDpEvent(noise_multiplier=scale):
            return 1 / scale if scale > 0 else math.inf
        case _:
            return math.inf


def noise_multiplier(event: dp_event.DpEvent) -> float | None:
    """Return the noise multiplier of a Gaussian or integer-noise event, also if it is repeated; None for other events.

    For integer noise, this is the noise's standard deviation divided by the largest L2 norm of a rounded vector.
    """
    event, _ = unrolled(event)
    if isinstance(event, IntegerNoiseDpEvent):
        return math.sqrt(event.variance) / event.l2
    inner = event.event if isinstance(event, dp_event.PoissonSampledDpEvent) else event
    if isinstance(inner, dp_event.GaussianDpEvent | dp_event.TruncatedSubsampledGaussianDpEvent):
        return float(inner.noise_multiplier)
    return None


def sampling_rate(event: dp_event.DpEvent) -> float | None:
    """Return the sampling rate of ``event``: the probability that a unit takes part in one release.

    Return None for an event without sampling.
    """
    match unrolled(event)[0]:
        case dp_event.PoissonSampledDpEvent(sampling_probability=rate):
            return float(rate)
        case dp_event.TruncatedSubsampledGaussianDpEvent(dataset_size=population, truncated_batch_size=cohort):
            return float(cohort / population)
        case dp_event.GaussianDpEvent() | IntegerNoiseDpEvent():
            return 1.0
        case _:
            return None


def sampling_in_words(event: dp_event.DpEvent, unit: str) -> str:
    """Return a phrase, for privacy statements, that describes the sampling of the cohort of one release."""
    match unrolled(event)[0]:
        case dp_event.PoissonSampledDpEvent(sampling_probability=rate):
            return (
                f"poisson: every {unit} takes part in a step with probability {rate:.6g}, independently of the others"
            )
        case dp_event.TruncatedSubsampledGaussianDpEvent(dataset_size=population, truncated_batch_size=cohort):
            if cohort < population:
                return f"fixed-size: {cohort} of {population} {unit}s take part in a step, drawn without replacement"
        case IntegerNoiseDpEvent():
            return f"public: the server sees which {unit}s take part, so sampling them does not reduce the cost"
        case dp_event.NonPrivateDpEvent():
            return "any: sampling does not protect a release without noise"
    return f"full: every {unit} takes part in every step"


def to_json(event: dp_event.DpEvent) -> dict[str, Any]:
    """Return ``event`` as plain JSON values for ``from_json``. Raises TypeError for a type without a JSON form."""
    match event:
        case dp_event.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
            return {"kind": "poisson", "sampling_rate": rate, "event": to_json(inner)}
        case dp_event.SelfComposedDpEvent(event=inner, count=times):
            return {"kind": "repeated", "times": times, "event": to_json(inner)}
        case dp_event.TruncatedSubsampledGaussianDpEvent(
            dataset_size=population, truncated_batch_size=cohort, noise_multiplier=noise, sampling_probability=1.0
        ):
            return {"kind": "fixed-size", "cohort": cohort, "population": population, "noise_multiplier": noise}
    for kind, (made, fields) in _PLAIN.items():
        if isinstance(event, made):
            return {"kind": kind, **{key: getattr(event, name) for key, name in fields.items()}}
    raise TypeError(f"{event} has no JSON form")


def from_json(value: dict[str, Any]) -> dp_event.DpEvent:
    """Return the event that ``to_json`` wrote. Raises RunError for any other value."""
    match value:
        case {"kind": "poisson", "sampling_rate": rate, "event": {"kind": "gaussian"} as inner} if (
            len(value) == 3 and is_number(rate) and rate <= 1
        ):
            return dp_event.PoissonSampledDpEvent(rate, from_json(inner))
        case {"kind": "repeated", "times": times, "event": dict(inner)} if len(value) == 3 and is_count(times):
            return dp_event.SelfComposedDpEvent(from_json(inner), times)
        case {"kind": "fixed-size", "cohort": cohort, "population": population, "noise_multiplier": noise} if (
            len(value) == 4 and is_number(noise) and is_count(cohort) and is_count(population)
            and 0 < cohort <= population
        ):  # fmt: skip
            return dp_event.TruncatedSubsampledGaussianDpEvent(population, 1.0, cohort, noise)
        case {"kind": str(kind), **fields} if kind in _PLAIN and set(fields) == set(_PLAIN[kind][1]):
            if all(is_number(field) for field in fields.values()):
                made, names = _PLAIN[kind]
                return made(**{names[key]: field for key, field in fields.items()})
    raise RunError(f"the charge log has a privacy event that this version does not know: {repr(value)[:200]}")


def is_number(value: object) -> bool:
    """Return True if ``value``, which was read from JSON, is a finite number of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def is_count(value: object) -> bool:
    """Return True if ``value``, which was read from JSON, is a whole number of at least 0."""
    return type(value) is int and is_number(value)
