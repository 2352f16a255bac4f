"""The code of ``fl-sim run``, ``table``, ``sweep``, ``plan`` and ``settings``.

torch and Flower are imported only after all settings are checked, so that invalid settings are reported at once.
"""

import hashlib
import json
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import typer

from fl_sim.cli.running_verbs import RunArguments
from fl_sim.cli.screen import say, waiting
from fl_sim.data.naming import without_settings
from fl_sim.data.places import look_for
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.reference import Group, groups
from fl_sim.importing import importing
from fl_sim.mistakes import guess
from fl_sim.other_words import elsewhere
from fl_sim.tables.labels import duration_in_words
from fl_sim.tables.plan import TableSettings, deadline_after, plan_table, table_settings, tuned
from fl_sim.tracking.trackers import chosen_trackers

if TYPE_CHECKING:
    from fl_sim.tables.tuning import Search

ANSWER_SECONDS: Final = 20.0
"""Seconds after which ``fl-sim plan`` starts no new PLD computation (slow numerical privacy accounting)."""

_BEST: Final = {
    "test": "picked on the test set, therefore optimistic",
    "validation": "picked on records held out for validation",
    "last": "the last round, the only one that was tested",
    "nothing": "nothing was measured",
}
"""{value of ``best_chosen_on`` in ``result.json``: explanation of the best accuracy}."""
_MOST_CHARACTERS = 60
_WIDEST = 110
"""Largest width of printed settings, in characters."""


def run_experiment(
    given: RunArguments, out: Path | None, data_root: Path | None, *, track: str = "", again: bool, json_output: bool
) -> None:
    """Run the experiment that the arguments ``given`` define, and print its result."""
    trackers = chosen_trackers(track)
    experiment = parse_experiment(given)
    look_for(experiment.data, data_root)
    with importing():
        from fl_sim.interface import run  # noqa: PLC0415
    result = run(experiment, out=out, data_root=data_root, again=again, track=trackers)
    if json_output:
        say(json.dumps(result.facts))
    else:
        _print_result(result.facts, result.directory)


def parse_experiment(given: RunArguments) -> Experiment:
    """Return the experiment that the arguments ``given`` define.

    If the file in the arguments defines a table, the result is the experiment in its section [base].
    """
    return experiment_from(with_overrides(_base_of(given), given.overrides))


def fill_table(
    given: RunArguments,
    out: Path | None,
    jobs: int | None,
    data_root: Path | None,
    *,
    hours: float | None,
    again: bool = False,
    track: str = "",
    json_output: bool,
) -> None:
    """Execute all unfinished runs of a table, and print the table. Raise RunError if any run failed.

    ``jobs``: the number of parallel runs; None: one per core. ``hours``: the time budget; if it ends before the table
    is finished, the exit code is 3. ``again``: True repeats finished runs whose records or code have changed since.
    """
    trackers, deadline = chosen_trackers(track), deadline_after(hours)
    assert given.path is not None, "fl-sim table has a default preset"
    settings = table_settings(given.table, given.overrides, str(given.path))
    plan = plan_table(settings, data_root)
    with importing():
        from fl_sim.cli.printed import print_table  # noqa: PLC0415
        from fl_sim.interface import RESULTS  # noqa: PLC0415
        from fl_sim.tables.filling import TableState, TimeIsUp, fill  # noqa: PLC0415
        from fl_sim.tracking.observers import tracking_of  # noqa: PLC0415
    tracking = tracking_of(trackers)
    out = out or RESULTS / given.path.stem
    state = TableState(settings, plan)
    try:
        fill(state, out, jobs, data_root, deadline=deadline, tracking=tracking, again=again)
    except TimeIsUp:
        print_table(state, out, json_output=json_output)
        failed = f", {len(state.failures())} failed ({'; '.join(state.failures())})" if state.failures() else ""
        say(
            f"--budget {hours:g} is used up: this table is PARTIAL, {state.num_finished()} of "
            f"{len(state.plan.runs)} cells are finished and kept in {out}{failed}; the same command runs the others",
            err=True,
        )
        raise typer.Exit(3) from None
    except KeyboardInterrupt:
        print_table(state, out, json_output=json_output)
        say(
            f"interrupted: {state.num_finished()} of {len(plan.runs)} cells are finished and kept in {out}; "
            "the same command runs the others",
            err=True,
        )
        raise typer.Exit(130) from None
    print_table(state, out, json_output=json_output)
    say(f"table.md, table.csv, rounds.csv, table.tex and table.json are in {out}", err=True)
    if failures := state.failures():
        raise RunError(f"{len(failures)} of {len(plan.runs)} cells failed: {'; '.join(failures)}")


