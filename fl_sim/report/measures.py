"""Measures of runs: names and units, costs until a target accuracy, means and confidence intervals over seeds.

Accuracies and other shares are given in percent. The names of these measures end in ``_percent``. The ± in tables and
the bands of curves are the sample standard deviation (ddof = 1) over seeds.
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
"""The type of an entry in ``table.csv``, such as the value of a setting."""

_SHARE: Final = re.compile(
    r"(^|[._])(accuracy(_[a-z_]+)?|([a-z_]+_)?deviation|([a-z_]+_)?worst_tenth|recall|precision|f1|auc|share|success_rate)$"
)
_NO_MEASURES: Final = {"seed", "clients", "rounds"}
"""Numbers in ``result.json`` that ``measures`` leaves out; it returns ``rounds`` as ``rounds_done``."""

_Number = TypeVar("_Number", int, float)

LADDER = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Target accuracies, in [0, 1]. ``result.json`` states the round and the costs at which a run reaches each target."""

FEWEST = 3
"""Smallest number of seeds for a confidence interval. With two seeds, a t interval is 25 standard errors wide."""

ENOUGH = 20
"""Smallest number of seeds for a bootstrap interval. With fewer seeds, the interval is Student's t.

A bootstrap interval is too narrow if there are few seeds (Hesterberg 2015, "What Teachers Should Know About the
Bootstrap"). A 95 % interval should contain the true mean in 95 % of all cases. With three seeds, the bootstrap interval
contains the true mean in 75 % of the cases. With ten seeds, it contains the true mean in 90 % of the cases
(benchmarks/interval_coverage.py). For normally distributed differences, Student's t is exact with any number of seeds.
"""

LEVEL: Final = 0.95
_RESAMPLES: Final = 10_000
_SEED: Final = 20_150_903
"""Seed of the bootstrap resamples. It is fixed, so that equal values always get equal intervals."""


