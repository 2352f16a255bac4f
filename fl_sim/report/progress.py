"""Progress on standard error: of one run, and of a table of runs.

A terminal shows a live bar for each, whose line is never wider than the terminal: what matters least is left out first.
Anywhere else a run prints a line a round, a table a line a cell.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.table import Column
from rich.text import Text

from fl_sim.errors import printable
from fl_sim.store.run_directory import RoundRecord

_GAP: Final = 2
_BAR: Final = (4, 10, 30)
"""Cells of a bar: the fewest, the fewest where there is room for more, the most."""
_ROOMY: Final = 60
_TITLE: Final = 12
"""Cells that a title is cut to."""

_SECONDS_BETWEEN_LINES = 2.0
_UNTIMED_LINES = 20
_PACE_OF = 10
"""The time left is told by the mean of so many rounds."""


@dataclass(frozen=True)
class Part:
    """A piece of a line. What has a higher ``rank`` is left out first; ``shortest``: cells that it may be cut to."""

    text: str
    rank: int
    shortest: int | None = None

    @property
    def least(self) -> int:
        """Return the cells that it takes at least."""
        whole = cell_len(self.text)
        return whole if self.shortest is None else min(whole, self.shortest)


class Line(ProgressColumn):
    """A whole line of rich's progress display: title, bar, and the Parts that the task's field ``parts`` returns."""

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))
        self._console = console

    def render(self, task: Task) -> Text:
        """Return the line, one cell narrower than the console, where some terminals would break it."""
        share = task.completed / task.total if task.total else 0.0
        return line(self._console.width - 1, task.description, share, task.fields["parts"]())


def line(width: int, title: str, share: float, parts: Sequence[Part]) -> Text:
    """Return title, bar (``share`` of it full) and ``parts`` in this order, in at most ``width`` cells.

    >>> str(line(40, "FedAvg on digits", 0.5, [Part("10/20", 0), Part("accuracy 0.5000", 1), Part("0:12 left", 2)]))
    '━━━━━  10/20  accuracy 0.5000  0:12 left'
    """
    told = [part for part in parts if part.text]
    bar = Part("━" * _BAR[2], 3, _BAR[width >= _ROOMY])
    every = [Part(title, 4, _TITLE), bar, *told]
    kept: list[Part] = []
    for part in sorted(every, key=lambda one: one.rank):
        if part.least and sum(one.least + _GAP for one in kept) + part.least <= width:
            kept.append(part)
    spare = width - sum(one.least + _GAP for one in kept) + _GAP
    text = Text(no_wrap=True, overflow="crop")
    for part in every:
        if part not in kept:
            continue
        more = min(spare, cell_len(part.text) - part.least)
        spare -= more
        cells = part.least + more
        text.append(" " * _GAP if text else "")
        if part is bar:
            full = round(share * cells)
            text.append("━" * full, "bar.complete").append("━" * (cells - full), "bar.back")
        else:
            whole = cell_len(part.text) <= cells
            text.append(part.text if whole else f"{set_cell_size(part.text, cells - 1).rstrip()}…")
    return text


def clock(seconds: float) -> str:
    """Return a length of time.

    >>> clock(75), clock(3675), clock(-3)
    ('1:15', '1:01:15', '0:00')
    """
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class RunProgress:
    """Shows a run of ``rounds`` rounds; use it as a context manager around the run.

    ``timed`` False, for what is private: no time is shown, and which rounds are does not depend on it.
    """

    def __init__(self, title: str, rounds: int, stream: TextIO | None = None, *, timed: bool = True) -> None:
        self._stream = stream or sys.stderr
        self._rounds = rounds
        self._timed = timed
        self._console = Console(file=self._stream, force_jupyter=False if stream else None)
        self._live = self._console.is_terminal
        self._bar = Progress(Line(self._console), console=self._console)
        self._done = 0
        self._measured: tuple[str, ...] = ()
        self._pace: tuple[float, ...] = ()  # replaced, never changed: another thread draws
        self._clients = ""
        self._start = self._last_round = time.monotonic()
        self._task = self._bar.add_task(title, total=rounds, parts=self._parts)
        self._last_line = 0.0
        self._preparing = False

    def __enter__(self) -> Self:
        """Start showing."""
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""
        if self._live:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    def started(self, first_round: int) -> None:
        """Start counting at ``first_round``."""
        if first_round > 1:
            self.say(f"going on after round {first_round - 1}, where this run had stopped")
        self._done = first_round - 1
        self._bar.update(self._task, completed=self._done)

    def preparing(self, what: str) -> None:
        """Show what happens before the first round."""
        self._preparing = True
        self.say(f"before the first round: {what}")

    def replied(self, replies: int) -> None:
        """Show how many clients of the round have answered."""
        self._clients = f"{replies} clients in"
        if self._preparing and not self._live and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.say(f"{replies} clients are done")

    def finished_round(self, record: RoundRecord) -> None:
        """Show a round."""
        self._preparing = False
        measured = {"accuracy": record.test_accuracy, "validation": record.validation_accuracy}
        self._measured = tuple(f"{name} {value:.4f}" for name, value in measured.items() if value is not None)
        if record.seconds is not None:
            self._pace = (*self._pace, record.seconds)[-_PACE_OF:]
        rate = "" if record.seconds is None else f"{record.seconds:.2f} s/round"
        self._done, self._clients, self._last_round = self._done + 1, "", time.monotonic()
        self._bar.update(self._task, completed=self._done)
        if not self._live and (record.round == self._rounds or self._is_due(record.round)):
            self._last_line = time.monotonic()
            self.say(f"round {record.round}/{self._rounds}  {'  '.join((*self._measured, rate))}".rstrip())

    def _parts(self) -> list[Part]:
        """Return what stands behind the bar. Where time is private there is none."""
        counted = Part(f"{self._done}/{self._rounds}", 0)
        measured = [Part(text, 1 + 4 * number) for number, text in enumerate(self._measured)]
        clients = Part(self._clients, 7)
        if not self._timed:
            return [counted, *measured, clients]
        now, mean = time.monotonic(), sum(self._pace) / len(self._pace) if self._pace else 0.0
        left = mean * (self._rounds - self._done) - (now - self._last_round)
        return [
            counted,
            *measured,
            Part(f"{self._pace[-1]:.2f} s/round" if self._pace else "", 6),
            Part(f"{clock(now - self._start)} so far", 8),
            Part(f"{clock(left)} left" if self._pace else "", 2),
            clients,
        ]

    def _is_due(self, server_round: int) -> bool:
        """Say whether a round is to be a line: every two seconds or, where time is private, about twenty of a run."""
        if not self._timed:
            return server_round % max(1, self._rounds // _UNTIMED_LINES) == 0
        return time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES


class TableProgress:
    """Shows a table of ``rounds`` {cell: number of rounds}; use it as a context manager around the runs."""

    def __init__(self, rounds: dict[str, int], stream: TextIO | None = None) -> None:
        self._rounds = rounds
        self._done = dict.fromkeys(rounds, 0)
        self._closed: set[str] = set()
        self._console = Console(file=stream or sys.stderr, force_jupyter=False if stream else None)
        self._live = self._console.is_terminal
        self._bars = Progress(Line(self._console), console=self._console)
        self._all = self._bars.add_task("all cells", total=sum(rounds.values()), parts=self._parts_of_all)
        self._told: dict[str, tuple[Part, ...]] = {}
        self._cells: dict[str, TaskID] = {}
        self._started_at: float | None = None
        self._rounds_run = 0
        self._is_timed = True

    def __enter__(self) -> Self:
        """Start showing."""
        if self._live:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""
        if self._live:
            self._bars.stop()

    def say(self, line: str) -> None:
        """Print a line, above the bars if there are any."""
        self._console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    def started(self, cell: str, first_round: int) -> None:
        """Show a cell that is taken up at ``first_round``."""
        self._done[cell] = first_round - 1
        self._started_at = self._started_at or time.monotonic()
        if first_round > 1:
            self.say(f"{cell} goes on after round {first_round - 1}")
        if self._live:
            self._cells[cell] = self._bars.add_task(
                cell, total=self._rounds[cell], completed=first_round - 1, parts=lambda: self._parts_of(cell)
            )
        self._update()

    def preparing(self, cell: str, what: str) -> None:
        """Show what happens before a cell's first round."""
        if cell in self._cells:
            self._told[cell] = (Part(what, 2, 20),)
        else:
            self.say(f"{cell}: before the first round {what}")

    def finished_round(self, cell: str, record: RoundRecord) -> None:
        """Show a cell's round."""
        self._done[cell] = record.round
        self._rounds_run += 1
        self._is_timed &= record.seconds is not None
        if cell in self._cells:
            accuracy = "" if record.test_accuracy is None else f"accuracy {record.test_accuracy:.4f}"
            rate = "" if record.seconds is None else f"{record.seconds:.2f} s/round"
            self._told[cell] = (Part(accuracy, 5), Part(rate, 6))
            self._bars.update(self._cells[cell], completed=record.round)
        self._update()

    def closed(self, cell: str, outcome: str) -> None:
        """Show how a cell ended; it does not run any more."""
        self._done[cell] = self._rounds[cell]
        self._closed.add(cell)
        if cell in self._cells:
            self._bars.remove_task(self._cells.pop(cell))
        self.say(f"[{len(self._closed)}/{len(self._rounds)}] {cell}: {outcome}{self._left('; ')}")
        self._update()

    def _left(self, before: str) -> str:
        """Say about how long the rest takes, at the pace so far; nothing where a cell's time is private."""
        left = sum(self._rounds.values()) - sum(self._done.values())
        if not self._is_timed or not left or not self._rounds_run or self._started_at is None:
            return ""
        seconds = left * (time.monotonic() - self._started_at) / self._rounds_run
        return f"{before}about {seconds:.0f} s left" if seconds < 100 else f"{before}about {seconds / 60:.0f} min left"

    def _update(self) -> None:
        self._bars.update(self._all, completed=sum(self._done.values()))

    def _parts_of_all(self) -> list[Part]:
        rounds = Part(f"{sum(self._done.values())}/{sum(self._rounds.values())} rounds", 5)
        return [rounds, Part(f"{len(self._closed)}/{len(self._rounds)} cells{self._left(', ')}", 0)]

    def _parts_of(self, cell: str) -> list[Part]:
        """Return what stands behind a cell's bar: which cell it is matters more than how full the bar is."""
        return [Part(f"{self._done[cell]}/{self._rounds[cell]} rounds", 0), *self._told.get(cell, ())]
