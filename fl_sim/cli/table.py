"""``fl-sim table``: methods against data sets and splits, resumable cell by cell."""

import json
import os
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fl_sim.cli.run import took
from fl_sim.errors import RunError, UserError
from fl_sim.mistakes import guess
from fl_sim.report.bills import bills_of
from fl_sim.report.release import Release
from fl_sim.report.runs import read_all
from fl_sim.report.table import MEASURES, SeedResult, Table, as_json, markdown, notes, texts, write_table
from fl_sim.report.table_progress import TableProgress
from fl_sim.tables.plan import PRESETS, Cell, Plan, TableSettings, plan_table, preset_names, read_settings
from fl_sim.tables.words import data_label
from fl_sim.tables.workers import Event, Failed, Finished, Preparing, RoundDone, Started, run_all

CELLS = "cells"


def fill_table(
    arguments: list[str], out: Path | None, jobs: int | None, data_root: Path | None, *, json_output: bool
) -> None:
    """Run all cells that are not finished, and print the table. Raises RunError where a cell failed."""
    path, overrides = _parse(arguments)
    settings = read_settings(path, overrides)
    plan = plan_table(settings, data_root)
    out = out or Path("results") / path.stem
    board = _Board(settings, plan)
    try:
        _fill(board, out, jobs or min(_cores(), len(plan.runs)), data_root)
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


@dataclass
class _Board:
    """What is known of each run."""

    settings: TableSettings
    plan: Plan
    outcomes: dict[str, Finished | Failed] = field(default_factory=dict)

    def num_finished(self) -> int:
        return sum(isinstance(outcome, Finished) for outcome in self.outcomes.values())

    def failures(self) -> list[str]:
        return [f"{name} ({outcome.error})" for name, outcome in self.outcomes.items() if isinstance(outcome, Failed)]

    def table(self) -> Table:
        plan = self.plan
        results = tuple(self._result(cell) for cell in plan.cells)
        settings = json.loads(self.settings.model_dump_json())  # unlike model_dump it leaves no inf, which is no JSON
        return Table(plan.rows, plan.columns, plan.upper_bounds, results, plan.caption, settings)

    def _result(self, cell: Cell) -> SeedResult:
        place = (cell.row, cell.column, cell.seed)
        directory = f"{CELLS}/{cell.name}"
        outcome = self.outcomes.get(cell.name)
        if outcome is None:
            return SeedResult(*place, "missing", directory)
        if isinstance(outcome, Failed):
            return SeedResult(*place, "failed", directory, error=outcome.error)
        result = outcome.result
        releases = tuple(Release.model_validate(release) for release in result["privacy"])
        return SeedResult(
            *place, "finished", directory, result["final_accuracy"], result["best_accuracy"], releases=releases
        )


def _parse(arguments: list[str]) -> tuple[Path, list[str]]:
    names = [argument for argument in arguments if "=" not in argument]
    if len(names) > 1:
        raise UserError(f"one FILE or PRESET at most, got {', '.join(names)}; settings are given as key=value")
    name = names[0] if names else "digits"
    presets = preset_names()
    path = PRESETS / f"{name}.toml" if name in presets else Path(name)
    if not path.exists():
        raise UserError(f"no file or preset {name!r}{guess(name, presets)}; presets: {', '.join(presets)}")
    return path, [argument for argument in arguments if "=" in argument]


def _fill(board: _Board, out: Path, jobs: int, data_root: Path | None) -> None:
    labels = {
        cell.name: f"{cell.row}, {_place(cell, board.plan)}, seed {cell.seed}" for cell in reversed(board.plan.cells)
    }
    runs = board.plan.runs
    with (
        TableProgress({labels[name]: experiment.rounds for name, experiment in runs.items()}) as progress,
        closing(run_all(runs, out / CELLS, jobs, data_root)) as events,
    ):
        for event in events:
            _tell(progress, labels[event.name], event)
            if isinstance(event, Finished | Failed):
                board.outcomes[event.name] = event
                write_table(out, board.table())


def _conclude(board: _Board, out: Path, *, json_output: bool) -> None:
    """Write and show the table with what all runs in its directory cost together, also those that it does not show."""
    bills = bills_of(read_all([out / CELLS]))
    table = replace(board.table(), bill=bills.bills)
    write_table(out, table)
    _show(table, json_output=json_output)
    for problem in bills.problems:
        typer.echo(f"warning: {problem.path}: {problem.error}", err=True)


def _place(cell: Cell, plan: Plan) -> str:
    return data_label(cell.experiment.data) if cell.row in plan.upper_bounds else cell.column


def _tell(progress: TableProgress, label: str, event: Event) -> None:
    match event:
        case Started(first_round=first_round):
            progress.started(label, first_round)
        case Preparing(what=what):
            progress.preparing(label, what)
        case RoundDone(record=record):
            progress.finished_round(label, record)
        case Finished(result=result):
            last, best = result["final_accuracy"], result["best_accuracy"]
            progress.closed(label, f"last {100 * last:.1f} %, best {100 * best:.1f} %, {took(result)}")
        case Failed(error=error):
            progress.closed(label, f"failed: {error}")


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


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
