"""The current state of the runs in a directory, and its display by ``fl-sim watch``.

The state is read from files only: nothing is locked or written. The display has a row of at most 80 characters for each
run. A line below the rows counts the runs in each state.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from fl_sim.errors import UserError, in_a_line
from fl_sim.privacy.terms import rounded_up
from fl_sim.report.files import PoolSettings
from fl_sim.report.groups import group, panels
from fl_sim.report.progress import clock
from fl_sim.report.row_names import short_names
from fl_sim.report.runs import TABLE, WANTED, SavedRun, places_in, read_json_table, read_run, with_table_names
from fl_sim.report.table import Table
from fl_sim.store.files import is_locked
from fl_sim.store.run_directory import CONFIG, RESULT, ROUNDS

State: TypeAlias = Literal["running", "waiting", "stopped", "failed", "damaged", "finished"]
STATES: Final[tuple[State, ...]] = ("running", "failed", "damaged", "stopped", "finished", "waiting")
"""The states of a run, in the order of the display."""

_TIMED_ROUNDS: Final = 10
"""Number of most recent rounds whose mean duration is shown."""
_SILENCE: Final = 60.0
"""A run counts as stopped if its files have not changed for this number of seconds.

If five rounds of the run take longer than 60 seconds, the limit is the time of five rounds. This limit applies only if
the lock file does not show whether the run is running, for example on another machine.
"""

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS: Final = "_.-=+*%#"
"""ASCII characters in place of ``_BLOCKS``, for terminals that cannot show block characters."""
_CURVE: Final = 12
_STYLES: Final = {"running": "bold cyan", "failed": "bold red", "damaged": "bold red", "stopped": "yellow"}
_AROUND: Final = 4
"""Number of lines of the display in addition to the rows of runs, such as the headings and the counts."""


@dataclass(frozen=True)
class Watched:
    """One run in the display.

    ``place``: data set and partition. ``round``: number of finished rounds. ``rounds``: planned number of rounds.
    ``accuracies``: accuracies of the evaluated rounds, in [0, 1]: on the test set if it is used, else on the validation
    records. ``round_seconds``: mean seconds of a round. ``left``: estimated remaining seconds.
    ``epsilon``: the epsilon spent so far, as text. Any field is None if its value is unknown, or hidden for privacy.
    """

    directory: str
    method: str
    place: str
    seed: int | None
    state: State
    round: int = 0
    rounds: int | None = None
    accuracies: tuple[float, ...] = ()
    round_seconds: float | None = None
    left: float | None = None
    epsilon: str = ""
    error: str = ""


@dataclass
class Watcher:
    """Reads the runs in the directory ``top`` repeatedly. A file is read again only if the file has changed."""

    top: Path
    _read: dict[Path, tuple[object, SavedRun | Table | str]] = field(default_factory=dict)

    def look(self) -> list[Watched]:
        """Return all runs in the directory, sorted by state. Runs of a table that have not started are included.

        Raises UserError for a missing directory, and for a directory without runs.
        """
        if not self.top.is_dir():
            raise UserError(f"{self.top} {'is no directory' if self.top.exists() else 'does not exist'}: {WANTED}")
        found = {place: self._at(place) for place in places_in(self.top)}
        runs = {place: one for place, one in found.items() if isinstance(one, SavedRun)}
        tables = {place: one for place, one in found.items() if isinstance(one, Table)}
        damaged = [
            Watched(self._name(place), "", "", None, "damaged", error=one)
            for place, one in found.items()
            if isinstance(one, str)
        ]
        watched = [*self._runs(with_table_names(runs.values(), tables)), *damaged, *self._waiting(tables, set(found))]
        if not watched:
            raise UserError(f"no run in {self.top} yet: {WANTED}")
        return sorted(watched, key=lambda one: STATES.index(one.state))

    def is_alive(self, watched: Sequence[Watched]) -> bool:
        """Return True if any run is running, or if a process that fills a table has locked the table's folder."""
        folders = {(self.top / one.directory).parent for one in watched if one.directory != "."}
        return any(one.state == "running" for one in watched) or any(is_locked(folder) for folder in folders)

    def _at(self, place: Path) -> SavedRun | Table | str:
        """Return the run or table in the directory ``place``, or an error message if its files cannot be read.

        The error may be temporary, because another process may be writing the file.
        """
        try:
            now = tuple(_version(place / name) for name in (CONFIG, ROUNDS, RESULT, TABLE))
            if place not in self._read or self._read[place][0] != now:
                self._read[place] = (now, read_json_table(place) if (place / TABLE).exists() else read_run(place))
        except (OSError, ValueError) as error:
            return str(error)
        return self._read[place][1]

    def _name(self, place: Path) -> str:
        return str(place.relative_to(self.top))

    def _runs(self, runs: Sequence[SavedRun]) -> list[Watched]:
        titles = {
            run.path: (names[label], f"{panel.data}, centralized" if one.is_bound else panel.title)
            for panel in panels(group(runs)[0])
            for names in (short_names(label for label, _ in panel.lines),)
            for label, one in panel.lines
            for run in one.runs
        }
        return [self._watched(run, *titles.get(run.path, (run.path.name, ""))) for run in runs]

    def _watched(self, run: SavedRun, method: str, title: str) -> Watched:
        timed = [record.seconds for record in run.rounds[-_TIMED_ROUNDS:] if record.seconds is not None]
        seconds = sum(timed) / len(timed) if timed else None
        state = _state(run, seconds)
        last, rounds = run.rounds[-1].round if run.rounds else 0, run.config.rounds
        left = None
        if state == "running" and seconds is not None:
            left = max(0.0, seconds * (rounds - last) - max(0.0, time.time() - _version(run.path / ROUNDS)[0] / 1e9))
        measured = ((one.test_accuracy, one.validation_accuracy) for one in run.rounds)
        accuracies = (test if test is not None else validation for test, validation in measured)
        return Watched(
            self._name(run.path), method, title, run.config.seed, state, last, rounds,
            tuple(one for one in accuracies if one is not None), seconds, left, _epsilon(run, state),
            _error(run, state),
        )  # fmt: skip

    def _waiting(self, tables: Mapping[Path, Table], begun: set[Path]) -> list[Watched]:
        """Return the planned runs of ``tables`` that have not started. ``begun``: directories of started runs.

        A run of centralized training can be in several columns, but is returned once.
        """
        missing = {}
        for place, table in tables.items():
            names = {**short_names(table.rows), **table.labels}
            for one in table.results:
                path = place / one.directory
                if one.status == "missing" and path not in begun:
                    missing[path] = Watched(self._name(path), names[one.row], one.column, one.seed, "waiting")
        return list(missing.values())


