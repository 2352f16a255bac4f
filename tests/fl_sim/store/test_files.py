"""Files written whole or not at all, and the words for what keeps one from being written."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import pytest

from fl_sim.errors import RunError
from fl_sim.store.files import append_line, explain, in_words, is_partial, remove_partial, write_whole


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
        "files.force_to_disk = lambda _: os.kill(os.getpid(), signal.SIGKILL); "
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
        (errno.ENOTDIR, "a file stands where a folder is needed"),
        (errno.ELOOP, "link"),
    ],
)
def test_the_words_name_file_trouble_and_cure(number: int, said: str) -> None:
    text = explain(OSError(number, os.strerror(number), "/data/run/rounds.jsonl"))
    assert text.startswith("/data/run/rounds.jsonl: ")
    assert said in text
    assert os.strerror(number) in text


def test_an_unknown_trouble_keeps_its_own_words() -> None:
    with pytest.raises(RunError, match="odd"), in_words():
        raise OSError("odd")
