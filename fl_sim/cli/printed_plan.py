"""What runs will take, on the screen and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fl_sim.cli.screen import say
from fl_sim.tables.forecast import Forecast, bills_of, in_time, seconds_together, time_in_words
from fl_sim.tables.tuning_forecast import SearchForecast, search_in_words

_WIDTH = 140
"""Characters of a line that goes to no terminal."""


def print_plan(found: Sequence[Forecast], searches: Sequence[SearchForecast], jobs: int) -> None:
    """Print a line for each run, what all of them take with ``jobs`` side by side, and what they cost in privacy.

    ``searches``: those before them that are not done.
    """
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    console.print(_drawn(found))
    say(_together(found, jobs))
    if making := [one.estimate for one in found if one.estimate.seconds and one.estimate.synthetic_seconds]:
        share = sum(one.synthetic_seconds for one in making) / sum(one.seconds or 0.0 for one in making)
        say(
            f"Synthetic records are {share:.1%} of the time of the runs that make them ({len(making)} of {len(found)})."
        )
    if searches:
        say(f"before them {search_in_words(searches, jobs)}")
    for told in dict.fromkeys(told for one in found for told in one.told):
        say(told)
    bills = bills_of(found)
    for bill in bills:
        say(bill.in_words)
    if not bills:
        say("Privacy: nothing here promises any.")


def as_json(found: Sequence[Forecast], searches: Sequence[SearchForecast], jobs: int) -> dict[str, Any]:
    """Return the same for programs; seconds are null where nothing was timed."""
    return {
        "jobs": jobs,
        "seconds": seconds_together(found, jobs),
        "runs": [
            {
                "name": one.name, "status": _status(one), "rounds": one.rounds, "rounds_done": one.done,
                "seconds": one.estimate.seconds, "seconds_left": one.seconds_left,
                "synthetic_seconds": one.estimate.synthetic_seconds,
                "bytes": asdict(one.estimate.traffic) if one.estimate.traffic else None,
                "bytes_once": {what: asdict(traffic) for what, traffic in one.estimate.once.items()},
                "left_out": list(one.estimate.left_out), "told": list(one.told),
            }
            for one in found
        ],
        "searches": [
            {
                "row": one.search.cell.row, "column": one.search.cell.column, "trials": one.search.rungs[0].trials,
                "rounds": one.rounds, "rounds_done": one.done, "seconds_left": one.seconds_left,
            }
            for one in searches
        ],
        "bill": [bill.to_json() for bill in bills_of(found)],
    }  # fmt: skip


def _drawn(found: Sequence[Forecast]) -> Table:
    drawn = Table("run", "state", box=box.SIMPLE)
    for head in ("time left", "MB down", "MB up"):
        drawn.add_column(head, justify="right")
    for one in found:
        traffic, seconds = one.estimate.total, one.seconds_left
        sizes = [f"{size / 1e6:,.1f}" for size in (traffic.down, traffic.up)] if traffic else ["-", "-"]
        drawn.add_row(one.name, _status(one), in_time(seconds) if seconds else "-", *sizes)
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
