"""A table of accuracies: means and deviations over seeds, the best of each column, as Markdown, CSV, LaTeX and JSON."""

import csv
import io
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fl_sim.report.release import Release
from fl_sim.report.release import notes as privacy_notes
from fl_sim.store.files import remove_partial
from fl_sim.store.run_directory import write_text

Status: TypeAlias = Literal["finished", "failed", "missing"]
Measure: TypeAlias = Literal["last", "best"]
MEASURES: tuple[Measure, Measure] = ("last", "best")


@dataclass(frozen=True)
class SeedResult:
    """What one run has to say: accuracies in [0, 1], None where it did not finish.

    ``directory`` is relative to the table's. ``releases``: the run's privacy statements.
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

    @property
    def guarantee(self) -> bool:
        """Return whether any of what the run released is under a privacy guarantee."""
        return any(one.protects for one in self.releases)


@dataclass(frozen=True)
class Table:
    """A table as far as it is filled. Rows in ``upper_bounds`` do not compete for the best value.

    ``bill``: what all runs together cost the records they are about (``Bill.to_json``); None while runs are to come.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    upper_bounds: frozenset[str]
    results: tuple[SeedResult, ...]
    caption: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    bill: tuple[Mapping[str, Any], ...] | None = None

    def at(self, row: str, column: str) -> list[SeedResult]:
        """Return the cell's results, one a seed."""
        return [result for result in self.results if (result.row, result.column) == (row, column)]


def write_table(out: Path, table: Table) -> None:
    """Write ``table.md``, ``table.csv``, ``table.tex`` and ``table.json``, each whole or not at all."""
    remove_partial(out)  # of a table whose process was killed
    write_text(out / "table.md", markdown(table) + "\n")
    write_text(out / "table.csv", csv_text(table))
    write_text(out / "table.tex", latex(table) + "\n")
    write_text(out / "table.json", json.dumps(as_json(table), indent=2) + "\n")


def percentages(results: Iterable[SeedResult], measure: Measure) -> list[float]:
    """Return the finished seeds' accuracies in percent."""
    accuracies = [getattr(result, measure) for result in results if result.status == "finished"]
    return [100 * accuracy for accuracy in accuracies if accuracy is not None]


def mean_and_deviation(values: list[float]) -> tuple[float | None, float | None]:
    """Return the mean and the sample standard deviation (ddof = 1), None where there are too few values."""
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def cell_text(results: list[SeedResult], measure: Measure) -> str:
    """Return what a reader sees: ``93.1``, ``93.1 ± 0.4``, ``93.1 ± 0.4 (2 of 3)``, ``failed`` or ``-``."""
    if any(result.status == "failed" for result in results):
        return "failed"
    values = percentages(results, measure)
    mean, deviation = mean_and_deviation(values)
    if mean is None:
        return "-"
    text = f"{mean:.1f}" if deviation is None else f"{mean:.1f} ± {deviation:.1f}"
    return text if len(values) == len(results) else f"{text} ({len(values)} of {len(results)})"


def best_rows(table: Table, column: str, measure: Measure) -> set[str]:
    """Return the rows with the highest mean as printed, among those with all seeds finished; ties all count."""
    means = {}
    for row in table.rows:
        results = table.at(row, column)
        mean, _ = mean_and_deviation(percentages(results, measure))
        if row not in table.upper_bounds and mean is not None and all(one.status == "finished" for one in results):
            means[row] = f"{mean:.1f}"
    highest = max(map(float, means.values()), default=None)
    return {row for row, text in means.items() if float(text) == highest}


def texts(table: Table) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Return (row, [(text, is the best of its column)]) with two entries a column: last round, best round."""
    heads = [(column, measure) for column in table.columns for measure in MEASURES]
    winners = {head: best_rows(table, *head) for head in heads}
    return [
        (row, [(cell_text(table.at(row, head[0]), head[1]), row in winners[head]) for head in heads])
        for row in table.rows
    ]


def notes(table: Table) -> list[str]:
    """Return the caption's lines, with who gives which privacy guarantee and what failed."""
    said: dict[str, list[tuple[Release, ...]]] = {}
    for row in table.rows:
        finished = [one.releases for one in table.results if (one.row, one.status) == (row, "finished")]
        said |= {row: finished} if finished else {}
    failures = [one for one in table.results if one.status == "failed"]
    return [
        *table.caption,
        *privacy_notes(said),
        *_bill_notes(table),
        *(f"failed: {one.row}, {one.column}, seed {one.seed}: {one.error}" for one in failures),
    ]


