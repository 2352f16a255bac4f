"""A table of accuracies: means and deviations over seeds, the best of each column, and what is said below.

Below it stand what it took to get somewhere, and further measures after the last round.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

from fl_sim.report.measures import ENOUGH, FEWEST, LADDER, Difference, Value, difference, mean_and_deviation
from fl_sim.report.release import Release
from fl_sim.report.release import notes as privacy_notes

Status: TypeAlias = Literal["finished", "failed", "missing"]
Measure: TypeAlias = Literal["last", "best"]
MEASURES: tuple[Measure, Measure] = ("last", "best")

DIFFERENCES = "Difference to the row with the highest mean after the last round, in points, and its 95 % interval"

_MOST_REMARKS = 8

_MEGABYTE: Final = 1e6
_FURTHER: Final = {
    "accuracy_of_last_ten_percent": "Mean accuracy of the last ten rounds, in percent",
    "balanced_accuracy_percent": "Balanced accuracy after the last round, in percent",
    "macro_f1_percent": "Macro-F1 after the last round, in percent",
    "auc_percent": "AUC after the last round, in percent",
    "client_worst_tenth_percent": "Accuracy of the worst tenth of the clients after the last round, in percent",
}


@dataclass(frozen=True)
class SeedResult:
    """What one run has to say: accuracies in [0, 1], None where it did not finish.

    ``directory`` is relative to the table's. ``releases``: the run's privacy statements. ``remarks``: what it
    warned of, and why it stopped early. ``settings`` and ``measures``:
    all of both, by dotted names, in the units that the names tell (``fl_sim.report.measures``).
    """

    row: str
    column: str
    seed: int
    status: Status
    directory: str
    last: float | None = None
    best: float | None = None
    error: str = ""
    releases: tuple[Release, ...] = ()
    remarks: tuple[str, ...] = ()
    settings: Mapping[str, Value] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)

    @property
    def guarantee(self) -> bool:
        """Return whether any of what the run released is under a privacy guarantee."""
        return any(one.protects for one in self.releases)

    def accuracy(self, measure: Measure) -> float | None:
        """Return an accuracy in percent, None where the run did not finish."""
        accuracy = self.last if measure == "last" else self.best
        return None if accuracy is None or self.status != "finished" else 100 * accuracy


@dataclass(frozen=True)
class Table:
    """A table as far as it is filled. Rows in ``upper_bounds`` do not compete for the best value.

    ``bill``: what all runs together cost the records they are about (``Bill.to_json``); None while runs are to come.
    ``tuning``: what a search for settings came to in each row and column, in the form of ``table.json``.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    upper_bounds: frozenset[str]
    results: tuple[SeedResult, ...]
    caption: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    bill: tuple[Mapping[str, Any], ...] | None = None
    tuning: tuple[Mapping[str, Any], ...] = ()

    def at(self, row: str, column: str) -> list[SeedResult]:
        """Return the cell's results, one a seed."""
        return self._by_place.get((row, column), [])

    @cached_property
    def _by_place(self) -> dict[tuple[str, str], list[SeedResult]]:
        places: dict[tuple[str, str], list[SeedResult]] = {}
        for one in self.results:
            places.setdefault((one.row, one.column), []).append(one)
        return places


@dataclass(frozen=True)
class Grid:
    """A further table below a table: its title, the heads of its columns after that of the rows, and (row, cells)."""

    title: str
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True)
class Lead:
    """The ``row`` of a column with the highest mean, None where no row competes, and how far the others are behind it.

    ``others``: {row: its difference to it, paired by seed}, None where too few seeds finished in both.
    """

    row: str | None
    others: Mapping[str, Difference | None]


def percentages(results: Iterable[SeedResult], measure: Measure) -> list[float]:
    """Return the finished seeds' accuracies in percent."""
    return [accuracy for one in results if (accuracy := one.accuracy(measure)) is not None]


def cell_text(results: list[SeedResult], measure: Measure) -> str:
    """Return what a reader sees: ``93.1``, ``93.1 ± 0.4``, ``93.1 ± 0.4 (2 of 3)``, ``failed`` or ``-``."""
    if any(result.status == "failed" for result in results):
        return "failed"
    return spread_text(percentages(results, measure), len(results))


