"""Progress of one run on standard error: a live bar on a terminal, a line a round anywhere else."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fl_sim.store.run_directory import RoundRecord

_SECONDS_BETWEEN_LINES = 2.0
_UNTIMED_LINES = 20


class RunProgress:
    """Shows a run of ``rounds`` rounds; use it as a context manager around the run.

    ``timed`` False, for what is private: no time is shown, and which rounds are does not depend on it.
    """

    def __init__(self, title: str, rounds: int, stream: TextIO | None = None, *, timed: bool = True) -> None:
        self._stream = stream or sys.stderr
        self._rounds = rounds
        self._timed = timed
        self._console = Console(file=self._stream)
        self._live = self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TextColumn("{task.fields[rate]}"),
            *([TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()] if timed else []),
            TextColumn("{task.fields[clients]}"),
            console=self._console,
        )
        self._task = self._bar.add_task(title, total=rounds, accuracy="", rate="", clients="")
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
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def started(self, first_round: int) -> None:
        """Start counting at ``first_round``."""
        if first_round > 1:
            self.say(f"going on after round {first_round - 1}, where this run had stopped")
        self._bar.update(self._task, completed=first_round - 1)

    def preparing(self, what: str) -> None:
        """Show what happens before the first round."""
        self._preparing = True
        self.say(f"before the first round: {what}")

    def replied(self, replies: int) -> None:
        """Show how many clients of the round have answered."""
        self._bar.update(self._task, clients=f"{replies} clients in")
        if self._preparing and not self._live and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.say(f"{replies} clients are done")

    def finished_round(self, record: RoundRecord) -> None:
        """Show a round."""
        self._preparing = False
        measured = {"accuracy": record.test_accuracy, "validation": record.validation_accuracy}
        accuracy = "  ".join(f"{name} {value:.4f}" for name, value in measured.items() if value is not None)
        rate = "" if record.seconds is None else f"{record.seconds:.2f} s/round"
        self._bar.update(self._task, advance=1, accuracy=accuracy, rate=rate, clients="")
        if not self._live and (record.round == self._rounds or self._is_due(record.round)):
            self._last_line = time.monotonic()
            self.say(f"round {record.round}/{self._rounds}  {accuracy}  {rate}".rstrip())

    def _is_due(self, server_round: int) -> bool:
        """Say whether a round is to be a line: every two seconds or, where time is private, about twenty of a run."""
        if not self._timed:
            return server_round % max(1, self._rounds // _UNTIMED_LINES) == 0
        return time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES
