"""``fl-sim table``: methods against data sets and splits, resumable cell by cell."""

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fl_sim.errors import RunError, UserError
from fl_sim.interface import RESULTS
from fl_sim.report.table import MEASURES, Table, as_json, markdown, notes, texts
from fl_sim.tables.filling import Board, conclude, fill
from fl_sim.tables.plan import plan_table, preset_path, read_settings


def fill_table(
    arguments: list[str], out: Path | None, jobs: int | None, data_root: Path | None, *, json_output: bool
) -> None:
    """Run all cells that are not finished, and print the table. Raises RunError where a cell failed."""
    path, overrides = _parse(arguments)
    settings = read_settings(path, overrides)
    plan = plan_table(settings, data_root)
    out = out or RESULTS / path.stem
    board = Board(settings, plan)
    try:
        fill(board, out, jobs, data_root)
    except KeyboardInterrupt:
        _conclude(board, out, json_output=json_output)
        typer.echo(
            f"interrupted: {board.num_finished()} of {len(plan.runs)} cells are finished and kept in {out}; "
            "the same command goes on from there",
            err=True,
        )
        raise typer.Exit(130) from None
    _conclude(board, out, json_output=json_output)
    typer.echo(f"table.md, table.csv, table.tex and table.json are in {out}", err=True)
    if failures := board.failures():
        raise RunError(f"{len(failures)} of {len(plan.runs)} cells failed: {'; '.join(failures)}")


def _parse(arguments: list[str]) -> tuple[Path, list[str]]:
    names = [argument for argument in arguments if "=" not in argument]
    if len(names) > 1:
        raise UserError(f"one FILE or PRESET at most, got {', '.join(names)}; settings are given as key=value")
    return preset_path(names[0] if names else "digits"), [argument for argument in arguments if "=" in argument]


def _conclude(board: Board, out: Path, *, json_output: bool) -> None:
    table, problems = conclude(board, out)
    _show(table, json_output=json_output)
    for problem in problems:
        typer.echo(f"warning: {problem.path}: {problem.error}", err=True)


def _show(table: Table, *, json_output: bool) -> None:
    console = Console()
    if json_output:
        typer.echo(json.dumps(as_json(table)))
    elif console.is_terminal:
        console.print(_for_terminal(table))
        for note in notes(table):
            console.print(note, highlight=False, markup=False)
    else:
        typer.echo(markdown(table))


def _for_terminal(table: Table) -> RichTable:
    shown = RichTable("Method")
    for column in table.columns:
        for measure in MEASURES:
            shown.add_column(Text(f"{column}\n{measure}"), justify="right")
    for row, cells in texts(table):
        shown.add_row(Text(row), *(Text(text, "bold green" if best else "") for text, best in cells))
    return shown
