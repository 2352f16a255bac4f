"""The files of a table: for people (Markdown, LaTeX) and for programs (JSON, tidy CSV).

``table.md`` and the LaTeX ``table`` environment tell everything that stands below a table. ``table.json`` is in percent
where a name does not say otherwise. ``table.csv`` has a line for each run, ``rounds.csv`` one for each run and round, a
column each number; names and units are those of ``fl_sim.report.measures``.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from fl_sim.errors import as_cell, in_a_line
from fl_sim.report.measures import Value, mean_and_deviation, of_round
from fl_sim.report.table import (
    MEASURES,
    Grid,
    Lead,
    SeedResult,
    Table,
    differences,
    further,
    lead,
    notes,
    percentages,
    targets,
    texts,
)
from fl_sim.store.files import remove_partial
from fl_sim.store.run_directory import RoundRecord, write_text

_FITTED: Final = r"\leavevmode\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\box0}\else\box0\fi\par\medskip"
"""Shows what was put in box 0, shrunk to the width of the text where it is wider."""

_SPECIAL: Final = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "[": "{[}",
    "]": "{]}", **{character: "\\" + character for character in "&%$#_{}"},
}  # fmt: skip

VERSION = 2
"""Of ``table.json``. Version 1 has no ``version``, no ``measures`` and no ``difference``, and is read all the same."""

_FIRST: Final = ("row", "column", "seed", "status")
_LAST: Final = ("dir", "error")


def write_table(out: Path, table: Table) -> None:
    """Write ``table.md``, ``table.csv``, ``table.tex`` and ``table.json``, each whole or not at all."""
    remove_partial(out)  # of a table whose process was killed
    write_text(out / "table.md", markdown(table) + "\n")
    write_text(out / "table.csv", csv_text(table))
    write_text(out / "table.tex", latex(table, out.resolve().name) + "\n")
    write_text(out / "table.json", json.dumps(as_json(table), indent=2) + "\n")


def write_rounds(out: Path, table: Table, rounds: Mapping[str, Sequence[RoundRecord]]) -> None:
    """Write ``rounds.csv``. ``rounds``: {directory of a run, as the table has it: its rounds}."""
    write_text(out / "rounds.csv", rounds_text(table, rounds))


def markdown(table: Table) -> str:
    """Return the table in Markdown: differences to the best row, what targets took, further measures, and notes."""
    heads = [f"{column} {measure}" for column in table.columns for measure in MEASURES]
    rows = [(row, [f"**{text}**" if best else text for text, best in cells]) for row, cells in texts(table)]
    return "\n\n".join(
        [_markdown_grid(heads, rows), *below(table), "\n".join(f"{in_a_line(note)}  " for note in notes(table))]
    ).rstrip()


def below(table: Table) -> list[str]:
    """Return paragraphs of Markdown: the title of each further table and the table itself."""
    parts: list[str] = []
    for grid in (differences(table), targets(table), *further(table)):
        parts += [f"{in_a_line(grid.title)}:", _markdown_grid(grid.heads, grid.rows)] if grid else []
    return parts


def latex(table: Table, label: str) -> str:
    """Return a LaTeX ``table`` environment: caption, table, differences to the best row, what targets took, and notes.

    ``label`` is put after ``tab:``. It needs the packages booktabs and graphicx.
    """
    said = notes(table)
    return "\n".join([
        r"% \usepackage{booktabs,graphicx}",
        r"\begin{table}[tbp]",
        r"\centering",
        rf"\caption{{{' '.join(map(_escape, said[:1]))}}}",
        rf"\label{{tab:{_label(label)}}}",
        r"\small",
        *_fitted(_tabular(table)),
        *_tabular_below(differences(table)),
        *_tabular_below(targets(table)),
        *([r"\begin{minipage}{\linewidth}\footnotesize", *(rf"{_escape(note)}\par" for note in said[1:]),
           r"\end{minipage}"] if said[1:] else []),
        r"\end{table}",
    ])  # fmt: skip


def as_json(table: Table) -> dict[str, Any]:
    """Return the table for programs: means, deviations and values in percent; lists in the order of ``seeds``.

    Where a row and a column have no run together, there is no cell.
    """
    leads = {column: lead(table, column, "last") for column in table.columns}
    places = [(row, column) for row in table.rows for column in table.columns if table.at(row, column)]
    cells = [_cell_json(table, row, column, leads[column]) for row, column in places]
    return {
        "version": VERSION,
        "unit": "percent",
        "rows": list(table.rows),
        "columns": list(table.columns),
        "upper_bounds": [row for row in table.rows if row in table.upper_bounds],
        "cells": cells,
        "caption": notes(table),
        "bill": None if table.bill is None else list(table.bill),
        "settings": dict(table.settings),
        **({"tuning": list(table.tuning)} if table.tuning else {}),
    }


def csv_text(table: Table) -> str:
    """Return ``run_lines`` as CSV; what is None is empty."""
    lines = run_lines(table)
    return _as_csv(list(lines[0]) if lines else [*_FIRST, *_LAST], lines)


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
    return _as_csv(
        [*_FIRST[:3], "round", *(name for name in names if name not in {*_FIRST, "round", "dir"}), "dir"], lines
    )


def _markdown_grid(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    lines = [["Method", *heads], ["---", *["---:"] * len(heads)], *([row, *cells] for row, cells in rows)]
    return "\n".join(
        f"| {' | '.join(in_a_line(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def _tabular(table: Table) -> list[str]:
    last = len(table.columns) * len(MEASURES) + 1
    groups = "".join(rf" & \multicolumn{{2}}{{c}}{{{_escape(column)}}}" for column in table.columns)
    rules = "".join(rf"\cmidrule(lr){{{start}-{start + 1}}}" for start in range(2, last + 1, 2))
    lines = [rf"\begin{{tabular}}{{l{'r' * (last - 1)}}}", r"\toprule"]
    measures = "".join(f" & {measure}" for measure in MEASURES) * len(table.columns)
    lines += [rf"{groups.removeprefix(' ')} \\", rules, rf"Method{measures} \\", r"\midrule"]
    first_bound = next((row for row in table.rows if row in table.upper_bounds), None)
    for row, cells in texts(table):
        lines += [r"\midrule"] if row == first_bound else []
        shown = (rf"\textbf{{{_escape(text)}}}" if best else _escape(text) for text, best in cells)
        lines.append(rf"{' & '.join([_escape(row), *shown])} \\")
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _tabular_below(grid: Grid | None) -> list[str]:
    """Return a further tabular with its title."""
    if grid is None:
        return []
    lines = [rf"\begin{{tabular}}{{l{'r' * len(grid.heads)}}}", r"\toprule"]
    lines += [rf"{' & '.join(['Method', *map(_escape, grid.heads)])} \\", r"\midrule"]
    lines += [rf"{' & '.join([_escape(row), *map(_escape, cells)])} \\" for row, cells in grid.rows]
    return [rf"{_escape(grid.title)}:\par\smallskip", *_fitted([*lines, r"\bottomrule", r"\end{tabular}"])]


def _fitted(lines: list[str]) -> list[str]:
    return [r"\setbox0=\hbox{%", *lines[:-1], lines[-1] + "}", _FITTED]


def _label(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9:.-]+", "-", name).strip("-") or "results"


def _escape(text: str) -> str:
    escaped = "".join(_SPECIAL.get(character, character) for character in in_a_line(text))
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", escaped)  # a minus, not a hyphen


def _cell_json(table: Table, row: str, column: str, ahead: Lead) -> dict[str, Any]:
    results = table.at(row, column)
    mean, deviation = mean_and_deviation(percentages(results, "last"))
    best_mean, best_deviation = mean_and_deviation(percentages(results, "best"))
    found = ahead.others.get(row)
    states = {result.status for result in results}
    return {
        "row": row, "column": column,
        "mean": mean, "std": deviation, "best_mean": best_mean, "best_std": best_deviation,
        "seeds": [result.seed for result in results],
        "values": [result.accuracy("last") for result in results],
        "best_values": [result.accuracy("best") for result in results],
        "status": next(state for state in ("failed", "missing", "finished") if state in states or state == "finished"),
        "statuses": [result.status for result in results],
        "errors": [result.error for result in results if result.error],
        "guarantee": bool(results) and all(result.guarantee for result in results),
        "dir": [result.directory for result in results],
        "difference": {"to": ahead.row, **asdict(found)} if found else None,
        "measures": _measures(results),
    }  # fmt: skip


def _measures(results: list[SeedResult]) -> dict[str, list[float | None]]:
    """Return {measure: a value a seed}, but for times: the same runs give the same table. ``table.csv`` has those."""
    names = dict.fromkeys(name for one in results for name in one.measures if "seconds" not in name.split("."))
    return {name: [one.measures.get(name) for one in results] for name in names}


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


def _as_csv(names: Sequence[str], lines: Iterable[Mapping[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(as_cell, names))
    for line in lines:
        cells = (line.get(name) for name in names)
        writer.writerow([as_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue()
