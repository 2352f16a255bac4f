"""Several data sets as domains of one task: equal sizes, class shares, scaling, names, digests, and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fl_sim.data import content_of, fingerprint, is_own, load, tuned_on, verify
from fl_sim.data.domains import _drawn
from fl_sim.data.naming import own_name, parts_of
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.experiment.identity import identity_of
from fl_sim.experiment.job import job_of
from fl_sim.simulation.run import run
from fl_sim.tables.labels import data_label
from fl_sim.types import Examples


def write_npz(
    path: Path, sizes: tuple[int, int] = (200, 60), shape: tuple[int, ...] = (6, 6), classes: int = 10
) -> str:
    """Write images with the class distribution 1 : 2 : 1 : 2 : ..., and return the name of the data set."""
    coins = np.random.default_rng(len(path.name))
    arrays: dict[str, Any] = {}
    for part, count in zip(("train", "test"), sizes, strict=True):
        labels = np.sort(np.arange(count) % (classes * 3 // 2)) * 2 // 3
        arrays |= {f"x_{part}": coins.integers(0, 256, (count, *shape), dtype=np.uint8), f"y_{part}": labels}
    np.savez(path, **arrays)
    return f"npz:{path}"


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return f"domains:digits+{write_npz(Path('own.npz'))}"


def test_domains_have_equal_sizes_and_are_sources(both: str) -> None:
    found, (digits, own) = load(both), map(load, parts_of(both))
    assert found.train.groups is not None
    assert found.test.groups is not None
    assert found.train.groups.tolist() == [0] * 200 + [1] * 200
    assert found.test.groups.tolist() == [0] * 60 + [1] * 60
    assert (found.input_shape, found.mean, found.std) == ((1, 8, 8), (0.5,), (0.5,))
    pixels = {image.tobytes() for image in digits.train.inputs}
    assert all(image.tobytes() in pixels for image in found.train.inputs[:200])
    assert np.array_equal(found.train.labels[200:], own.train.labels)
    for part, of in ((found.train, digits.train), (found.test, digits.test)):
        half = len(part) // 2
        exact = np.bincount(of.labels) * half / len(of)
        assert np.abs(np.bincount(part.labels[:half]) - exact).max() < 1
    assert found.note == (
        "domains with 200 training and 60 test records each, drawn by seed 0 with the class distribution of the set: "
        "0 digits (of 1,437 and 360), 1 npz:own.npz (of 200 and 60); bilinearly scaled to 8x8: npz:own.npz; normalised "
        "by mean 0.5 and deviation 0.5"
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.data())
def test_a_draw_has_the_class_shares_of_the_set_and_no_record_twice(labels: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(labels)))
    part = Examples(np.arange(len(labels), dtype=np.float32)[:, None], np.array(labels))
    drawn = _drawn(part, count, 5, "set train")
    chosen = drawn.inputs[:, 0].astype(int)
    assert len(drawn) == count == len(set(chosen.tolist()))
    assert np.array_equal(drawn.labels, part.labels[chosen])
    exact = np.bincount(labels, minlength=5) * count / len(labels)
    assert np.abs(np.bincount(drawn.labels, minlength=5) - exact).max() < 1


def test_a_set_is_drawn_alike_beside_any_other(tmp_path: Path) -> None:
    first, second = (write_npz(tmp_path / name) for name in ("a.npz", "bb.npz"))
    one, other = load(f"domains:digits+{first}"), load(f"domains:{second}+digits")
    assert np.array_equal(one.train.inputs[:200], other.train.inputs[200:])


def test_images_are_scaled_like_image_files_and_grey_ones_get_three_channels(tmp_path: Path) -> None:
    colour = write_npz(tmp_path / "colour.npz", shape=(5, 9, 3))
    found = load(f"domains:{colour}+digits")
    assert found.input_shape == (3, 8, 8)  # 64 pixels are more than 45
    grey = found.train.inputs[200:]
    assert np.array_equal(grey[:, 0], grey[:, 1])
    assert np.array_equal(grey[:, 0], grey[:, 2])
    image = Image.fromarray(load(colour).train.inputs[3].transpose(1, 2, 0)).resize((8, 8), Image.Resampling.BILINEAR)
    assert np.array_equal(found.train.inputs[3].transpose(1, 2, 0), np.asarray(image))
    assert "grey images with three equal channels: digits" in found.note
    smaller = load(f"domains:{colour}+digits:size=6x4:records=50")
    assert (smaller.input_shape, len(smaller.train), len(smaller.test)) == ((3, 4, 6), 100, 120)


def test_names_of_domains(both: str) -> None:
    assert parts_of("domains:mnist+csv%3Aa%2Bb.csv%3Alabel%3Dx:records=5") == ("mnist", "csv:a+b.csv:label=x")
    table = with_overrides({}, ["data=domains:mnist+digits", "data.records=1000", "data.size=8x8"])
    name = experiment_from(table).data
    assert own_name(name) == own_name("domains:mnist+digits:records=1000:size=8x8")
    assert experiment_from({"data": {"kind": "domains", "place": "mnist+digits", "records": 1000, "size": "8x8"}}).data
    assert (is_own(name), is_own(both), is_own("mnist")) == (False, True, False)
    assert data_label("domains:mnist+digits") == "MNIST + digits"
    assert data_label(name).startswith("MNIST + digits [")
    assert tuned_on("domains:mnist+cifar100+digits").count("by this project: ") == 2
    assert "on training records of digits by this project: the number of" in tuned_on("domains:mnist+digits")


def test_digests_cover_every_part(tmp_path: Path) -> None:
    names = [write_npz(tmp_path / name) for name in ("a.npz", "bb.npz")]
    whole = f"domains:digits+{'+'.join(names)}"
    before = [fingerprint(whole, None), content_of(whole, None)]
    assert content_of(f"{whole}:records=20", None) == before[1]
    assert content_of(f"domains:{names[1]}+digits+{names[0]}", None) == before[1]
    for place, name in enumerate(names):
        write_npz(tmp_path / ("a.npz", "bb.npz")[place], (200, 61))
        now = [fingerprint(whole, None, with_test=True), content_of(whole, None)]
        assert len(load(name).test) == 61
        assert now[0] != before[0]
    arrays = dict(np.load(tmp_path / "bb.npz"))
    arrays["x_train"][0, 0, 0] ^= 1
    np.savez(tmp_path / "bb.npz", **arrays)
    assert content_of(whole, None) != before[1]
    experiment = experiment_from({"data": whole})
    assert identity_of(experiment, None).records == fingerprint(whole, None, with_test=True)
    assert identity_of(experiment_from({"data": "domains:digits+mnist"}), None).records == ""


def test_every_part_is_verified(both: str, tmp_path: Path) -> None:
    assert verify(both).ok
    (tmp_path / "own.npz").write_bytes(b"no archive")
    assert not verify(both).ok


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("domains:digits", r"must join two data sets or more, such as domains:mnist\+digits"),
        ("domains:digits+", "must join two data sets or more"),
        ("domains:digits+digits", "names digits twice"),
        ("domains:Digits+digits", r"unknown data set 'Digits' \(did you mean 'digits'\?\)"),
        ("domains:digits+npz:none.npz", r"npz:none\.npz: there is no file .*none\.npz; correct the path"),
        ("domains:digits+domains%3Amnist", "joins domains:mnist, which has parts itself: list all parts"),
        ("domains:digits+{table}", "the records of npz:.* are not images: join images only"),
        ("domains:digits+{wide}", "images must have 1 or 3 channels, and those of npz:.* have 4"),
        ("domains:digits+{few}", r"different numbers of classes \(10 of digits, 4 of npz:"),
        ("domains:digits+{own}:records=201", r"data\.records = '201': .* from 1 to 200, .* training records of npz:"),
        ("domains:digits+{own}:records=0", r"data\.records = '0'"),
        ("domains:digits+{own}:size=8", r"data\.size = '8': write WIDTHxHEIGHT"),
        ("domains:{named}+{other}", "has the classes 0, 1, .*, and npz:.* has a, b, .*: name and order them alike"),
        ("domains:digits+{own}:label=x", r"unknown setting data\.label of domains data; valid: size, records"),
    ],
)
def test_parts_that_make_no_task_are_refused(tmp_path: Path, name: str, message: str) -> None:
    own = write_npz(tmp_path / "own.npz")
    made = {
        "own": own,
        "few": write_npz(tmp_path / "few.npz", classes=4),
        "wide": write_npz(tmp_path / "wide.npz", shape=(6, 6, 4)),
        "table": f"npz:{tmp_path / 'table.npz'}",
        "named": own.replace(":", "%3A") + "%3Aclasses%3D10",
        "other": own.replace(":", "%3A") + "%3Aclasses%3Da,b,c,d,e,f,g,h,i,j",
    }
    labels = np.arange(40) % 10
    np.savez(tmp_path / "table.npz", x_train=np.zeros((40, 3)), y_train=labels, x_test=np.zeros((40, 3)), y_test=labels)
    with pytest.raises(UserError, match=message):
        load(name.format(**made))


def made(**given: Any) -> Any:
    table = {"data": "domains:digits+digits", "model": "logistic", "rounds": 2, "clients": 4, "partition": "domain"}
    return experiment_from({**table, **given})


def test_a_private_run_takes_public_sets_as_they_are_and_no_others(
    both: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FL_SIM_OFFLINE", "1")
    monkeypatch.delenv("FL_SIM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    private = {"aggregator": {"kind": "global-dp", "noise_multiplier": 1.0}}
    with pytest.raises(UserError, match=r"This run's ledger would not include .*: join public data sets only"):
        job_of(made(data=both, **private))
    write_npz(tmp_path / "mnist.npz", shape=(28, 28))
    job = job_of(made(data="domains:digits+mnist", **private), tmp_path)  # without evaluate.test_is_public
    assert len(job.dataset.train) == 400
    assert "mnist: 200 of 60,000 training images" in job.dataset.note
    with pytest.raises(UserError, match=r"mnist was not found in .*; it was not downloaded because FL_SIM_OFF"):
        load("domains:digits+mnist", tmp_path / "elsewhere")


def test_a_run_measures_each_client_on_its_own_domain_and_resumes(both: str, tmp_path: Path) -> None:
    experiment = made(data=both, evaluate={"clients": "own"})
    job = job_of(experiment)
    groups = job.dataset.test.groups
    assert groups is not None
    assert [set(groups[part].tolist()) for part in job.own_tests] == [{0}, {1}, {0}, {1}]
    assert sorted(job.own_tests.records.tolist()) == list(range(120))
    whole = run(experiment, tmp_path / "whole")
    run(made(data=both, evaluate={"clients": "own"}, rounds=1), tmp_path / "parts")
    longer = run(experiment, tmp_path / "parts")
    assert longer["final_accuracy"] == whole["final_accuracy"]
    assert longer["personal"] == whole["personal"]
    by_client, by_source = whole["personal"]["by_client"]["own"], whole["personal"]["by_source"]
    assert list(by_source) == ["digits", "npz:own.npz"]
    for place, accuracies in enumerate(by_source.values()):
        assert accuracies["own_accuracy"] == pytest.approx((by_client[place] + by_client[place + 2]) / 2)
    assert whole["measures"]["client_accuracy_is"] == "accuracy on each client's own test records"
    drawn = job_of(made(data=both, evaluate={"clients": "class-shares"}))
    assert [set(groups[part].tolist()) for part in drawn.own_tests] == [{0}, {1}, {0}, {1}]
