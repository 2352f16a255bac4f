"""What ``fl-sim watch`` shows: a row a run, whole at 80 columns, and how many runs are in which state."""

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fl_sim.printable import in_a_line
from fl_sim.report.progress import clock
from fl_sim.report.watching import STATES, Watched

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS: Final = "_.-=+*%#"
"""For terminals that have no others."""
_CURVE: Final = 12
_STYLES: Final = {"running": "bold cyan", "failed": "bold red", "damaged": "bold red", "stopped": "yellow"}
_AROUND: Final = 4
"""Lines besides the rows: heads, the count, and what is said below."""


def view(watched: Sequence[Watched], *, height: int | None, is_plain: bool = False) -> RenderableType:
    """Return a table of as many runs as ``height`` lines have room for (None: all), and below it what they come to.

    Running ones come first. ``is_plain``: only ASCII is drawn.
    """
    shown = _fitting(watched, height)
    has = {name: any(getattr(one, name) not in (None, "") for one in shown) for name in ("pace", "left", "epsilon")}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for head in ("round", "acc %"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("curve", no_wrap=True)
    for name, head in (("pace", "s/round"), ("left", "left"), ("epsilon", "epsilon")):
        if has[name]:
            table.add_column(head, justify="right", no_wrap=name != "epsilon")
    place = None
    for one in shown:
        if one.place != place and len({run.place for run in watched}) > 1:
            place = one.place
            table.add_row(Text(in_a_line(place) or "not readable", "italic"))
        table.add_row(*_cells(one, has, _PLAIN_BLOCKS if is_plain else _BLOCKS))
    told = [Text(in_a_line(f"{one.directory}: {one.error}"), "yellow", overflow="fold") for one in shown if one.error]
    return Group(table, *told, Text(_counted(watched, len(shown))))


def _fitting(watched: Sequence[Watched], height: int | None) -> list[Watched]:
    """Return as many runs as there is room for, those of one place together: each place takes a line, too."""
    kept: list[Watched] = []
    for one in watched:
        lines = _AROUND + len(kept) + 1 + len({run.place for run in (*kept, one)})
        lines += sum(bool(run.error) for run in (*kept, one))
        if height is not None and kept and lines > height:
            break
        kept.append(one)
    places = list(dict.fromkeys(one.place for one in kept))
    return sorted(kept, key=lambda one: places.index(one.place))


def curve(accuracies: Sequence[float], blocks: str = _BLOCKS, width: int = _CURVE) -> str:
    """Return the accuracies as a row of blocks, from their lowest to their highest.

    >>> curve([0.1, 0.4, 0.9]), curve([0.5, 0.5]), curve([])
    ('▁▄█', '▁▁', '')
    """
    if not accuracies:
        return ""
    steps = min(width, len(accuracies))
    chosen = [accuracies[round((at + 1) * len(accuracies) / steps) - 1] for at in range(steps)]
    low, high = min(chosen), max(chosen)
    return "".join(blocks[round((len(blocks) - 1) * (one - low) / (high - low or 1.0))] for one in chosen)


def _cells(one: Watched, has: dict[str, bool], blocks: str) -> list[Text]:
    name = one.method or one.directory
    cells = [
        Text(in_a_line(name if one.seed is None else f"{name}, seed {one.seed}")),
        Text(one.state, _STYLES.get(one.state, "")),
        Text("" if one.rounds is None else f"{one.round}/{one.rounds}"),
        Text(f"{100 * one.accuracies[-1]:.1f}" if one.accuracies else ""),
        Text(curve(one.accuracies, blocks)),
    ]
    if has["pace"]:
        cells.append(Text("" if one.pace is None else f"{one.pace:.2f}"))
    if has["left"]:
        cells.append(Text("" if one.left is None else clock(one.left)))
    if has["epsilon"]:
        cells.append(Text(in_a_line(one.epsilon)))
    return cells


def _counted(watched: Sequence[Watched], shown: int) -> str:
    counts = {state: sum(one.state == state for one in watched) for state in STATES}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    runs = "1 run" if len(watched) == 1 else f"{len(watched)} runs"
    hidden = len(watched) - shown
    return f"{runs}: {told}{f' ({hidden} of them not shown: no room)' if hidden else ''}"
