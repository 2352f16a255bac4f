"""A table of accuracies: means and deviations over seeds, the best row of each column, further tables, and notes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

from fl_sim.privacy.terms import rounded_up
from fl_sim.report.files import PrivacyStatement
from fl_sim.report.measures import ENOUGH, FEWEST, LADDER, Difference, Value, difference, mean_and_deviation, spread

Status: TypeAlias = Literal["finished", "failed", "missing"]
Measure: TypeAlias = Literal["last", "best"]
MEASURES: tuple[Measure, Measure] = ("last", "best")

DIFFERENCES = "Difference to the row with the highest mean after the last round, in points, and its 95 % interval"

_MOST_WARNINGS = 8

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
    """The result of one run: accuracies in [0, 1], None for a run that did not finish.

    ``directory`` is relative to the table's. ``statements``: the run's privacy statements. ``warnings`` include the
    reason of an early stop. ``settings`` and ``measures``: all of both, by dotted names, in the units that the names
    state (``fl_sim.report.measures``).
    """

    row: str
    column: str
    seed: int
    status: Status
    directory: str
    last: float | None = None
    best: float | None = None
    error: str = ""
    statements: tuple[PrivacyStatement, ...] = ()
    warnings: tuple[str, ...] = ()
    settings: Mapping[str, Value] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)

    @property
    def guarantee(self) -> bool:
        """Return True if any release of the run has a privacy guarantee."""
        return any(one.protects for one in self.statements)

    def accuracy(self, measure: Measure) -> float | None:
        """Return an accuracy in percent, None for a run that did not finish."""
        accuracy = self.last if measure == "last" else self.best
        return None if accuracy is None or self.status != "finished" else 100 * accuracy


@dataclass(frozen=True)
class Table:
    """A complete or partly filled table. Rows in ``upper_bounds`` do not compete for the best value.

    ``bill``: the privacy cost of all runs together (``Bill.to_json``); None while runs are missing.
    ``tuning``: the results of a search for settings by row and column, in the form of ``table.json``.
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
        """Return the cell's results, one per seed."""
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
    """The ``row`` with the highest mean in a column, None if no row competes.

    ``others``: {row: its difference to the leading row, paired by seed}, None with too few seeds finished in both.
    """

    row: str | None
    others: Mapping[str, Difference | None]


def percentages(results: Iterable[SeedResult], measure: Measure) -> list[float]:
    """Return the finished seeds' accuracies in percent."""
    return [accuracy for one in results if (accuracy := one.accuracy(measure)) is not None]


def cell_text(results: list[SeedResult], measure: Measure) -> str:
    """Return the text of a cell: ``93.1``, ``93.1 ± 0.4``, ``93.1 ± 0.4 (2 of 3)``, ``failed`` or ``-``."""
    if any(result.status == "failed" for result in results):
        return "failed"
    return _spread(percentages(results, measure), len(results))


def lead(table: Table, column: str, measure: Measure) -> Lead:
    """Find the leading row among those that compete: no upper bound, and all seeds finished."""
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
    """Return the leading row if the interval of every other row's difference to it excludes 0; else no row.

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


def texts(table: Table) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Return (row, [(text, is the best of its column)]) with two entries per column: last round, best round."""
    heads = [(column, measure) for column in table.columns for measure in MEASURES]
    winners = {head: best_rows(table, *head) for head in heads}
    return [
        (row, [(cell_text(table.at(row, head[0]), head[1]), row in winners[head]) for head in heads])
        for row in table.rows
    ]


def differences(table: Table) -> Grid | None:
    """Return the difference of every row to the one with the highest mean; None if no interval can be given."""
    leads = [lead(table, column, "last") for column in table.columns]
    if not any(found for one in leads for found in one.others.values()):
        return None
    rows = []
    for row in (row for row in table.rows if row not in table.upper_bounds):
        found = [one.others.get(row) for one in leads]
        cells = ["-" if one is None else f"{one.mean:+.1f} [{one.low:+.1f}, {one.high:+.1f}]" for one in found]
        rows.append((row, ["highest mean" if row == one.row else cell for one, cell in zip(leads, cells, strict=True)]))
    return Grid(DIFFERENCES, table.columns, rows)


def targets(table: Table) -> Grid | None:
    """Return rounds, MB and virtual seconds to a target: for each column the highest that all runs of a row reached.

    A row with runs below the target shows the mean of the others, and their number.
    """
    chosen = {column: _highest(table, column) for column in table.columns}
    columns = [column for column, accuracy in chosen.items() if accuracy is not None]
    if not columns:
        return None
    heads = [f"{column}, {chosen[column]} %" for column in columns]
    rows = [
        (row, [_cost(table.at(row, column), f"reached.{chosen[column]}") for column in columns]) for row in table.rows
    ]
    timed = any(name.endswith(".virtual_seconds") for one in table.results for name in one.measures)
    clock = ", virtual seconds" if timed else ""
    return Grid(f"Rounds to a test accuracy{clock}, and MB from and to all clients until then", heads, rows)


def further(table: Table) -> list[Grid]:
    """Return a grid for each further measure that any run has."""
    grids = []
    for name, title in _FURTHER.items():
        if any(name in one.measures for one in table.results):
            rows = []
            for row in table.rows:
                cells = [table.at(row, column) for column in table.columns]
                values = [[one.measures[name] for one in cell if name in one.measures] for cell in cells]
                rows.append((row, [_spread(some, len(cell)) for some, cell in zip(values, cells, strict=True)]))
            grids.append(Grid(title, table.columns, rows))
    return grids


