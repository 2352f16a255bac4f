"""The harness that takes the disk away: the cases that need no file system of their own."""

from pathlib import Path

import pytest

CASES = [
    "file-size limit: the checkpoint",
    "file-size limit: what clients keep",
    "deleted while it runs",
    "a folder in the log's place",
    "--out lies in a file",
    "--out is a link in a circle",
]


@pytest.fixture(scope="module")
def harness(load_benchmark):
    return load_benchmark("disk_limits")


@pytest.mark.parametrize("case", CASES)
def test_a_disk_that_is_taken_away_is_named_with_the_cure_and_nothing_is_lost(
    tmp_path: Path, harness, case: str
) -> None:
    assert harness.attempt(case, tmp_path / "case").wrong == ""


def test_the_harness_sees_a_traceback(tmp_path: Path, harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(harness.CASES, "raw", refuses)
    assert "Traceback" in harness.attempt("raw", tmp_path / "case").wrong
