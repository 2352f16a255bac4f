"""Output of the command line: printed text, and the progress line during long work."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import typer

from fl_sim.errors import printable

SILENT_SECONDS: Final = 2.0
"""Seconds before the first progress line. Without a terminal, also the shortest time between two progress lines."""


def say(text: object = "", *, err: bool = False) -> None:
    """Print ``text`` to standard output, or to standard error if ``err`` is True. Control characters are escaped."""
    typer.echo(printable(str(text)), err=err)


@contextmanager
def waiting() -> Iterator[Callable[[str], object]]:
    """Yield a function that shows the progress of long work: it prints a line of text to standard error.

    On a terminal, each line replaces the previous one, and the last line is erased at the end of the ``with`` block.
    """
    from rich.cells import set_cell_size  # noqa: PLC0415 (slow, and few verbs need it)
    from rich.console import Console  # noqa: PLC0415

    console, last = Console(stderr=True), time.monotonic()

    def show(text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < SILENT_SECONDS:
            return
        if console.is_terminal:
            sys.stderr.write(f"\r{set_cell_size(printable(text), console.width - 1)}")
        else:
            last = now
            sys.stderr.write(f"fl-sim: {printable(text)}\n")
        sys.stderr.flush()

    try:
        yield show
    finally:
        if console.is_terminal and time.monotonic() - last > SILENT_SECONDS:
            sys.stderr.write(f"\r{' ' * (console.width - 1)}\r")
            sys.stderr.flush()
