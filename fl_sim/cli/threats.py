"""The code of ``fl-sim unlearn``: it makes the run that never knew a client, and prints its measures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_sim.cli.screen import say
from fl_sim.importing import importing


def show_unlearning(run: Path, client: int, out: Path | None, data_root: Path | None, *, json_output: bool) -> None:
    """Make the run that never knew ``client``, in ``out`` (None: beside ``run``), and print its measures."""
    with importing():
        from fl_sim.threats.finished import FinishedRun  # noqa: PLC0415 (slow, only here)
        from fl_sim.threats.unlearning import beginning_of, check_client, unlearn  # noqa: PLC0415

    finished = FinishedRun.of(run, data_root)
    check_client(finished, client)
    say(f"training continues {beginning_of(finished, client).why}", err=True)
    made = unlearn(finished, client, out or run.with_name(f"{run.name}-without-{client}"))
    if json_output:
        say(json.dumps(made))
        return
    before, after, cost = made["before"], made["after"], made["cost"]
    rows = {
        "accuracy on test records": "test_accuracy",
        "accuracy on other clients' records": "kept_accuracy",
        "accuracy on forgotten records": "forgotten_accuracy",
    }
    say(f"{'':36}{'before':>18}{'after':>18}")
    for title, name in rows.items():
        say(f"{title:36}{_percent(before[name]):>18}{_percent(after[name]):>18}")
    areas = [_area(one["membership"]) for one in (before, after)]
    say(f"{'membership of forgotten records':36}{areas[0]:>18}{areas[1]:>18}")
    say("(membership: .5 is chance; in brackets, the interval of 95 % confidence)")
    say(
        f"cost: {cost['rounds']} of {cost['rounds_of_retraining']} rounds ({cost['rounds_saved']} saved), "
        f"{cost['seconds']:.1f} s; the run itself took {cost['seconds_of_the_run']:.1f} s"
    )
    say(f"the model is that of the run that never knew client {client}, bit for bit: {made['out']}")
    say(f"{made['run']} still holds the model that knows these records: delete it if they must be forgotten")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _area(found: Mapping[str, Any] | None) -> str:
    return "-" if found is None else f"{found['area']:.3f} [{found['low']:.2f}, {found['high']:.2f}]"
