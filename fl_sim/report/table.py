"""Tables of accuracies: means and standard deviations over seeds, the best row of each column, and further tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, Literal, TypeAlias

from fl_sim.report.files import PrivacyStatement
from fl_sim.report.heat_map import HeatMap
from fl_sim.report.measures import FEWEST, LADDER, Difference, Value, difference, mean_and_deviation, mean_text

Status: TypeAlias = Literal["finished", "failed", "missing"]
Measure: TypeAlias = Literal["last", "best"]
MEASURES: tuple[Measure, Measure] = ("last", "best")

DIFFERENCES = "Difference to {} after the last round, in points, and its 95 % interval"
HIGHEST = "the row with the highest mean"

_LAST_TEN, _TEN = "accuracy_of_last_ten_percent", 10
_MEGABYTE: Final = 1e6
_FURTHER: Final = {
    _LAST_TEN: "Mean accuracy of the last ten rounds, in percent",
    "balanced_accuracy_percent": "Balanced accuracy after the last round, in percent",
    "macro_f1_percent": "Macro-F1 after the last round, in percent",
    "auc_percent": "AUC after the last round, in percent",
    "perplexity": "Perplexity of the next token after the last round",
    "client_worst_tenth_percent": "Accuracy of the worst tenth of the clients after the last round, in percent",
}


@dataclass(frozen=True)
class SeedResult:
    """The result of one run of a table.

    ``directory``: run directory, relative to the table's folder. ``last``, ``best``: accuracies in [0, 1] after the
    last round and in the best round; None for a run that did not finish. ``statements``: privacy statements of the run.
    ``warnings``: warnings of the run, with the reason of an early stop. ``settings``: all settings by dotted name.
    ``measures``: all measures by dotted name, with names and units as in ``fl_sim.report.measures``.
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
        """Return True if any published output of the run has a privacy guarantee."""
        return any(one.protects for one in self.statements)

    def accuracy(self, measure: Measure) -> float | None:
        """Return the accuracy of the last or the best round in percent; None for a run that did not finish."""
        accuracy = self.last if measure == "last" else self.best
        return None if accuracy is None or self.status != "finished" else 100 * accuracy


@dataclass(frozen=True)
class Table:
    """A table with the results of all or some of its runs.

    ``upper_bounds``: the rows of centralized training, which cannot be the best row. ``bill``: the total privacy cost
    of all runs (``Bill.to_json``); None while runs are missing. ``tuning``: the results of the hyperparameter search by
    row and column, in the format of ``table.json``. ``labels``: {row: short label}; empty for older tables.
    ``reference``: the row with which the other rows are compared; empty: the row with the highest mean. ``alone``: the
    rows of local-only training: without federation, each client trains its own model. ``titles``: the titles of the
    measures of stages (``fl_sim.simulation.stage.Stage.titles``); None for a table of an older version, which did not
    store titles. ``heat_maps``: the layouts of the heat maps that a report draws.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    upper_bounds: frozenset[str]
    results: tuple[SeedResult, ...]
    caption: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    bill: tuple[Mapping[str, Any], ...] | None = None
    tuning: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    reference: str = ""
    alone: frozenset[str] = frozenset()
    titles: Mapping[str, str] | None = None
    heat_maps: tuple[HeatMap, ...] = ()

    def label(self, row: str) -> str:
        """Return the short label of a row; the name of the row if it has no label."""
        return self.labels.get(row, row)

    def at(self, row: str, column: str) -> list[SeedResult]:
        """Return the results of one cell (``row``, ``column``), one per seed."""
        return self._by_place.get((row, column), [])

    @cached_property
    def _by_place(self) -> dict[tuple[str, str], list[SeedResult]]:
        places: dict[tuple[str, str], list[SeedResult]] = {}
        for one in self.results:
            places.setdefault((one.row, one.column), []).append(one)
        return places


@dataclass(frozen=True)
class Grid:
    """A further table that a report shows below the table of accuracies.

    ``heads``: headings of the value columns. ``rows``: (row label, cells). ``corner``: heading of the row labels.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    corner: str = "Method"


