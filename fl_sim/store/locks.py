"""Locks on folders: the system lets go of them when their process ends, however it ends.

The lock is a file ``.lock`` in the folder, which names its holder and is gone when nobody holds it. It is readable by
its owner alone, and no link is followed to it.
"""

import errno
import fcntl
import json
import math
import os
import platform
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from fl_sim.errors import RunError
from fl_sim.printable import in_a_line
from fl_sim.store.files import remove_partial

LOCK: Final = ".lock"
_PATIENCE: Final = 2.0  # seconds of waiting in silence
_PAUSE: Final = 0.02  # seconds between two tries
_SKEW: Final = 60.0  # seconds by which a clock may have been set since
_TIME: Final = "%Y-%m-%d %H:%M:%S UTC"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is alone in ``folder``, then be it.

    Says on standard error who is waited for after two seconds. Raises RunError where the folder cannot be locked.
    """
    path, start, told = folder / LOCK, time.monotonic(), False
    while (lock := _try(path)) is None:
        if not told and time.monotonic() - start > _PATIENCE:
            sys.stderr.write(in_a_line(f"fl-sim: waiting for {_holder(path)}, which is working in {folder}") + "\n")
            told = True
        time.sleep(_PAUSE)
    with _held(path, lock):
        yield


@contextmanager
def sole_run(folder: Path) -> Iterator[None]:
    """Be the one process that writes into the run directory ``folder``.

    Raises RunError, with the first one's process number and start, where there is one already.
    """
    path = folder / LOCK
    lock = _try(path)
    if lock is None:
        raise RunError(f"{folder} is being written by {_holder(path)}: wait for it, or stop it")
    with _held(path, lock):
        yield


def is_held(folder: Path) -> bool | None:
    """Return whether the process that wrote the lock of ``folder`` still works there; nothing is locked or changed.

    None: that process is on another machine, or this system does not tell. A process that has the number of a dead
    one began after the lock was written.
    """
    try:
        said = json.loads(_content(folder / LOCK))
        pid, machine, begun = int(said["pid"]), str(said["machine"]), datetime.strptime(said["started"], _TIME)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if machine != platform.node() or not Path("/proc/stat").exists():
        return None
    return _began(pid) <= begun.replace(tzinfo=UTC).timestamp() + _SKEW


def _began(pid: int) -> float:
    """Return when a process began, in seconds since 1970; infinity where there is none with that number."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        [started] = [line for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines() if "btime" in line]
    except (OSError, ValueError, IndexError):
        return math.inf
    return float(int(started.split()[1]) + ticks / os.sysconf("SC_CLK_TCK"))


def _try(path: Path) -> int | None:
    """Return the locked file's descriptor, None where another process holds it."""
    while True:
        lock = _open(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        if _is(path, lock):
            return lock
        os.close(lock)  # its last holder has removed it since it was opened


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RunError(f"{path} is a link, which a lock never is: remove it") from error
        raise RunError(f"{path} cannot be made or opened, so the folder cannot be locked ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise RunError(f"{path} is not a plain file, which a lock is: remove it")
    return lock


def _is(path: Path, lock: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(lock))
    except FileNotFoundError:
        return False


@contextmanager
def _held(path: Path, lock: int) -> Iterator[None]:
    try:
        with suppress(OSError):  # a full disk: the lock holds, it merely does not name its holder
            said = {"pid": os.getpid(), "started": datetime.now(UTC).strftime(_TIME), "machine": platform.node()}
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps(said).encode(), 0)
        remove_partial(path.parent)
        yield
    finally:
        with suppress(OSError):
            if _is(path, lock):
                path.unlink()
        os.close(lock)


def _holder(path: Path) -> str:
    try:
        said = json.loads(_content(path))
        return f"process {int(said['pid'])}, started {str(said['started'])[:40]}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # not written yet, or gone already
        return "another process"


def _content(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(1000)
