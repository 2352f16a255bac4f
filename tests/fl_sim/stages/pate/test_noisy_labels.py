"""PATE's votes and noisy labels are made and paid for once."""

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
from fl_sim.stages.pate import noisy_labels
from fl_sim.stages.pate.noisy_labels import Released, Votes, prepare_votes, publish_cost, release_labels
from strategies.pate.labelling import UNANSWERED
from strategies.pate.settings import Pate

SETTINGS = Pate(queries=12, labelling={"mechanism": "lnmax:0.5", "delta": 1e-5})
CONFIDENT = Pate(  # in one run of a million all queries would be answered
    queries=12,
    labelling={"mechanism": {"kind": "confident", "threshold": 14, "sigma_threshold": 2.0, "sigma": 3.0}},
)


def votes_in(folder: Path, *, seed: int = 0) -> Votes:
    """Votes of 20 teachers on 15 records, for one of three classes."""
    predictions = np.random.default_rng(seed).choice(3, size=(20, 15), p=[0.7, 0.2, 0.1])
    counts = np.stack([(predictions == label).sum(axis=0) for label in range(3)], axis=1)
    return Votes(predictions, counts, np.arange(15), folder / "cache", 1.0, reused=False)


def released(tmp_path: Path, settings: Pate = SETTINGS, out: str = "out", *, seed: int = 0) -> Released:
    (tmp_path / out).mkdir(exist_ok=True)
    return release_labels(settings, votes_in(tmp_path, seed=seed), 0, tmp_path / out)


def kept(tmp_path: Path, name: str) -> Path:
    (found,) = (tmp_path / "cache").glob(f"labels-*/{name}")
    return found


def test_labels_are_paid_for_once_and_read_back(tmp_path: Path) -> None:
    first, again = released(tmp_path), released(tmp_path)
    assert (first.reused, again.reused) == (False, True)
    assert again.labelled.labels.tolist() == first.labelled.labels.tolist()
    assert again.charges == first.charges == kept(tmp_path, "ledger.jsonl").read_bytes()
    assert again.ledger.epsilon == first.ledger.epsilon > 0
    assert not list((tmp_path / "cache").glob("labels-*/key"))


