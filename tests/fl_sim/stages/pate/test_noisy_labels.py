"""Noisy labels and what they were paid with: nothing is believed beyond what the ledger says."""

import json
import stat
from pathlib import Path

import numpy as np
import pytest

from fl_sim.errors import RunError
from fl_sim.stages.pate import noisy_labels
from fl_sim.stages.pate.ensemble import Votes
from fl_sim.stages.pate.noisy_labels import Released, publish_cost, release_labels
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
    with pytest.raises(RunError, match="shows charges for labels about these records"):
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
    with pytest.raises(
        RunError, match=rf"holds 1 labels that .* was not charged for, the first is that of query {silent}"
    ):
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
    with pytest.raises(RunError, match="the votes are no longer those that this noise was drawn for"):
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
        with pytest.raises(RunError, match=r"published.json is damaged: delete it, and the same figure"):
            publish_cost(SETTINGS, votes, labels)
    path.unlink()
    with pytest.raises(RunError, match="cost-key is damaged, or the votes are no longer those"):
        publish_cost(SETTINGS, votes_in(tmp_path, seed=1), labels)