@dataclass(frozen=True)
class Comparison:
    """The comparison of the rows in one column with a reference row.

    ``row``: the reference row; None if the column has no such row. ``others``: {row: difference to the reference row,
    paired by seed}. A difference is None if too few seeds have a finished run in both rows.
    """

    row: str | None
    others: Mapping[str, Difference | None]


def title_of_measure(name: str, titles: Mapping[str, str]) -> str:
    """Return the title of a measure, for people. ``name``: its dotted name in ``result.json``.

    If the measure has no title, return its name. The measure must be a share, which is a number in [0, 1]. ``titles``:
    the titles of the measures of stages.
    """
    return {**_FURTHER, **titles}.get(f"{name}_percent", name)


def percentages(results: Iterable[SeedResult], measure: Measure) -> list[float]:
    """Return the accuracies, in percent, of the finished runs in ``results``."""
    return [accuracy for one in results if (accuracy := one.accuracy(measure)) is not None]


def cell_text(results: list[SeedResult], measure: Measure) -> str:
    """Return the text of a cell: mean ± standard deviation over seeds, in percent; ``failed`` if any run failed.

    If only two of three runs are finished, the text is such as ``93.1 ± 0.4 (2 of 3)``. If no run is finished, the text
    is ``-``.
    """
    if any(result.status == "failed" for result in results):
        return "failed"
    return _mean_text(percentages(results, measure), len(results))


def compare_with_best(table: Table, column: str, measure: Measure) -> Comparison:
    """Compare the rows of a column with the row that has the highest mean accuracy.

    Rows of centralized training are left out. A row with unfinished runs cannot be the row with the highest mean.
    """
    means = _means(table, column, measure)
    first = max(means, key=lambda row: means[row], default=None)
    return Comparison(None, {}) if first is None else _against(table, first, column, measure)


def compare(table: Table, column: str) -> Comparison:
    """Compare the final accuracies of all rows in a column with the final accuracy of the reference row.

    If the table has no reference row, the rows are compared with the row that has the highest mean.
    """
    if table.reference:
        return _against(table, table.reference, column, "last")
    return compare_with_best(table, column, "last")


def best_rows(table: Table, column: str, measure: Measure) -> set[str]:
    """Return a set with the best row, if all other rows are significantly worse; else an empty set.

    The best row has the highest mean. Another row is significantly worse if the 95 % confidence interval of the
    difference between both rows excludes 0. Rows with a failed run are ignored. The set is empty if there are fewer
    than three seeds or no other rows.
    """
    comparison = compare_with_best(table, column, measure)
    rivals = [
        found
        for row, found in comparison.others.items()
        if table.at(row, column) and not any(one.status == "failed" for one in table.at(row, column))
    ]
    is_best = bool(rivals) and all(found is not None and found.is_significant for found in rivals)
    return {comparison.row} if comparison.row is not None and is_best else set()


def bold_rows(table: Table, column: str, measure: Measure) -> set[str]:
    """Return the rows to print in bold: the result of ``best_rows``.

    If there are too few seeds for ``best_rows``, the rows with the highest mean are returned. Means are compared as the
    table shows them, rounded to one decimal place.
    """
    if most_seeds(table) >= FEWEST:
        return best_rows(table, column, measure)
    means = {row: round(mean, 1) for row, mean in _means(table, column, measure).items()}
    return {row for row, mean in means.items() if len(means) > 1 and mean == max(means.values())}


def most_seeds(table: Table) -> int:
    """Return the largest number of seeds that any cell of the table has."""
    return max((len(table.at(row, column)) for row in table.rows for column in table.columns), default=0)


