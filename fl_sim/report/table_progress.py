"""Progress of a table on standard error: a live view of all running cells on a terminal, a line a cell elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import Progress, TaskID

from fl_sim.printable import printable
from fl_sim.report.progress_line import Line, Part
from fl_sim.store.run_directory import RoundRecord


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
