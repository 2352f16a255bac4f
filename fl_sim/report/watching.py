"""What the runs in a directory are doing, told by their files alone, and how ``fl-sim watch`` shows it.

Nothing is locked, and nothing is written. A run is a row, whole at 80 columns, and below is how many runs are in which
state.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from fl_sim.errors import UserError, in_a_line
from fl_sim.privacy.terms import rounded_up
from fl_sim.report.files import Synthesis
from fl_sim.report.groups import group, panels
from fl_sim.report.page_words import privacy_in_short, short_names
from fl_sim.report.progress import clock
from fl_sim.report.runs import TABLE, WANTED, Run, places_in, read_json_table, read_run
from fl_sim.report.table import Table
from fl_sim.store.files import is_locked
from fl_sim.store.run_directory import CONFIG, RESULT, ROUNDS

State: TypeAlias = Literal["running", "waiting", "stopped", "failed", "damaged", "finished"]
STATES: Final[tuple[State, ...]] = ("running", "failed", "damaged", "stopped", "finished", "waiting")
"""In the order in which they are shown."""

_PACE_OF: Final = 10
_SILENCE: Final = 60.0
"""A run on another machine whose files did not change for as many seconds, or for five rounds, counts as stopped."""

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS: Final = "_.-=+*%#"
"""For terminals that have no others."""
_CURVE: Final = 12
_STYLES: Final = {"running": "bold cyan", "failed": "bold red", "damaged": "bold red", "stopped": "yellow"}
_AROUND: Final = 4
"""Lines besides the rows: heads, the count, and what is said below."""


@dataclass(frozen=True)
class Watched:
    """One run. ``place``: its data and split; ``rounds``: how many there will be; None: not known, or not told.

    ``accuracies``: in [0, 1], of the evaluated rounds, on held-out records where the test records are not looked at.
    ``pace`` and ``left``: seconds of a round, and until the end. ``epsilon``: what it has spent, in words.
    """

    directory: str
    method: str
    place: str
    seed: int | None
    state: State
    round: int = 0
    rounds: int | None = None
    accuracies: tuple[float, ...] = ()
    pace: float | None = None
    left: float | None = None
    epsilon: str = ""
    error: str = ""


@dataclass
class Watcher:
    """Looks at ``top`` again and again; reads only those files again that have changed since."""

    top: Path
    _read: dict[Path, tuple[object, Run | Table | str]] = field(default_factory=dict)

    def look(self) -> list[Watched]:
        """Return what runs are in the directory, and what waits to be run.

        Raises UserError where there is no such directory, and where no run is in it.
        """
        if not self.top.is_dir():
            raise UserError(f"{self.top} is {'no directory' if self.top.exists() else 'not there'}: {WANTED}")
        found = {place: self._at(place) for place in places_in(self.top)}
        runs = {place: one for place, one in found.items() if isinstance(one, Run)}
        tables = {place: one for place, one in found.items() if isinstance(one, Table)}
        damaged = [
            Watched(self._name(place), "", "", None, "damaged", error=one)
            for place, one in found.items()
            if isinstance(one, str)
        ]
        watched = [*self._runs(_named(runs, tables)), *damaged, *self._waiting(tables, set(found))]
        if not watched:
            raise UserError(f"no run in {self.top} yet: {WANTED}")
        return sorted(watched, key=lambda one: STATES.index(one.state))

    def is_alive(self, watched: Sequence[Watched]) -> bool:
        """Return whether anything of it is running, or about to be."""
        folders = {(self.top / one.directory).parent for one in watched if one.directory != "."}
        return any(one.state == "running" for one in watched) or any(is_locked(folder) for folder in folders)

    def _at(self, place: Path) -> Run | Table | str:
        """Return what is at ``place``, or what is wrong with it; what is being written may be whole the next time."""
        try:
            now = tuple(_version(place / name) for name in (CONFIG, ROUNDS, RESULT, TABLE))
            if place not in self._read or self._read[place][0] != now:
                self._read[place] = (now, read_json_table(place) if (place / TABLE).exists() else read_run(place))
        except (OSError, ValueError) as error:
            return str(error)
        return self._read[place][1]

    def _name(self, place: Path) -> str:
        return str(place.relative_to(self.top))

    def _runs(self, runs: Mapping[Path, Run]) -> list[Watched]:
        titles = {
            run.path: (names[label], f"{panel.data}, centralized" if one.is_bound else panel.title)
            for panel in panels(group(list(runs.values()))[0])
            for names in (short_names(label for label, _ in panel.lines),)
            for label, one in panel.lines
            for run in one.runs
        }
        return [self._watched(run, *titles.get(place, (place.name, ""))) for place, run in runs.items()]

    def _watched(self, run: Run, method: str, title: str) -> Watched:
        paces = [record.seconds for record in run.rounds[-_PACE_OF:] if record.seconds is not None]
        pace = sum(paces) / len(paces) if paces else None
        state = _state(run, pace)
        last, rounds = run.rounds[-1].round if run.rounds else 0, run.config.rounds
        left = None
        if state == "running" and pace is not None:
            left = max(0.0, pace * (rounds - last) - max(0.0, time.time() - _changed(run.path / ROUNDS)))
        measured = ((one.test_accuracy, one.validation_accuracy) for one in run.rounds)
        accuracies = (test if test is not None else validation for test, validation in measured)
        return Watched(
            self._name(run.path), method, title, run.config.seed, state, last, rounds,
            tuple(one for one in accuracies if one is not None), pace, left, _epsilon(run, state),
            _error(run, state),
        )  # fmt: skip

    def _waiting(self, tables: Mapping[Path, Table], begun: set[Path]) -> list[Watched]:
        """Return the runs of tables that have not begun; an upper bound stands in several columns, and runs once."""
        missing = {}
        for place, table in tables.items():
            names = short_names(table.rows)
            for one in table.results:
                path = place / one.directory
                if one.status == "missing" and path not in begun:
                    missing[path] = Watched(self._name(path), names[one.row], one.column, one.seed, "waiting")
        return list(missing.values())


def view(watched: Sequence[Watched], *, height: int | None, is_plain: bool = False) -> RenderableType:
    """Return a table of as many runs as ``height`` lines have room for (None: all), and below it what they come to.

    Running ones come first. ``is_plain``: only ASCII is drawn.
    """
    shown = _fitting(watched, height)
    has = {name: any(getattr(one, name) not in (None, "") for one in shown) for name in ("pace", "left", "epsilon")}
    table = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False)
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


def _named(runs: Mapping[Path, Run], tables: Mapping[Path, Table]) -> dict[Path, Run]:
    """Return ``runs`` called as the tables call them that they belong to."""
    places: dict[Path, set[tuple[str, str]]] = {}
    for place, table in tables.items():
        for one in table.results:
            places.setdefault(place / one.directory, set()).add((one.row, one.column))
    named = {}
    for path, run in runs.items():
        rows = {row for row, _ in places.get(path, ())}
        columns = {column for _, column in places.get(path, ())}
        only = len(rows) == len(columns) == 1
        named[path] = replace(run, row=rows.pop(), column=columns.pop()) if only else run
    return named


def _state(run: Run, pace: float | None) -> State:
    held = is_locked(run.path)
    if held is None:
        silence = time.time() - max(_changed(run.path / name) for name in (CONFIG, ROUNDS))
        held = run.outcome is None and silence < max(_SILENCE, 5 * (pace or 0.0))
    if held:
        return "running"
    if run.outcome is None or run.status == "interrupted":
        return "stopped"
    return "finished" if run.status == "finished" else "failed"


def _error(run: Run, state: State) -> str:
    if state in {"finished", "running"}:
        return ""
    if run.outcome is None:
        return f"stopped after {len(run.rounds)} of {run.config.rounds} rounds; the same command goes on from there"
    return run.error


def _epsilon(run: Run, state: State) -> str:
    """Return the epsilon spent so far; of what clients release beforehand a run tells when it ends."""
    if run.outcome is not None and state != "running":
        told = privacy_in_short(run)
        return "" if told == "none" else told.removeprefix("epsilon ")
    spent = [record.epsilon for record in run.rounds if record.epsilon is not None]
    if spent:  # by a client; a record that is in a pool, too, has paid more
        more = " per client, more per record" if isinstance(run.config.preprocess, Synthesis) else ""
        return f"{rounded_up(max(spent), 3)}{more}"
    return "told at the end" if run.preprocess else ""


def _version(path: Path) -> object:
    try:
        now = path.stat()
    except OSError:
        return None
    return now.st_mtime_ns, now.st_size, now.st_ino


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


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
