"""Progress display on standard error, for one run and for a table of runs.

A terminal shows live progress bars. If a line would be wider than the terminal, its least important parts are left out.
Without a terminal, a run prints lines about its rounds, and a table prints lines about its cells.
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
_NARROW, _BAR, _WIDE_BAR = 4, 10, 30
"""Widths of a progress bar in terminal cells: smallest width in a narrow line, smallest in a wide line, largest."""
_WIDE_LINE: Final = 60
_SHORTEST_TITLE: Final = 12

_SECONDS_BETWEEN_LINES = 2.0
_UNTIMED_LINES = 20
_TIMED_ROUNDS = 10
"""Number of most recent rounds whose mean duration gives the estimate of the remaining time."""


@dataclass(frozen=True)
class LinePart:
    """A part of a progress line.

    ``rank``: the importance of the part; 0 is the most important. If the line is too wide, parts with a higher rank are
    left out first. ``shortest``: the smallest width, in terminal cells, to which the text may be cut; None: the text is
    never cut.
    """

    text: str
    rank: int
    shortest: int | None = None

    @property
    def least(self) -> int:
        """Return the smallest width to which this part may be cut, in terminal cells."""
        whole = cell_len(self.text)
        return whole if self.shortest is None else min(whole, self.shortest)


class ProgressLine(ProgressColumn):
    """A line of rich's progress display: title, bar, and the parts that the function in the field ``parts`` returns."""

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))
        self._console = console

    def render(self, task: Task) -> Text:
        """Return the progress line, one cell narrower than the console. Some terminals would wrap a full line."""
        share = task.completed / task.total if task.total else 0.0
        return line(self._console.width - 1, task.description, share, task.fields["parts"]())


