"""Locks: one at a time, named to those who wait or are refused, gone with their process, deaf to links."""

import errno
import fcntl
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from fl_sim.errors import RunError
from fl_sim.store import locks
from fl_sim.store.locks import alone_in, sole_run

_HOLD = """
import sys, time
from pathlib import Path
from fl_sim.store.locks import sole_run
with sole_run(Path(sys.argv[1])):
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
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)
    with another_process_in(tmp_path) as first:
        when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        match = rf"{re.escape(str(tmp_path))} is being written by process {first.pid}, started {when}: wait for it, or"
        with pytest.raises(RunError, match=match), sole_run(tmp_path):
            pass
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600
        threading.Timer(0.4, first.kill).start()
        with alone_in(tmp_path):
            first.wait()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"waiting for process {first.pid}, started 2" in said
    assert not (tmp_path / ".lock").exists()


def test_a_file_that_a_killed_process_left_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("1 of somebody")
    with sole_run(tmp_path):
        pass
    assert not (tmp_path / ".lock").exists()


def test_one_process_is_refused_as_well(tmp_path: Path) -> None:
    with (
        sole_run(tmp_path),
        pytest.raises(RunError, match=f"by process {os.getpid()}, started"),
        sole_run(tmp_path),
    ):
        pass
    with sole_run(tmp_path):
        pass


def test_many_that_wait_are_alone_one_after_the_other(tmp_path: Path) -> None:
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(20):
            with alone_in(tmp_path):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


@pytest.mark.parametrize("lock", [sole_run, alone_in])
@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_file_that_its_last_holder_removes_at_that_moment_is_no_lock(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lock: AbstractContextManager,  # type: ignore[type-arg]
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
    with lock(tmp_path):  # type: ignore[operator]
        assert len(locked) == 2
        assert (tmp_path / ".lock").exists()


def test_whoever_lets_go_leaves_the_lock_of_another_alone(tmp_path: Path) -> None:
    with sole_run(tmp_path):
        (tmp_path / ".lock").unlink()
        (tmp_path / ".lock").write_text("of another")
    assert (tmp_path / ".lock").read_text() == "of another"


@pytest.mark.parametrize("lock", [sole_run, alone_in])
def test_no_link_is_followed_and_nothing_else_is_taken_for_a_lock(tmp_path: Path, lock: AbstractContextManager) -> None:  # type: ignore[type-arg]
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / ".lock").symlink_to(target)
    with pytest.raises(RunError, match="is a link"), lock(tmp_path):  # type: ignore[operator]
        pass
    assert target.read_text() == "precious"
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(RunError, match="not a plain file"), lock(tmp_path):  # type: ignore[operator]
        pass
    with pytest.raises(RunError, match="cannot be locked"), lock(tmp_path / "nowhere"):  # type: ignore[operator]
        pass
    assert not (tmp_path / "nowhere").exists()


def test_a_thread_that_waits_for_itself_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)
    with alone_in(tmp_path), pytest.raises(RuntimeError, match="Deadlock"), alone_in(tmp_path):
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RunError, match=r"cannot be locked \(No locks available\)"), sole_run(tmp_path):
        pass


def test_a_lock_that_cannot_name_its_holder_still_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> int:
        raise OSError(28, "disk full")

    monkeypatch.setattr(os, "pwrite", full_disk)
    with sole_run(tmp_path), pytest.raises(RunError, match="by another process"), sole_run(tmp_path):
        pass


@pytest.mark.parametrize("lock", [sole_run, alone_in])
def test_whoever_has_the_folder_removes_what_killed_writers_left(tmp_path: Path, lock) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f".pool.json.{dead.pid}.7.part", f".pool.json.{os.getpid()}.7.part", "pool.json"):
        (tmp_path / name).write_text("half")
    with lock(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {
            ".lock", f".pool.json.{os.getpid()}.7.part", "pool.json",
        }  # fmt: skip
