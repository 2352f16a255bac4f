"""Printed forecasts and tables: in colour on a terminal, elsewhere as plain text, and as JSON on request."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fl_sim.cli.screen import say
from fl_sim.errors import in_a_line, printable
from fl_sim.privacy.bill import Bill
from fl_sim.report.captions import notes
from fl_sim.report.table import MEASURES, Grid, Table, differences, mapped, targets, texts
from fl_sim.report.table_files import as_json, markdown
from fl_sim.simulation.timing import Stopwatch, Timing
from fl_sim.tables.filling import TableState, conclude
from fl_sim.tables.forecast import Forecast, SearchForecast, in_time, search_in_words, seconds_together, time_in_words

_WIDTH: Final = 140
"""Width of a line in characters if the output is not a terminal."""

_MOST_NAMED: Final = 6
"""Largest number of kinds of work, such as a minibatch step, in a line. ``--json`` lists all."""

_ROUGH: Final = (
    "There was not enough time for PLD accounting: some of these epsilons were computed by RDP alone, and the "
    "runs will state the same or smaller epsilons ('fl-sim privacy' computes one epsilon by both accountants)."
)


@dataclass(frozen=True)
class PlanReport:
    """The output of ``fl-sim plan``: forecasts of all runs and of their unfinished hyperparameter searches.

    ``jobs``: the number of parallel runs. ``bills``: the total privacy cost of all runs for each data set and privacy
    unit (client or record). ``watch``: the measured times; None if no time was measured. ``is_rough``: True if any
    epsilon in ``bills`` was computed only by RDP, without the tighter PLD accountant.
    """

    runs: Sequence[Forecast]
    searches: Sequence[SearchForecast]
    jobs: int
    bills: Sequence[Bill]
    watch: Stopwatch | None
    is_rough: bool

    def print(self) -> None:
        """Print a line for each run, the total time, the measured times, and the total privacy cost of all runs."""
        console = Console()
        console = console if console.is_terminal else Console(width=_WIDTH)
        console.print(_run_grid(self.runs))
        left_out = sorted({what for one in self.runs for what in one.estimate.left_out})
        not_counted = f"; not counted: {_first(left_out, ', ')}" if left_out else ""
        say(f"{time_in_words(self.runs, self.jobs)}{not_counted}")
        timed = self._timed()
        whole = [f"{what}: {short(one.piece)}" for what, one in timed if not (one.at_least or one.why_not)]
        rest = [f"{what}: over {short(one.piece)}" for what, one in timed if one.at_least]
        rest += [f"{what}: {one.why_not}" for what, one in timed if one.why_not]
        for head, lines in (
            ("Timed just now", whole),
            ("Not timed completely, so the total time is a lower bound", rest),
        ):
            if lines:
                say(f"{head}: {_first(lines, '; ')}.")
        if making := [one.estimate for one in self.runs if one.estimate.seconds and one.estimate.synthetic_seconds]:
            share = sum(one.synthetic_seconds for one in making) / sum(one.seconds or 0.0 for one in making)
            say(
                f"Making synthetic records takes {share:.1%} of the time of the {len(making)} runs with synthetic "
                f"records (of {len(self.runs)} runs)."
            )
        if self.searches:
            say(f"before these runs: {search_in_words(self.searches, self.jobs)}")
        for sentence in dict.fromkeys(sentence for one in self.runs for sentence in one.notes):
            say(sentence)
        for bill in self.bills:
            say(bill.in_words)
        if not self.bills:
            say("Privacy: no run has a privacy guarantee.")
        if self.is_rough:
            say(_ROUGH)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values. All times in seconds are None if no time was measured."""
        return {
            "jobs": self.jobs,
            "seconds": seconds_together(self.runs, self.jobs),
            "seconds_at_least": any(one.estimate.at_least for one in self.runs),
            "timed": [
                {
                    "what": what, "seconds": None if timing.why_not else timing.piece,
                    "seconds_of_a_turn": None if timing.why_not else timing.turn, "at_least": timing.at_least,
                    "why_not": timing.why_not or None,
                }
                for what, timing in self._timed()
            ],
            "runs": [
                {
                    "name": one.name, "status": _status(one), "rounds": one.rounds, "rounds_done": one.done,
                    "seconds": one.estimate.seconds, "seconds_left": one.seconds_left,
                    "seconds_at_least": one.estimate.at_least, "synthetic_seconds": one.estimate.synthetic_seconds,
                    "bytes": asdict(one.estimate.traffic) if one.estimate.traffic else None,
                    "bytes_once": {what: asdict(traffic) for what, traffic in one.estimate.once.items()},
                    "left_out": list(one.estimate.left_out), "told": list(one.notes),
                }
                for one in self.runs
            ],
            "searches": [
                {
                    "row": one.search.cell.row, "column": one.search.cell.column, "trials": one.search.rungs[0].trials,
                    "rounds": one.rounds, "rounds_done": one.done, "seconds_left": one.seconds_left,
                }
                for one in self.searches
            ],
            "bill": [bill.to_json() for bill in self.bills],
            "bill_by_rdp_alone": self.is_rough,
        }  # fmt: skip

    def _timed(self) -> Sequence[tuple[str, Timing]]:
        return () if self.watch is None else self.watch.told


