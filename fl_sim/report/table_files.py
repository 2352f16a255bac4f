"""Writes the files of a table: Markdown and LaTeX for people, JSON and CSV for programs.

``table.md`` has the table, notes, and further tables, such as differences and costs. ``table.tex`` has the table as a
LaTeX ``table`` environment with notes, and ``table-further.tex`` has the further tables. Values in ``table.json`` are
in percent, unless their names state another unit. ``table.csv`` has one line for each run. ``rounds.csv`` has one line
for each round of each run. Each measure is a column, with name and unit as in ``fl_sim.report.measures``.
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
from fl_sim.report.captions import notes
from fl_sim.report.heat_map import HeatMap
from fl_sim.report.measures import Value, mean_and_deviation, of_round
from fl_sim.report.table import (
    MEASURES,
    Comparison,
    Grid,
    SeedResult,
    Table,
    compare,
    differences,
    further,
    mapped,
    percentages,
    targets,
    texts,
)
from fl_sim.store.files import remove_partial
from fl_sim.store.run_directory import RoundRecord, write_text

_SPECIAL: Final = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "[": "{[}",
    "]": "{]}", **{character: "\\" + character for character in "&%$#_{}"},
}  # fmt: skip

VERSION = 2
"""Format version of ``table.json``. Files of version 1, without ``measures`` and ``difference``, can be read, too."""

_FIRST: Final = ("row", "column", "seed", "status")
_LAST: Final = ("label", "dir", "error")
_FURTHER_TEX: Final = "table-further.tex"

_GREEK: Final = "alpha|beta|gamma|delta|epsilon|eta|lambda|mu|rho|sigma|tau|theta"
_FORMULA: Final = re.compile(rf"(?<![\w.])({_GREEK})( ?= ?| (?=\d))(-?\d+(?:\.\d+)?)(?:e([+-]\d+))?(?![\w.]*\w)")
"""Regular expression for a parameter with a Greek name and its value, such as ``mu=0.1`` or ``delta 1e-05``."""


def write_table(out: Path, table: Table) -> None:
    """Write ``table.md``, ``table.csv``, ``table.json`` and the LaTeX files into the folder ``out``.

    Each file is written atomically.
    """
    remove_partial(out)  # a killed process may have left temporary files
    write_text(out / "table.md", markdown(table) + "\n")
    write_text(out / "table.csv", csv_text(table))
    write_text(out / "table.tex", latex(table, out.resolve().name) + "\n")
    if more := latex_further(table, out.resolve().name):
        write_text(out / _FURTHER_TEX, more + "\n")
    else:
        (out / _FURTHER_TEX).unlink(missing_ok=True)
    write_text(out / "table.json", json.dumps(as_json(table), indent=2) + "\n")


def write_rounds(out: Path, table: Table, rounds: Mapping[str, Sequence[RoundRecord]]) -> None:
    """Write ``rounds.csv`` to ``out``. ``rounds``: {run directory, relative to ``out``: rounds of the run}."""
    write_text(out / "rounds.csv", rounds_text(table, rounds))


def markdown(table: Table) -> str:
    """Return the content of ``table.md``: the table, notes and further tables in Markdown.

    A table with heat maps is shown as one table for each map.
    """
    heads = [f"{column} {measure}" for column in table.columns for measure in MEASURES]
    rows = [
        (table.label(row), [f"**{text}**" if best else text for text, best in cells]) for row, cells in texts(table)
    ]
    below = "\n".join(f"{in_a_line(note)}  " for note in notes(table))
    first = _paragraphs(mapped(table)) or [_markdown_grid(heads, rows)]
    return "\n\n".join([part for part in (*first, below.rstrip(), *further_paragraphs(table)) if part])


def further_paragraphs(table: Table) -> list[str]:
    """Return the further tables as Markdown paragraphs: for each table its title, then the table."""
    return _paragraphs(_further_grids(table))


def _paragraphs(grids: Iterable[Grid]) -> list[str]:
    return [
        text
        for grid in grids
        for text in (f"{in_a_line(grid.title)}:", _markdown_grid(grid.heads, grid.rows, grid.corner))
    ]


def _further_grids(table: Table) -> list[Grid]:
    return [grid for grid in (differences(table), targets(table), *further(table)) if grid]


def latex(table: Table, label: str) -> str:
    """Return the content of ``table.tex``: a LaTeX ``table`` environment with caption, accuracies and notes.

    ``label``: the name for references in LaTeX, without its prefix ``tab:``. The LaTeX document needs the packages
    booktabs and graphicx.
    """
    caption, *below = notes(table) or [""]
    under = [r"\begin{minipage}{\linewidth}\footnotesize", *(rf"{_escape(note)}\par" for note in below),
             r"\end{minipage}"]  # fmt: skip
    shown = [line for grid in mapped(table) for line in (rf"{_escape(grid.title)}\par", *_tabular_of(grid))]
    shown = shown or _tabular(table)
    return "\n".join([
        r"% \usepackage{booktabs,graphicx}",
        *_environment(caption, _label(label), [*shown, *(under if below else [])]),
    ])  # fmt: skip


def latex_further(table: Table, label: str) -> str:
    """Return the content of ``table-further.tex``: a LaTeX ``table`` environment for each further table, or "".

    ``label``: the prefix of the names for references in LaTeX.
    """
    parts = [
        "\n".join(_environment(f"{grid.title}.", f"{_label(label)}-{number}", _tabular_of(grid)))
        for number, grid in enumerate(_further_grids(table), 1)
    ]
    return "\n\n".join([r"% \usepackage{booktabs,graphicx}", *parts]) if parts else ""


def as_json(table: Table) -> dict[str, Any]:
    """Return the content of ``table.json``, with accuracies in percent.

    A cell of the table lists its ``seeds``. All other lists of the cell have one entry for each seed, in the same
    order. Cells without any run are left out.
    """
    comparisons = {column: compare(table, column) for column in table.columns}
    places = [(row, column) for row in table.rows for column in table.columns if table.at(row, column)]
    return {
        "version": VERSION,
        "unit": "percent",
        "rows": list(table.rows),
        "labels": {row: table.label(row) for row in table.rows},
        "reference": table.reference,
        "columns": list(table.columns),
        "upper_bounds": [row for row in table.rows if row in table.upper_bounds],
        **({"alone": [row for row in table.rows if row in table.alone]} if table.alone else {}),
        "titles": dict(table.titles or {}),
        **({"heat_maps": [_heat_map(one) for one in table.heat_maps]} if table.heat_maps else {}),
        "cells": [
            {"row": row, "column": column, **_cell(table.at(row, column), row, comparisons[column])}
            for row, column in places
        ],
        "caption": notes(table),
        "bill": None if table.bill is None else list(table.bill),
        "settings": dict(table.settings),
        **({"tuning": list(table.tuning)} if table.tuning else {}),
    }


def _heat_map(one: HeatMap) -> dict[str, Any]:
    places = [[*place, row] for place, row in one.places.items()]
    return {**{key: value for key, value in vars(one).items() if key != "places"}, "places": places}


def csv_text(table: Table) -> str:
    """Return the content of ``table.csv``: the lines of ``run_lines`` as CSV text, with an empty entry for None."""
    lines = run_lines(table)
    return _as_csv(list(lines[0]) if lines else [*_FIRST, *_LAST], lines)


def run_lines(table: Table) -> list[dict[str, Value | None]]:
    """Return a line of ``table.csv`` for each run, as {name of the entry: value}.

    The entries are the run's row, column, seed, status, settings, measures and directory. They have the same names in
    all lines. A value is None if the run has no such setting or measure. A run of centralized training belongs to
    several columns, but is returned once, with the names of all its columns.
    """
    lines = [
        {**_place(same), "status": same[0].status, **same[0].settings,
         "final_accuracy_percent": same[0].accuracy("last"), "best_accuracy_percent": same[0].accuracy("best"),
         **same[0].measures, "label": table.label(same[0].row), "dir": same[0].directory, "error": same[0].error}
        for same in _runs(table)
    ]  # fmt: skip
    settings = dict.fromkeys(name for one in table.results for name in one.settings)
    middle = dict.fromkeys([*settings, *(name for line in lines for name in line)])
    names = [*_FIRST, *(name for name in middle if name not in {*_FIRST, *_LAST}), *_LAST]
    return [{name: line.get(name) for name in names} for line in lines]


def rounds_text(table: Table, rounds: Mapping[str, Sequence[RoundRecord]]) -> str:
    """Return the content of ``rounds.csv``: one line for each round of each run.

    ``rounds``: {run directory, relative to the table's folder: rounds of the run}.
    """
    lines = [
        of_round(record) | _place(same) | {"dir": same[0].directory}
        for same in _runs(table)
        for record in rounds.get(same[0].directory, ())
    ]
    names = dict.fromkeys(name for line in lines for name in line)
    return _as_csv(
        [*_FIRST[:3], "round", *(name for name in names if name not in {*_FIRST, "round", "dir"}), "dir"], lines
    )


def _markdown_grid(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], corner: str = "Method") -> str:
    lines = [[corner, *heads], ["---", *["---:"] * len(heads)], *([row, *cells] for row, cells in rows)]
    return "\n".join(
        f"| {' | '.join(in_a_line(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def _tabular_of(grid: Grid) -> list[str]:
    heads = [_line([_escape(grid.corner), *map(_escape, grid.heads)])]
    lines = [_line([_escape(row), *map(_escape, cells)]) for row, cells in grid.rows]
    return _fitted(heads, lines, len(grid.heads))


def _tabular(table: Table) -> list[str]:
    last = len(table.columns) * len(MEASURES) + 1
    groups = "".join(rf" & \multicolumn{{2}}{{c}}{{{_escape(column)}}}" for column in table.columns)
    rules = "".join(rf"\cmidrule(lr){{{start}-{start + 1}}}" for start in range(2, last + 1, 2))
    heads = [rf"{groups.removeprefix(' ')} \\", rules, _line(["Method", *MEASURES * len(table.columns)])]
    lines = []
    first_bound = next((row for row in table.rows if row in table.upper_bounds), None)
    for row, cells in texts(table):
        lines += [r"\midrule"] if row == first_bound else []
        shown = (rf"\textbf{{{_escape(text)}}}" if best else _escape(text) for text, best in cells)
        lines.append(_line([_escape(table.label(row)), *shown]))
    return _fitted(heads, lines, last - 1)


def _environment(caption: str, label: str, content: Sequence[str]) -> list[str]:
    return [
        r"\begin{table}[tbp]",
        r"\centering",
        rf"\caption{{{_escape(caption)}}}",
        rf"\label{{tab:{label}}}",
        r"\small",
        *content,
        r"\end{table}",
    ]


def _label(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9:.-]+", "-", text).strip("-") or "results"


def _line(cells: Sequence[str]) -> str:
    return rf"{' & '.join(cells)} \\"


def _fitted(heads: Sequence[str], lines: Sequence[str], num_columns: int) -> list[str]:
    """Return the lines of a LaTeX ``tabular``. LaTeX scales the table down if it is wider than the text."""
    return [
        r"\setbox0=\hbox{%",
        rf"\begin{{tabular}}{{l{'r' * num_columns}}}",
        r"\toprule",
        *heads,
        r"\midrule",
        *lines,
        r"\bottomrule",
        r"\end{tabular}}",
        r"\leavevmode\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\box0}\else\box0\fi\par\medskip",
    ]


def _escape(text: str) -> str:
    """Return ``text`` with escaped special characters for LaTeX. A text such as "alpha=0.1" becomes a formula."""
    line = in_a_line(text)
    parts, end = [], 0
    for found in _FORMULA.finditer(line):
        parts += [_escape_words(line[end : found.start()]), _formula(found)]
        end = found.end()
    return "".join([*parts, _escape_words(line[end:])])


def _formula(found: re.Match[str]) -> str:
    name, _, number, power = found.groups()
    value = number
    if power:
        value = ("" if number == "1" else rf"{number}\times ") + f"10^{{{int(power)}}}"
    return rf"$\{'varepsilon' if name == 'epsilon' else name}={value}$"


def _escape_words(text: str) -> str:
    escaped = "".join(_SPECIAL.get(character, character) for character in text)
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", escaped)  # negative numbers get a minus sign in place of a hyphen


def _cell(results: Sequence[SeedResult], row: str, comparison: Comparison) -> dict[str, Any]:
    mean, deviation = mean_and_deviation(percentages(results, "last"))
    best_mean, best_deviation = mean_and_deviation(percentages(results, "best"))
    found = comparison.others.get(row)
    states = {result.status for result in results}
    # Times are only in ``table.csv``, so that repeated runs give the same ``table.json``.
    measures = dict.fromkeys(name for one in results for name in one.measures if "seconds" not in name.split("."))
    return {
        "mean": mean, "std": deviation, "best_mean": best_mean, "best_std": best_deviation,
        "seeds": [result.seed for result in results],
        "values": [result.accuracy("last") for result in results],
        "best_values": [result.accuracy("best") for result in results],
        "status": next(state for state in ("failed", "missing", "finished") if state in states or state == "finished"),
        "statuses": [result.status for result in results],
        "errors": [result.error for result in results if result.error],
        "guarantee": bool(results) and all(result.guarantee for result in results),
        "dir": [result.directory for result in results],
        "difference": {"to": comparison.row, **asdict(found)} if found else None,
        "measures": {name: [one.measures.get(name) for one in results] for name in measures},
    }  # fmt: skip


def _runs(table: Table) -> Iterable[list[SeedResult]]:
    """Return one list for each run: its results in all table cells to which the run belongs.

    A run of centralized training belongs to several columns of the table.
    """
    runs: dict[str, list[SeedResult]] = {}
    for one in table.results:
        runs.setdefault(one.directory, []).append(one)
    return runs.values()


def _place(same: Sequence[SeedResult]) -> dict[str, Value]:
    return {"row": same[0].row, "column": "; ".join(one.column for one in same), "seed": same[0].seed}


def _as_csv(names: Sequence[str], lines: Iterable[Mapping[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(as_cell, names))
    for line in lines:
        cells = (line.get(name) for name in names)
        writer.writerow([as_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue()
