"""Private data of the machine's owner: the secret key for keyed hashes, and the printed output of private runs.

Warnings of libraries may quote numbers, and the user's code may print a record. A run's epsilon does not cover such
output. So the output goes to a file that only the owner can read, and not to the screen or to the log of a cluster job.
"""

import hashlib
import hmac
import io
import logging
import os
import re
import secrets
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Final, TextIO

from fl_sim.store.files import user_folder

_KEY: Final = "key"
_FLEETING: Final = secrets.token_bytes(32)
_KEYED = re.compile("keyed-([0-9a-f]{16})-([0-9a-f]{32})-[0-9a-f]{64}")

MOST_CHARACTERS: Final = 2**20
"""The maximum number of characters in a private log."""


def keyed(digest: str) -> str:
    """Return a keyed hash (HMAC) of ``digest``, with this machine's secret key and a new salt; empty without a key.

    Only a person with the key can test whether given records have this digest, or whether two hashes belong to the same
    digest. There is no key if the key file can be neither read nor created.
    """
    key = machine_key()
    return _under(key, secrets.token_hex(16), digest) if key else ""


def matches(recorded: str, digest: str) -> bool | None:
    """Return True if ``recorded`` is a keyed hash of ``digest``, else False; None if it is from another machine."""
    found, key = _KEYED.fullmatch(recorded), machine_key()
    if found is None or found[1] != _name(key):
        return None
    return hmac.compare_digest(_under(key, found[2], digest), recorded)


def machine_key(*, make: bool = True) -> bytes:
    """Return the secret key of this machine; empty if its file cannot be read or created.

    ``make``: True creates a missing key. If False, nothing is written, and a missing key is replaced by a random key
    that only this process uses.
    """
    path = user_folder("FL_SIM_LEDGERS", "XDG_STATE_HOME", "~/.local/state", "ledgers") / _KEY
    try:
        if not path.exists():
            if not make:
                return _FLEETING
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = path.with_name(f"{_KEY}.{secrets.token_hex(8)}")
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
            try:
                with suppress(FileExistsError):
                    os.link(new, path)  # atomic; raises FileExistsError if another process made the key first
            finally:
                new.unlink()
        return path.read_bytes()
    except OSError:
        return b""


class PrivateLog(io.StringIO):
    """A text stream that appends to the file at ``path``. The first write creates the file, for its owner only."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._left = path, MOST_CHARACTERS

    def write(self, text: str, /) -> int:
        """Append ``text``. Text beyond the size limit, and text that cannot be written, is dropped without an error."""
        kept = text[: self._left]
        self._left -= len(kept)
        if kept:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            with suppress(OSError), os.fdopen(os.open(self._path, flags, 0o600), "wb") as file:
                file.write(kept.encode(errors="backslashreplace"))
        return len(text)


@contextmanager
def warnings_to(stream: PrivateLog) -> Iterator[None]:
    """Redirect warnings, and log records that would go to the screen, to ``stream`` in a ``with`` block."""

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
def prints_to(stream: PrivateLog) -> Iterator[None]:
    """Redirect the standard output and standard error of all threads to ``stream`` in a ``with`` block."""
    with redirect_stdout(stream), redirect_stderr(stream):
        yield


def _under(key: bytes, salt: str, digest: str) -> str:
    return f"keyed-{_name(key)}-{salt}-{hmac.new(key, f'{salt} {digest}'.encode(), hashlib.sha256).hexdigest()}"


def _name(key: bytes) -> str:
    return hashlib.sha256(b"the name of " + key).hexdigest()[:16]


def _on_screen() -> Iterator[logging.Handler]:
    """Yield the logging handlers, of all loggers, that write to the screen."""
    screens = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    known = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(one for one in known if isinstance(one, logging.Logger))]
    for handler in {id(handler): handler for logger in loggers for handler in logger.handlers}.values():
        if isinstance(handler, logging.StreamHandler) and handler.stream in screens:
            yield handler
