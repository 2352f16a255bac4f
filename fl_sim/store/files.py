"""Atomic writing of files, messages with cures for errors of the operating system, and locks on folders.

A lock is a file ``.lock`` in the folder. The file names the process that owns the lock. The operating system releases
the lock when that process ends, for any reason. Only the user who created the lock file may read it. If ``.lock`` is a
symbolic link, it is refused.
"""

import errno
import json
import math
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from threading import get_ident
from typing import Final

from filelock import FileLock, Timeout

from fl_sim.errors import RunError, UserError, in_a_line

_PARTIAL: Final = re.compile(r"\..+\.(\d+)\.\d+\.part")
"""The name of an unfinished file contains the process id and the thread id of its writer."""

_CURES: Final = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "your disk quota is used up: free some space",
    errno.EFBIG: "the file would be larger than allowed here: raise the limit (ulimit -f unlimited)",
    errno.EROFS: "nothing can be written to this file system: choose another place",
    errno.EACCES: "you have no permission to use it: change its permissions, or choose another place",
    errno.EPERM: "you have no permission to use it: change its permissions, or choose another place",
    errno.ENOENT: "it does not exist, or its folder was deleted: choose a permanent folder",
    errno.ENOTDIR: "there is a file where a folder is needed: move it away, or choose another place",
    errno.EEXIST: "there is something else where a folder is needed: move it away, or choose another place",
    errno.EISDIR: "there is a folder where a file is needed: move it away, or choose another place",
    errno.ELOOP: "a symbolic link points back to itself, or is not allowed here: remove the link",
    errno.EMFILE: "too many files are open at once: raise the limit (ulimit -n 4096)",
    errno.ENAMETOOLONG: "the name is too long: choose a shorter one",
    errno.EIO: "the disk failed: choose a place on another disk",
}

LOCK: Final = ".lock"
_PATIENCE: Final = 2.0  # seconds of waiting for a lock until a message is shown
_PAUSE: Final = 0.02  # seconds between two tries to lock a folder
# The lock is tried several times, because its previous owner may need a moment to remove the lock file.
_A_FEW_TRIES: Final = 5 * _PAUSE
_FOR_EVER: Final = -1.0
# The largest error of the system clock, in seconds, in the comparison of a process's start with the time of its lock.
_SKEW: Final = 60.0
_TIME: Final = "%Y-%m-%d %H:%M:%S UTC"


def write_whole(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file atomically: a reader sees the old file or the whole new file, even after a power cut.

    ``mode``: the permissions before the user's umask is applied. Raises an OSError whose message names ``path``.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with path_in_errors(path):
        try:
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, flags, mode), "wb") as file:
                file.write(content)
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def append_line(path: Path, line: bytes, *, is_first: bool) -> None:
    """Append a whole line or nothing, and wait until it is on the disk. Raises OSError that names ``path``.

    ``is_first``: True for the first line, which may create the file. If the file is missing for a later line, earlier
    lines were lost, and FileNotFoundError is raised.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if is_first else 0)
    with path_in_errors(path):
        descriptor = os.open(path, flags, 0o666)
        with FileIO(descriptor, "ab") as file:
            before = os.fstat(descriptor).st_size
            try:
                write_all(file, line)
                os.fsync(descriptor)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(descriptor, before)
                raise
        if is_first:
            sync_folder(path.parent)


def read_whole(path: Path, most: int = 2**40) -> bytes:
    """Return the content of a file that this program wrote, at most ``most`` bytes.

    Raises UserError for a longer file, and for a path that is not a regular file, such as a device or a pipe. Raises
    OSError, such as FileNotFoundError, that names the file.
    """
    with path_in_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with FileIO(descriptor) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > most:
                raise UserError(f"{path} is not a file that this program wrote: restore the file, or choose another")
            return file.readall()


def user_folder(variable: str, base_variable: str, base: str, name: str) -> Path:
    """Return the user's permanent folder for ``name``.

    It is the value of the environment variable ``variable``, if set. Otherwise it is ``fl-sim/NAME`` below the value of
    the environment variable ``base_variable`` (such as XDG_CACHE_HOME). If neither variable is set, it is
    ``fl-sim/NAME`` below the folder ``base``.
    """
    named, below = os.environ.get(variable), os.environ.get(base_variable) or base
    return (Path(named) if named else Path(below) / "fl-sim" / name).expanduser().absolute()


def write_all(file: FileIO, content: bytes | memoryview) -> None:
    """Write all of ``content`` at the file's current position, in several system calls if necessary."""
    left = memoryview(content).cast("B")
    while left:
        left = left[file.write(left) :]


