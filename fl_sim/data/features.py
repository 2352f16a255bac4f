"""Replaces images by feature vectors, such as scattering coefficients, and caches them in a file.

The name of a cache file (fl_sim.data.kept) contains a digest of the records and the version of the transform.
"""

import hashlib
import math
from dataclasses import replace
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.kept import Arrays, cache_root, kept_arrays
from fl_sim.data.naming import is_own
from fl_sim.errors import UserError
from fl_sim.types import Dataset, Examples

Features: TypeAlias = Literal[
    "none", "scattering", "whitened-scattering", "scattering-maps",
    "root-scattering-maps", "mirrored-scattering", "mirrored-whitened-scattering", "mirrored-scattering-maps",
    "mirrored-root-scattering-maps",
]  # fmt: skip
"""The representation of images: pixels ("none"), scattering features, or whitened features (fl_sim.data.scattering).

"scattering-maps": all scattering maps, whitened. "root-scattering-maps": the square roots of these maps, whitened
(fl_sim.data.scattering_maps). With the prefix "mirrored-", each map is the mean of a map of the image and the same map
of its mirror image.
"""

Vectors: TypeAlias = NDArray[np.float32]

_VERSION: Final = {
    "scattering": 1, "whitened-scattering": 1, "scattering-maps": 1, "root-scattering-maps": 1,
    "mirrored-scattering": 1, "mirrored-whitened-scattering": 1, "mirrored-scattering-maps": 1,
    "mirrored-root-scattering-maps": 1,
}  # fmt: skip
"""The version of each transform. Increase it when the results of the transform change.

Old cache files are then ignored.
"""

_MIRRORED: Final = "mirrored-"
_MAPS, _ROOT_MAPS = "scattering-maps", "root-scattering-maps"

_FILE: Final = "features.safetensors"
_PARTS: Final = ("train", "test")


def version_of(features: Features) -> str:
    """Return the name and version of a transform of images, such as ``scattering-1``; "" for "none"."""
    return "" if features == "none" else f"{features}-{_VERSION[features]}"


def as_features(dataset: Dataset, features: Features, records: str) -> Dataset:
    """Replace the images of ``dataset`` by feature vectors of shape (records, numbers), each of L2 norm at most 1.

    The function sets ``Dataset.std`` to 1 / sqrt(numbers). Models receive the features divided by ``std``, which have a
    standard deviation of about 1. ``records``: a digest of all records of ``dataset``, for the name of the cache file.
    Raises UserError for records that are no images or have an unsuitable size, RunError if the cache file cannot be
    written.
    """
    if features == "none":
        return dataset
    from fl_sim.data import scattering, scattering_maps  # noqa: PLC0415 (torch and scipy: settings need neither)

    scattering.check_shape(dataset.input_shape, features)
    kind, mirrored = _without_prefix(features)
    size_of = scattering_maps.num_numbers if kind in {_MAPS, _ROOT_MAPS} else scattering.dimension_of
    size = size_of(dataset.input_shape, mirrored=mirrored)
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

    If the file is missing or damaged, all features are computed and written into it. ``size``: the number of features
    of a record.
    """
    identity = hashlib.sha256(f"{version_of(features)} {records}".encode()).hexdigest()
    folder = cache_root() / f"{dataset.name.partition(':')[0]}-{version_of(features)}-{identity[:20]}"
    shapes = [(len(dataset.train), size), (len(dataset.test), size)]
    count = len(dataset.train) + len(dataset.test)
    made = kept_arrays(
        folder / _FILE,
        _PARTS,
        identity,
        lambda: {part: vectors_of(getattr(dataset, part).inputs, features) for part in _PARTS},
        lambda found: [found[part].shape for part in _PARTS] == shapes and _is_float32(found),
        f"the {features} features of {count:,} images",
        private=is_own(dataset.name),  # features of the user's own records are private
    )
    return made["train"], made["test"]


def _is_float32(arrays: Arrays) -> bool:
    return all(array.dtype == np.float32 for array in arrays.values())


def vectors_of(images: NDArray[np.uint8] | Vectors, features: Features) -> Vectors:
    """Compute the features of ``images`` (n, channels, height, width), shape (n, numbers), without the cache file."""
    from fl_sim.data.scattering import features_of, whitening_of  # noqa: PLC0415 (as above)
    from fl_sim.data.scattering_maps import maps_of  # noqa: PLC0415 (as above)

    kind, mirrored = _without_prefix(features)
    if kind in {_MAPS, _ROOT_MAPS}:
        return maps_of(images, mirrored=mirrored, root=kind == _ROOT_MAPS)
    vectors = features_of(images, mirrored=mirrored)
    if kind == "scattering":
        return vectors
    assert kind == "whitened-scattering", kind
    channels, height, width = images.shape[1:]
    return whitening_of((channels, height, width), mirrored=mirrored).of(vectors)


def _without_prefix(features: Features) -> tuple[str, bool]:
    """Return the name of the features without the prefix "mirrored-", and True if the name has this prefix."""
    return features.removeprefix(_MIRRORED), features.startswith(_MIRRORED)
