"""Plans and tables on the screen: in colour at a terminal, as plain text in a pipe, as JSON where that is asked for."""

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
from fl_sim.report.table import MEASURES, Grid, Table, differences, notes, targets, texts
from fl_sim.report.table_files import as_json, markdown
from fl_sim.simulation.stopwatch import Stopwatch, Timing
from fl_sim.tables.filling import Board, conclude
from fl_sim.tables.forecast import Forecast, SearchForecast, in_time, search_in_words, seconds_together, time_in_words

_WIDTH = 140
"""Characters of a line that goes to no terminal."""


_MOST_TOLD: Final = 8
"""Kinds of work that are listed on the screen; ``--json`` has all."""

_ROUGH: Final = (
    "The time for privacy accounting was up: some of these epsilons are the RDP accountant's alone, and what the runs "
    "will state is no larger ('fl-sim privacy' computes one of them by both accountants)."
)


@dataclass(frozen=True)
class Shown:
    """What is shown of ``runs``, ``jobs`` of them side by side, after ``searches`` that are not done.

    ``watch``: what was timed; None: nothing. ``is_rough``: whether a bill has epsilons for which there was no time.
    """

    runs: Sequence[Forecast]
    searches: Sequence[SearchForecast]
    jobs: int
    bills: Sequence[Bill]
    watch: Stopwatch | None
    is_rough: bool

    def print(self) -> None:
        """Print a line for each run, what all of them take, what was timed, and what they cost in privacy."""
        console = Console()
        console = console if console.is_terminal else Console(width=_WIDTH)
        console.print(_drawn(self.runs))
        say(_together(self.runs, self.jobs))
        for line in self._timed_in_words():
            say(line)
        if making := [one.estimate for one in self.runs if one.estimate.seconds and one.estimate.synthetic_seconds]:
            share = sum(one.synthetic_seconds for one in making) / sum(one.seconds or 0.0 for one in making)
            say(
                f"Synthetic records are {share:.1%} of the time of the runs that make them ({len(making)} of "
                f"{len(self.runs)})."
            )
        if self.searches:
            say(f"before them {search_in_words(self.searches, self.jobs)}")
        for told in dict.fromkeys(told for one in self.runs for told in one.told):
            say(told)
        for bill in self.bills:
            say(bill.in_words)
        if not self.bills:
            say("Privacy: nothing here promises any.")
        if self.is_rough:
            say(_ROUGH)

    def to_json(self) -> dict[str, Any]:
        """Return the same for programs; seconds are null where nothing was timed."""
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
                    "left_out": list(one.estimate.left_out), "told": list(one.told),
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

    def _timed_in_words(self) -> list[str]:
        """Return what was timed, and what was not or not as a whole."""
        timed = self._timed()
        whole = [f"{what}: {short(timing.piece)}" for what, timing in timed if not (timing.at_least or timing.why_not)]
        rest = [f"{what}: over {short(timing.piece)}" for what, timing in timed if timing.at_least]
        rest += [f"{what}: {timing.why_not}" for what, timing in timed if timing.why_not]
        heads = ("Timed just now", whole), ("Not timed as a whole, so the time is a lower bound", rest)
        return [f"{head}: {_some(said)}." for head, said in heads if said]


def short(seconds: float) -> str:
    """Return a time that was measured in three digits.

    >>> [short(seconds) for seconds in (4.21e-7, 0.0123, 1.5)]
    ['0.421 us', '12.3 ms', '1.5 s']
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def print_table(board: Board, out: Path, *, json_output: bool) -> None:
    """Write and print what is known of a table, and the files of it that could not be read."""
    table, problems = conclude(board, out)
    _show(table, json_output=json_output)
    for problem in problems:
        say(f"warning: {problem.path}: {problem.error}", err=True)


def _some(said: Sequence[str]) -> str:
    more = len(said) - _MOST_TOLD
    return "; ".join(said) if more <= 0 else f"{'; '.join(said[:_MOST_TOLD])}; and {more} more kinds of work (--json)"


def _drawn(found: Sequence[Forecast]) -> RichTable:
    drawn = RichTable("run", "state", box=box.SIMPLE)
    for head in ("time left", "MB down", "MB up"):
        drawn.add_column(head, justify="right")
    for one in found:
        traffic, seconds = one.estimate.total, one.seconds_left
        sizes = [f"{size / 1e6:,.1f}" for size in (traffic.down, traffic.up)] if traffic else ["-", "-"]
        told = f"{'over ' if one.estimate.at_least else ''}{in_time(seconds)}" if seconds else "-"
        drawn.add_row(one.name, _status(one), told, *sizes)
    return drawn


def _status(one: Forecast) -> str:
    if one.is_finished:
        return "finished"
    begun = f"{one.done} of {one.rounds} rounds done" if one.done else "new"
    return f"{begun}, synthetic records there" if one.has_pool else begun


def _together(found: Sequence[Forecast], jobs: int) -> str:
    told = time_in_words(found, jobs)
    left_out = sorted({what for one in found for what in one.estimate.left_out})
    return f"{told}; not counted: {', '.join(left_out)}" if left_out else told


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
