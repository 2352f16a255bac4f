"""``fl-sim table``: methods against data sets and splits, resumable cell by cell."""

from pathlib import Path

import typer

from fl_sim.cli.arguments import Given
from fl_sim.cli.screen import say
from fl_sim.errors import RunError
from fl_sim.importing import importing
from fl_sim.tables.budget import deadline_after
from fl_sim.tables.plan import plan_table, table_settings
from fl_sim.tracking.trackers import chosen_trackers


def fill_table(
    given: Given,
    out: Path | None,
    jobs: int | None,
    data_root: Path | None,
    *,
    hours: float | None,
    again: bool = False,
    track: str = "",
    json_output: bool,
) -> None:
    """Run all cells that are not finished, and print the table. Raises RunError where a cell failed.

    ``hours``: how much time there is. Exits with 3 where that was too short. ``again``: whether runs of other records
    or code are run again.
    """
    trackers, deadline = chosen_trackers(track), deadline_after(hours)
    assert given.path is not None, "without one typed, a preset"
    settings = table_settings(given.table, given.overrides, str(given.path))
    plan = plan_table(settings, data_root)
    with importing():  # now: a mistake in the settings is told without waiting for torch and Flower
        from fl_sim.cli.printed import print_table  # noqa: PLC0415
        from fl_sim.interface import RESULTS  # noqa: PLC0415
        from fl_sim.tables.filling import Board, TimeIsUp, fill  # noqa: PLC0415
        from fl_sim.tracking.following import following_of  # noqa: PLC0415
    following = following_of(trackers)
    out = out or RESULTS / given.path.stem
    board = Board(settings, plan)
    try:
        fill(board, out, jobs, data_root, deadline=deadline, following=following, again=again)
    except TimeIsUp:
        print_table(board, out, json_output=json_output)
        failed = f", {len(board.failures())} failed ({'; '.join(board.failures())})" if board.failures() else ""
        say(
            f"--budget {hours:g} leaves no time for more: this table is PARTIAL, {board.num_finished()} of "
            f"{len(board.plan.runs)} cells are finished and kept in {out}{failed}; the same command goes on from there",
            err=True,
        )
        raise typer.Exit(3) from None
    except KeyboardInterrupt:
        print_table(board, out, json_output=json_output)
        say(
            f"interrupted: {board.num_finished()} of {len(plan.runs)} cells are finished and kept in {out}; "
            "the same command goes on from there",
            err=True,
        )
        raise typer.Exit(130) from None
    print_table(board, out, json_output=json_output)
    say(f"table.md, table.csv, rounds.csv, table.tex and table.json are in {out}", err=True)
    if failures := board.failures():
        raise RunError(f"{len(failures)} of {len(plan.runs)} cells failed: {'; '.join(failures)}")
