"""The official layouts, all on small generated files (labelled so in their notes), image folders, and the download."""

import hashlib
import importlib
import pickle
import struct

import numpy as np
import pytest
from scipy.io import savemat

from fl_sim.data import find, load, verify
from fl_sim.data.naming import KNOWN
from fl_sim.errors import UserError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 28, 28), dtype=np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9], dtype=np.uint8)


@pytest.fixture(autouse=True)
def no_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("FL_SIM_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FL_SIM_DATA", raising=False)


@pytest.fixture
def datasets():
    """torchvision's: importing it takes longer than all tests of this file, and every worker imports the file."""
    return importlib.import_module("torchvision.datasets")


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(root):
    raw = root / "MNIST/raw"
    raw.mkdir(parents=True)
    for split, number in (("train", 6), ("t10k", 2)):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(IMAGES[:number]))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(LABELS[:number]))
    return raw


def test_idx_files_are_mapped_as_written(tmp_path):
    write_mnist(tmp_path)
    mnist = load("mnist", tmp_path)
    np.testing.assert_array_equal(mnist.train.inputs, IMAGES[:, np.newaxis])
    assert mnist.train.labels.tolist() == [3, 1, 4, 1, 5, 9]
    assert mnist.test.labels.tolist() == [3, 1]
    assert mnist.note == "6 of 60,000 training images; 2 of 10,000 test images"


def test_verify_tells_a_generated_mnist_from_the_published_one(tmp_path):
    write_mnist(tmp_path)
    check = verify("mnist", tmp_path)
    assert not check.ok
    assert len(check.problems) == 4
    assert "official file has 6bbc9ace898e44ae57da46a324031adb" in check.problems[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(IMAGES)[:-1], "train-images-idx3-ubyte is truncated: 4719 bytes, expected 4720"),
        (idx(IMAGES)[:9], "train-images-idx3-ubyte is truncated: 9 bytes, expected 16"),
        (idx(IMAGES) + b"x", "train-images-idx3-ubyte is too long: 4721 bytes, expected 4720"),
        (b"", "train-images-idx3-ubyte is no idx file of bytes with 3 dimensions"),
        (b"\x1f\x8b\x08\x00" + bytes(40), r"starts with 0x1f8b0800, not 0x00000803"),
        (idx(IMAGES[:0]), r"train-images-idx3-ubyte holds no records \(shape \(0, 28, 28\)\)"),
        (idx(IMAGES[:5]), "6 training labels and 5 records"),
        (idx(IMAGES[:, :14]), r"shape \(1, 14, 28\), but mnist is uint8 of shape \(1, 28, 28\)"),
    ],
)
def test_damaged_idx_files_are_refused_with_file_and_sizes(tmp_path, content, message):
    (write_mnist(tmp_path) / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load("mnist", tmp_path)


def write_cifar10(root):
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    pixels = RNG.integers(0, 256, (12, 3072), dtype=np.uint8)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for number, name in enumerate(names):
        part = {"data": pixels[2 * number : 2 * number + 2], "labels": [number, 9]}
        (folder / name).write_bytes(pickle.dumps(part))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    return folder, pixels


def test_cifar_batches_that_are_not_the_published_ones_are_refused_before_they_are_unpickled(tmp_path):
    folder, _ = write_cifar10(tmp_path)
    opened = tmp_path / "opened"

    class Trap:
        def __reduce__(self):
            return (opened.touch, ())

    (folder / "data_batch_1").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UserError, match="cifar-10-batches-py: a file differs from the published file"):
        load("cifar10", tmp_path)
    assert not opened.exists()
    assert "official file has c99cafc152244af753f735de768cd75f" in verify("cifar10", tmp_path).problems[0]