def as_table(given: RunArguments) -> RunArguments:
    """Convert the arguments of ``fl-sim sweep`` to arguments of ``fl-sim table``.

    Settings with several values become the section [grid] of the table. All other settings become its section [base].
    The name of the table depends on [base] and on which settings vary, but not on their values: further values extend
    the same table. Raises UserError if no setting has several values, and for an empty or repeated value.
    """
    typed = [override.partition("=") for override in given.overrides]
    varied = {key: value.split(",") for key, _, value in typed if "," in value}
    if not varied:
        raise UserError(
            "no setting has several values: give some, such as 'fl-sim sweep local.learning_rate=0.01,0.1 seed=0,1,2'; "
            "for one run use 'fl-sim run'"
        )
    for key, values in varied.items():
        if "" in values or len(set(values)) < len(values):
            raise UserError(
                f"{key}={','.join(values)} has a repeated or an empty value: separate different values by one comma"
            )
    fixed = [override for override in given.overrides if override.partition("=")[0] not in varied]
    base = with_overrides(_base_of(given), fixed)
    same = json.dumps([base, sorted(varied)], sort_keys=True, default=str)
    names = "-".join(varied)[:_MOST_CHARACTERS]
    path = Path(f"sweep-{names}-{hashlib.sha256(same.encode()).hexdigest()[:8]}.toml")
    return RunArguments("the sweep", path, {"centralized": False, "base": base, "grid": varied}, [])


def show_plan(
    given: RunArguments,
    out: Path | None,
    jobs: int | None,
    data_root: Path | None,
    *,
    quick: bool = False,
    json_output: bool,
) -> None:
    """Print the forecasts of a run, or of every run of a table, and the total privacy cost of all runs.

    ``quick``: True omits the estimates of time.
    """
    deadline, is_late = time.monotonic() + ANSWER_SECONDS, list[bool]()

    def in_time() -> bool:
        is_late.append(time.monotonic() >= deadline)
        return not is_late[-1]

    with waiting() as show, redirect_stdout(sys.stderr):  # keep prints of user code out of the JSON output
        if given.path is not None and {"base", "grid", "tune"} & set(given.table):
            planned = _planned_table(given.path, given, out, jobs, data_root, show)
        elif jobs is not None:
            raise UserError(f"--jobs {jobs} is for the parallel runs of a table, but this is one run: leave it out")
        else:
            planned = _planned_run(given, out, data_root)
        with importing():
            from fl_sim.cli.printed import PlanReport  # noqa: PLC0415
            from fl_sim.privacy.bill import bills  # noqa: PLC0415
            from fl_sim.privacy.loss_distribution import begun_only_if  # noqa: PLC0415
            from fl_sim.simulation.timing import Stopwatch  # noqa: PLC0415
            from fl_sim.tables.forecast import forecast, search_forecasts  # noqa: PLC0415
        watch = None if quick else Stopwatch()
        found = forecast(planned.runs, planned.cells, data_root, watch, billed=in_time, say=show)
        searches = []
        if planned.settings is not None:
            searches = search_forecasts(planned.settings, planned.searches, planned.cells.parent, data_root, found)
        show("computing the total privacy cost of all runs")
        with begun_only_if(in_time):
            costs = bills([one.paid for one in found if one.paid is not None])
        report = PlanReport(found, searches, planned.jobs, costs, watch, is_rough=any(is_late))
    if json_output:
        say(json.dumps({"directory": str(planned.cells), **report.to_json()}))
    else:
        report.print()


def show_settings(name: str | None, *, json_output: bool) -> None:
    """Print the documentation of ``name``: a setting, a group of settings, or a value that has further settings.

    For example, the value ``fedprox`` of the setting ``algorithm`` has the setting ``algorithm.mu``. If ``name`` is
    None, print the documentation of the most common settings.
    """
    every = groups()
    if name is None:
        chosen = [group for group in every if not group.kind and group.name in {"", "local", "evaluate"}]
    else:
        chosen = _find(name, every)
    if json_output:
        say(json.dumps([asdict(group) for group in chosen]))
        return
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    for group in chosen:
        say("\n".join([*_lines_of(group, width), ""]))
    if name is None:
        say("Further: 'fl-sim settings NAME', where NAME is a setting, the first part of its name, or a kind, such as")
        say("local.schedule, preprocess, scaffold or poisson.")