def _first(texts: Sequence[str], between: str) -> str:
    """Return one line with the first entries of ``texts``. If entries are left out, the line ends with their number."""
    more = f"{between}and {len(texts) - _MOST_NAMED} more kinds of work (--json)" if texts[_MOST_NAMED:] else ""
    return between.join(texts[:_MOST_NAMED]) + more


def short(seconds: float) -> str:
    """Return a duration, given in seconds, as text with three significant digits, in s, ms or us.

    >>> [short(seconds) for seconds in (4.21e-7, 0.0123, 1.5)]
    ['0.421 us', '12.3 ms', '1.5 s']
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def print_table(state: TableState, out: Path, *, json_output: bool) -> None:
    """Write the files of a table, and print the table with the results so far.

    Print a warning for each run whose privacy cost could not be read.
    """
    table, problems = conclude(state, out)
    console = Console()
    if json_output:
        say(json.dumps(as_json(table)))
    elif console.is_terminal:
        for one in [_further_grid(grid) for grid in mapped(table)] or [_table_grid(table)]:
            console.print(one)
        for note in notes(table):
            console.print(printable(note), highlight=False, markup=False)
        for further in filter(None, (differences(table), targets(table))):
            console.print(_further_grid(further))
    else:
        say(markdown(table))
    for problem in problems:
        say(f"warning: {problem.path}: {problem.error}", err=True)


def _run_grid(runs: Sequence[Forecast]) -> RichTable:
    grid = RichTable("run", "state", box=box.SIMPLE)
    for head in ("time left", "MB down", "MB up"):
        grid.add_column(head, justify="right")
    for one in runs:
        traffic, seconds = one.estimate.total, one.seconds_left
        sizes = [f"{size / 1e6:,.1f}" for size in (traffic.down, traffic.up)] if traffic else ["-", "-"]
        time_left = f"{'over ' if one.estimate.at_least else ''}{in_time(seconds)}" if seconds else "-"
        grid.add_row(one.name, _status(one), time_left, *sizes)
    return grid


def _status(one: Forecast) -> str:
    if one.is_finished:
        return "finished"
    begun = f"{one.done} of {one.rounds} rounds done" if one.done else "new"
    return f"{begun}, synthetic records exist" if one.has_pool else begun


def _further_grid(further: Grid) -> RichTable:
    grid = RichTable(in_a_line(further.corner), title=Text(in_a_line(further.title)))
    for head in further.heads:
        grid.add_column(Text(in_a_line(head)), justify="right")
    for row, cells in further.rows:
        grid.add_row(Text(in_a_line(row)), *(Text(in_a_line(cell)) for cell in cells))
    return grid


def _table_grid(table: Table) -> RichTable:
    grid = RichTable("Method")
    for column in table.columns:
        for measure in MEASURES:
            grid.add_column(Text(f"{in_a_line(column)}\n{measure}"), justify="right")
    for row, cells in texts(table):
        grid.add_row(
            Text(in_a_line(table.label(row))), *(Text(text, "bold green" if best else "") for text, best in cells)
        )
    return grid
