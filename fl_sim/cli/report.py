"""The code of ``fl-sim report`` (a page about runs), ``watch`` (live progress) and ``export`` (runs for trackers)."""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live
from rich.progress import Progress

from fl_sim.cli.screen import say
from fl_sim.data.naming import KNOWN
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.report.figures.by_client import client_figures, draw_clients
from fl_sim.report.figures.by_epsilon import Images, is_in_features, sample_pictures, with_pools
from fl_sim.report.figures.curves import draw_all
from fl_sim.report.figures.heat_map import draw_heat_maps
from fl_sim.report.figures.pate import pate_pictures
from fl_sim.report.figures.sweep import draw_sweeps, sweeps
from fl_sim.report.gallery import PAGE as GALLERY
from fl_sim.report.gallery import gallery_text, leaderboard_text, read_gallery, read_leaderboard
from fl_sim.report.groups import Panel, group, panels
from fl_sim.report.measures import as_percent, mean_and_deviation
from fl_sim.report.page import page
from fl_sim.report.page_sections import groups_of, runs_of, summary, target_rows, title_of
from fl_sim.report.picture import Picture, for_papers
from fl_sim.report.progress import LinePart, ProgressLine, clock
from fl_sim.report.runs import Found, SavedRun, find, read_all
from fl_sim.report.watching import STATES, Watched, Watcher, view
from fl_sim.store.files import run_lock
from fl_sim.store.run_directory import write_text

if TYPE_CHECKING:
    from fl_sim.data.features import Features

PAGE = "report.html"

_PLAIN_WIDTH = 200
"""Width of the display of ``fl-sim watch`` in characters if the output is not a terminal."""


def write_report(
    directories: list[Path], out: Path | None, *, paper: bool, pictures: bool, target: float | None, json_output: bool,
    full_axis: bool = False,
) -> None:  # fmt: skip
    """Write the report page and its figures, and print the paths of the files.

    Warnings name the runs that are unfinished or cannot be shown. ``out``: the folder for the files; None: the default.
    ``paper``: True also writes the figures as PDF and SVG, in the widths of one and of two columns of a paper.
    ``pictures``: True computes, for each synthetic feature vector, an image with nearly the same features. ``target``:
    a test accuracy in [0, 1]; if it is given, the report also states what each run needed to reach this accuracy.
    ``full_axis``: True draws accuracies on an axis from 0 to 100 %, False only over the range of the accuracies.
    """
    found = _with_titles(find(directories))
    groups, doubles = group(found.runs)
    found.problems += doubles
    shown = panels(groups)
    if pictures and not any(is_in_features(run) for _, run in with_pools(groups)):
        say("--pictures has no effect: no run here has synthetic records that are feature vectors", err=True)
    samples, damaged = sample_pictures(groups, find_images if pictures else None)
    votes, unreadable = pate_pictures(groups)
    found.problems += [*damaged, *unreadable]
    bills, deltas = _privacy_of(found)
    costs = [str(bill["in_words"]) for bill in bills]
    figures = [
        *draw_all(shown, full_axis=full_axis),
        *draw_clients(client_figures(found)),
        *draw_sweeps(sweeps(groups), full_axis=full_axis),
        *draw_heat_maps(found.tables.values()),
        *deltas,
        *samples,
        *votes,
    ]
    out = out or (directories[0] / "report" if len(directories) == 1 else Path("results/report"))
    out.mkdir(parents=True, exist_ok=True)
    files = {picture.name: picture.png for picture in figures}
    for picture in figures if paper else ():
        files |= for_papers(picture)
    for name, content in files.items():
        (out / name).write_bytes(content)
    write_text(out / PAGE, page(found, shown, figures, costs, target, full_axis=full_axis))
    faults = [(run.path, run.status, run.error) for run in found.runs if run.status != "finished"]
    faults += [(problem.path, "problem", problem.error) for problem in found.problems]
    reached = [] if target is None else target_rows(groups_of(shown), target)
    for path, _, error in faults:
        say(f"warning: {path}: {error}", err=True)
    if json_output:
        result = _as_json(out, list(files), shown, faults) | {"bill": bills}
        if target is not None:
            result["target"] = {"accuracy": target, "rows": [
                {"method": one.method, "where": one.where, "runs": one.runs, "reached": list(map(asdict, one.reached))}
                for one in reached
            ]}  # fmt: skip
        say(json.dumps(result))
        return
    reached_in_words = [f"to {100 * (target or 0):g} %: {one.in_words}" for one in reached]
    lines = [title_of(shown), summary(groups_of(shown)), *reached_in_words, *costs]
    say("\n".join([*lines, *(str(out / name) for name in (PAGE, *files))]))