def test_what_is_kept_is_for_its_owner_alone(tmp_path: Path) -> None:
    released(tmp_path)
    publish_cost(SETTINGS, votes_in(tmp_path), released(tmp_path))
    for folder in (tmp_path / "cache").glob("labels-*"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert {modes[name] for name in ("labels.json", "published.json", "cost-key")} == {0o600}


def cut(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def edited(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"query 3", b"query 4"))


@pytest.mark.parametrize(
    ("damage", "words"), [(Path.unlink, "is missing"), (cut, "holds 11 charges"), (edited, "is damaged, line")]
)
def test_labels_whose_ledger_is_gone_cut_or_edited_are_refused(tmp_path: Path, damage, words: str) -> None:
    released(tmp_path)
    damage(kept(tmp_path, "ledger.jsonl"))
    with pytest.raises(
        RunError, match=rf"ledger.jsonl.* {words}.*put an unchanged copy of it back, or start .*FL_SIM_POOLS"
    ):
        released(tmp_path, out="other")


def test_a_run_directory_remembers_charges_that_the_cache_has_lost(tmp_path: Path) -> None:
    first = released(tmp_path)
    (tmp_path / "out" / "ledger.jsonl").write_bytes(first.charges)
    for name in ("ledger.jsonl", "labels.json"):
        kept(tmp_path, name).unlink()
    with pytest.raises(RunError, match=r"charges for labels .* another --out"):
        released(tmp_path)
    assert not list((tmp_path / "cache").glob("labels-*/labels.json"))
    assert released(tmp_path, out="fresh").ledger.epsilon == first.ledger.epsilon
    with pytest.raises(RunError, match="contains charges for labels that are missing in"):
        released(tmp_path)  # the cache is full again, but of another release


def changed(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(200)),
    "huge": lambda path: path.write_bytes(b" " * 10**6),
    "deep": lambda path: path.write_bytes(b"[" * 10**5),
    "foreign": lambda path: path.write_text('{"pool": "synthetic.safetensors"}'),
    "a list": lambda path: path.write_text("[1, 2]"),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a class too many": lambda path: changed(path, labels=[3] * 12),
    "too few": lambda path: changed(path, labels=[1] * 11),
    "halves": lambda path: changed(path, labels=[0.5] * 12),
    "more asked than there are": lambda path: changed(path, num_asked=13),
    "answered without being asked": lambda path: changed(path, num_asked=3),
    "no receipt": lambda path: changed(path, receipt={}),
    "half a receipt": lambda path: changed(path, receipt={"ledger": "a", "charges": -1, "digest": ""}),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_labels_that_are_damaged_are_refused_in_one_line(tmp_path: Path, damage) -> None:
    released(tmp_path)
    damage(kept(tmp_path, "labels.json"))
    with pytest.raises(RunError, match=r"labels.json .*unchanged copy.* or delete it") as one:
        released(tmp_path)
    assert "\n" not in str(one.value)


def test_labels_that_nobody_paid_for_are_refused(tmp_path: Path) -> None:
    first = released(tmp_path, CONFIDENT)
    (silent, *_) = np.flatnonzero(first.labelled.labels == UNANSWERED)
    labels = first.labelled.labels.tolist()
    labels[silent] = 1
    changed(kept(tmp_path, "labels.json"), labels=labels)
    with pytest.raises(RunError, match=rf"contains 1 labels without a charge in .* \(first: query {silent}\)"):
        released(tmp_path, CONFIDENT)


def test_labels_that_are_made_again_are_paid_for_again(tmp_path: Path) -> None:
    first = released(tmp_path)
    kept(tmp_path, "labels.json").unlink()
    again = released(tmp_path)
    assert again.ledger.epsilon > first.ledger.epsilon
    assert len(again.ledger.charges) == 24


def killed_before_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    before = noisy_labels.write_private

    def write(path: Path, content: bytes) -> None:
        if path.name == "labels.json":
            raise KeyboardInterrupt
        before(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(noisy_labels, "write_private", write)
        with pytest.raises(KeyboardInterrupt):
            released(tmp_path)
    return kept(tmp_path, "key")


def test_a_killed_labelling_goes_on_with_the_same_noise_on_the_same_votes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = killed_before_labels(tmp_path, monkeypatch)
    with pytest.raises(RunError, match="the votes have changed since the noise was drawn from this key"):
        released(tmp_path, seed=1)
    content = key.read_bytes()
    for damaged in (content[:40], b"", bytes(64), content + b"0"):
        key.write_bytes(damaged)
        with pytest.raises(RunError, match="key is damaged, or the votes"):
            released(tmp_path)
    key.write_bytes(content)
    assert len(released(tmp_path).ledger.charges) == 12
    assert not key.exists()


def test_a_killed_labelling_whose_key_is_lost_pays_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_before_labels(tmp_path, monkeypatch).unlink()
    assert len(released(tmp_path).ledger.charges) == 24


def test_a_published_figure_comes_out_the_same_however_often_it_is_asked_for(tmp_path: Path) -> None:
    votes, labels = votes_in(tmp_path), released(tmp_path)
    said = publish_cost(SETTINGS, votes, labels)
    path = kept(tmp_path, "published.json")
    path.unlink()
    assert publish_cost(SETTINGS, votes, labels) == said
    for damage in (b"", b"{}", bytes(300), path.read_bytes().replace(b'"epsilon": ', b'"epsilon": NaN, "a": ')):
        path.write_bytes(damage)
        with pytest.raises(RunError, match=r"published.json is damaged: delete it; the same epsilon"):
            publish_cost(SETTINGS, votes, labels)
    path.unlink()
    with pytest.raises(RunError, match="cost-key is damaged, or the votes have changed since"):
        publish_cost(SETTINGS, votes_in(tmp_path, seed=1), labels)


ORDER = TaskConfig("", 0, 0.0, "", "")
EXPERIMENT = experiment_from({"algorithm": {"kind": "pate", "public_records": 40, "queries": 10}, "clients": 5})
DAMAGED = r"the votes in .* are damaged: delete votes.npy and votes.json there; .* keep the folders of labels there"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let five teachers vote on 40 records without any training; return whether each exchange was private."""
    calls: list[bool] = []

    def ask_teachers(*_: Any, teachers: int, records: int, classes: int, private: bool) -> Any:
        calls.append(private)
        return np.random.default_rng(0).integers(classes, size=(teachers, records)), ()

    monkeypatch.setattr(noisy_labels, "ask_teachers", ask_teachers)
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
    facts = {"seconds": 1.0, "silent": [], "sha256": noisy_labels.hashlib.sha256(content).hexdigest()}
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

    monkeypatch.setattr(noisy_labels, "write_private", write)
    with pytest.raises(RunError, match=r"votes.npy: .*; or set FL_SIM_POOLS to another folder") as caught:
        votes_of()
    assert "\n" not in str(caught.value)


def test_a_file_in_the_place_of_the_cache_is_said_with_the_cure(tmp_path: Path, asked: list[bool]) -> None:
    (tmp_path / ".pools").write_text("")
    with pytest.raises(RunError, match="or set FL_SIM_POOLS to another folder"):
        votes_of()
