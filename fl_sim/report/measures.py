"""Measures of runs: names and units, the cost until a target accuracy, means and confidence intervals over seeds.

Shares are given in percent, and their names end in ``_percent``. The ± in tables and the bands of curves are the sample
standard deviation (ddof = 1) over seeds.
"""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fl_sim.settings import flat
from fl_sim.store.run_directory import RoundRecord

Value: TypeAlias = str | int | float | bool
"""The value of a setting, or another entry, in a column of ``table.csv``."""

_SHARE: Final = re.compile(
    r"(^|[._])(accuracy(_[a-z_]+)?|client_deviation|client_worst_tenth|recall|precision|f1|auc|share)$"
)
_NO_MEASURES: Final = {"seed", "clients", "rounds"}
"""Top-level numbers of ``result.json`` that are settings, or that get another name in ``measures``."""

_Number = TypeVar("_Number", int, float)

LADDER = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Target accuracies, in [0, 1]: ``result.json`` states the cost until each target is reached."""

FEWEST = 3
"""Smallest number of seeds for a confidence interval. With two seeds, the t interval is 25 standard errors wide."""

ENOUGH = 20
"""Smallest number of seeds for a bootstrap interval. With fewer seeds the interval is Student's t.

A bootstrap interval of n differences lies between the smallest and the largest difference, and is too narrow by about
sqrt((n - 1) / n) * z / t (Hesterberg 2015, "What Teachers Should Know About the Bootstrap"). Instead of 95 % of all
cases, it covers the true mean in 75 % with three seeds and in 90 % with ten (benchmarks/interval_coverage.py). For
normally distributed differences, Student's t is exact with any number of seeds.
"""

LEVEL: Final = 0.95
_RESAMPLES: Final = 10_000
_SEED: Final = 20_150_903
"""Seed of the bootstrap resamples. It is fixed, so that equal values always get equal intervals."""


def measures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return all numbers of a ``result.json`` by dotted name, such as ``final_accuracy_percent``, ``seconds.train``.

    Lists are left out, apart from the privacy statements. For each unit, ``epsilon.record`` and ``delta.record`` are
    the cost of all releases about the unit. If there are several statements about a unit, each statement has its own
    epsilon: ``epsilon.record.1`` and so on. Numbers in the section ``measures`` of the file get no prefix.
    """
    top = {name: value for name, value in result.items() if name not in {*_NO_MEASURES, "measures"}}
    beside = result.get("measures", {})
    if result.get("partition") == "centralized":  # earlier versions gave its accuracy to its only client
        beside = {name: value for name, value in beside.items() if not name.startswith("client_")}
    return _numbers({"rounds_done": result.get("rounds"), **top, **beside, **_epsilons(result)})


