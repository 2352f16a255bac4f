"""Tidy CSV: ``table.csv`` has a line for each run, ``rounds.csv`` one for each run and round, a column each number.

Names and units are those of ``fl_sim.report.measures``: a share is in percent, and its name says so.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fl_sim.printable import as_cell
from fl_sim.report.measures import Value, of_round
from fl_sim.report.table import SeedResult, Table
from fl_sim.store.run_directory import RoundRecord

_FIRST: Final = ("row", "column", "seed", "status")
_LAST: Final = ("dir", "error")


def csv_text(table: Table) -> str:
    """Return ``run_lines`` as CSV; what is None is empty."""
    lines = run_lines(table)
    return _text(list(lines[0]) if lines else [*_FIRST, *_LAST], lines)


def run_lines(table: Table) -> list[dict[str, Value | None]]:
    """Return a line for each run: its place, its status, a column a setting, a column a measure, where it lies.

    All lines have all columns, None where a run has no such setting or measure. A run that stands in several columns of
    the table, as an upper bound does, is one line, which names all of them.
    """
    lines = [
        {**_place(same), "status": same[0].status, **same[0].settings, **_accuracies(same[0]), **same[0].measures,
         "dir": same[0].directory, "error": same[0].error}
        for same in _runs(table)
    ]  # fmt: skip
    settings = dict.fromkeys(name for one in table.results for name in one.settings)
    middle = dict.fromkeys([*settings, *(name for line in lines for name in line)])
    names = [*_FIRST, *(name for name in middle if name not in {*_FIRST, *_LAST}), *_LAST]
    return [{name: line.get(name) for name in names} for line in lines]


def rounds_text(table: Table, rounds: Mapping[str, Sequence[RoundRecord]]) -> str:
    """Return a line for each run and round. ``rounds``: {directory of a run: its rounds}."""
    lines = [
        {**_place(same), "dir": same[0].directory, **of_round(record)}
        for same in _runs(table)
        for record in rounds.get(same[0].directory, ())
    ]
    names = dict.fromkeys(name for line in lines for name in line)
    return _text(
        [*_FIRST[:3], "round", *(name for name in names if name not in {*_FIRST, "round", "dir"}), "dir"], lines
    )


def _runs(table: Table) -> Iterable[list[SeedResult]]:
    """Return the places in the table of each run."""
    runs: dict[str, list[SeedResult]] = {}
    for one in table.results:
        runs.setdefault(one.directory, []).append(one)
    return runs.values()


def _place(same: Sequence[SeedResult]) -> dict[str, Value]:
    return {"row": same[0].row, "column": "; ".join(one.column for one in same), "seed": same[0].seed}


def _accuracies(one: SeedResult) -> dict[str, float | None]:
    return {"final_accuracy_percent": one.accuracy("last"), "best_accuracy_percent": one.accuracy("best")}


def _text(names: Sequence[str], lines: Iterable[Mapping[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(as_cell, names))
    for line in lines:
        cells = (line.get(name) for name in names)
        writer.writerow([as_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue()
