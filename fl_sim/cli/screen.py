"""Lines on the screen: all that the command line prints passes here, and what is said while somebody waits."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import typer

from fl_sim.errors import printable

SILENT_SECONDS: Final = 2.0
"""For so long nothing is said at first, and where lines stay (no terminal), between two of them."""


def say(text: object = "", *, err: bool = False) -> None:
    """Print ``text`` and a line break to standard output, or to standard error with ``err``; names from files, too."""
    typer.echo(printable(str(text)), err=err)


@contextmanager
def waiting() -> Iterator[Callable[[str], object]]:
    """Give what shows a line about what is done next; on a terminal each takes the place of the last one."""
    from rich.cells import set_cell_size  # noqa: PLC0415 (every verb prints, and few draw)
    from rich.console import Console  # noqa: PLC0415

    console, said = Console(stderr=True), time.monotonic()

    def tell(text: str) -> None:
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
        yield tell
    finally:
        if console.is_terminal and time.monotonic() - said > SILENT_SECONDS:
            sys.stderr.write(f"\r{' ' * (console.width - 1)}\r")
            sys.stderr.flush()