def line(width: int, title: str, share: float, parts: Sequence[LinePart]) -> Text:
    """Return a line with ``title``, progress bar and ``parts``, at most ``width`` terminal cells wide.

    ``share``: the filled share of the bar, in [0, 1].

    >>> parts = [LinePart("10/20", 0), LinePart("accuracy 0.5000", 1), LinePart("0:12 left", 2)]
    >>> str(line(40, "FedAvg on digits", 0.5, parts))
    '━━━━━  10/20  accuracy 0.5000  0:12 left'
    """
    bar = LinePart("━" * _WIDE_BAR, 3, _BAR if width >= _WIDE_LINE else _NARROW)
    every = [LinePart(title, 4, _SHORTEST_TITLE), bar, *(part for part in parts if part.text)]
    kept: list[LinePart] = []
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
    """Return a duration, given in seconds, as text: minutes:seconds or hours:minutes:seconds.

    A negative duration is shown as 0.

    >>> clock(75), clock(3675), clock(-3)
    ('1:15', '1:01:15', '0:00')
    """
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Bars:
    """Context manager that shows live progress bars on a terminal, and prints lines of text above the bars.

    ``stream``: the stream for the display; None: standard error.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._console = Console(file=stream or sys.stderr, force_jupyter=False if stream else None)
        self._live = self._console.is_terminal
        self._bars = Progress(ProgressLine(self._console), console=self._console)

    def __enter__(self) -> Self:
        if self._live:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bars.stop()

    def say(self, line: str) -> None:
        """Print a line of text, above any progress bars."""
        self._console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


class RunProgress(_Bars):
    """Progress display of a run with ``rounds`` rounds.

    ``timed``: False for a private run, whose display shows no time. Without a terminal, a private run prints a line for
    every n-th round; other runs print a line every two seconds.
    """

    def __init__(self, title: str, rounds: int, stream: TextIO | None = None, *, timed: bool = True) -> None:
        super().__init__(stream)
        self._rounds = rounds
        self._timed = timed
        self._done = 0
        self._measured: tuple[str, ...] = ()
        # an immutable tuple, because the thread that draws the bars may read it during a change
        self._round_seconds: tuple[float, ...] = ()
        self._clients = ""
        self._start = self._last_round = time.monotonic()
        self._task = self._bars.add_task(title, total=rounds, parts=self._parts)
        self._last_line = 0.0
        self._preparing = False

    def started(self, first_round: int) -> None:
        """Show the number of finished rounds, which is ``first_round`` - 1.

        If the run is resumed, also print a line about this.
        """
        if first_round > 1:
            self.say(f"resuming this run after round {first_round - 1}, where it had stopped")
        self._done = first_round - 1
        self._bars.update(self._task, completed=self._done)

    def preparing(self, what: str) -> None:
        """Print a line about a preparation before the first round. ``what``: its name, such as "synthetic records"."""
        self._preparing = True
        self.say(f"before the first round: {what}")

    def replied(self, replies: int) -> None:
        """Show the number of clients that have replied in this round or preparation."""
        self._clients = f"{replies} clients in"
        if self._preparing and not self._live and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.say(f"{replies} clients are done")

    def finished_round(self, record: RoundRecord) -> None:
        """Show the accuracies and the duration of a finished round."""
        self._preparing = False
        measured = {"accuracy": record.test_accuracy, "validation": record.validation_accuracy}
        self._measured = tuple(f"{name} {value:.4f}" for name, value in measured.items() if value is not None)
        if record.seconds is not None:
            self._round_seconds = (*self._round_seconds, record.seconds)[-_TIMED_ROUNDS:]
        rate = "" if record.seconds is None else f"{record.seconds:.2f} s/round"
        self._done, self._clients, self._last_round = self._done + 1, "", time.monotonic()
        self._bars.update(self._task, completed=self._done)
        is_due = time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES
        if not self._timed:  # about 20 lines per run, at fixed round numbers
            is_due = record.round % max(1, self._rounds // _UNTIMED_LINES) == 0
        if not self._live and (record.round == self._rounds or is_due):
            self._last_line = time.monotonic()
            self.say(f"round {record.round}/{self._rounds}  {'  '.join((*self._measured, rate))}".rstrip())

    def _parts(self) -> list[LinePart]:
        """Return the parts of a run's progress line that follow the bar, such as accuracies and times.

        The line of a private run shows no times.
        """
        counted = LinePart(f"{self._done}/{self._rounds}", 0)
        measured = [LinePart(text, 1 + 4 * number) for number, text in enumerate(self._measured)]
        clients = LinePart(self._clients, 7)
        if not self._timed:
            return [counted, *measured, clients]
        now, seconds = time.monotonic(), self._round_seconds
        mean = sum(seconds) / len(seconds) if seconds else 0.0
        left = mean * (self._rounds - self._done) - (now - self._last_round)
        return [
            counted,
            *measured,
            LinePart(f"{seconds[-1]:.2f} s/round" if seconds else "", 6),
            LinePart(f"{clock(now - self._start)} so far", 8),
            LinePart(f"{clock(left)} left" if seconds else "", 2),
            clients,
        ]


class TableProgress(_Bars):
    """Progress display of a table of runs. ``rounds``: {label of a cell: number of rounds}."""

    def __init__(self, rounds: dict[str, int], stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._rounds = rounds
        self._done = dict.fromkeys(rounds, 0)
        self._closed: set[str] = set()
        self._all = self._bars.add_task("all cells", total=sum(rounds.values()), parts=self._parts_of_all)
        self._parts: dict[str, tuple[LinePart, ...]] = {}
        self._cells: dict[str, TaskID] = {}
        self._started_at: float | None = None
        self._rounds_run = 0
        self._is_timed = True

    def started(self, cell: str, first_round: int) -> None:
        """Show a cell of the table whose run starts, or resumes at ``first_round``."""
        self._done[cell] = first_round - 1
        self._started_at = self._started_at or time.monotonic()
        if first_round > 1:
            self.say(f"{cell} resumes after round {first_round - 1}")
        if self._live:

            def parts() -> list[LinePart]:
                return [LinePart(f"{self._done[cell]}/{self._rounds[cell]} rounds", 0), *self._parts.get(cell, ())]

            total, done = self._rounds[cell], first_round - 1
            self._cells[cell] = self._bars.add_task(cell, total=total, completed=done, parts=parts)
        self._update()

    def preparing(self, cell: str, what: str) -> None:
        """Show a preparation before the first round of a cell's run. ``what``: the name of the preparation."""
        if cell in self._cells:
            self._parts[cell] = (LinePart(what, 2, 20),)
        else:
            self.say(f"{cell}: before the first round {what}")

    def finished_round(self, cell: str, record: RoundRecord) -> None:
        """Advance the progress bar of a run by one finished round, and show the round's accuracy."""
        self._done[cell] = record.round
        self._rounds_run += 1
        self._is_timed &= record.seconds is not None
        if cell in self._cells:
            accuracy = "" if record.test_accuracy is None else f"accuracy {record.test_accuracy:.4f}"
            rate = "" if record.seconds is None else f"{record.seconds:.2f} s/round"
            self._parts[cell] = (LinePart(accuracy, 5), LinePart(rate, 6))
            self._bars.update(self._cells[cell], completed=record.round)
        self._update()

    def closed(self, cell: str, outcome: str) -> None:
        """Print the outcome of a cell of the table whose run has ended, and remove its progress bar."""
        self._done[cell] = self._rounds[cell]
        self._closed.add(cell)
        if cell in self._cells:
            self._bars.remove_task(self._cells.pop(cell))
        self.say(f"[{len(self._closed)}/{len(self._rounds)}] {cell}: {outcome}{self._left('; ')}")
        self._update()

    def _left(self, before: str) -> str:
        """Return a text with the estimated remaining time, such as "; about 30 s left".

        The text begins with ``before``. The text is empty if the time is unknown, or if any run is private, because
        times of private runs are hidden.
        """
        left = sum(self._rounds.values()) - sum(self._done.values())
        if not self._is_timed or not left or not self._rounds_run or self._started_at is None:
            return ""
        seconds = left * (time.monotonic() - self._started_at) / self._rounds_run
        return f"{before}about {seconds:.0f} s left" if seconds < 100 else f"{before}about {seconds / 60:.0f} min left"

    def _update(self) -> None:
        self._bars.update(self._all, completed=sum(self._done.values()))

    def _parts_of_all(self) -> list[LinePart]:
        rounds = LinePart(f"{sum(self._done.values())}/{sum(self._rounds.values())} rounds", 5)
        return [rounds, LinePart(f"{len(self._closed)}/{len(self._rounds)} cells{self._left(', ')}", 0)]
