"""What code says while a private run computes, by print, warnings and logging: in a file for its owner alone.

Libraries warn of numbers, and some quote them; code of the user's may print a record. Nobody who reads over the
owner's shoulder, or the log of a job, is to see that, and it is no part of what the run's epsilon covers.
"""

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Final, TextIO

MOST_CHARACTERS: Final = 2**20
"""How much is kept, of code that goes on and on."""


class Unheard(io.StringIO):
    """A stream into the file at ``path``, which is made, readable by its owner alone, when something is said."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._left = path, MOST_CHARACTERS

    def write(self, text: str, /) -> int:
        """Append ``text``; what cannot be kept is lost, and nothing fails for it."""
        kept = text[: self._left]
        self._left -= len(kept)
        if kept:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            with suppress(OSError), os.fdopen(os.open(self._path, flags, 0o600), "wb") as file:
                file.write(kept.encode(errors="backslashreplace"))
        return len(text)


@contextmanager
def warnings_unheard(stream: Unheard) -> Iterator[None]:
    """Send warnings, and what loggers would write to the screen, to ``stream`` in this block."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        del file
        stream.write(warnings.formatwarning(message, category, filename, lineno, line))

    before, last, on_screen = warnings.showwarning, logging.lastResort, list(_on_screen())

    def divert(record: logging.LogRecord) -> bool:
        stream.write(f"{record.levelname} {record.name}: {record.getMessage()}\n")
        return False

    warnings.showwarning = show
    logging.lastResort = logging.StreamHandler(stream)
    logging.lastResort.setLevel(logging.WARNING)
    for handler in on_screen:
        handler.addFilter(divert)
    try:
        yield
    finally:
        warnings.showwarning, logging.lastResort = before, last
        for handler in on_screen:
            handler.removeFilter(divert)


@contextmanager
def prints_unheard(stream: Unheard) -> Iterator[None]:
    """Send what is printed in this block, in whatever thread, to ``stream``."""
    with redirect_stdout(stream), redirect_stderr(stream):
        yield


def _on_screen() -> Iterator[logging.Handler]:
    """Give the handlers of all loggers that write to the screen."""
    screens = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    known = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(one for one in known if isinstance(one, logging.Logger))]
    for handler in {id(handler): handler for logger in loggers for handler in logger.handlers}.values():
        if isinstance(handler, logging.StreamHandler) and handler.stream in screens:
            yield handler