def spread_text(values: Sequence[float], wanted: int) -> str:
    """Return mean and deviation, and of how many of ``wanted`` runs where these are not all; ``-`` without any."""
    mean, deviation = mean_and_deviation(values)
    if mean is None:
        return "-"
    text = f"{mean:.1f}" if deviation is None else f"{mean:.1f} ± {deviation:.1f}"
    return text if len(values) == wanted else f"{text} ({len(values)} of {wanted})"


def lead(table: Table, column: str, measure: Measure) -> Lead:
    """Return who is ahead, of the rows that compete: no upper bound, and all seeds finished."""
    means = {}
    for row in table.rows:
        results = table.at(row, column)
        mean, _ = mean_and_deviation(percentages(results, measure))
        if row not in table.upper_bounds and mean is not None and all(one.status == "finished" for one in results):
            means[row] = mean
    first = max(means, key=lambda row: means[row], default=None)
    if first is None:
        return Lead(None, {})
    of_first = {one.seed: one.accuracy(measure) for one in table.at(first, column)}
    others = {}
    for row in table.rows:
        if row != first and row not in table.upper_bounds:
            pairs = [(one.accuracy(measure), of_first.get(one.seed)) for one in table.at(row, column)]
            others[row] = difference([(own, best) for own, best in pairs if own is not None and best is not None])
    return Lead(first, others)


def best_rows(table: Table, column: str, measure: Measure) -> set[str]:
    """Return the row ahead, if the interval of every other row's difference to it leaves out 0; else no row.

    A row that failed does not compete. With one seed, with two, and without a rival, no row is the best.
    """
    ahead = lead(table, column, measure)
    rivals = [
        found
        for row, found in ahead.others.items()
        if table.at(row, column) and not any(one.status == "failed" for one in table.at(row, column))
    ]
    is_best = bool(rivals) and all(found is not None and found.is_significant for found in rivals)
    return {ahead.row} if ahead.row is not None and is_best else set()


def differences(table: Table) -> Grid | None:
    """Return how far every row is behind the one with the highest mean; None where no interval can be given."""
    leads = [lead(table, column, "last") for column in table.columns]
    if not any(found for one in leads for found in one.others.values()):
        return None
    rows = [
        (row, ["highest mean" if row == one.row else _difference_text(one.others.get(row)) for one in leads])
        for row in table.rows
        if row not in table.upper_bounds
    ]
    return Grid(DIFFERENCES, table.columns, rows)


def texts(table: Table) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Return (row, [(text, is the best of its column)]) with two entries a column: last round, best round."""
    heads = [(column, measure) for column in table.columns for measure in MEASURES]
    winners = {head: best_rows(table, *head) for head in heads}
    return [
        (row, [(cell_text(table.at(row, head[0]), head[1]), row in winners[head]) for head in heads])
        for row in table.rows
    ]


def notes(table: Table) -> list[str]:
    """Return the caption's lines: what is shown, what runs warned of, then all else, with privacy and what failed."""
    said: dict[str, list[tuple[Release, ...]]] = {}
    for row in table.rows:
        finished = [one.releases for one in table.results if (one.row, one.status) == (row, "finished")]
        said |= {row: finished} if finished else {}
    failures = [one for one in table.results if one.status == "failed"]
    return [
        *table.caption[:1],
        *_remarks(table),
        *table.caption[1:],
        *_significance(table),
        *privacy_notes(said),
        *_bill_notes(table),
        *(f"failed: {one.row}, {one.column}, seed {one.seed}: {one.error}" for one in failures),
    ]


def targets(table: Table) -> Grid | None:
    """Return rounds, MB and virtual seconds to an accuracy: for each column the highest that all of some row reached.

    A row that not all of its runs got there with tells the mean of those that did, and how many they were.
    """
    chosen = {column: _highest(table, column) for column in table.columns}
    columns = [column for column, accuracy in chosen.items() if accuracy is not None]
    if not columns:
        return None
    heads = [f"{column}, {chosen[column]} %" for column in columns]
    rows = [(row, [_taken(table, row, column, chosen[column]) for column in columns]) for row in table.rows]
    timed = any(name.endswith(".virtual_seconds") for one in table.results for name in one.measures)
    clock = ", virtual seconds" if timed else ""
    return Grid(f"Rounds to a test accuracy{clock}, and MB from and to all clients until then", heads, rows)


