"""``fl-sim watch``: what runs in a directory, told by its files, until all has ended."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from fl_sim.cli.screen import say
from fl_sim.report.watching import STATES, Watched, Watcher, view


def watch_directory(directory: Path, *, every: float, once: bool, json_output: bool) -> None:
    """Show the runs in ``directory`` every ``every`` seconds, until none is running, or the user has seen enough.

    ``once``: show them and end. Where standard output is no terminal, plain text is written: at the start, whenever a
    run ends, and at the end.
    """
    watcher = Watcher(directory)
    watched = watcher.look()
    if json_output:
        say(json.dumps(_as_json(directory, watched)))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH, no_color=True)
    with suppress(KeyboardInterrupt):  # whoever looks on may go, and nothing is lost
        if once or not watcher.is_alive(watched):
            _show(console, watched)
        elif console.is_terminal:
            _live(console, watcher, every)
        else:
            _lines(console, watcher, every)


_PLAIN_WIDTH = 200


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
    told: list[tuple[str, str]] | None = None
    while True:
        watched = watcher.look()
        states = [(one.directory, str(one.state)) for one in watched]
        if states != told:
            _show(console, watched)
            told = states
        if not watcher.is_alive(watched):
            return
        time.sleep(every)


def _as_json(directory: Path, watched: Sequence[Watched]) -> dict[str, Any]:
    return {
        "dir": str(directory),
        "states": {state: sum(one.state == state for one in watched) for state in STATES},
        "runs": [
            {
                "dir": one.directory, "method": one.method, "place": one.place, "seed": one.seed, "state": one.state,
                "round": one.round, "rounds": one.rounds, "accuracy": one.accuracies[-1] if one.accuracies else None,
                "seconds_per_round": one.pace, "seconds_left": one.left, "epsilon": one.epsilon, "error": one.error,
            }
            for one in watched
        ],
    }  # fmt: skip