def _privacy_of(found: Found) -> tuple[list[dict[str, Any]], list[Picture]]:
    """Return the privacy bills (total costs) of all runs, and figures that show delta as a function of epsilon.

    Add an entry to ``found.problems`` for each run whose privacy cost is unknown.
    """
    if not found.has_statements:
        return [], []
    from fl_sim.report.figures.delta import delta_pictures  # noqa: PLC0415 (the accountants load slowly)
    from fl_sim.report.payments import bills_of  # noqa: PLC0415

    bills, unknown = bills_of(found)
    found.problems += unknown
    return bills, delta_pictures(found.runs)


def watch_directory(directory: Path, *, every: float, once: bool, json_output: bool) -> None:
    """Show the state of the runs in ``directory`` until all runs have ended, or until Ctrl-C.

    ``every``: seconds between updates. ``once``: True shows the state only once. Without a terminal, the display is
    plain text, printed at the start and whenever the state of a run changes.
    """
    watcher = Watcher(directory)
    watched = watcher.look()
    if json_output:
        say(json.dumps(_watched_as_json(directory, watched)))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH, no_color=True)
    with suppress(KeyboardInterrupt):  # Ctrl-C ends the display without an error
        if once or not watcher.is_alive(watched):
            _show(console, watched)
        elif console.is_terminal:
            _live(console, watcher, every)
        else:
            _lines(console, watcher, every)


def write_gallery(directories: list[Path], out: Path | None, *, json_output: bool) -> None:
    """Write README.md into a gallery, which is a directory with a folder for each table, and print its path.

    README.md is the leaderboard if the directory has a file ``leaderboard.toml``, else the gallery page.
    """
    if len(directories) > 1 or out is not None:
        raise UserError(
            "--gallery takes one DIR, with a folder for each table, and writes DIR/README.md: leave out --out and "
            "further directories"
        )
    (directory,) = directories
    entries = read_gallery(directory)
    path = directory / GALLERY
    leaderboard = read_leaderboard(directory)
    write_text(path, leaderboard_text(leaderboard, entries) if leaderboard else gallery_text(entries, _root(directory)))
    waiting = [entry.name for entry in entries if entry.table is None]
    if json_output:
        say(json.dumps({"page": str(path), "tables": len(entries) - len(waiting), "to_be_run": waiting}))
        return
    say(f"{path}: {len(entries) - len(waiting)} tables")
    if waiting:
        say(f"still to be run: {', '.join(waiting)}")


