"""Images that were found for synthetic feature vectors: kept in a file beside the pool, and told from real records.

Which records they are for is decided here; how they are found is the caller's, as the transform belongs to the data.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fl_sim.report.figures.samples import Samples
from fl_sim.report.runs import Run
from fl_sim.store.files import write_whole

PICTURES: Final = "synthetic-pictures.safetensors"

Images: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.float32]]
"""Images, (records, channels, height, width), and how far their features are from the vectors.

The distances, (records,), are in units of the vectors' own lengths.
"""

Finder: TypeAlias = Callable[[Run, NDArray[np.float32]], Images]
"""Finds images for vectors of a run's pool. Raises ValueError where that is not possible."""

_VERSION: Final = 1
"""To be raised when other images are found than before."""

_LARGEST: Final = 2**28  # bytes


def is_in_features(run: Run) -> bool:
    """Say whether the synthetic records of ``run`` are feature vectors of images."""
    return run.config.features != "none"


def some_vectors(samples: Samples, classes: int, each: int) -> Samples:
    """Return ``samples`` with the vectors alone that images are for: of so many ``classes`` so many records ``each``.

    Raises ValueError where they are no vectors.
    """
    if samples.inputs.ndim != 2 or samples.inputs.dtype != np.float32:
        raise ValueError(f"records of shape {samples.inputs.shape[1:]} are no feature vectors")
    firsts = [samples.first(label, each) for label in range(min(classes, samples.num_classes))]
    places = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *firsts]))
    return replace(samples, inputs=samples.inputs[places], places=places)


def kept_images(run: Run, samples: Samples) -> Images | None:
    """Return the images that were found before for these vectors; None where there are none, or others, or damaged."""
    path = run.path / PICTURES
    if not path.is_file() or path.stat().st_size > _LARGEST:
        return None
    try:
        with safe_open(path, "np") as file:
            said = file.metadata() or {}
            images, distances = file.get_tensor("images"), file.get_tensor("distances")
    except (OSError, SafetensorError):
        return None
    fits = images.ndim == 4 and images.dtype == np.uint8 and distances.dtype == np.float32
    if not fits or not len(images) == len(distances) == len(samples.places):
        return None
    is_whole = said.get("pool") == _identity(run, samples) and said.get("sha256") == _digest(images, distances)
    return (images, distances) if is_whole else None


def keep_images(run: Run, samples: Samples, found: Images) -> None:
    """Write the images beside the pool. Raises OSError."""
    images, distances = found
    said = {"pool": _identity(run, samples), "sha256": _digest(images, distances)}
    write_whole(run.path / PICTURES, save({"images": images, "distances": distances}, said))


def in_words(distances: list[float]) -> list[str]:
    """Return what a reader must know of such images: how near they are, run by run, and that they are nobody's."""
    least, most = f"{min(distances):.2f}", f"{max(distances):.2f}"
    far = least if least == most else f"{least} to {most}"
    found = "The images were found for synthetic feature vectors: pixels were changed until their features came close"
    return [
        f"{found} (mean distance {far} of the vectors' own length).",
        "They are no records of anybody, and cost no privacy beyond the vectors' own: nothing else was looked at.",
    ]


def _identity(run: Run, samples: Samples) -> str:
    """Return a digest that is another one when the pool has changed."""
    digest = hashlib.sha256(f"{_VERSION} {run.config.features} {samples.inputs.shape}".encode())
    digest.update(np.ascontiguousarray(samples.places).data)
    digest.update(np.ascontiguousarray(samples.inputs).data)
    return digest.hexdigest()


def _digest(images: NDArray[np.uint8], distances: NDArray[np.float32]) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(images).data)
    digest.update(np.ascontiguousarray(distances).data)
    return digest.hexdigest()
