"""A folder of images: PATH/train/CLASS/*.png and PATH/test/CLASS/*.png (or .jpg, .tif, .bmp), read with Pillow."""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.checked import own_dataset
from fl_sim.data.naming import OwnName
from fl_sim.data.pictures import Wanted, pixels, stacked, wanted_by
from fl_sim.errors import UserError
from fl_sim.import_path import in_one_line
from fl_sim.types import Dataset, Examples

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp"})


def read(name: str, own: OwnName, path: Path) -> Dataset:
    """Return the images as a data set; classes are train's subfolders, numbered in the order of their names.

    Grey images stay one channel unless any image has colour. Normalised by 0.5 and 0.5, never by statistics of the
    training images: those are the clients' private data. Raises UserError naming the file that cannot be read, has
    another size than the first, or belongs to a class without training images.
    """
    wanted, classes = wanted_by(own), _subfolders(path / "train")
    strangers = sorted(set(_subfolders(path / "test")) - set(classes))
    if strangers:
        raise UserError(f"{path}: test has class {strangers[0]!r}, but train has only {', '.join(classes)}")
    files = [*(train := _files(path / "train", classes)), *_files(path / "test", classes)]
    images = stacked(((str(file), partial(_image, file, wanted)) for file, _ in files), len(files))
    labels = np.array([label for _, label in files], dtype=np.int64)
    first, second = (Examples(images[rows], labels[rows]) for rows in (slice(len(train)), slice(len(train), None)))
    half = (0.5,) * images.shape[1]
    dataset = own_dataset(name, first, second, half, half, str(path))
    others = _num_others(path, classes)
    left = f"{others:,} files that are no images by their names are left out" if others else ""
    note = "; ".join(filter(None, (wanted.told(), left)))
    return replace(dataset, note=note, classes=tuple(classes))


def _subfolders(split: Path) -> list[str]:
    if not split.is_dir():
        raise UserError(f"there is no folder {split}; wanted are {split.parent}/train/CLASS/*.png and test/CLASS/*.png")
    names = sorted(entry.name for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise UserError(f"{split} has no class folders; wanted are {split}/CLASS/*.png")
    return names


def _files(split: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """Return (file, label) of every image in a part."""
    files = [(file, label) for label, name in enumerate(classes) for file in _image_files(split / name)]
    if not files:
        raise UserError(f"{split} holds no images; wanted are {', '.join(sorted(SUFFIXES))} files in its class folders")
    return files


def _image_files(folder: Path) -> list[Path]:
    return [file for file in _entries(folder) if file.suffix.lower() in SUFFIXES]


def _entries(folder: Path) -> list[Path]:
    """Return all in ``folder`` that is not hidden, in order; a class may have no test images, and so no folder."""
    return sorted(file for file in folder.iterdir() if not file.name.startswith(".")) if folder.is_dir() else []


def _num_others(path: Path, classes: list[str]) -> int:
    """Return how many files in the folders of classes have no image's name."""
    entries = (entry for part in ("train", "test") for name in classes for entry in _entries(path / part / name))
    return sum(entry.suffix.lower() not in SUFFIXES for entry in entries)


def _image(file: Path, wanted: Wanted) -> NDArray[np.uint8]:
    from PIL import Image  # noqa: PLC0415 (only this source needs it)

    try:
        with warnings.catch_warnings(), Image.open(file) as image:
            warnings.simplefilter("ignore")  # what Pillow only warns of is damage that it can live with
            return pixels(image, str(file), wanted)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{file} cannot be read as an image ({in_one_line(error)}); replace or remove it") from error
