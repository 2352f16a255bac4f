"""Privacy events as JSON and as words: what a charge log stores and what a reader is told."""

import sys
from typing import Any, Final

from dp_accounting import dp_event

from fl_sim.errors import RunError
from fl_sim.privacy.accounting import unrolled
from fl_sim.privacy.pure import BoundedRangeDpEvent

_PLAIN: Final[dict[str, tuple[type, dict[str, str]]]] = {
    "gaussian": (dp_event.GaussianDpEvent, {"noise_multiplier": "noise_multiplier"}),
    "laplace": (dp_event.LaplaceDpEvent, {"noise_multiplier": "noise_multiplier"}),
    "geometric": (dp_event.DiscreteLaplaceDpEvent, {"parameter": "noise_parameter", "sensitivity": "sensitivity"}),
    "bounded-range": (BoundedRangeDpEvent, {"epsilon": "epsilon"}),
    "zcdp": (dp_event.ZCDpEvent, {"rho": "rho", "xi": "xi"}),
    "none": (dp_event.NonPrivateDpEvent, {}),
}
"""{kind: (event class, {JSON key: its field})} of the events that are written field by field."""


def to_json(event: dp_event.DpEvent) -> dict[str, Any]:
    """Return ``event`` as plain JSON, which ``from_json`` reads. Raises TypeError for a type not written here."""
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
    """Return the event that ``to_json`` wrote. Raises RunError for anything else."""
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
    raise RunError(f"the charge log holds an event that this version does not know: {repr(value)[:200]}")


def is_number(value: object) -> bool:
    """Return whether ``value``, read from JSON, is a finite number from 0 up."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def noise_multiplier(event: dp_event.DpEvent) -> float | None:
    """Return noise / clipping norm of a (sampled, repeated) Gaussian event, None for any other."""
    event, _ = unrolled(event)
    inner = event.event if isinstance(event, dp_event.PoissonSampledDpEvent) else event
    if isinstance(inner, dp_event.GaussianDpEvent | dp_event.TruncatedSubsampledGaussianDpEvent):
        return float(inner.noise_multiplier)
    return None


def sampling_rate(event: dp_event.DpEvent) -> float | None:
    """Return a unit's chance to take part in one release; None where there is no sampling to speak of."""
    match unrolled(event)[0]:
        case dp_event.PoissonSampledDpEvent(sampling_probability=rate):
            return float(rate)
        case dp_event.TruncatedSubsampledGaussianDpEvent(dataset_size=population, truncated_batch_size=cohort):
            return float(cohort / population)
        case dp_event.GaussianDpEvent():
            return 1.0
        case _:
            return None


def sampling_in_words(event: dp_event.DpEvent, unit: str) -> str:
    """Say how the units of one release are chosen."""
    match unrolled(event)[0]:
        case dp_event.PoissonSampledDpEvent(sampling_probability=rate):
            return (
                f"poisson: every {unit} takes part in a step with probability {rate:.6g}, independently of the others"
            )
        case dp_event.TruncatedSubsampledGaussianDpEvent(dataset_size=population, truncated_batch_size=cohort):
            return f"fixed-size: {cohort} of {population} {unit}s take part in a step, drawn without replacement"
        case dp_event.NonPrivateDpEvent():
            return "any: a release without protection is not helped by sampling"
        case _:
            return f"full: every {unit} takes part in every step"


def is_count(value: object) -> bool:
    """Return whether ``value``, read from JSON, is a whole number from 0 up."""
    return type(value) is int and is_number(value)