def view(watched: Sequence[Watched], *, height: int | None, is_plain: bool = False) -> RenderableType:
    """Return the display of ``fl-sim watch``: a table of the runs that fit into ``height`` lines, and counts of runs.

    The first runs of ``watched`` are shown, grouped by data set and partition. The last line counts the runs in each
    state. ``height``: the number of lines; None shows all runs. ``is_plain``: True draws the curves with ASCII
    characters only.
    """
    shown = _fitting(watched, height)
    further = {
        "s/round": ["" if one.round_seconds is None else f"{one.round_seconds:.2f}" for one in shown],
        "left": ["" if one.left is None else clock(one.left) for one in shown],
        "epsilon": [in_a_line(one.epsilon) for one in shown],
    }
    further = {head: cells for head, cells in further.items() if any(cells)}
    table = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for head in ("round", "acc %"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("curve", no_wrap=True)
    for head in further:
        table.add_column(head, justify="right", no_wrap=head != "epsilon")
    place = None
    for number, one in enumerate(shown):
        if one.place != place and len({run.place for run in watched}) > 1:
            place = one.place
            table.add_row(Text(in_a_line(place) or "not readable", "italic"))
        name = one.method or one.directory
        table.add_row(
            Text(in_a_line(name if one.seed is None else f"{name}, seed {one.seed}")),
            Text(one.state, _STYLES.get(one.state, "")),
            Text("" if one.rounds is None else f"{one.round}/{one.rounds}"),
            Text(f"{100 * one.accuracies[-1]:.1f}" if one.accuracies else ""),
            Text(curve(one.accuracies, _PLAIN_BLOCKS if is_plain else _BLOCKS)),
            *(Text(cells[number]) for cells in further.values()),
        )
    errors = [Text(in_a_line(f"{one.directory}: {one.error}"), "yellow", overflow="fold") for one in shown if one.error]
    counts = {state: sum(one.state == state for one in watched) for state in STATES}
    counted = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    runs = "1 run" if len(watched) == 1 else f"{len(watched)} runs"
    hidden = f" ({len(watched) - len(shown)} runs are not shown: no room)" if len(shown) < len(watched) else ""
    return Group(table, *errors, Text(f"{runs}: {counted}{hidden}"))


def curve(accuracies: Sequence[float], blocks: str = _BLOCKS, width: int = _CURVE) -> str:
    """Return a bar chart of the accuracies as text of at most ``width`` block characters.

    ``blocks``: the block characters, in ascending order. The lowest accuracy is drawn as the first character, and the
    highest accuracy as the last character.

    >>> curve([0.1, 0.4, 0.9]), curve([0.5, 0.5]), curve([])
    ('▁▄█', '▁▁', '')
    """
    if not accuracies:
        return ""
    steps = min(width, len(accuracies))
    chosen = [accuracies[round((at + 1) * len(accuracies) / steps) - 1] for at in range(steps)]
    low, high = min(chosen), max(chosen)
    return "".join(blocks[round((len(blocks) - 1) * (one - low) / (high - low or 1.0))] for one in chosen)


def _state(run: SavedRun, round_seconds: float | None) -> State:
    held = is_locked(run.path)
    if held is None:
        silence = time.time() - max(_version(run.path / name)[0] / 1e9 for name in (CONFIG, ROUNDS))
        held = run.result is None and silence < max(_SILENCE, 5 * (round_seconds or 0.0))
    if held:
        return "running"
    if run.result is None or run.status == "interrupted":
        return "stopped"
    return "finished" if run.status == "finished" else "failed"


def _error(run: SavedRun, state: State) -> str:
    if state in {"finished", "running"}:
        return ""
    if run.result is None:
        return f"stopped after {len(run.rounds)} of {run.config.rounds} rounds; the same command resumes the run"
    return run.error


def _epsilon(run: SavedRun, state: State) -> str:
    """Return, as text, the epsilon that a run has spent so far.

    The epsilon of the run's preprocessing is known only at the end of the run.
    """
    if run.result is not None and state != "running":
        return "" if run.privacy_in_short == "none" else run.privacy_in_short.removeprefix("epsilon ")
    spent = [record.epsilon for record in run.rounds if record.epsilon is not None]
    # The epsilon of a round is a cost per client. Released synthetic records have a further cost, per record.
    if spent:
        more = " per client, more per record" if isinstance(run.config.preprocess, PoolSettings) else ""
        return f"{rounded_up(max(spent), 3)}{more}"
    return "stated at the end" if run.preprocess else ""


def _version(path: Path) -> tuple[int, int, int]:
    """Return (modification time in nanoseconds, size in bytes, inode) of a file, to detect changes of the file.

    All three numbers are 0 for a missing file.
    """
    try:
        now = path.stat()
    except OSError:
        return 0, 0, 0
    return now.st_mtime_ns, now.st_size, now.st_ino


def _fitting(watched: Sequence[Watched], height: int | None) -> list[Watched]:
    """Return the runs that fit into ``height`` lines of the display, grouped by data set and partition.

    Each group needs one line for its heading, and each error one more line.
    """
    kept: list[Watched] = []
    for one in watched:
        lines = _AROUND + len(kept) + 1 + len({run.place for run in (*kept, one)})
        lines += sum(bool(run.error) for run in (*kept, one))
        if height is not None and kept and lines > height:
            break
        kept.append(one)
    places = list(dict.fromkeys(one.place for one in kept))
    return sorted(kept, key=lambda one: places.index(one.place))