def test_cifar_batches_are_read_channels_first(tmp_path, monkeypatch, datasets):
    folder, pixels = write_cifar10(tmp_path)
    md5 = {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    cifar = datasets.CIFAR10
    monkeypatch.setattr(cifar, "train_list", [[name, md5[name]] for name in sorted(md5) if name.startswith("data")])
    monkeypatch.setattr(cifar, "test_list", [["test_batch", md5["test_batch"]]])
    monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": md5["batches.meta"]})
    dataset = load("cifar10", tmp_path)
    np.testing.assert_array_equal(dataset.train.inputs, pixels[:10].reshape(10, 3, 32, 32))
    assert dataset.train.labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert dataset.test.labels.tolist() == [5, 9]
    assert verify("cifar10", tmp_path).ok


def write_svhn(root, **changes):
    pixels = RNG.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    for split in ("train", "test"):
        content = {"X": pixels, "y": np.array([[1], [10], [9], [2]], dtype=np.uint8), **changes}
        savemat(root / f"{split}_32x32.mat", {name: value for name, value in content.items() if value is not None})
    return pixels


def test_generated_svhn_files_are_read_with_label_ten_as_the_digit_zero(tmp_path):
    pixels = write_svhn(tmp_path)
    svhn = load("svhn", tmp_path)
    assert svhn.train.labels.tolist() == [1, 0, 9, 2]
    assert svhn.input_shape == (3, 32, 32)
    np.testing.assert_array_equal(svhn.train.inputs[2, 1], pixels[:, :, 1, 2])
    assert svhn.note == "4 of 73,257 training images; 4 of 26,032 test images"
    assert "official file has e26dedcc434d2e4c54c9b2d4a06d8373" in verify("svhn", tmp_path).problems[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": None}, "train_32x32.mat has no array 'y'"),
        ({"X": np.zeros((32, 32, 3))}, r"X is float64 \(32, 32, 3\)"),
        ({"y": np.ones((3, 1), dtype=np.uint8)}, "3 training labels and 4 records"),
    ],
)
def test_svhn_files_of_another_layout_are_refused(tmp_path, changes, message):
    write_svhn(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        load("svhn", tmp_path)


@pytest.mark.parametrize("keep", [0, 100, 2000])
def test_a_truncated_svhn_file_is_refused_by_name(tmp_path, keep):
    write_svhn(tmp_path)
    file = tmp_path / "train_32x32.mat"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"train_32x32.mat (is no readable|has no array)"):
        load("svhn", tmp_path)


def test_a_missing_set_is_downloaded_into_the_given_root(tmp_path, monkeypatch, datasets, capsys):
    monkeypatch.delenv("FL_SIM_OFFLINE")

    def download(root, *, download):
        assert download
        print("torchvision talks")
        write_mnist(root)

    monkeypatch.setattr(datasets, "MNIST", download)
    assert len(load("mnist", tmp_path / "new").train) == 6
    assert find("mnist", tmp_path / "new").path == tmp_path / "new"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("error", [OSError("name or service not known"), RuntimeError("Tried\n two mirrors")])
def test_a_failed_download_says_why_and_what_to_do(tmp_path, monkeypatch, datasets, error):
    monkeypatch.delenv("FL_SIM_OFFLINE")

    def download(root, *, download, split):
        raise error

    monkeypatch.setattr(datasets, "SVHN", download)
    with pytest.raises(UserError) as caught:
        load("svhn", tmp_path)
    assert " ".join(str(error).split()) in str(caught.value)
    assert "put train_32x32.mat, test_32x32.mat, or svhn.npz" in str(caught.value)
    assert "data=digits" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_torchvision_still_has_every_class_and_file_we_name(datasets):
    for known in KNOWN.values():
        assert not known.torchvision_class or hasattr(datasets, known.torchvision_class)
        assert bool(known.merged) == bool(known.finer)
    for name in ("cifar10", "cifar100", "cifar100-coarse"):
        cls = getattr(datasets, KNOWN[name].torchvision_class)
        files = [file for file, _ in (*cls.train_list, *cls.test_list)] + [cls.meta["filename"]]
        assert [f"{cls.base_folder}/{file}" for file in files] == list(KNOWN[name].files)
