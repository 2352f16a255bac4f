"""Locks on folders: the system lets go of them when their process ends, however it ends.

The lock is a file ``.lock`` in the folder, which names its holder and is gone when nobody holds it. It is readable by
its owner alone, and no link is followed to it.
"""

import json
import math
import os
import platform
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from fl_sim.errors import RunError
from fl_sim.printable import in_a_line
from fl_sim.store.files import remove_partial

LOCK: Final = ".lock"
_PATIENCE: Final = 2.0  # seconds of waiting in silence
_PAUSE: Final = 0.02  # seconds between two tries
_A_FEW_TRIES: Final = 5 * _PAUSE  # one may meet a file that its last holder is about to remove
_FOR_EVER: Final = -1.0
_SKEW: Final = 60.0  # seconds by which a clock may have been set since
_TIME: Final = "%Y-%m-%d %H:%M:%S UTC"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is alone in ``folder``, then be it.

    Says on standard error who is waited for after two seconds. Raises RunError where the folder cannot be locked.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(_locked(folder, _PATIENCE))
        except Timeout:
            said = f"fl-sim: waiting for {_holder(folder / LOCK)}, which is working in {folder}"
            sys.stderr.write(in_a_line(said) + "\n")
            stack.enter_context(_locked(folder, _FOR_EVER))
        yield


@contextmanager
def sole_run(folder: Path) -> Iterator[None]:
    """Be the one process that writes into the run directory ``folder``.

    Raises RunError, with the first one's process number and start, where there is one already.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(_locked(folder, _A_FEW_TRIES))
        except Timeout:
            holder = _holder(folder / LOCK)
            raise RunError(f"{folder} is being written by {holder}: wait for it, or stop it") from None
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


def _check_plain(path: Path) -> None:
    """Raise RunError where something else than a plain file is in the lock's place."""
    try:
        mode = path.lstat().st_mode  # one look: its last holder may remove it at any moment
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise RunError(f"{path} is a link, or not a plain file, which a lock is: remove it")


@contextmanager
def _locked(folder: Path, timeout: float) -> Iterator[None]:
    """Hold the lock of ``folder``. Raises Timeout where another process holds it for ``timeout`` seconds."""
    path = folder / LOCK
    mine: list[os.stat_result] = []

    def sign(descriptor: int) -> None:
        mine[:] = [os.fstat(descriptor)]
        if not _is(path, mine[0]):
            raise _RemovedError
        with suppress(OSError):  # a full disk: the lock holds, it merely does not name its holder
            said = {"pid": os.getpid(), "started": datetime.now(UTC).strftime(_TIME), "machine": platform.node()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(said).encode(), 0)

    lock = FileLock(
        path, timeout, 0o600, thread_local=False, poll_interval=_PAUSE, preserve_lock_file=True, on_acquired=sign
    )
    try:
        folder.stat()  # FileLock would make the folder
        _check_plain(path)
        while not lock.is_locked:
            with suppress(_RemovedError):
                lock.acquire()
    except Timeout:
        raise
    except OSError as error:
        raise RunError(f"{path} cannot be made or opened, so the folder cannot be locked ({error.strerror})") from error
    try:
        remove_partial(folder)
        yield
    finally:
        with suppress(OSError):
            if _is(path, mine[0]):
                path.unlink()
        lock.release()


class _RemovedError(Exception):
    """The last holder removed the file between opening and locking; on NFS it has another name then, not none."""


def _is(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), status)
    except FileNotFoundError:
        return False


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