def sync_folder(folder: Path) -> None:
    """Wait until the file names in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial(folder: Path) -> None:
    """Delete unfinished temporary files in ``folder`` if the process that wrote them no longer runs."""
    for path in folder.glob(".*.part"):
        named = _PARTIAL.fullmatch(path.name)
        if named and not _is_alive(int(named[1])):
            path.unlink(missing_ok=True)


def is_partial(path: Path) -> bool:
    """Return True if ``path`` is the temporary file of an unfinished ``write_whole``."""
    return _PARTIAL.fullmatch(path.name) is not None


@contextmanager
def path_in_errors(path: Path) -> Iterator[None]:
    """Add the file name ``path`` to every OSError in a ``with`` block, because errors of failed writes name no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@contextmanager
def readable_os_errors(path: Path | None = None) -> Iterator[None]:
    """Convert an OSError in a ``with`` block into a RunError with file, reason and cure.

    ``path``: the file that the new message names, in place of the file in the OSError.
    """
    try:
        yield
    except OSError as error:
        named = OSError(error.errno, error.strerror or str(error), str(path)) if path else error
        raise RunError(explain(named)) from error


def explain(error: OSError) -> str:
    """Return one sentence that names the file, the reason and the cure of an OSError."""
    said = error.strerror or str(error) or type(error).__name__
    cure = _CURES.get(error.errno or 0)
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{cure} ({said})" if cure else f"{where}{said}"


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock ``folder`` for this process in a ``with`` block; wait while another process has locked it.

    After two seconds of waiting, a message on standard error names the process that holds the lock. Raises RunError if
    the folder cannot be locked.
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
def run_lock(folder: Path) -> Iterator[None]:
    """Lock the run directory ``folder`` for this process in a ``with`` block; give up after a few tries.

    Raises RunError if another process has locked ``folder``. The message names that process and its start time.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(_locked(folder, _A_FEW_TRIES))
        except Timeout:
            holder = _holder(folder / LOCK)
            raise RunError(f"{folder} is being written by {holder}: wait for that process, or stop it") from None
        yield


def is_locked(folder: Path) -> bool | None:
    """Return True if the process that locked ``folder`` still runs. This function itself locks and changes nothing.

    Returns None if that process is on another machine, or if this system cannot tell. A new process may have the
    process id of a dead process. Therefore the start time of the process is compared with the time of the lock.
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


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _began(pid: int) -> float:
    """Return the start time of process ``pid`` in seconds since 1970; infinity if there is no such process."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        [started] = [line for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines() if "btime" in line]
    except (OSError, ValueError, IndexError):
        return math.inf
    return float(int(started.split()[1]) + ticks / os.sysconf("SC_CLK_TCK"))


@contextmanager
def _locked(folder: Path, timeout: float) -> Iterator[None]:
    """Lock ``folder`` in a ``with`` block. Raises Timeout if another process holds the lock for ``timeout`` seconds."""
    path = folder / LOCK
    mine: list[os.stat_result] = []

    def sign(descriptor: int) -> None:
        mine[:] = [os.fstat(descriptor)]
        if not _is(path, mine[0]):
            raise _RemovedError
        with suppress(OSError):  # on a full disk the lock still works, but the lock file does not name the owner
            said = {"pid": os.getpid(), "started": datetime.now(UTC).strftime(_TIME), "machine": platform.node()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(said).encode(), 0)

    lock = FileLock(
        path, timeout, 0o600, thread_local=False, poll_interval=_PAUSE, preserve_lock_file=True, on_acquired=sign
    )
    try:
        folder.stat()  # raises an error for a missing folder; FileLock would create the folder
        with suppress(FileNotFoundError):
            # A single system call returns the type of the file, or an error if the file is missing. Between two system
            # calls, another process could remove the file.
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode):
                raise RunError(f"{path} is a link, or not a plain file, so it cannot be a lock: remove it")
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
    """Signals that the lock must be tried again.

    After this process had opened the lock file, the previous owner of the lock removed or (on NFS) renamed the file.
    """


def _is(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), status)
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        said = json.loads(_content(path))
        return f"process {int(said['pid'])}, started {str(said['started'])[:40]}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # the lock file is incomplete or missing
        return "another process"


def _content(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(1000)
