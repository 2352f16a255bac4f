"""Replaces images by feature vectors, such as scattering coefficients, and caches them in a file.

The cache is in $FL_SIM_FEATURES, or in the user's cache folder if the variable is not set. The name of a cache file
contains a digest of the records and the version of the transform. A damaged file is computed again.
"""

import hashlib
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fl_sim.data.naming import is_own
from fl_sim.errors import UserError
from fl_sim.store.files import folder_lock, readable_os_errors, user_folder, write_whole
from fl_sim.types import Dataset, Examples

Features: TypeAlias = Literal["none", "scattering", "whitened-scattering"]
"""The representation of images: pixels ("none"), scattering features, or whitened features (fl_sim.data.scattering)."""

Vectors: TypeAlias = NDArray[np.float32]

_VERSION: Final = {"scattering": 1, "whitened-scattering": 1}
"""The version of each transform. Increase a version when its transform gives other numbers.

Old cache files are then ignored.
"""

_FILE: Final = "features.safetensors"
_PARTS: Final = ("train", "test")


def features_root() -> Path:
    """Return the cache folder: $FL_SIM_FEATURES if it is set, else a folder in the user's cache folder."""
    return user_folder("FL_SIM_FEATURES", "XDG_CACHE_HOME", "~/.cache", "features")


def version_of(features: Features) -> str:
    """Return the name and version of a transform, such as ``scattering-1``; empty for "none"."""
    return "" if features == "none" else f"{features}-{_VERSION[features]}"


def as_features(dataset: Dataset, features: Features, records: str) -> Dataset:
    """Replace the images of ``dataset`` by feature vectors of shape (records, numbers), each of L2 norm at most 1.

    ``std`` of the result is 1 / sqrt(numbers). Models receive the features divided by ``std``, with a standard
    deviation of about 1. ``records``: a digest of all records of ``dataset``, for the name of the cache file. Raises
    UserError for records that are no images or have an unsuitable size, RunError if the cache file cannot be written.
    """
    if features == "none":
        return dataset
    from fl_sim.data import scattering  # noqa: PLC0415 (torch and scipy: settings need neither)

    size = scattering.dimension_of(dataset.input_shape)
    if dataset.validation is not None:
        raise UserError(
            f"features={features} are computed for training and test images only, and {dataset.name} has validation "
            "records: remove these from the data and set evaluate.validation=0.1, or leave features out"
        )
    train, test = _kept(dataset, features, records, size)
    note = f"{features} features of the images, {size} numbers a record, which look at no other record"
    return replace(
        dataset,
        train=Examples(train, dataset.train.labels, dataset.train.groups),
        test=Examples(test, dataset.test.labels, dataset.test.groups),
        mean=(0.0,),
        std=(1 / math.sqrt(size),),
        note="; ".join(filter(None, [dataset.note, note])),
        image_shape=dataset.input_shape,
    )


def _kept(dataset: Dataset, features: Features, records: str, size: int) -> tuple[Vectors, Vectors]:
    """Return the features of the training and test records from the cache file.

    If the file is missing or damaged, all features are computed and written. ``size``: the number of features of a
    record.
    """
    identity = hashlib.sha256(f"{version_of(features)} {records}".encode()).hexdigest()
    folder = features_root() / f"{dataset.name.partition(':')[0]}-{version_of(features)}-{identity[:20]}"
    private = is_own(dataset.name)  # features of the user's own records are as private as the records
    shapes = (len(dataset.train), size), (len(dataset.test), size)
    with readable_os_errors():
        folder.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        with folder_lock(folder):
            path = folder / _FILE
            for place, mode in ((folder, 0o700), (path, 0o600)) if private else ():  # an earlier version left it open
                if place.exists() and place.stat().st_mode & 0o077 and place.stat().st_uid == os.getuid():
                    place.chmod(mode)
            damaged = ""
            try:
                return _read(path, identity, shapes)
            except FileNotFoundError:
                pass
            except (SafetensorError, UserError, ValueError, KeyError) as error:
                damaged = f"{path} is damaged or of another kind ({error}) and is made again; "
            count = len(dataset.train) + len(dataset.test)
            sys.stderr.write(f"fl-sim: {damaged}making the {features} features of {count:,} images, once\n")
            made = vectors_of(dataset.train.inputs, features), vectors_of(dataset.test.inputs, features)
            said = {"identity": identity, "sha256": _digest(made)}
            write_whole(path, save(dict(zip(_PARTS, made, strict=True)), said), mode=0o600 if private else 0o666)
            return made


def vectors_of(images: NDArray[np.uint8] | Vectors, features: Features) -> Vectors:
    """Compute the features of ``images`` (n, channels, height, width), shape (n, numbers), without the cache."""
    from fl_sim.data.scattering import features_of, whitening_of  # noqa: PLC0415 (as above)

    vectors = features_of(images)
    if features == "scattering":
        return vectors
    channels, height, width = images.shape[1:]
    return whitening_of((channels, height, width)).of(vectors)


def _read(path: Path, identity: str, shapes: tuple[tuple[int, int], tuple[int, int]]) -> tuple[Vectors, Vectors]:
    """Return the features in the cache file ``path``.

    ``identity``: the hash of records and version that the file must contain. Raises FileNotFoundError if the file is
    missing, and another error if the file is damaged.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    with safe_open(path, "np") as file:
        said = file.metadata() or {}
        train, test = (file.get_tensor(part) for part in _PARTS)
    if said.get("identity") != identity or any(part.dtype != np.float32 for part in (train, test)):
        raise ValueError("it holds the features of other records")
    if (train.shape, test.shape) != shapes or said.get("sha256") != _digest((train, test)):
        raise ValueError("its content does not have the stored checksum")
    return train, test


def _digest(parts: tuple[Vectors, Vectors]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()