def of_round(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a round, {name: value}, with the names and units of ``measures``; None is left out."""
    return _numbers(record.numbers())


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Value]:
    """Return the settings of a resolved experiment, {dotted name: value}. Lists become text, None empty text."""
    known = {name: "" if value is None else value for name, value in flat(settings)}
    return {name: value if isinstance(value, Value) else str(value) for name, value in known.items()}


def percent(name: str, value: float) -> tuple[str, float]:
    """Return name and value of a measure. A share, recognised by its name, is converted to percent and renamed.

    >>> percent("test_accuracy", 0.5), percent("test_loss", 0.5)
    (('test_accuracy_percent', 50.0), ('test_loss', 0.5))
    """
    return (f"{name}_percent", 100 * value) if _SHARE.search(name) else (name, value)


def as_percent(share: float | None) -> float | None:
    """Return a share in percent, or None for None."""
    return None if share is None else 100 * share


@dataclass(frozen=True)
class Spent:
    """Costs: bytes to and from all clients, wall-clock seconds, virtual seconds. None: unknown or private."""

    bytes: int | None = 0
    seconds: float | None = 0.0
    virtual_seconds: float | None = 0.0


@dataclass(frozen=True)
class Reached:
    """The first evaluated round with a test accuracy of at least ``accuracy``, and the costs up to its end."""

    accuracy: float
    round: int
    bytes: int | None
    seconds: float | None
    virtual_seconds: float | None = None


def mean_of_last(rounds: Sequence[RoundRecord], count: int = 10) -> float | None:
    """Return the mean test accuracy of the evaluated rounds among the last ``count``; None if none was evaluated."""
    accuracies = [one.test_accuracy for one in rounds[-count:] if one.test_accuracy is not None]
    return sum(accuracies) / len(accuracies) if accuracies else None


def area_under(rounds: Sequence[RoundRecord]) -> float | None:
    """Return the mean test accuracy over rounds, in [0, 1]: the area under the accuracy curve divided by its length.

    The curve is linear between evaluated rounds and begins with the first one. None if no round was evaluated.
    """
    curve = [(one.round, one.test_accuracy) for one in rounds if one.test_accuracy is not None]
    if len(curve) < 2:
        return curve[0][1] if curve else None
    area = sum((later - round_) * (before + after) / 2 for (round_, before), (later, after) in pairwise(curve))
    return area / (curve[-1][0] - curve[0][0])


def reached(rounds: Sequence[RoundRecord], accuracy: float, beforehand: Spent = Spent()) -> Reached | None:
    """Return the cost until a test accuracy of at least ``accuracy``; None if no evaluated round reaches it.

    ``rounds``: all rounds from the first one on. ``beforehand``: the costs before the first round. If a cost is unknown
    for one round, the sum is unknown too.
    """
    for one, spent in zip(rounds, spent_by(rounds, beforehand), strict=True):
        if one.test_accuracy is not None and one.test_accuracy >= accuracy:
            return Reached(accuracy, one.round, spent.bytes, spent.seconds, spent.virtual_seconds)
    return None


def spent_by(rounds: Sequence[RoundRecord], beforehand: Spent = Spent()) -> list[Spent]:
    """Return the cumulative costs at the end of each round, including the costs ``beforehand``."""
    totals, total = [], beforehand
    for one in rounds:
        total = Spent(
            _plus(total.bytes, _plus(one.bytes_down, one.bytes_up)),
            _plus(total.seconds, one.seconds),
            _plus(total.virtual_seconds, one.virtual_seconds),
        )
        totals.append(total)
    return totals


@dataclass(frozen=True)
class Difference:
    """The mean difference of two table rows, paired by seed, and its 95 % interval from ``low`` to ``high``."""

    seeds: int
    mean: float
    low: float
    high: float
    method: Literal["t", "bootstrap"]

    @property
    def is_significant(self) -> bool:
        """Return True if the interval excludes 0."""
        return self.low > 0 or self.high < 0


def mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and the sample standard deviation (ddof = 1); each is None if there are too few values."""
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def spread(values: Iterable[float | None], digits: int = 1) -> str:
    """Return mean and sample standard deviation as text: ``93.1 ± 0.4``, or ``93.1`` for one value, ``-`` for none."""
    mean, deviation = mean_and_deviation([value for value in values if value is not None])
    if mean is None:
        return "-"
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def difference(pairs: Sequence[tuple[float, float]]) -> Difference | None:
    """Return the mean difference, first minus second value of each pair, with interval; None below three pairs.

    The interval is Student's t for fewer than 20 pairs, else the bias-corrected and accelerated bootstrap (BCa) of the
    mean difference (Efron 1987), 10,000 resamples of pairs. It is not corrected for the number of rows.
    """
    differences = np.array([one - other for one, other in pairs])
    if len(differences) < FEWEST:
        return None
    mean = float(differences.mean())
    if np.ptp(differences) == 0:
        return Difference(len(differences), mean, mean, mean, "t")
    if len(differences) < ENOUGH:
        from scipy.special import stdtrit  # noqa: PLC0415 (half a second to import, and one seed needs none)

        n = len(differences)
        reach = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * float(differences.std(ddof=1)) / n**0.5
        return Difference(n, mean, mean - reach, mean + reach, "t")
    return Difference(len(differences), mean, *_bootstrap(differences), "bootstrap")


def _epsilons(result: Mapping[str, Any]) -> dict[str, Any]:
    by_unit: dict[str, list[Mapping[str, Any]]] = {}
    for release in result.get("privacy", []):
        by_unit.setdefault(str(release["unit"]), []).append(release)
    found: dict[str, Any] = {}
    for unit, releases in by_unit.items():
        wholes = [
            (one["epsilon_whole_run"], one["delta_whole_run"]) for one in releases if one.get("epsilon_whole_run")
        ]
        told = wholes or [(one["epsilon"], one.get("delta")) for one in releases]
        if wholes or len(releases) == 1:  # earlier versions did not say what several cost together
            found[f"epsilon.{unit}"], found[f"delta.{unit}"] = told[0]
        for number, one in enumerate(releases if wholes or len(releases) > 1 else (), start=1):
            place = f"{unit}.{number}"
            found[f"epsilon.{place}"], found[f"delta.{place}"] = one["epsilon"], one.get("delta")
    return found


def _numbers(table: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a nested table by dotted name, with shares in percent."""
    numbers = {name: value for name, value in flat(table) if isinstance(value, int | float)}
    return dict(percent(name, value) for name, value in numbers.items() if not isinstance(value, bool))


def _plus(left: _Number | None, right: _Number | None) -> _Number | None:
    return None if left is None or right is None else left + right


def _bootstrap(values: NDArray[np.float64]) -> tuple[float, float]:
    from scipy.special import ndtr, ndtri  # noqa: PLC0415

    n, mean = len(values), values.mean()
    draws = np.random.default_rng(_SEED).integers(n, size=(_RESAMPLES, n))
    means = values[draws].mean(axis=1)
    below = ((means < mean).sum() + (means == mean).sum() / 2) / _RESAMPLES
    bias = ndtri(np.clip(below, 1 / _RESAMPLES, 1 - 1 / _RESAMPLES))
    left_out = (values.sum() - values) / (n - 1)
    pull = left_out.mean() - left_out
    acceleration = (pull**3).sum() / (6 * (pull**2).sum() ** 1.5)
    tails = bias + ndtri(np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    low, high = np.quantile(means, ndtr(bias + tails / (1 - acceleration * tails)))
    return float(low), float(high)
