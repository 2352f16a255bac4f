"""Files written whole or not at all, and the words for what keeps one from being written; and locks.

Locks: one at a time, named to those who wait or are refused, gone with their process, deaf to links.
"""

import errno
import fcntl
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from fl_sim.errors import RunError
from fl_sim.store import files
from fl_sim.store.files import (
    append_line,
    explain,
    folder_lock,
    is_partial,
    readable_os_errors,
    remove_partial,
    run_lock,
    write_whole,
)

Lock = Callable[[Path], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def largest_file(load_benchmark: Callable[[str], ModuleType]) -> Callable[[int], AbstractContextManager[None]]:
    limit: Callable[[int], AbstractContextManager[None]] = load_benchmark("disk_limits").file_limit
    return limit


def test_a_file_that_cannot_be_finished_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, largest_file: Callable[[int], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    with largest_file(1000), pytest.raises(OSError, match="File too large") as caught:
        write_whole(path, bytes(2000))
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_that_cannot_be_finished_is_not_begun(
    tmp_path: Path, largest_file: Callable[[int], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "log"
    append_line(path, b"one\n", is_first=True)
    with largest_file(1000), pytest.raises(OSError, match="File too large"):
        append_line(path, bytes(2000), is_first=False)
    append_line(path, b"two\n", is_first=False)
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_later_line_never_begins_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        append_line(tmp_path / "log", b"two\n", is_first=False)
    assert not list(tmp_path.iterdir())


def test_links_are_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"mine")
    (tmp_path / "log").symlink_to(tmp_path / "target")
    with pytest.raises(OSError) as caught:  # noqa: PT011 (the number tells)
        append_line(tmp_path / "log", b"theirs", is_first=True)
    assert caught.value.errno == errno.ELOOP
    write_whole(tmp_path / "log", b"theirs")
    assert (tmp_path / "target").read_bytes() == b"mine"
    assert not (tmp_path / "log").is_symlink()


def test_a_private_file_is_private_from_the_start(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_whole(tmp_path / "key", b"secret", mode=0o600)
        write_whole(tmp_path / "open", b"all")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("key", "open")] == [0o600, 0o666]


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from fl_sim.store import files; "
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL); "
        "files.write_whole(Path(sys.argv[1]) / 'result.json', b'half')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[3], check=False)
    (left,) = tmp_path.iterdir()
    assert is_partial(left)
    others = [f".result.json.{os.getpid()}.1.part", ".photo.part", "notes.1.2.part", ".hidden"]
    for name in others:
        (tmp_path / name).write_text("not a dead writer's")
    remove_partial(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full: free some space"),
        (errno.EDQUOT, "quota is used up"),
        (errno.EFBIG, "ulimit -f unlimited"),
        (errno.EROFS, "choose another place"),
        (errno.EACCES, "change its permissions"),
        (errno.ENOENT, "was deleted"),
        (errno.ENOTDIR, "there is a file where a folder is needed"),
        (errno.ELOOP, "link"),
    ],
)
def test_the_words_name_file_trouble_and_cure(number: int, said: str) -> None:
    text = explain(OSError(number, os.strerror(number), "/data/run/rounds.jsonl"))
    assert text.startswith("/data/run/rounds.jsonl: ")
    assert said in text
    assert os.strerror(number) in text


def test_an_unknown_trouble_keeps_its_own_words() -> None:
    with pytest.raises(RunError, match="odd"), readable_os_errors():
        raise OSError("odd")


_HOLD = """
import sys, time
from pathlib import Path
from fl_sim.store.files import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def another_process_in(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_another_process_is_named_to_the_second_run_and_to_the_one_that_waits_and_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "_PATIENCE", 0.05)
    with another_process_in(tmp_path) as first:
        when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        match = rf"{re.escape(str(tmp_path))} is being written by process {first.pid}, started {when}: wait for"
        with pytest.raises(RunError, match=match), run_lock(tmp_path):
            pass
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600
        threading.Timer(0.4, first.kill).start()
        with folder_lock(tmp_path):
            first.wait()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"waiting for process {first.pid}, started 2" in said
    assert not (tmp_path / ".lock").exists()


def test_a_file_that_a_killed_process_left_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("1 of somebody")
    with run_lock(tmp_path):
        pass
    assert not (tmp_path / ".lock").exists()


def test_one_process_is_refused_as_well(tmp_path: Path) -> None:
    with (
        run_lock(tmp_path),
        pytest.raises(RunError, match=f"by process {os.getpid()}, started"),
        run_lock(tmp_path),
    ):
        pass
    with run_lock(tmp_path):
        pass


def test_many_that_wait_are_alone_one_after_the_other(tmp_path: Path) -> None:
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(20):
            with folder_lock(tmp_path):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


@pytest.mark.parametrize("lock", [run_lock, folder_lock])
@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_file_that_its_last_holder_removes_at_that_moment_is_no_lock(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lock: Lock,
    is_renamed: bool,  # noqa: FBT001
) -> None:
    """NFS renames a removed file that is open."""
    locked = []

    def flock(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_UN:
            return
        locked.append(descriptor)
        if len(locked) == 1:
            (tmp_path / ".lock").rename(tmp_path / ".nfs1")
            if not is_renamed:
                (tmp_path / ".nfs1").unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock(tmp_path):
        assert len(locked) == 2
        assert (tmp_path / ".lock").exists()


def test_whoever_lets_go_leaves_the_lock_of_another_alone(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        (tmp_path / ".lock").unlink()
        (tmp_path / ".lock").write_text("of another")
    assert (tmp_path / ".lock").read_text() == "of another"


@pytest.mark.parametrize("lock", [run_lock, folder_lock])
def test_no_link_is_followed_and_nothing_else_is_taken_for_a_lock(tmp_path: Path, lock: Lock) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / ".lock").symlink_to(target)
    with pytest.raises(RunError, match="is a link"), lock(tmp_path):
        pass
    assert target.read_text() == "precious"
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(RunError, match="not a plain file"), lock(tmp_path):
        pass
    with pytest.raises(RunError, match="cannot be locked"), lock(tmp_path / "nowhere"):
        pass
    assert not (tmp_path / "nowhere").exists()


def test_a_thread_that_waits_for_itself_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PATIENCE", 0.05)
    with folder_lock(tmp_path), pytest.raises(RuntimeError, match="Deadlock"), folder_lock(tmp_path):
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RunError, match=r"cannot be locked \(No locks available\)"), run_lock(tmp_path):
        pass


def test_a_lock_that_cannot_name_its_holder_still_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> int:
        raise OSError(28, "disk full")

    monkeypatch.setattr(os, "pwrite", full_disk)
    with run_lock(tmp_path), pytest.raises(RunError, match="by another process"), run_lock(tmp_path):
        pass


@pytest.mark.parametrize("lock", [run_lock, folder_lock])
def test_whoever_has_the_folder_removes_what_killed_writers_left(tmp_path: Path, lock) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f".pool.json.{dead.pid}.7.part", f".pool.json.{os.getpid()}.7.part", "pool.json"):
        (tmp_path / name).write_text("half")
    with lock(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {
            ".lock", f".pool.json.{os.getpid()}.7.part", "pool.json",
        }  # fmt: skip
