"""A table on the screen: in colour at a terminal, as Markdown in a pipe, as JSON where that is asked for."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fl_sim.cli.screen import say
from fl_sim.printable import in_a_line, printable
from fl_sim.report.table import MEASURES, Grid, Table, differences, notes, targets, texts
from fl_sim.report.table_files import as_json, markdown
from fl_sim.tables.filling import Board, conclude


def print_table(board: Board, out: Path, *, json_output: bool) -> None:
    """Write and print what is known of a table, and the files of it that could not be read."""
    table, problems = conclude(board, out)
    _show(table, json_output=json_output)
    for problem in problems:
        say(f"warning: {problem.path}: {problem.error}", err=True)


def _show(table: Table, *, json_output: bool) -> None:
    console = Console()
    if json_output:
        say(json.dumps(as_json(table)))
    elif console.is_terminal:
        console.print(_for_terminal(table))
        for grid in filter(None, (differences(table), targets(table))):
            console.print(_grid(grid))
        for note in notes(table):
            console.print(printable(note), highlight=False, markup=False)
    else:
        say(markdown(table))


def _for_terminal(table: Table) -> RichTable:
    shown = RichTable("Method")
    for column in table.columns:
        for measure in MEASURES:
            shown.add_column(Text(f"{in_a_line(column)}\n{measure}"), justify="right")
    for row, cells in texts(table):
        shown.add_row(Text(in_a_line(row)), *(Text(text, "bold green" if best else "") for text, best in cells))
    return shown


def _grid(grid: Grid) -> RichTable:
    shown = RichTable("Method", title=Text(in_a_line(grid.title)))
    for head in grid.heads:
        shown.add_column(Text(in_a_line(head)), justify="right")
    for row, cells in grid.rows:
        shown.add_row(Text(in_a_line(row)), *(Text(in_a_line(cell)) for cell in cells))
    return shown