def _bill_notes(table: Table) -> list[str]:
    if table.bill is not None:
        return [str(bill["in_words"]) for bill in table.bill]
    if any(result.guarantee for result in table.results):
        return ["What all runs together cost the records they are about is told once the table is done."]
    return []


def markdown(table: Table) -> str:
    """Return the table in Markdown, notes below."""
    heads = ["Method", *(f"{column} {measure}" for column in table.columns for measure in MEASURES)]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    lines += [[row, *(f"**{text}**" if best else text for text, best in cells)] for row, cells in texts(table)]
    escaped = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join([*(f"| {line} |" for line in escaped), "", *(f"{note}  " for note in notes(table))]).rstrip()


def csv_text(table: Table) -> str:
    """Return one line per method, column and seed, accuracies in [0, 1]."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "seed", "status", "final_accuracy", "best_accuracy", "dir", "error"])
    for one in table.results:
        writer.writerow([one.row, one.column, one.seed, one.status, one.last, one.best, one.directory, one.error])
    return text.getvalue()


def latex(table: Table) -> str:
    """Return a tabular with booktabs rules, notes as comments above."""
    last = len(table.columns) * len(MEASURES) + 1
    groups = "".join(rf" & \multicolumn{{2}}{{c}}{{{_escape(column)}}}" for column in table.columns)
    rules = "".join(rf"\cmidrule(lr){{{start}-{start + 1}}}" for start in range(2, last + 1, 2))
    lines = [*(f"% {note}" for note in notes(table)), rf"\begin{{tabular}}{{l{'r' * (last - 1)}}}", r"\toprule"]
    measures = " & last & best" * len(table.columns)
    lines += [rf"{groups.removeprefix(' ')} \\", rules, rf"Method{measures} \\", r"\midrule"]
    for row, cells in texts(table):
        lines += [r"\midrule"] if row in table.upper_bounds and row == _first(table.rows, table.upper_bounds) else []
        shown = (rf"\textbf{{{_escape(text)}}}" if best else _escape(text) for text, best in cells)
        lines.append(rf"{' & '.join([_escape(row), *shown])} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def as_json(table: Table) -> dict[str, Any]:
    """Return the table for programs: means, deviations and values in percent; lists in the order of ``seeds``."""
    return {
        "unit": "percent",
        "rows": list(table.rows),
        "columns": list(table.columns),
        "upper_bounds": [row for row in table.rows if row in table.upper_bounds],
        "cells": [_cell_json(table, row, column) for row in table.rows for column in table.columns],
        "caption": notes(table),
        "bill": None if table.bill is None else list(table.bill),
        "settings": dict(table.settings),
    }


def _cell_json(table: Table, row: str, column: str) -> dict[str, Any]:
    results = table.at(row, column)
    mean, deviation = mean_and_deviation(percentages(results, "last"))
    best_mean, best_deviation = mean_and_deviation(percentages(results, "best"))
    states = {result.status for result in results}
    return {
        "row": row, "column": column,
        "mean": mean, "std": deviation, "best_mean": best_mean, "best_std": best_deviation,
        "seeds": [result.seed for result in results],
        "values": [_percent(result.last) for result in results],
        "best_values": [_percent(result.best) for result in results],
        "status": next(state for state in ("failed", "missing", "finished") if state in states or state == "finished"),
        "errors": [result.error for result in results if result.error],
        "guarantee": bool(results) and all(result.guarantee for result in results),
        "dir": [result.directory for result in results],
    }  # fmt: skip


def _percent(accuracy: float | None) -> float | None:
    return None if accuracy is None else 100 * accuracy


def _first(rows: Iterable[str], among: frozenset[str]) -> str | None:
    return next((row for row in rows if row in among), None)


def _escape(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    special |= {character: "\\" + character for character in "&%$#_{}"}
    return "".join(special.get(character, character) for character in text)
