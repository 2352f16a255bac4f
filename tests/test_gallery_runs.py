"""What a table of the gallery was made of is kept with it, and its command goes on from there."""

import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import fl_sim

FOLDERS = sorted((Path(__file__).parent.parent / "docs" / "results").glob("*/table.json"))
BASE = {"data": "digits", "model": "logistic", "clients": 3, "rounds": 2}


@pytest.fixture
def gallery(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("gallery")


def _table(out: Path) -> bytes:
    plan = {"centralized": False, "base": BASE, "grid": {"algorithm": ["fedavg"], "seed": [0, 1]}}
    fl_sim.table(plan, out=out, jobs=1, progress=False)
    return (out / "table.json").read_bytes()


def test_a_table_goes_on_from_what_was_kept_with_the_same_figures(gallery: ModuleType, tmp_path: Path) -> None:
    first, kept, second = (tmp_path / name for name in ("first", "kept", "second"))
    kept.mkdir()
    made = _table(first)
    assert gallery.keep(first, kept) == 2
    packed = (kept / gallery.PACKED).read_bytes()
    assert gallery.keep(first, kept) == 2
    assert (kept / gallery.PACKED).read_bytes() == packed, "the same runs are the same bytes"
    assert gallery.go_on(kept, second) == 2
    written = {path: path.stat().st_mtime_ns for path in second.glob("cells/*/rounds.jsonl")}
    assert len(written) == 2
    assert _table(second) == made
    assert all(path.stat().st_mtime_ns == when for path, when in written.items()), "nothing of it was run again"


def test_runs_that_did_not_finish_are_not_kept(gallery: ModuleType, tmp_path: Path) -> None:
    for name, status in (("done", "finished"), ("half", "failed")):
        run = tmp_path / "out" / "cells" / name
        run.mkdir(parents=True)
        for part in gallery.OF_A_RUN:
            (run / part).write_text(json.dumps({"status": status}))
    for part in gallery.TABLE:
        (tmp_path / "out" / part).write_text("{}")
    (tmp_path / "kept").mkdir()
    assert gallery.keep(tmp_path / "out", tmp_path / "kept") == 1
    assert gallery.go_on(tmp_path / "kept", tmp_path / "on") == 1
    assert [path.name for path in (tmp_path / "on" / "cells").iterdir()] == ["done"]


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.SYMTYPE])
def test_what_lies_outside_of_the_table_is_not_unpacked(gallery: ModuleType, tmp_path: Path, kind: bytes) -> None:
    entry = tarfile.TarInfo("../elsewhere")
    entry.type, entry.linkname = kind, "/etc"
    with tarfile.open(tmp_path / gallery.PACKED, "w:xz") as packed:
        packed.addfile(entry)
    with pytest.raises(SystemExit, match="which is no file of a table"):
        gallery.go_on(tmp_path, tmp_path / "table")
    assert not (tmp_path / "elsewhere").exists()


def test_what_is_there_is_never_overwritten_and_what_is_not_is_said(gallery: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"is there already"):
        gallery.go_on(tmp_path, tmp_path)
    with pytest.raises(SystemExit, match=r"holds no runs\.tar\.xz, nor does the history"):
        gallery.go_on(tmp_path, tmp_path / "new")
    with pytest.raises(SystemExit, match=r"has no table\.json and no table\.csv"):
        gallery.keep(tmp_path, tmp_path)


def test_an_archive_is_found_in_the_history_after_it_has_left_the_repository(
    gallery: ModuleType, tmp_path: Path
) -> None:
    def git(*command: str) -> None:
        settings = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *settings, *command], cwd=tmp_path, check=True, capture_output=True)

    folder = tmp_path / "results" / "one"
    folder.mkdir(parents=True)
    (folder / "table.json").write_text("{}")
    git("init", "-q")
    for content in (b"old", b"new", None):
        (folder / gallery.PACKED).unlink(missing_ok=True)
        if content:
            (folder / gallery.PACKED).write_bytes(content)
        git("add", "-A")
        git("commit", "-q", "-m", "one")
    assert gallery.find_archive(folder) == b"new"
    assert gallery.collect(folder.parent, tmp_path / "out") == 1
    assert (tmp_path / "out" / f"one-{gallery.PACKED}").read_bytes() == b"new"
    (folder.parent / "two").mkdir()
    (folder.parent / "two" / "table.json").write_text("{}")
    with pytest.raises(SystemExit, match="no archive of two: a full clone has those of before"):
        gallery.collect(folder.parent, tmp_path / "out")


@pytest.mark.parametrize("packed", FOLDERS, ids=lambda path: path.parent.name)
def test_the_runs_of_the_gallery_are_those_of_its_tables(gallery: ModuleType, packed: Path, tmp_path: Path) -> None:
    if gallery.find_archive(packed.parent) is None:
        pytest.skip("a shallow clone: archives are in the repository's history and attached to releases")
    gallery.go_on(packed.parent, tmp_path / "runs")
    known = {}
    for cell in json.loads((packed.parent / "table.json").read_text())["cells"]:
        known.update(zip(cell["dir"], cell["values"], strict=True))
    kept = {
        str(path.parent.relative_to(tmp_path / "runs")): 100 * json.loads(path.read_text())["final_accuracy"]
        for path in (tmp_path / "runs").glob("cells/*/result.json")
    }
    assert kept == pytest.approx({name: value for name, value in known.items() if value is not None})