def notes(table: Table) -> list[str]:
    """Return the lines of the caption: content, warnings of runs, then all else, with privacy and failures."""
    statements: dict[str, list[tuple[PrivacyStatement, ...]]] = {}
    for row in table.rows:
        finished = [one.statements for one in table.results if (one.row, one.status) == (row, "finished")]
        statements |= {row: finished} if finished else {}
    failures = [one for one in table.results if one.status == "failed"]
    bill = [str(bill["in_words"]) for bill in table.bill or ()]
    if table.bill is None and any(result.guarantee for result in table.results):
        bill = ["The privacy cost of all runs together is stated once the table is complete."]
    return [
        *table.caption[:1],
        *_warnings(table),
        *table.caption[1:],
        *_significance(table),
        *privacy_notes(statements),
        *bill,
        *(f"failed: {one.row}, {one.column}, seed {one.seed}: {one.error}" for one in failures),
    ]


def privacy_notes(rows: Mapping[str, Sequence[Sequence[PrivacyStatement]]]) -> list[str]:
    """Return a line for each guarantee with the rows that give it, and a line for the rows without any.

    ``rows``: {row: the statements of each of its runs}. A row's epsilon is the largest of its runs, each by itself: the
    bill has the cost of all runs together.
    """
    promises: dict[tuple[str, str], dict[str, tuple[float, tuple[float, float]]]] = {}
    for row, runs in rows.items():
        for one in (one for statements in runs for one in statements if one.protects):
            said = promises.setdefault((f"of a {one.unit}, delta {one.delta or 0:g}", one.limits), {})
            own, (whole, delta) = one.epsilon or 0.0, one.of_run
            largest, largest_whole = said.get(row, (0.0, (0.0, 0.0)))
            said[row] = max(largest, own), max(largest_whole, (whole or 0.0, delta))
    lines = []
    for (where, limits), epsilons in promises.items():
        of_rows = []
        for row, (epsilon, (whole, delta)) in epsilons.items():
            more = f" (the whole run {rounded_up(whole, 3)} at delta {delta:.4g})" if whole > epsilon else ""
            of_rows.append(f"{row} epsilon {rounded_up(epsilon, 3)}{more}")
        lines.append(f"Privacy of each run by itself, {where}: {', '.join(of_rows)}. {limits}".strip())
    protected = {row: [any(one.protects for one in statements) for statements in runs] for row, runs in rows.items()}
    bare = {row: some for row, some in protected.items() if not all(some)}
    names = ", ".join(f"{row} (in some runs)" if any(some) else row for row, some in bare.items())
    if len(bare) == len(rows) and not any(map(any, bare.values())):
        names = "all methods"
    return [*lines, *([f"No privacy guarantee: {names}."] if bare else [])]


def _spread(values: Sequence[float], wanted: int) -> str:
    """Return mean and deviation, and the number of values if fewer than ``wanted``."""
    return spread(values) + (f" ({len(values)} of {wanted})" if 0 < len(values) < wanted else "")


def _highest(table: Table, column: str) -> str | None:
    """Return the highest target that all runs of a competing row reached, as the measures' names write it."""
    for accuracy in (f"{100 * step:g}" for step in reversed(LADDER)):
        for row in table.rows:
            results = table.at(row, column)
            name = f"reached.{accuracy}.round"
            if row not in table.upper_bounds and results and all(name in one.measures for one in results):
                return accuracy
    return None


def _cost(results: Sequence[SeedResult], target: str) -> str:
    """Return the mean rounds, virtual seconds and MB of the runs that reached ``target``."""
    there = [one.measures for one in results if f"{target}.round" in one.measures]
    if not there:
        return f"- (0 of {len(results)})"
    rounds, _ = mean_and_deviation([one[f"{target}.round"] for one in there])
    sent, _ = mean_and_deviation([one[name] / _MEGABYTE for one in there if (name := f"{target}.bytes") in one])
    virtual, _ = mean_and_deviation([one[name] for one in there if (name := f"{target}.virtual_seconds") in one])
    text = f"{rounds:g}" if len(there) == 1 else f"{rounds:.1f}"
    text += "" if virtual is None else f", {virtual:.4g} s"
    text += "" if sent is None else f", {sent:.3g} MB"
    return text + ("" if len(there) == len(results) else f" ({len(there)} of {len(results)})")


def _warnings(table: Table) -> list[str]:
    """Return the warnings of finished runs that are not in the caption, with the runs; the most frequent first."""
    runs: dict[str, list[str]] = {}
    for one in table.results:
        for warning in dict.fromkeys(one.warnings):
            if one.status == "finished" and f"{warning}." not in table.caption:
                runs.setdefault(warning, []).append(f"{one.row}, {one.column}, seed {one.seed}")
    lines = []
    for warning, (first, *others) in sorted(runs.items(), key=lambda item: -len(item[1])):
        more = f" and {len(others)} other {'run' if len(others) == 1 else 'runs'}" if others else ""
        lines.append(f"{first}{more}: {warning.rstrip('.')}.")
    left = len(lines) - _MOST_WARNINGS
    return [*lines[:_MOST_WARNINGS], *([f"{left} more: warnings and stopped in result.json of the runs."] * (left > 0))]


def _significance(table: Table) -> list[str]:
    """Return the meaning of bold, or the reason why nothing is bold."""
    seeds = max((len(table.at(row, column)) for row in table.rows for column in table.columns), default=0)
    if len(set(table.rows) - table.upper_bounds) < 2 or not seeds:  # nothing to compare
        return []
    if seeds < FEWEST:
        few = "One seed" if seeds == 1 else "Two seeds"
        return [f"{few}: no row is bold; fewer than {FEWEST} seeds give no interval of a difference between two rows."]
    interval = f"Student's t, from {ENOUGH} seeds on BCa bootstrap; not corrected for the number of rows"
    condition = "the 95 % interval of every other row's difference to it, paired by seed, excludes 0"
    return [f"Bold: the highest mean, if {condition} ({interval})."]
