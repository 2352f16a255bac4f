"""``fl-sim table`` and ``fl-sim sweep``: methods, or values of any settings, side by side; resumable cell by cell."""

import hashlib
import json
from pathlib import Path

import typer

from fl_sim.cli.arguments import Given
from fl_sim.cli.run import base_of
from fl_sim.cli.screen import say
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import with_overrides
from fl_sim.importing import importing
from fl_sim.tables.budget import deadline_after
from fl_sim.tables.plan import plan_table, table_settings
from fl_sim.tracking.trackers import chosen_trackers

_MOST_CHARACTERS = 60


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


def as_table(given: Given) -> Given:
    """Return what was typed as a table: settings with several values are its grid, all others its base.

    It is named after the settings that vary and what stays the same, so that further values go on with the same table.
    Raises UserError where nothing has several values, or a value is empty.
    """
    typed = [override.partition("=") for override in given.overrides]
    varied = {key: value.split(",") for key, _, value in typed if "," in value}
    if not varied:
        raise UserError(
            "nothing varies: give a setting several values, such as 'fl-sim sweep local.learning_rate=0.01,0.1 "
            "seed=0,1,2'; one run is 'fl-sim run'"
        )
    for key, values in varied.items():
        if "" in values or len(set(values)) < len(values):
            raise UserError(
                f"{key}={','.join(values)} names a value twice, or an empty one: separate values by one comma"
            )
    fixed = [override for override in given.overrides if override.partition("=")[0] not in varied]
    base = with_overrides(base_of(given), fixed)
    same = json.dumps([base, sorted(varied)], sort_keys=True, default=str)
    names = "-".join(varied)[:_MOST_CHARACTERS]
    path = Path(f"sweep-{names}-{hashlib.sha256(same.encode()).hexdigest()[:8]}.toml")
    return Given("the sweep", path, {"centralized": False, "base": base, "grid": varied}, [])