def title_of(group: Group) -> str:
    """Return the title that 'fl-sim settings' prints above a group of settings, such as ``algorithm=fedprox``.

    If the group is valid only together with another setting, the title also names that setting.
    """
    title = f"{group.name}={group.kind}" if group.kind else group.name
    return f"{title}, with {group.within}" if group.within else title


def _base_of(given: RunArguments) -> dict[str, Any]:
    """Return the settings in the file of the arguments ``given``: for a table, the settings in its section [base].

    For a table, also print a warning that its other sections are ignored.
    """
    table = given.table
    if "base" in table and (left := [f"[{name}]" for name in ("grid", "tune") if name in table]):
        say(
            f"{given.name} defines a table: this run uses only its [base], not {' and '.join(left)}; 'fl-sim table "
            f"{given.name}' uses all sections",
            err=True,
        )
    base: dict[str, Any] = table.get("base", table)
    return base


def _print_result(result: Mapping[str, Any], out: Path) -> None:
    note = f" ({result['data_note']})" if result["data_note"] else ""
    server = f", {result['titles']['server']}" if result["titles"].get("server") else ""
    share = result.get("measures", {}).get("majority_share")
    majority = "" if share is None else f" (largest class: {_percent(share)} of the test records)"
    say(
        f"{result['algorithm']}{server} on {without_settings(result['data'])}{note}, {result['partition']}, "
        f"{result['clients']} clients, {result['model']}: "
        f"accuracy {_percent(result['final_accuracy'])}{majority} after {result['rounds']} rounds, "
        f"best {_percent(result['best_accuracy'])} ({_BEST[result.get('best_chosen_on', 'test')]}), "
        f"{duration_in_words(result)} on engine {result['engine']}"
    )
    if result["stopped"]:
        say(result["stopped"])
    if "virtual_seconds" in result:
        late = f", {result['late']:,} updates came too late" if result.get("late") else ""
        say(f"virtual time: {result['virtual_seconds']:,.1f} s on simulated devices{late}")
    if len(result["preprocess"]) > 1:  # if the run had no preprocessing, the dictionary has only the entry "kind"
        say(_preprocessing(result["preprocess"], is_drawn=(out / "samples.png").exists()))
    if result["calibrate"]["kind"] != "none":
        say(_calibration(result["calibrate"]))
    if "tstr" in result:
        say(_classifiers(result["tstr"]))
    if "pate" in result:
        say(_votes(result["pate"]))
    for section in result.values():
        if isinstance(section, dict) and "in_words" in section:
            say(section["in_words"])
    if not result["privacy"]:
        say("privacy: none - updates leave the clients without noise")
    for statement in result["privacy"]:
        say(f"privacy of a {statement['unit']}: {statement['guarantee']}")
        if statement["unit"] == "client":
            say(f"  sampling: {statement['sampling']}")
        say(f"  covers: {statement['covers']}")
        say(f"  does not cover: {statement['does_not_cover']}")
    say(f"results in {out}")


def _preprocessing(made: Mapping[str, Any], *, is_drawn: bool) -> str:
    if made["kind"] == "private-start":
        return (
            f"{made['kind']}: the initial model was trained on {made['num_images']:,} images, drawn from "
            f"{made['releases']} releases; the cost of the releases is part of the clients' epsilon"
        )
    origin = "from an earlier run with the same settings" if made["reused"] else "made in this run"
    trainer = f", trained by: {made['trainer']}" if made.get("trainer") else ""
    pictures = "; look at them in samples.png" if is_drawn else ""
    return (
        f"{made['kind']}: {made['num_synthetic']} synthetic records by {made['generator']} (gamma {made['gamma']:g}, "
        f"trained on: {made['train_on']}), {origin}{trainer}{pictures}"
    )


def _calibration(made: Mapping[str, Any]) -> str:
    if "accuracy_after" not in made:
        return f"{made['kind']}: not done, because the run ended early"
    skipped = ", ".join(map(str, made["classes_skipped"]))
    left_out = f"; without classes that have too few records: {skipped}" if skipped else ""
    return (
        f"{made['kind']}: accuracy {_percent(made['accuracy_before'])} before the head was trained again, "
        f"{_percent(made['accuracy_after'])} after{left_out}"
    )


def _votes(facts: Mapping[str, Any]) -> str:
    return (
        f"{facts['teachers']} teachers answered {facts['queries_answered']} of {facts['queries_asked']} queries about "
        f"{facts['public_records']} public records; correct noisy labels: {_percent(facts['label_accuracy'])}; student "
        f"{facts['student']}, evaluated on {facts['evaluation_records']} other records"
    )