def find_images(run: SavedRun, vectors: NDArray[np.float32]) -> Images:
    """Find an image for each of the synthetic feature ``vectors`` of ``run``, to show them in the report.

    Returns (images, distances). A distance is the difference between the features of an image and the given vector (see
    ``Images``). The search prints its progress. It uses only the vectors, the shape of the images and the public
    feature transform. Raises ValueError if the shape is unknown, if the transform has no approximate inverse, or if
    ``vectors`` cannot be features of images of this shape.
    """
    from fl_sim.data.images_of_features import images_of  # noqa: PLC0415 (imports torch, which is slow)

    features, shape = run.config.features, _shape_of(run)
    if features not in {"scattering", "whitened-scattering"}:
        raise ValueError(f"no images can be found for features={features}, only for scattering and whitened-scattering")
    console = Console(file=sys.stderr)
    console.print(
        f"finding images for {len(vectors)} synthetic feature vectors of {run.path}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    begun, searching_since, share = time.monotonic(), 0.0, 0.0

    def parts() -> list[LinePart]:
        now = time.monotonic()
        left = f"{clock((now - searching_since) * (1 / share - 1))} left" if share else ""
        return [LinePart(f"{share:.0%}", 0), LinePart(f"{clock(now - begun)} so far", 2), LinePart(left, 1)]

    with Progress(ProgressLine(console), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("finding images", total=1.0, parts=parts)

        def show(done: float) -> None:
            nonlocal share, searching_since
            # the first call of ``show`` is the start of the search, from which the remaining time is estimated
            searching_since = searching_since or time.monotonic()
            share = done
            bar.update(task, completed=done)

        return images_of(vectors, shape, cast("Features", features), show)


def export_runs(directories: Sequence[Path], trackers: Sequence[str], *, json_output: bool) -> None:
    """Send every run in ``directories`` and their subfolders to ``trackers``, and print the address of each sent run.

    Raises UserError if there is no run, and RunError if a tracker failed or a run could not be read.
    """
    if observers := [name for name in trackers if ":" in name]:
        raise UserError(
            f"--to {observers[0]}: your own observer is called during a run, not after it: use 'fl-sim run --track "
            f"{observers[0]}'"
        )
    found = read_all(directories)
    if not found.read and not found.problems:
        raise UserError(
            f"no run in {', '.join(map(str, directories))}: give a directory that 'fl-sim run --out' or 'fl-sim table "
            "--out' wrote, or a folder with such directories"
        )
    for problem in found.problems:
        say(f"warning: {problem.path}: {problem.error}", err=True)
    sent = [_exported(run, trackers, json_output=json_output) for run in found.read]
    if json_output:
        say(json.dumps({"runs": sent, "problems": [str(problem.path) for problem in found.problems]}))
    failed = sum(bool(run["failed"]) for run in sent) + found.num_unread
    if failed:
        raise RunError(f"{failed} of {len(sent) + found.num_unread} runs were not sent completely: see the warnings")


def _with_titles(found: Found) -> Found:
    """Add column titles to the tables in ``found`` that an older version of fl-sim wrote without titles.

    The columns contain measures of stages, such as the accuracy after calibration. The titles are taken from the stages
    of an experiment with default settings, because in older versions only these stages had columns.
    """
    older = [place for place, table in found.tables.items() if table.titles is None]
    if older:
        from fl_sim.simulation.stage import stage_kinds  # noqa: PLC0415 (imports Flower, which is slow)

        titles = {name: title for kind in stage_kinds(Experiment()) for name, title in kind.titles.items()}
        found.tables |= {place: replace(found.tables[place], titles=titles) for place in older}
    return found


def _as_json(out: Path, files: list[str], shown: list[Panel], faults: list[tuple[Path, str, str]]) -> dict[str, Any]:
    groups = groups_of(shown)
    rows = []
    for label, one in (line for some in groups.values() for line in some):
        done = [run.result for run in one.finished if run.result]
        final = [value for result in done if (value := as_percent(result.final_accuracy)) is not None]
        best = [value for result in done if (value := as_percent(result.best_accuracy)) is not None]
        rows.append({
            "method": label, "algorithm": one.runs[0].config.algorithm.kind, "data": one.data, "data_note": one.note,
            "partition": one.partition, "clients": one.runs[0].config.clients, "model": one.runs[0].config.model,
            "seeds": [run.config.seed for run in one.runs], "status": [run.status for run in one.runs],
            "mean": mean_and_deviation(final)[0], "std": mean_and_deviation(final)[1],
            "best_mean": mean_and_deviation(best)[0], "best_std": mean_and_deviation(best)[1],
            "best_chosen_on": [result.best_chosen_on for result in done],
            "seconds": [result.seconds.total for result in done], "dir": [str(run.path) for run in one.runs],
        })  # fmt: skip
    return {
        "report": str(out / PAGE),
        "figures": [str(out / name) for name in files],
        "runs": len(runs_of(groups)),
        "finished": sum(run.status == "finished" for run in runs_of(groups)),
        "unit": "percent",
        "rows": rows,
        "problems": [{"dir": str(path), "status": status, "error": error} for path, status, error in faults],
    }


def _root(directory: Path) -> str:
    """Return the relative path from ``directory`` to the repository's root. The page's links to TOML files use it."""
    inside = directory.resolve()
    for number, above in enumerate([inside, *inside.parents]):
        if (above / "benchmarks").is_dir():
            return "/".join([os.pardir] * number) or os.curdir
    return os.curdir


def _shape_of(run: SavedRun) -> tuple[int, int, int]:
    """Return the shape (channels, height, width) of the images from which the feature vectors were computed.

    Older runs do not state this shape. For them, the result is the image shape of their public data set. Raises
    ValueError if the shape is unknown.
    """
    known = KNOWN.get(run.config.data)
    recorded = run.result.image_shape if run.result else None
    match tuple(recorded or (known.shape if known else ())):
        case (int(channels), int(height), int(width)):
            return channels, height, width
        case _:
            raise ValueError(
                "its result.json does not state the shape of the images from which the features were computed: repeat "
                "the run with this version of fl-sim, in a new directory"
            )


def _exported(run: SavedRun, trackers: Sequence[str], *, json_output: bool) -> dict[str, object]:
    from fl_sim.tracking.observers import send_whole  # noqa: PLC0415 (imports Flower, which is slow)

    if run.status != "finished":
        say(f"warning: {run.path}: {run.error}", err=True)
    with run_lock(run.path):
        sender = send_whole(run.path, trackers, lambda line: say(f"warning: {line}", err=True))
    places = {tracker: session.place for tracker, session in sender.sessions.items()}
    there = [tracker for tracker in trackers if tracker not in {*places, *sender.failed}]
    if not json_output:
        sent = [*(f"{name} ({place})" for name, place in places.items()), *(f"{name} has this run" for name in there)]
        say(f"{run.path}: {len(run.rounds)} rounds; {', '.join(sent) or 'sent nowhere'}")
    return {"dir": str(run.path), "rounds": len(run.rounds), "sent": places, "there": there, "failed": sender.failed}


def _show(console: Console, watched: Sequence[Watched]) -> None:
    console.print(view(watched, height=None, is_plain=not console.encoding.startswith("utf")))


def _live(console: Console, watcher: Watcher, every: float) -> None:
    plain = not console.encoding.startswith("utf")
    watched = watcher.look()
    with Live(console=console, auto_refresh=False, transient=True) as live, suppress(KeyboardInterrupt):
        while watcher.is_alive(watched):
            live.update(view(watched, height=console.height, is_plain=plain), refresh=True)
            time.sleep(every)
            watched = watcher.look()
    _show(console, watched)


def _lines(console: Console, watcher: Watcher, every: float) -> None:
    shown: list[tuple[str, str]] | None = None
    while True:
        watched = watcher.look()
        states = [(one.directory, str(one.state)) for one in watched]
        if states != shown:
            _show(console, watched)
            shown = states
        if not watcher.is_alive(watched):
            return
        time.sleep(every)


def _watched_as_json(directory: Path, watched: Sequence[Watched]) -> dict[str, Any]:
    return {
        "dir": str(directory),
        "states": {state: sum(one.state == state for one in watched) for state in STATES},
        "runs": [
            {
                "dir": one.directory, "method": one.method, "place": one.place, "seed": one.seed, "state": one.state,
                "round": one.round, "rounds": one.rounds, "accuracy": one.accuracies[-1] if one.accuracies else None,
                "seconds_per_round": one.round_seconds, "seconds_left": one.left, "epsilon": one.epsilon,
                "error": one.error,
            }
            for one in watched
        ],
    }  # fmt: skip
