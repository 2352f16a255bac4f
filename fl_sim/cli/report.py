"""``fl-sim report``: figures and a page from finished runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fl_sim.cli.pictures import find_images
from fl_sim.cli.screen import say
from fl_sim.report.bills import bills_of
from fl_sim.report.figures.by_epsilon import is_in_features, sample_pictures, with_pools
from fl_sim.report.figures.curves import draw_all
from fl_sim.report.figures.pate import pate_pictures
from fl_sim.report.figures.sweep import draw_sweeps, sweeps
from fl_sim.report.groups import Panel, group, panels
from fl_sim.report.measures import mean_and_deviation
from fl_sim.report.page import page
from fl_sim.report.page_words import Taken, groups_of, percent, runs_of, summary, taken, title_of
from fl_sim.report.picture import for_papers
from fl_sim.report.runs import Found, find
from fl_sim.store.run_directory import write_text

PAGE = "report.html"


def write_report(
    directories: list[Path],
    out: Path | None,
    *,
    paper: bool,
    pictures: bool,
    target: float | None,
    json_output: bool,
) -> None:
    """Write the page and its figures, and print where they are and what could not be shown.

    ``paper``: diagrams are also written as PDF and SVG, as wide as a paper's column and as its text. ``pictures``:
    images are found for synthetic records that are feature vectors. ``target``: a test accuracy in [0, 1]; what runs
    took to it is told, too.
    """
    found = find(directories)
    groups, doubles = group(found.runs)
    found.problems += doubles
    shown = panels(groups)
    if pictures and not any(is_in_features(run) for _, run in with_pools(groups)):
        say("--pictures: no run here has synthetic records that are feature vectors: nothing to find", err=True)
    samples, damaged = sample_pictures(groups, find_images if pictures else None)
    votes, unreadable = pate_pictures(groups)
    bills = bills_of(found)
    found.problems += [*damaged, *unreadable, *bills.problems]
    figures = [*draw_all(shown), *draw_sweeps(sweeps(groups)), *samples, *votes]
    out = out or (directories[0] / "report" if len(directories) == 1 else Path("results/report"))
    out.mkdir(parents=True, exist_ok=True)
    files = {picture.name: picture.png for picture in figures}
    for picture in figures if paper else ():
        files |= for_papers(picture)
    for name, content in files.items():
        (out / name).write_bytes(content)
    write_text(out / PAGE, page(found, shown, figures, bills.in_words, target))
    problems, got_there = _problems(found), [] if target is None else taken(groups_of(shown), target)
    for problem in problems:
        say(f"warning: {problem['dir']}: {problem['error']}", err=True)
    if json_output:
        told = _as_json(out, list(files), shown, problems) | {"bill": list(bills.bills)}
        say(json.dumps(told | ({} if target is None else {"target": _target_as_json(target, got_there)})))
        return
    say(title_of(shown))
    say(summary(groups_of(shown)))
    for line in [*(f"to {100 * (target or 0):g} %: {one.in_words}" for one in got_there), *bills.in_words]:
        say(line)
    for name in (PAGE, *files):
        say(str(out / name))


def _problems(found: Found) -> list[dict[str, str]]:
    unfinished = [(run.path, run.status, run.error) for run in found.runs if run.status != "finished"]
    damaged = [(problem.path, "problem", problem.error) for problem in found.problems]
    return [{"dir": str(path), "status": status, "error": error} for path, status, error in unfinished + damaged]


def _target_as_json(target: float, got_there: list[Taken]) -> dict[str, Any]:
    rows = [
        {"method": one.method, "where": one.where, "runs": one.runs, "reached": [asdict(run) for run in one.reached]}
        for one in got_there
    ]
    return {"accuracy": target, "rows": rows}


def _as_json(out: Path, files: list[str], shown: list[Panel], problems: list[dict[str, str]]) -> dict[str, Any]:
    groups = groups_of(shown)
    rows = []
    for label, one in (line for some in groups.values() for line in some):
        done = [run.outcome for run in one.finished if run.outcome]
        final = [value for outcome in done if (value := percent(outcome.final_accuracy)) is not None]
        best = [value for outcome in done if (value := percent(outcome.best_accuracy)) is not None]
        rows.append({
            "method": label, "algorithm": one.runs[0].config.algorithm.kind, "data": one.data, "data_note": one.note,
            "partition": one.partition, "clients": one.runs[0].config.clients, "model": one.runs[0].config.model,
            "seeds": [run.config.seed for run in one.runs], "status": [run.status for run in one.runs],
            "mean": mean_and_deviation(final)[0], "std": mean_and_deviation(final)[1],
            "best_mean": mean_and_deviation(best)[0], "best_std": mean_and_deviation(best)[1],
            "best_chosen_on": [outcome.best_chosen_on for outcome in done],
            "seconds": [outcome.seconds.total for outcome in done], "dir": [str(run.path) for run in one.runs],
        })  # fmt: skip
    return {
        "report": str(out / PAGE),
        "figures": [str(out / name) for name in files],
        "runs": len(runs_of(groups)),
        "finished": sum(run.status == "finished" for run in runs_of(groups)),
        "unit": "percent",
        "rows": rows,
        "problems": problems,
    }
