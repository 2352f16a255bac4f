"""MedMNIST's npz files: one class an image is taken, several labels, volumes and other targets are refused."""

import numpy as np
import pytest

from fl_sim.data import load
from fl_sim.errors import UserError


def written(folder, **changes):
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 6), ("val", 2), ("test", 3)):
        arrays[f"{part}_images"] = rng.integers(0, 256, (count, 28, 28, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = (np.arange(count) % 2).astype(np.uint8)[:, np.newaxis]
    np.savez(folder / "pathmnist.npz", **{**arrays, **changes})
    return f"medmnist:{folder}/pathmnist.npz", arrays


def test_images_and_labels_come_back_and_validation_is_left_out_aloud(tmp_path):
    name, arrays = written(tmp_path)
    found = load(name)
    np.testing.assert_array_equal(found.train.inputs, arrays["train_images"].transpose(0, 3, 1, 2))
    assert found.test.labels.tolist() == [0, 1, 0]
    assert found.note == "its 2 validation images are left out"
    both = load(f"{name}:val=train")
    assert len(both.train) == 8
    assert both.note == "its 2 validation images are trained on, too"
    kept = load(f"{name}:val=validate")
    assert kept.validation is not None
    assert (len(kept.train), len(kept.validation), kept.note) == (6, 2, "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": np.zeros((6, 14), np.uint8)}, r"train_labels has 14 labels an image \(multi-label"),
        ({"test_labels": np.zeros((3, 1))}, r"wanted is one class an image.*\(regression\) are not supported"),
        ({"train_images": np.zeros((6, 28, 28, 28), np.uint8)}, r"volumes \(MedMNIST's 3D sets\) are not supported"),
        ({"train_images": np.zeros((6, 28), np.float32)}, "wanted are uint8 images"),
        ({"x_train": np.zeros(3)}, "x_train, which nothing reads"),
    ],
)
def test_what_is_no_image_with_one_class_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        load(written(tmp_path, **changes)[0])


def test_an_unknown_use_and_another_file_are_refused(tmp_path):
    name, _ = written(tmp_path)
    with pytest.raises(UserError, match=r"data\.val = 'tran' \(did you mean 'train'\?\)"):
        load(f"{name}:val=tran")
    np.savez(tmp_path / "own.npz", x_train=np.zeros(3))
    with pytest.raises(UserError, match=r"lacks train_images, .*; it holds x_train"):
        load(f"medmnist:{tmp_path}/own.npz")


def test_channels_first_are_told_as_such_not_as_volumes(tmp_path):
    for shape, message in (((6, 3, 28, 28), "looks like channels first"), ((6, 28, 28, 28), "volumes")):
        name, _ = written(tmp_path, train_images=np.zeros(shape, np.uint8))
        with pytest.raises(UserError, match=message):
            load(name)
