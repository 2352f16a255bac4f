"""``fl-sim export``: finished runs are shown by trackers."""

import json
from collections.abc import Sequence
from pathlib import Path

from fl_sim.cli.screen import say
from fl_sim.errors import RunError, UserError
from fl_sim.report.runs import Run, read_all
from fl_sim.store.locks import sole_run
from fl_sim.tracking.following import send_whole


def export_runs(directories: Sequence[Path], trackers: Sequence[str], *, json_output: bool) -> None:
    """Send every run in or below ``directories`` to ``trackers``, and print where each is.

    Raises UserError where there is no run, RunError where a tracker failed or a run could not be read.
    """
    if observers := [name for name in trackers if ":" in name]:
        raise UserError(f"--to {observers[0]}: an observer is told of runs while they go on; give it to --track")
    found = read_all(directories)
    if not found.read and not found.problems:
        raise UserError(
            f"no run in {', '.join(map(str, directories))}: give a directory that 'fl-sim run --out' or 'fl-sim table "
            "--out' wrote, or one that holds such directories"
        )
    for problem in found.problems:
        say(f"warning: {problem.path}: {problem.error}", err=True)
    sent = [_exported(run, trackers, json_output=json_output) for run in found.read]
    if json_output:
        say(json.dumps({"runs": sent, "problems": [str(problem.path) for problem in found.problems]}))
    failed = sum(bool(run["failed"]) for run in sent) + found.num_unread
    if failed:
        raise RunError(f"{failed} of {len(sent) + found.num_unread} runs were not sent whole: see above")


def _exported(run: Run, trackers: Sequence[str], *, json_output: bool) -> dict[str, object]:
    if run.status != "finished":
        say(f"warning: {run.path}: {run.error}", err=True)
    with sole_run(run.path):
        sender = send_whole(run.path, trackers, lambda line: say(f"warning: {line}", err=True))
    places = {tracker: session.place for tracker, session in sender.sessions.items()}
    there = [tracker for tracker in trackers if tracker not in {*places, *sender.failed}]
    if not json_output:
        told = [*(f"{tracker} ({place})" for tracker, place in places.items()), *(f"{one} had it" for one in there)]
        say(f"{run.path}: {len(run.rounds)} rounds; {', '.join(told) or 'sent nowhere'}")
    return {"dir": str(run.path), "rounds": len(run.rounds), "sent": places, "there": there, "failed": sender.failed}
