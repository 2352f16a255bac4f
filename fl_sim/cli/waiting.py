"""What is done while somebody waits: one line on standard error, once that has taken two seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.cells import set_cell_size
from rich.console import Console

from fl_sim.printable import printable

SILENT_SECONDS: Final = 2.0
"""For so long nothing is said at first, and where lines stay (no terminal), between two of them."""


@contextmanager
def waiting() -> Iterator[Callable[[str], object]]:
    """Give what shows a line about what is done next; on a terminal each takes the place of the last one."""
    console, said = Console(stderr=True), time.monotonic()

    def say(text: str) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said < SILENT_SECONDS:
            return
        if console.is_terminal:
            sys.stderr.write(f"\r{set_cell_size(printable(text), console.width - 1)}")
        else:
            said = now
            sys.stderr.write(f"fl-sim: {printable(text)}\n")
        sys.stderr.flush()

    try:
        yield say
    finally:
        if console.is_terminal and time.monotonic() - said > SILENT_SECONDS:
            sys.stderr.write(f"\r{' ' * (console.width - 1)}\r")
            sys.stderr.flush()
