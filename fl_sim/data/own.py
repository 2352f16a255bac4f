"""The user's own data set by import path: ``data=my_package.sets:hospitals``, a function of the data root."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from fl_sim.data.checked import looks_channels_last, tokens_in, with_validation
from fl_sim.errors import UserError
from fl_sim.import_path import load_object
from fl_sim.own_code import with_place
from fl_sim.seeding import seeded_alone
from fl_sim.types import Dataset, Examples


def read(name: str, data_root: Path | None) -> Dataset:
    """Return what the function at the import path ``name`` makes of ``data_root`` (None where none was given), checked.

    It must return the same ``fl_sim.types.Dataset`` in every process. Raises UserError for anything else.
    """
    factory = load_object(name, "data set")
    if not callable(factory):
        raise UserError(f"data set {name!r} is {type(factory).__name__}, not a function of the data root")
    try:
        with seeded_alone(0, "data set"):
            made = factory(data_root)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"data set {name!r} failed with {with_place(error)}") from error
    if not isinstance(made, Dataset):
        raise UserError(f"data set {name!r} returned {type(made).__name__}, not a fl_sim.types.Dataset")
    _check_dataset(made, f"data set {name!r}")
    return replace(made, name=name)


def _check_dataset(made: Dataset, where: str) -> None:
    validation = () if made.validation is None else (("validation", made.validation),)
    for split, part in (("train", made.train), ("test", made.test), *validation):
        _check(part, made.num_classes, f"{where}, {split}")
        if made.vocabulary:
            tokens_in(f"{where}, {split}", part.inputs.astype(np.int64), made.vocabulary)
    if made.train.inputs.shape[1:] != made.test.inputs.shape[1:] or made.train.inputs.dtype != made.test.inputs.dtype:
        raise UserError(f"{where}: training and test records differ in shape or type")
    channels = made.input_shape[0] if len(made.input_shape) == 3 else 1
    for what, values in (("mean", made.mean), ("std", made.std)):
        if len(values) != channels or not np.isfinite(values).all() or (what == "std" and min(values) <= 0):
            raise UserError(f"{where}: {what} is {values}, wanted are {channels} finite numbers, std above 0")
    with_validation(made, made.validation, where)


def _check(part: Examples, num_classes: int, where: str) -> None:
    inputs, labels = part.inputs, part.labels
    if not (isinstance(inputs, np.ndarray) and isinstance(labels, np.ndarray)):
        raise UserError(f"{where}: inputs and labels must be NumPy arrays")
    is_image, is_table = inputs.dtype == np.uint8 and inputs.ndim == 4, inputs.dtype == np.float32 and inputs.ndim == 2
    if not (is_image or is_table):
        raise UserError(
            f"{where}: inputs are {inputs.dtype} of shape {inputs.shape}; wanted are uint8 images (records, channels, "
            "height, width), or float32 features or tokens (records, numbers)"
        )
    if is_image and looks_channels_last(inputs.shape):
        raise UserError(
            f"{where}: images of shape {inputs.shape} look like channels last; wanted is (records, channels, height, "
            "width): inputs.transpose(0, 3, 1, 2)"
        )
    if labels.dtype != np.int64 or labels.shape != (len(inputs),) or not len(labels):
        raise UserError(
            f"{where}: labels are {labels.dtype} of shape {labels.shape}; wanted is int64, one for each of "
            f"{len(inputs)} records, of which there is at least one"
        )
    if part.groups is not None and (part.groups.dtype != np.int64 or part.groups.shape != labels.shape):
        raise UserError(
            f"{where}: groups are {part.groups.dtype} of shape {part.groups.shape}; wanted is int64, one for each of "
            f"{len(inputs)} records"
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UserError(f"{where}: labels run from {labels.min()} to {labels.max()}, wanted are 0 to {num_classes - 1}")
    if is_table and not np.isfinite(inputs).all():
        raise UserError(f"{where}: {np.count_nonzero(~np.isfinite(inputs).all(axis=1))} records are not finite")
