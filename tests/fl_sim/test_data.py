"""Names, roots and the embedded set; real sets where $FL_SIM_DATA has them."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fl_sim.data import NAMES, DataSource, find, load, roots, tuned_on, verify
from fl_sim.data.reading import read
from fl_sim.errors import UserError
from fl_sim.types import records_of

REAL_ROOT = os.environ.get("FL_SIM_DATA")


@pytest.fixture(autouse=True)
def no_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("FL_SIM_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FL_SIM_DATA", raising=False)


def real(name):
    if REAL_ROOT is None:
        pytest.skip("FL_SIM_DATA is not set: no real data sets here")
    if find(name, Path(REAL_ROOT)) is None:
        pytest.skip(f"$FL_SIM_DATA holds no {name}")
    return load(name, Path(REAL_ROOT))


def write_npz(path, num_train=4, **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (num_train, 28, 28), dtype=np.uint8), "y_train": np.arange(num_train) % 10,
        "x_test": rng.integers(0, 256, (2, 28, 28), dtype=np.uint8), "y_test": np.arange(2),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{**arrays, **changes})
    return arrays


def test_digits_are_embedded_and_always_the_same():
    digits = load("digits")
    assert (len(digits.train), len(digits.test), digits.num_classes, digits.input_shape) == (1437, 360, 10, (1, 8, 8))
    assert digits.train.inputs.dtype == np.uint8
    assert digits.train.inputs.max() == 255
    assert digits.train.inputs.sum(dtype=np.int64) == 7_162_982
    assert digits.train.labels[:12].tolist() == [3, 9, 1, 3, 1, 9, 4, 4, 2, 8, 3, 5]
    assert digits.test.labels[:12].tolist() == [7, 6, 3, 7, 7, 3, 2, 8, 9, 3, 2, 6]
    assert np.bincount(digits.train.labels).tolist() == [142, 146, 142, 146, 145, 145, 145, 143, 139, 144]


def test_digits_are_those_of_scikit_learn():
    values, labels = load_digits(return_X_y=True)
    parts = train_test_split(np.arange(len(labels)), test_size=360, stratify=labels, random_state=0)
    for examples, part in zip((load("digits").train, load("digits").test), parts, strict=True):
        assert np.array_equal(examples.inputs.reshape(-1, 64), np.rint(values[part] * (255 / 16)))
        assert np.array_equal(examples.labels, labels[part])


def test_digits_constants_are_those_of_the_training_part():
    digits = load("digits")
    values = digits.train.inputs / 255
    assert digits.mean == pytest.approx((values.mean(),), abs=5e-5)
    assert digits.std == pytest.approx((values.std(),), abs=5e-5)


def test_a_data_set_is_read_once_per_process():
    assert load("digits") is load("digits")


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("mnist", 1e-4), ("fashion-mnist", 1e-4), ("cifar10", 1e-4), ("cifar100", 2e-3)],  # of cifar100 a part is here
)
def test_published_constants_are_those_of_the_real_training_images(name, tolerance):
    dataset = real(name)
    pixels = np.arange(256) / 255
    for channel, (mean, std) in enumerate(zip(dataset.mean, dataset.std, strict=True)):
        chunks = np.array_split(dataset.train.inputs[:, channel], 20)
        share = sum(np.bincount(chunk.ravel(), minlength=256) for chunk in chunks) / dataset.train.inputs[:, 0].size
        actual = (share * pixels).sum()
        assert mean == pytest.approx(actual, abs=tolerance)
        assert std == pytest.approx(np.sqrt((share * (pixels - actual) ** 2).sum()), abs=tolerance)


def test_the_superclasses_of_cifar100_are_those_that_its_files_name():
    coarse, fine = real("cifar100-coarse"), real("cifar100")
    with np.load(Path(REAL_ROOT) / "cifar100.npz") as published:
        of_class = published["fine_to_coarse"]
    for part, finer in ((coarse.train, fine.train), (coarse.test, fine.test)):
        assert np.array_equal(part.labels, of_class[finer.labels])
        assert part.inputs is finer.inputs or np.array_equal(part.inputs[:50], finer.inputs[:50])
    assert (coarse.num_classes, coarse.name) == (20, "cifar100-coarse")
    assert np.unique(of_class, return_counts=True)[1].tolist() == [5] * 20
    assert not np.array_equal(fine.train.labels, coarse.train.labels)


def test_superclasses_are_read_from_the_files_of_the_classes(tmp_path):
    images = np.zeros((100, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "cifar100.npz", x_train=images, y_train=np.arange(100), x_test=images[:2], y_test=[0, 99])
    dataset = load("cifar100-coarse", tmp_path)
    assert dataset.train.labels[[0, 4, 15, 72, 95]].tolist() == [4, 0, 11, 0, 0]  # apple; beaver, camel, seal, whale
    assert dataset.test.labels.tolist() == [4, 13]  # apple, worm
    assert (dataset.num_classes, dataset.note) == (20, load("cifar100", tmp_path).note)
    assert find("cifar100-coarse", tmp_path) == find("cifar100", tmp_path)
    assert [records_of(name) for name in ("cifar100-coarse", "cifar100", "digits", "npz:a")] == [
        "cifar100", "cifar100", "digits", "npz:a",
    ]  # fmt: skip


def test_mnist_is_the_official_one_mapped_in_well_under_a_second():
    real("mnist")
    started = time.process_time()
    mnist = read("mnist", find("mnist", Path(REAL_ROOT)))  # unlike load, this reads anew
    assert time.process_time() - started < 1  # of this process: to read and scale all of it takes several
    assert mnist.note == ""
    assert (len(mnist.train), len(mnist.test)) == (60_000, 10_000)
    assert mnist.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert not mnist.train.inputs.flags.writeable  # a memory map
    assert mnist.train.take(np.array([0])).inputs.flags.writeable  # a copy
    assert verify("mnist", Path(REAL_ROOT)).ok


def test_the_note_of_a_copy_says_how_it_differs(tmp_path):
    write_npz(tmp_path / "mnist.npz", jpeg_train=np.array([0]), jpeg_test=np.array([], dtype=int))
    copy = "83.3 % lossless copy (1 images decoded from JPEG)"
    assert load("mnist", tmp_path).note == f"{copy}; 4 of 60,000 training images; 2 of 10,000 test images"


def test_roots_are_the_given_one_then_the_environment_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FL_SIM_DATA", str(tmp_path / "env"))
    expected = [tmp_path / "given", tmp_path / "env", tmp_path / "cache" / "fl-sim"]
    assert [root.path for root in roots(tmp_path / "given")] == expected
    assert [root.path for root in roots(None)] == expected[1:]
    assert [root.path for root in roots(tmp_path / "env")] == expected[1:]


def test_the_first_root_that_has_the_set_wins(monkeypatch, tmp_path):
    monkeypatch.setenv("FL_SIM_DATA", str(tmp_path / "env"))
    write_npz(tmp_path / "cache" / "fl-sim" / "mnist.npz")
    assert find("mnist", tmp_path / "given") == DataSource("npz", tmp_path / "cache" / "fl-sim" / "mnist.npz")
    write_npz(tmp_path / "env" / "mnist.npz")
    assert find("mnist", tmp_path / "given") == DataSource("npz", tmp_path / "env" / "mnist.npz")
    write_npz(tmp_path / "given" / "mnist.npz")
    assert find("mnist", tmp_path / "given") == DataSource("npz", tmp_path / "given" / "mnist.npz")


@pytest.mark.parametrize("file", ["fashion-mnist.npz", "fashion_mnist.npz"])
def test_fashion_mnist_is_found_under_both_spellings(tmp_path, file):
    write_npz(tmp_path / file)
    assert load("fashion-mnist", tmp_path).note == "4 of 60,000 training images; 2 of 10,000 test images"


def test_a_missing_set_names_files_places_and_the_embedded_alternative(tmp_path):
    (tmp_path / "MNIST/raw").mkdir(parents=True)
    (tmp_path / "MNIST/raw/train-images-idx3-ubyte").touch()
    with pytest.raises(UserError) as caught:
        load("mnist", tmp_path)
    message = str(caught.value)
    assert f"{tmp_path} (--data-root, which lacks MNIST/raw/train-labels-idx1-ubyte, MNIST/raw/t10k" in message
    assert f"{tmp_path}/cache/fl-sim (the user's cache, no such directory)" in message
    assert "put MNIST/raw/{train-images-idx3-ubyte, " in message
    assert "or mnist.npz (x_train, y_train, x_test, y_test), into one of these directories" in message
    assert "data=digits" in message
    assert "FL_SIM_OFFLINE" in message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fashion_mnist", r"unknown data set 'fashion_mnist' \(did you mean 'fashion-mnist'\?\); valid: digits, mnist"),
        ("imagenet", "unknown data set 'imagenet'; valid: .*, diabetes, csv:PATH, parquet:PATH, npz:PATH"),
        ("npz:", "unknown data set 'npz:'"),
        ("npz:/nowhere/x.npz", "there is no file /nowhere/x.npz"),
        ("folder:/nowhere", "there is no folder /nowhere"),
    ],
)
def test_names_that_are_wrong_are_refused_with_what_is_right(name, message):
    with pytest.raises(UserError, match=message):
        load(name)


def test_verify_reports_what_is_missing_or_damaged_without_raising(tmp_path):
    missing = verify("svhn", tmp_path)
    assert not missing.ok
    assert "svhn was not found" in missing.problems[0]
    write_npz(tmp_path / "mnist.npz")
    assert verify("mnist", tmp_path).ok
    content = bytearray((tmp_path / "mnist.npz").read_bytes())
    content[1000] ^= 0xFF  # a pixel of x_train: only the checksum can tell
    (tmp_path / "mnist.npz").write_bytes(content)
    assert verify("mnist", tmp_path).problems == (
        f"{tmp_path}/mnist.npz: x_train.npy does not match its checksum; fetch or write the file again",
    )


def test_every_name_is_documented_in_the_message_for_unknown_ones():
    with pytest.raises(UserError) as caught:
        load("nonsense")
    assert all(name in str(caught.value) for name in NAMES)


def test_choices_made_on_training_records_are_named():
    for name in ("mnist", "digits"):
        assert tuned_on(name).startswith(" Choices made beforehand on these training records")
    assert "generators" in tuned_on("mnist")
    assert "PATE" in tuned_on("mnist")
    assert tuned_on("npz:mnist.npz") == tuned_on("svhn") == ""
    assert "gaussian" in tuned_on("cifar10")
    assert "Global DP" in tuned_on("fashion-mnist")
    assert "warped" in tuned_on("fashion-mnist")
    assert all("whitened-scattering" in tuned_on(name) for name in ("mnist", "cifar10"))


@pytest.mark.parametrize("name", ["9" * 5000, "npz:" + "9" * 5000, "folder:" + "9" * 5000, f"{'m' * 5000}:f"])
def test_a_refusal_quotes_no_more_of_a_name_than_anybody_reads(name):
    with pytest.raises(UserError) as caught:
        load(name)
    assert len(str(caught.value)) < 2000