def texts(table: Table) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Return (name, cells) of each row of the table. A cell is (text, True if the text is bold).

    Each column has two cells: the accuracy after the last round, and the accuracy in the best round.
    """
    heads = [(column, measure) for column in table.columns for measure in MEASURES]
    winners = {head: bold_rows(table, *head) for head in heads}
    return [
        (row, [(cell_text(table.at(row, head[0]), head[1]), row in winners[head]) for head in heads])
        for row in table.rows
    ]


def mapped(table: Table) -> list[Grid]:
    """Return the heat maps of a table as tables of final accuracies; an empty list for a table without heat maps."""
    shown = str(table.settings.get("measure", ""))
    title = title_of_measure(shown, table.titles or {}) if shown else "Test accuracy"
    heading = f"{title} after the last round, in percent"
    return [_mapped(table, one, heading, lambda results: cell_text(results, "last")) for one in table.heat_maps]


def _mapped(table: Table, one: HeatMap, title: str, text: Callable[[list[SeedResult]], str]) -> Grid:
    cells = {place: text(table.at(row, one.column)) for place, row in one.places.items()}
    rows = [(row, [cells.get((row, column), "-") for column in one.column_labels]) for row in one.row_labels]
    return Grid(f"{title}, {one.title}", one.column_labels, rows, f"{one.rows} / {one.columns}")


def _maps_with(table: Table, name: str) -> list[HeatMap]:
    """Return the heat maps that can show the measure ``name``: at least one run in such a map has this measure."""
    return [
        one
        for one in table.heat_maps
        if any(_has(result, name) for row in one.places.values() for result in table.at(row, one.column))
    ]


def differences(table: Table) -> Grid | None:
    """Return a table with the difference of each row to the reference row, for each column.

    The result is None if no confidence interval can be computed, and for a table with heat maps but no reference row.
    The rows of a heat map differ in settings, such as the strength of an attack. The row with the highest mean, such as
    the weakest attack, is then no useful reference.
    """
    if table.heat_maps and not table.reference:
        return None
    comparisons = [compare(table, column) for column in table.columns]
    if not any(found for one in comparisons for found in one.others.values()):
        return None
    rows = []
    for row in (row for row in table.rows if row not in table.upper_bounds):
        found = [one.others.get(row) for one in comparisons]
        cells = ["-" if one is None else f"{one.mean:+.1f} [{one.low:+.1f}, {one.high:+.1f}]" for one in found]
        own = "reference" if table.reference else "highest mean"
        shown = [own if row == one.row else cell for one, cell in zip(comparisons, cells, strict=True)]
        rows.append((table.label(row), shown))
    return Grid(DIFFERENCES.format(table.label(table.reference) or HIGHEST), table.columns, rows)


def targets(table: Table) -> Grid | None:
    """Return a table of rounds, MB and virtual seconds until a target accuracy; None if no run reached a target.

    The target of a column is the highest accuracy in the list ``LADDER`` that all runs of at least one row reached. If
    only some runs of a row reach the target, the row shows the mean and the number of these runs.
    """
    # If the table shows a measure other than the global model's accuracy, there are no target accuracies.
    if table.settings.get("measure"):
        return None
    chosen = {column: _highest(table, column) for column in table.columns}
    columns = [column for column, accuracy in chosen.items() if accuracy is not None]
    if not columns:
        return None
    heads = [f"{column}, {chosen[column]} %" for column in columns]
    rows = [
        (table.label(row), [_cost(table.at(row, column), f"reached.{chosen[column]}") for column in columns])
        for row in table.rows
    ]
    timed = any(name.endswith(".virtual_seconds") for one in table.results for name in one.measures)
    clock = ", virtual seconds" if timed else ""
    return Grid(f"Rounds to a test accuracy{clock}, and MB from and to all clients until then", heads, rows)


def further(table: Table) -> list[Grid]:
    """Return further tables, one for each further measure that any run has, such as balanced accuracy.

    If ``table`` has heat maps, each measure has a table per heat map. If the name of a measure contains ``*``, the
    measure has a table per column of ``table``.
    """
    grids: list[Grid] = []
    shown = str(table.settings.get("measure", ""))
    # if the table shows a measure of the clients' own models, the measures of the global model are left out
    section = shown.rpartition(".")[0]
    for name, title in {**_FURTHER, **(table.titles or {})}.items():
        if "*" in name:
            grids += _by_part(table, name, title)
        elif name != f"{shown}_percent" and name.startswith(section) and any(_has(one, name) for one in table.results):
            places = [(column, name) for column in table.columns]
            mapped_means = [_mapped(table, one, title, partial(_mean_of, name)) for one in _maps_with(table, name)]
            grids += mapped_means if table.heat_maps else [_grid(table, title, table.columns, places)]
    return grids


def _by_part(table: Table, pattern: str, title: str) -> list[Grid]:
    """Return one new table for each column of ``table``, with the measures whose names match ``pattern``.

    ``pattern``: the name of a measure with ``*`` for a part of the name, such as a domain. The new table has a column
    for each text that replaces ``*``. There is no new table for a column of ``table`` without such measures.
    """
    start, _, end = pattern.partition("*")
    grids = []
    for column in table.columns:
        measured = [one for row in table.rows for one in table.at(row, column)]
        names = dict.fromkeys(name for one in measured for name in one.measures)
        parts = [
            name[len(start) : -len(end)]
            for name in names
            if name.startswith(start) and name.endswith(end) and len(name) > len(start) + len(end)
        ]
        named = title if len(table.columns) == 1 else f"{title}, {column}"
        if parts:
            grids.append(_grid(table, named, parts, [(column, f"{start}{part}{end}") for part in parts]))
    return grids


def _grid(table: Table, title: str, heads: Sequence[str], places: Sequence[tuple[str, str]]) -> Grid:
    """Return a further table: for each row of ``table``, the mean over seeds of several measures.

    ``places``: for each heading in ``heads``, the pair (column of ``table``, name of the measure) that it shows.
    """
    rows = [
        (table.label(row), [_mean_of(name, table.at(row, column)) for column, name in places]) for row in table.rows
    ]
    return Grid(title, heads, rows)


def _mean_of(name: str, results: list[SeedResult]) -> str:
    return _mean_text([one.measures[name] for one in results if _has(one, name)], len(results))


def _has(one: SeedResult, name: str) -> bool:
    """Return True if a run has the measure ``name``, so that a further table can show it.

    The measure "mean of the last ten rounds" counts as missing if the run has fewer than ten rounds.
    """
    return name in one.measures and (name != _LAST_TEN or one.measures.get("rounds_done", _TEN) >= _TEN)


def _means(table: Table, column: str, measure: Measure) -> dict[str, float]:
    """Return {row: mean accuracy in percent} of the rows of a column. Rows with an unfinished run are left out.

    Rows of centralized training are left out, too.
    """
    means = {}
    for row in table.rows:
        results = table.at(row, column)
        mean, _ = mean_and_deviation(percentages(results, measure))
        if row not in table.upper_bounds and mean is not None and all(one.status == "finished" for one in results):
            means[row] = mean
    return means


def _against(table: Table, first: str, column: str, measure: Measure) -> Comparison:
    """Compare every row of a column with the row ``first``, by the differences of runs with the same seed.

    Rows of centralized training are left out.
    """
    of_first = {one.seed: one.accuracy(measure) for one in table.at(first, column)}
    others = {}
    for row in table.rows:
        if row != first and row not in table.upper_bounds:
            pairs = [(one.accuracy(measure), of_first.get(one.seed)) for one in table.at(row, column)]
            others[row] = difference([(own, best) for own, best in pairs if own is not None and best is not None])
    return Comparison(first, others)


def _mean_text(values: Sequence[float], wanted: int) -> str:
    return mean_text(values) + (f" ({len(values)} of {wanted})" if 0 < len(values) < wanted else "")


def _highest(table: Table, column: str) -> str | None:
    """Return the highest target accuracy that all runs of at least one row reached, as text in percent, or None."""
    for accuracy in (f"{100 * step:g}" for step in reversed(LADDER)):
        for row in table.rows:
            results = table.at(row, column)
            name = f"reached.{accuracy}.round"
            if row not in table.upper_bounds and results and all(name in one.measures for one in results):
                return accuracy
    return None


def _cost(results: Sequence[SeedResult], target: str) -> str:
    """Return as text the mean costs (rounds, MB, virtual seconds) of the runs that reached a target accuracy.

    ``target``: the prefix in the names of these costs, such as "reached.90" for the target accuracy 90 %.
    """
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
