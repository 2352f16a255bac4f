"""``fl-sim privacy labels``: what the label picker does with one class, number by number, and what it costs."""

import math
from typing import Any, Final, Literal

import numpy as np

from clients.dafl.labels import ExponentialMechanism, Geometric
from fl_sim.errors import UserError

_LARGEST_RANGE: Final = 10**6
_BAR: Final = 40
_MOST_ROWS: Final = 25


def answer(
    mechanism: Literal["exponential", "geometric"],
    records: int,
    gamma: float,
    epsilon: float,
    largest: int,
    *,
    classes: int,
    false_positive: float,
) -> dict[str, Any]:
    """Return the distribution of one class's selection, its moments and its price as JSON values.

    Raises UserError where a value makes no sense.
    """
    _check(records, epsilon, largest, classes, false_positive)
    kind = ExponentialMechanism if mechanism == "exponential" else Geometric
    picker = kind(epsilon=epsilon, false_positive=false_positive)
    pmf = picker.pmf(records, gamma, largest)
    counts = np.arange(largest + 1)
    mean = float(pmf @ counts)
    threshold = picker.threshold(gamma, largest)
    totals = picker.totals(classes)
    return {
        "unit": "record",
        "mechanism": mechanism,
        "records": records,
        "gamma": gamma,
        "range": largest,
        "classes": classes,
        "epsilon": epsilon,
        "delta": 0.0,
        "epsilon_parallel": totals.parallel,
        "epsilon_sequential": totals.sequential,
        "epsilon_replace_one": totals.replace_one,
        "target": gamma * records,
        "mean": mean,
        "standard_deviation": math.sqrt(float(pmf @ (counts - mean) ** 2)),
        "threshold": threshold,
        "false_positive": false_positive,
        "dropped": float(pmf[:threshold].sum()),
        "mean_of_absent_class": float(picker.pmf(0, gamma, largest) @ counts),
        "pmf": pmf.tolist(),
    }


def in_words(found: dict[str, Any]) -> str:
    """Return the answer as lines for people; of a long distribution, the part about its mean."""
    lines = [
        f"synthetic labels    {found['mean']:.4g} on average, standard deviation {found['standard_deviation']:.4g}",
        f"target              {found['target']:.6g} = gamma x records; at most {found['range']}",
        f"threshold           {found['threshold']}; fewer count as none",
        f"  of this class     {found['dropped']:.3g} is the chance to fall below it",
        f"  of an absent one  {found['false_positive']:g} at most is the chance to reach it",
        f"absent class        {found['mean_of_absent_class']:.3g} labels on average without the threshold",
        f"epsilon             {found['epsilon_parallel']:g} for all classes together, since a record is in one class",
        f"  sequential        {found['epsilon_sequential']:g} added up over {found['classes']} classes",
        f"  replace one       {found['epsilon_replace_one']:g} where a record may change its class",
        "unit                record, add-or-remove-one; delta 0",
        "",
        f"{'labels':>8}  probability",
    ]
    pmf = found["pmf"]
    first = min(max(0, round(found["mean"]) - _MOST_ROWS // 2), max(0, len(pmf) - _MOST_ROWS))
    shown = range(first, min(first + _MOST_ROWS, len(pmf)))
    lines += [f"{count:8}  {pmf[count]:.6f} {'#' * round(_BAR * pmf[count] / max(pmf))}".rstrip() for count in shown]
    return "\n".join(lines)


def _check(records: int, epsilon: float, largest: int, classes: int, false_positive: float) -> None:
    if records < 0:
        raise UserError(f"{records} records: give 0 or more")
    if not 0 < epsilon < math.inf:
        raise UserError(f"epsilon {epsilon} is not a positive number: choose one such as 0.1")
    if largest > _LARGEST_RANGE:
        raise UserError(f"a range up to {largest} is too long to print: give at most {_LARGEST_RANGE}")
    if classes < 1:
        raise UserError(f"{classes} classes: give at least 1")
    if not 0 < false_positive <= 1:
        raise UserError(f"a false-positive probability of {false_positive} is not in (0, 1]: choose one such as 0.01")