def _classifiers(facts: Mapping[str, Any]) -> str:
    accuracies = "; ".join(
        f"{one['name']} {_percent(one['test_accuracy'])} (held-out synthetic {_percent(one['held_out_accuracy'])})"
        for one in facts["classifiers"]
    )
    frechet = facts["frechet"]
    apart = frechet and f"; Frechet distance to real test records {frechet['distance']:.1f} ({frechet['features']})"
    return f"classifiers on synthetic records: {accuracies}; chosen: {facts['chosen']}{apart or ''}"


def _percent(accuracy: float | None) -> str:
    return "not evaluated" if accuracy is None else f"{100 * accuracy:.2f} %"


class _Planned(NamedTuple):
    """The planned runs, and their unfinished hyperparameter searches.

    ``runs``: {name of the run directory: experiment}. ``cells``: the folder with these run directories. ``jobs``: the
    number of parallel runs. ``settings``: the settings of the table; None for a single run. ``searches``: the
    unfinished hyperparameter searches.
    """

    runs: Mapping[str, Experiment]
    cells: Path
    jobs: int = 1
    settings: TableSettings | None = None
    searches: "tuple[Search, ...]" = ()


def _planned_run(given: RunArguments, out: Path | None, data_root: Path | None) -> _Planned:
    experiment = parse_experiment(given)
    look_for(experiment.data, data_root)
    with importing():
        from fl_sim.interface import directory_of  # noqa: PLC0415
    experiment, directory = directory_of(experiment, out, data_root)
    return _Planned({directory.name: experiment}, directory.parent)


def _planned_table(
    path: Path,
    given: RunArguments,
    out: Path | None,
    jobs: int | None,
    data_root: Path | None,
    show: Callable[[str], object],
) -> _Planned:
    settings = table_settings(given.table, given.overrides, str(path))
    plan = plan_table(settings, data_root, show)
    with importing():
        from fl_sim.interface import RESULTS  # noqa: PLC0415
        from fl_sim.simulation.client_runtime import cores  # noqa: PLC0415
        from fl_sim.tables.filling import CELLS  # noqa: PLC0415
        from fl_sim.tables.tuning import known_choices, searches_of, values_of  # noqa: PLC0415
        from fl_sim.tables.workers import with_share_of_cores  # noqa: PLC0415
    out = out or RESULTS / path.stem
    searches = () if settings.tune is None else searches_of(settings, plan, data_root)
    if searches and (chosen := known_choices(settings, searches, out, data_root)) is not None:
        plan, searches = tuned(settings, plan, values_of(chosen), data_root), ()
    jobs = jobs or min(cores(), len(plan.runs))
    runs = {name: with_share_of_cores(experiment, jobs) for name, experiment in plan.runs.items()}
    return _Planned(runs, out / CELLS, jobs, settings, searches)


def _find(name: str, every: Sequence[Group]) -> list[Group]:
    """Return the groups of settings that the user's ``name`` selects from ``every``, the list of all groups.

    ``name``: the name of a setting (``local.epochs``), the common start of several settings (``local``), a setting with
    its value (``algorithm=fedprox``), or only the value (``fedprox``). For a single setting, the result is a group with
    only this setting. Raises UserError for an unknown name.
    """
    setting, _, kind = name.partition("=")
    kind = re.sub(r"-\d+$", "-k", kind.partition(":")[0])
    if kind or "=" in name:
        found = [group for group in every if (group.name, group.kind) == (setting, kind)]
    else:
        found = [group for group in every if name == group.kind or (group.name + ".").startswith(name + ".")]
        alone = {setting: group for group in every for setting in group.settings if setting.name == name}
        found = [Group(group.name, group.kind, group.within, "", (one,)) for one, group in alone.items()] + found
    if found:
        return found
    names = {group.kind or group.name for group in every} | {
        setting.name for group in every for setting in group.settings
    }
    meant = elsewhere(name) or guess(kind or name, names - {""})
    raise UserError(f"no setting or kind is called {name!r}{meant}; 'fl-sim settings' lists them")


def _lines_of(group: Group, width: int) -> list[str]:
    wrapped = partial(textwrap.wrap, width=width, subsequent_indent="      ", break_on_hyphens=False)
    title = title_of(group)
    lines = [title] if title and group.about else []
    lines += textwrap.wrap(group.about.replace("``", ""), width)
    for setting in group.settings:
        default = f" (default: {setting.default})" if setting.default else ""
        lines += ["", *wrapped(f"{setting.name}: {setting.takes}{default}", initial_indent="  ")]
        lines += wrapped(setting.meaning.replace("``", ""), initial_indent="      ")
    return lines if lines[0] else lines[1:]