def further(table: Table) -> list[Grid]:
    """Return a grid for each further measure that any run has."""
    return [
        Grid(title, table.columns, [(row, _cells(table, row, name)) for row in table.rows])
        for name, title in _FURTHER.items()
        if any(name in one.measures for one in table.results)
    ]


def _difference_text(found: Difference | None) -> str:
    return "-" if found is None else f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def _remarks(table: Table) -> list[str]:
    """Return what finished runs remarked that the caption does not say for all, with the runs; the commonest first."""
    runs: dict[str, list[str]] = {}
    for one in table.results:
        for remark in dict.fromkeys(one.remarks):
            if one.status == "finished" and f"{remark}." not in table.caption:
                runs.setdefault(remark, []).append(f"{one.row}, {one.column}, seed {one.seed}")
    commonest = sorted(runs.items(), key=lambda item: -len(item[1]))
    lines = [f"{names[0]}{_and_others(len(names) - 1)}: {said.rstrip('.')}." for said, names in commonest]
    left = len(lines) - _MOST_REMARKS
    return [*lines[:_MOST_REMARKS], *([f"{left} more: warnings and stopped in result.json of the runs."] * (left > 0))]


def _and_others(number: int) -> str:
    return f" and {number} other {'run' if number == 1 else 'runs'}" if number else ""


def _significance(table: Table) -> list[str]:
    """Say what bold means, or why nothing is bold."""
    seeds = max((len(table.at(row, column)) for row in table.rows for column in table.columns), default=0)
    if len(set(table.rows) - table.upper_bounds) < 2 or not seeds:  # nothing to compare
        return []
    if seeds < FEWEST:
        few = "One seed" if seeds == 1 else "Two seeds"
        return [f"{few}: no row is bold; fewer than {FEWEST} seeds give no interval of a difference between two rows."]
    interval = f"Student's t, from {ENOUGH} seeds on BCa bootstrap; not corrected for the number of rows"
    told = "the 95 % interval of every other row's difference to it, paired by seed, leaves out 0"
    return [f"Bold: the highest mean, where {told} ({interval})."]


def _bill_notes(table: Table) -> list[str]:
    if table.bill is not None:
        return [str(bill["in_words"]) for bill in table.bill]
    if any(result.guarantee for result in table.results):
        return ["What all runs together cost the records they are about is told once the table is done."]
    return []


def _cells(table: Table, row: str, name: str) -> list[str]:
    places = [table.at(row, column) for column in table.columns]
    return [
        spread_text([one.measures[name] for one in results if name in one.measures], len(results)) for results in places
    ]


def _highest(table: Table, column: str) -> str | None:
    """Return the highest accuracy that all runs of a row that competes reached, as its name has it."""
    for accuracy in (f"{100 * step:g}" for step in reversed(LADDER)):
        for row in table.rows:
            results = table.at(row, column)
            if row not in table.upper_bounds and results and all(_round(accuracy) in one.measures for one in results):
                return accuracy
    return None


def _taken(table: Table, row: str, column: str, accuracy: str | None) -> str:
    results = table.at(row, column)
    there = [one.measures for one in results if accuracy and _round(accuracy) in one.measures]
    if not there or accuracy is None:
        return f"- (0 of {len(results)})"
    rounds, _ = mean_and_deviation([one[_round(accuracy)] for one in there])
    sent, _ = mean_and_deviation([one[_bytes(accuracy)] / _MEGABYTE for one in there if _bytes(accuracy) in one])
    virtual = [one[name] for one in there if (name := f"reached.{accuracy}.virtual_seconds") in one]
    text = f"{rounds:g}" if len(there) == 1 else f"{rounds:.1f}"
    text += f", {mean_and_deviation(virtual)[0]:.4g} s" if virtual else ""
    megabytes = "" if sent is None else f", {sent:.3g} MB"
    return text + megabytes + ("" if len(there) == len(results) else f" ({len(there)} of {len(results)})")


def _round(accuracy: str) -> str:
    return f"reached.{accuracy}.round"


def _bytes(accuracy: str) -> str:
    return f"reached.{accuracy}.bytes"
