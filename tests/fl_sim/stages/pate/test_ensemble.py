"""The cache of votes: for its owner alone, checked when it is read, and in words where it cannot be written."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_sim.engines.wire import TaskConfig
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.stages.pate import ensemble
from fl_sim.stages.pate.ensemble import Votes, prepare_votes

ORDER = TaskConfig("", 0, 0.0, "", "")
EXPERIMENT = experiment_from({"algorithm": {"kind": "pate", "public_records": 40, "queries": 10}, "clients": 5})
DAMAGED = r"the votes in .* are damaged: delete votes.npy and votes.json there, .* leave the labels beside them"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let five teachers vote on 40 records without any training; return whether each exchange was private."""
    calls: list[bool] = []

    def ask_teachers(*_: Any, teachers: int, records: int, classes: int, private: bool) -> Any:
        calls.append(private)
        return np.random.default_rng(0).integers(classes, size=(teachers, records)), ()

    monkeypatch.setattr(ensemble, "ask_teachers", ask_teachers)
    return calls


def votes_of(experiment: Experiment = EXPERIMENT) -> Votes:
    return prepare_votes(job_of(experiment), experiment.algorithm, None, ORDER)  # type: ignore[arg-type]


def folder_in(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / ".pools").iterdir()
    return folder


def test_votes_are_made_once_kept_whole_and_for_their_owner(tmp_path: Path, asked: list[bool]) -> None:
    before = os.umask(0)
    try:
        first, again = votes_of(), votes_of()
    finally:
        os.umask(before)
    assert asked == [True]
    assert (first.reused, again.reused) == (False, True)
    assert np.array_equal(first.predictions, again.predictions)
    assert again.counts.sum(axis=1).tolist() == [5] * 40
    assert np.array_equal(np.load(folder_in(tmp_path) / "votes.npy"), first.predictions)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder_in(tmp_path).iterdir()}
    assert modes == {"votes.npy": 0o600, "votes.json": 0o600}
    folder_in(tmp_path).chmod(0o755)
    votes_of()
    assert stat.S_IMODE(folder_in(tmp_path).stat().st_mode) == 0o700


def test_other_votes_with_a_hash_that_fits_are_refused(tmp_path: Path, asked: list[bool]) -> None:
    votes = votes_of().predictions
    for shape, dtype in (((5, 39), np.uint8), ((4, 40), np.uint8), ((40, 5), np.uint8), ((5, 40), np.float64)):
        _forge(tmp_path, np.resize(votes, shape).astype(dtype))
        with pytest.raises(UserError, match=DAMAGED):
            votes_of()
    _forge(tmp_path, np.where(votes == 0, 10, votes).astype(np.uint8))
    with pytest.raises(UserError, match=DAMAGED):
        votes_of()
    _forge(tmp_path, votes.astype(np.uint8))
    assert votes_of().reused


def _forge(tmp_path: Path, votes: np.ndarray) -> None:
    np.save(folder_in(tmp_path) / "votes.npy", votes)
    content = (folder_in(tmp_path) / "votes.npy").read_bytes()
    facts = {"seconds": 1.0, "silent": [], "sha256": ensemble.hashlib.sha256(content).hexdigest()}
    (folder_in(tmp_path) / "votes.json").write_text(json.dumps(facts))


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, Any]:
    """Return the file to damage and what makes its new content of the old."""
    name = draw(st.sampled_from(["votes.json", "votes.npy"]))
    place, byte = draw(st.integers(0, 10**6)), draw(st.integers(1, 255))
    ways = [
        lambda old: old[: place % len(old)],
        lambda old: bytes(len(old)),
        lambda old: b"",
        lambda old: old + bytes([byte]),
        lambda old: _flipped(old, place % len(old), byte),
        lambda old: draw(st.binary(max_size=300)),
        lambda old: b"[" * (place % 100_000),
        lambda old: b"1" * (1 + place),
        lambda old: old * 3,
        lambda old: json.dumps(draw(st.dictionaries(st.sampled_from(["seconds", "silent", "sha256", "more"]),
                                                    st.none() | st.integers() | st.text() | st.floats()))).encode(),
    ]  # fmt: skip
    return name, ways[draw(st.integers(0, len(ways) - 1))]


def _flipped(content: bytes, place: int, by: int) -> bytes:
    return content[:place] + bytes([content[place] ^ by]) + content[place + 1 :]


def test_whatever_is_done_to_the_files_the_same_votes_come_out_or_one_line(tmp_path: Path, asked: list[bool]) -> None:
    votes = votes_of().predictions
    folder = folder_in(tmp_path)
    originals = {name: (folder / name).read_bytes() for name in ("votes.json", "votes.npy")}

    @settings(max_examples=150, deadline=None)
    @given(damages())
    def damaged(damage: tuple[str, Any]) -> None:
        name, way = damage
        for other, content in originals.items():
            (folder / other).write_bytes(content)
        (folder / name).write_bytes(way(originals[name]))
        try:
            assert np.array_equal(votes_of().predictions, votes)
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017 (either outcome is right)
            assert "delete votes.npy" in str(error)  # noqa: PT017

    damaged()


def test_a_file_that_is_no_file_is_refused_without_waiting(tmp_path: Path, asked: list[bool]) -> None:
    votes_of()
    path = folder_in(tmp_path) / "votes.npy"
    path.unlink()
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), path.mkdir):
        make()
        with pytest.raises(UserError, match=DAMAGED):
            votes_of()
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("trouble", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_said_with_the_cure(
    tmp_path: Path, asked: list[bool], monkeypatch: pytest.MonkeyPatch, trouble: int
) -> None:
    def write(path: Path, content: bytes) -> None:
        raise OSError(trouble, os.strerror(trouble), str(path))

    monkeypatch.setattr(ensemble, "write_private", write)
    with pytest.raises(RunError, match=r"votes.npy: .*; FL_SIM_POOLS names another place") as caught:
        votes_of()
    assert "\n" not in str(caught.value)


def test_a_file_in_the_place_of_the_cache_is_said_with_the_cure(tmp_path: Path, asked: list[bool]) -> None:
    (tmp_path / ".pools").write_text("")
    with pytest.raises(RunError, match="FL_SIM_POOLS names another place"):
        votes_of()