def measures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of ``result.json`` as {dotted name: value}, such as {"seconds.train": 12.5}.

    ``result``: the content of ``result.json``. Numbers in lists are left out, except numbers in the list of privacy
    statements. For each privacy unit, such as ``record``, ``epsilon.record`` and ``delta.record`` are returned. These
    numbers are the total privacy cost of all published outputs about the unit. If a unit has several statements, the
    epsilon of each statement is also returned: ``epsilon.record.1`` and so on. The names of numbers in the section
    ``measures`` of the file get no prefix.
    """
    top = {name: value for name, value in result.items() if name not in {*_NO_MEASURES, "measures"}}
    beside = result.get("measures", {})
    # old results of centralized training contain client measures, which are left out
    if result.get("partition") == "centralized":
        beside = {name: value for name, value in beside.items() if not name.startswith("client_")}
    return _numbers({"rounds_done": result.get("rounds"), **top, **beside, **_epsilons(result)})


def of_round(record: RoundRecord) -> dict[str, float]:
    """Return the measures of one round, {name: value}, with names and units as in the function ``measures``.

    Unknown measures are left out.
    """
    return _numbers(record.numbers())


def share_in(numbers: Mapping[str, float], name: str) -> float | None:
    """Return a measure of a run as a number in [0, 1]; None if the run lacks this measure.

    ``numbers``: the run's measures, in percent if their names end in ``_percent``. ``name``: the name of the measure
    without ``_percent``.
    """
    value = numbers.get(f"{name}_percent")
    return None if value is None else value / 100


def best_of(name: str) -> str:
    """Convert the dotted name of a measure to the name of the same measure in the best round.

    >>> best_of("section.accuracy")
    'section.best_accuracy'
    """
    section, dot, measure = name.rpartition(".")
    return f"{section}{dot}best_{measure}"


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Value]:
    """Return the settings of an experiment as {dotted name: value}. Lists become text, and None becomes empty text."""
    known = {name: "" if value is None else value for name, value in flat(settings)}
    return {name: value if isinstance(value, Value) else str(value) for name, value in known.items()}


def percent(name: str, value: float) -> tuple[str, float]:
    """Return (name, value) of a measure. A share in [0, 1] is converted to percent, and its name to ``..._percent``.

    Shares are recognised by their names.

    >>> percent("test_accuracy", 0.5), percent("test_loss", 0.5)
    (('test_accuracy_percent', 50.0), ('test_loss', 0.5))
    """
    return (f"{name}_percent", 100 * value) if _SHARE.search(name) else (name, value)


def as_percent(share: float | None) -> float | None:
    """Return a share in [0, 1] as percent. The result is None if the share is None."""
    return None if share is None else 100 * share


@dataclass(frozen=True)
class Spent:
    """The costs of a run until some round: bytes to and from all clients, wall-clock seconds, virtual seconds.

    Virtual seconds are the simulated time of devices. A cost is None if it is unknown, or hidden for privacy.
    """

    bytes: int | None = 0
    seconds: float | None = 0.0
    virtual_seconds: float | None = 0.0


@dataclass(frozen=True)
class Reached:
    """The first evaluated round with a test accuracy of at least ``accuracy``, and the costs until this round's end.

    A cost is None if it is unknown, or hidden for privacy.
    """

    accuracy: float
    round: int
    bytes: int | None
    seconds: float | None
    virtual_seconds: float | None = None


def mean_of_last(rounds: Sequence[RoundRecord], count: int = 10) -> float | None:
    """Return the mean test accuracy, in [0, 1], of the evaluated rounds among the last ``count`` rounds.

    The result is None if none of the last ``count`` rounds was evaluated.
    """
    accuracies = [one.test_accuracy for one in rounds[-count:] if one.test_accuracy is not None]
    return sum(accuracies) / len(accuracies) if accuracies else None


def area_under(rounds: Sequence[RoundRecord]) -> float | None:
    """Return the mean height of the curve of test accuracy: the area under it, divided by the curve's length in rounds.

    The curve begins with the first evaluated round. Between evaluated rounds the curve is linear. The result is None if
    no round was evaluated.
    """
    curve = [(one.round, one.test_accuracy) for one in rounds if one.test_accuracy is not None]
    if len(curve) < 2:
        return curve[0][1] if curve else None
    area = sum((later - round_) * (before + after) / 2 for (round_, before), (later, after) in pairwise(curve))
    return area / (curve[-1][0] - curve[0][0])


def reached(rounds: Sequence[RoundRecord], accuracy: float, beforehand: Spent = Spent()) -> Reached | None:
    """Return the round and the costs at which the test accuracy first is at least ``accuracy``, in [0, 1].

    The result is None if no evaluated round has this accuracy. ``rounds``: all rounds of the run. ``beforehand``: the
    costs before the first round. If a cost is unknown for one round, the total cost is unknown too.
    """
    for one, spent in zip(rounds, spent_by(rounds, beforehand), strict=True):
        if one.test_accuracy is not None and one.test_accuracy >= accuracy:
            return Reached(accuracy, one.round, spent.bytes, spent.seconds, spent.virtual_seconds)
    return None


def spent_by(rounds: Sequence[RoundRecord], beforehand: Spent = Spent()) -> list[Spent]:
    """Return the total costs of a run at the end of each round. ``beforehand``: the costs before the first round."""
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
    """The mean difference of two table rows, paired by seed, and its 95 % confidence interval.

    ``seeds``: number of seeds, each with a pair of results. ``low``, ``high``: the ends of the interval. ``method``:
    the method that gives the interval: Student's t or the bootstrap.
    """

    seeds: int
    mean: float
    low: float
    high: float
    method: Literal["t", "bootstrap"]

    @property
    def is_significant(self) -> bool:
        """Return True if the difference is significant: its confidence interval excludes 0."""
        return self.low > 0 or self.high < 0


def mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return (mean, sample standard deviation with ddof = 1) of ``values``.

    Without values, the mean is None. With fewer than two values, the standard deviation is None.
    """
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def mean_text(values: Iterable[float | None], digits: int = 1) -> str:
    """Return mean and sample standard deviation of ``values`` as text, such as ``93.1 ± 0.4``.

    Values that are None are left out. The text for one value is ``93.1``, and without values ``-``. ``digits``: the
    number of decimal places.
    """
    mean, deviation = mean_and_deviation([value for value in values if value is not None])
    if mean is None:
        return "-"
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def difference(pairs: Sequence[tuple[float, float]]) -> Difference | None:
    """Return the mean difference (first minus second value) of all ``pairs``, with a 95 % confidence interval.

    The result is None for fewer than three pairs. For fewer than 20 pairs, the interval is Student's t. Otherwise it is
    the bias-corrected and accelerated bootstrap (BCa, Efron 1987) with 10,000 resamples of pairs. The interval is not
    corrected for multiple comparisons: a table with more rows does not get wider intervals.
    """
    differences = np.array([one - other for one, other in pairs])
    if len(differences) < FEWEST:
        return None
    mean = float(differences.mean())
    if np.ptp(differences) == 0:
        return Difference(len(differences), mean, mean, mean, "t")
    if len(differences) < ENOUGH:
        from scipy.special import stdtrit  # noqa: PLC0415 (imported only if needed: the import takes half a second)

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
        costs = wholes or [(one["epsilon"], one.get("delta")) for one in releases]
        if wholes or len(releases) == 1:  # results of older versions lack the total privacy cost of several releases
            found[f"epsilon.{unit}"], found[f"delta.{unit}"] = costs[0]
        for number, one in enumerate(releases if wholes or len(releases) > 1 else (), start=1):
            place = f"{unit}.{number}"
            found[f"epsilon.{place}"], found[f"delta.{place}"] = one["epsilon"], one.get("delta")
    return found


def _numbers(table: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a nested dictionary as {dotted name: value}, with shares in percent."""
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
