"""``fl-sim table``, ``sweep`` and ``plan``: methods or values side by side, and what they take before they run."""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import typer

from fl_sim.cli.arguments import Given
from fl_sim.cli.run import base_of, parse_experiment
from fl_sim.cli.screen import say, waiting
from fl_sim.data.places import look_for
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, with_overrides
from fl_sim.importing import importing
from fl_sim.tables.plan import Plan, TableSettings, deadline_after, plan_table, table_settings, tuned
from fl_sim.tracking.trackers import chosen_trackers

if TYPE_CHECKING:
    from fl_sim.tables.tuning_trials import Search

ANSWER_SECONDS: Final = 20.0
"""After so long no PLD is begun any more."""

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


def show_plan(
    given: Given, out: Path | None, jobs: int | None, data_root: Path | None, *, quick: bool, json_output: bool
) -> None:
    """Print every run that was typed, or that the table's file holds, with what it takes, and their bill."""
    path, deadline = given.path, time.monotonic() + ANSWER_SECONDS
    with waiting() as tell, redirect_stdout(sys.stderr):  # whatever code of the user's prints
        if path is None or not {"base", "grid", "tune"} & set(given.table):
            if jobs is not None:
                raise UserError(f"--jobs {jobs} is for the cells of a table, and this is one run: leave it out")
            runs, cells = _one_run(given, out, data_root)
            side_by_side, table = 1, None
        else:
            table = _searched(table_settings(given.table, given.overrides, str(path)), out, path.stem, data_root, tell)
            runs, cells, side_by_side = _table(table.plan.runs, out, path.stem, jobs)
        with importing():  # now: a mistake in the settings is told without waiting for torch and Flower
            from fl_sim.cli.printed import Shown  # noqa: PLC0415
            from fl_sim.privacy.loss_distribution import begun_only_if  # noqa: PLC0415
            from fl_sim.simulation.stopwatch import Stopwatch  # noqa: PLC0415
            from fl_sim.tables.forecast import bills_of, forecast, search_forecasts  # noqa: PLC0415
        watch, refused = None if quick else Stopwatch(), list[bool]()

        def in_time() -> bool:
            refused.extend([] if (is_in_time := time.monotonic() < deadline) else [True])
            return is_in_time

        found = forecast(runs, cells, data_root, watch, billed=in_time, say=tell)
        searches = search_forecasts(table.settings, table.searches, cells.parent, data_root, found) if table else []
        tell("adding up what all runs cost in privacy")
        with begun_only_if(in_time):
            bills = bills_of(found)
        shown = Shown(found, searches, side_by_side, bills, watch, is_rough=bool(refused))
    if json_output:
        say(json.dumps({"directory": str(cells), **shown.to_json()}))
    else:
        shown.print()


class _Table(NamedTuple):
    """A table: its own runs with what a search has chosen, and the searches that have not."""

    settings: TableSettings
    plan: Plan
    searches: "tuple[Search, ...]"


def _searched(
    settings: TableSettings, out: Path | None, name: str, data_root: Path | None, tell: Callable[[str], object]
) -> _Table:
    plan = plan_table(settings, data_root, tell)
    if settings.tune is None:
        return _Table(settings, plan, ())
    with importing():
        from fl_sim.interface import RESULTS  # noqa: PLC0415
        from fl_sim.tables.tuning import known_choices, values_of  # noqa: PLC0415
        from fl_sim.tables.tuning_trials import searches_of  # noqa: PLC0415
    searches = searches_of(settings, plan, data_root)
    chosen = known_choices(settings, searches, out or RESULTS / name, data_root)
    if chosen is None:
        return _Table(settings, plan, searches)
    return _Table(settings, tuned(settings, plan, values_of(chosen), data_root), ())


def _one_run(given: Given, out: Path | None, data_root: Path | None) -> tuple[dict[str, Experiment], Path]:
    """Return {name of its directory: experiment}, and the folder around that."""
    experiment = parse_experiment(given)
    look_for(experiment.data, data_root)
    with importing():
        from fl_sim.interface import directory_of  # noqa: PLC0415
    experiment, directory = directory_of(experiment, out, data_root)
    return {directory.name: experiment}, directory.parent


def _table(
    runs: dict[str, Experiment], out: Path | None, name: str, jobs: int | None
) -> tuple[dict[str, Experiment], Path, int]:
    """Return {name of its directory: experiment}, the folder around them, and how many go side by side."""
    from fl_sim.interface import RESULTS  # noqa: PLC0415 (as above)
    from fl_sim.simulation.capacity import cores  # noqa: PLC0415
    from fl_sim.tables.filling import CELLS  # noqa: PLC0415
    from fl_sim.tables.workers import with_share_of_cores  # noqa: PLC0415

    side_by_side = jobs or min(cores(), len(runs))
    shared = {name: with_share_of_cores(experiment, side_by_side) for name, experiment in runs.items()}
    return shared, (out or RESULTS / name) / CELLS, side_by_side
