"""Progress of one run on standard error: a live bar on a terminal, a line a round anywhere else."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import Progress

from fl_sim.printable import printable
from fl_sim.report.progress_line import Line, Part, clock
from fl_sim.store.run_directory import RoundRecord

_SECONDS_BETWEEN_LINES = 2.0
_UNTIMED_LINES = 20
_PACE_OF = 10
"""The time left is told by the mean of so many rounds."""


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
