"""MedMNIST's npz files (Yang et al. 2023): train_images, train_labels, and the same of val and test."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.checked import own_dataset, with_validation
from fl_sim.data.listed import listed_classes, read_off_classes
from fl_sim.data.naming import OwnName
from fl_sim.data.npz import images_inferred, images_of, read_arrays
from fl_sim.errors import UserError
from fl_sim.mistakes import guess
from fl_sim.types import Dataset, Examples

ARRAYS: Final = ("train_images", "train_labels", "val_images", "val_labels", "test_images", "test_labels")
_USES: Final = ("leave", "train", "validate")


def read(name: str, own: OwnName, path: Path) -> Dataset:
    """Return the images with one label each, normalised by 0.5 and 0.5 as MedMNIST's own programs do.

    ``data.val``: "leave" leaves the validation part out and says so, "train" trains on it, too, "validate" keeps it for
    ``evaluate.validation=given``. Raises UserError for several labels an image, for volumes, and for what is no such
    file.
    """
    use = own.option("val") or "leave"
    if use not in _USES:
        raise UserError(f"data.val = {use!r}{guess(use, _USES)}; valid: {', '.join(_USES)}")
    arrays = read_arrays(path, ARRAYS)
    train, val, test = (
        Examples(
            _images(path, f"{part}_images", arrays[f"{part}_images"]),
            _labels(path, f"{part}_labels", arrays[f"{part}_labels"]),
        )
        for part in ("train", "val", "test")
    )
    if use == "train":
        inputs, labels = (
            np.concatenate([getattr(part, what) for part in (train, val)]) for what in ("inputs", "labels")
        )
        train = Examples(inputs, labels)
    half = (0.5,) * train.inputs.shape[1]
    listed, taken = listed_classes(own), images_inferred(arrays["train_images"].shape)
    made = own_dataset(name, train, test, half, half, str(path), listed=listed)
    made = replace(made, inferred=taken, read_off=read_off_classes(listed))
    if use == "validate":
        return with_validation(made, val, str(path))
    note = f"its {len(val):,} validation images are {'trained on, too' if use == 'train' else 'left out'}"
    return replace(made, note=note)


def _images(path: Path, name: str, array: NDArray[np.generic]) -> NDArray[np.uint8]:
    images = images_of(f"{path}: {name}", array)
    if array.ndim == 4 and array.shape[3] not in {1, 3, 4}:
        raise UserError(f"{path}: {name} has shape {array.shape}: volumes (MedMNIST's 3D sets) are not supported")
    if images.dtype != np.uint8:
        raise UserError(f"{path}: {name} is {array.dtype} of shape {array.shape}; wanted are uint8 images")
    return images.astype(np.uint8, copy=False)


def _labels(path: Path, name: str, array: NDArray[np.generic]) -> NDArray[np.int64]:
    if array.ndim == 2 and array.shape[1] > 1:
        raise UserError(
            f"{path}: {name} has {array.shape[1]} labels an image (multi-label, as ChestMNIST has): these are not "
            "supported, take one of MedMNIST's sets with one class an image"
        )
    if array.dtype.kind not in "iu" or array.ndim not in {1, 2}:
        raise UserError(
            f"{path}: {name} is {array.dtype} of shape {array.shape}: wanted is one class an image, a whole number; "
            "other targets (regression) are not supported"
        )
    return array.reshape(-1).astype(np.int64)
