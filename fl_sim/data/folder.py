"""A folder of images: PATH/train/CLASS/*.png and PATH/test/CLASS/*.png (or .jpg), read with Pillow."""

import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.checked import own_dataset
from fl_sim.errors import UserError
from fl_sim.import_path import in_one_line
from fl_sim.types import Dataset, Examples

SUFFIXES = frozenset({".png", ".jpg", ".jpeg"})
_GREY, _COLOUR = frozenset({"1", "L"}), frozenset({"P", "RGB", "RGBA"})


def read(name: str, path: Path) -> Dataset:
    """Return the images as a data set; classes are train's subfolders, numbered in the order of their names.

    Grey images stay one channel unless any image has colour. Normalised by 0.5 and 0.5, never by statistics of the
    training images: those are the clients' private data. Raises UserError naming the file that cannot be read, has
    another size than the first, or belongs to a class without training images.
    """
    classes = _subfolders(path / "train")
    strangers = sorted(set(_subfolders(path / "test")) - set(classes))
    if strangers:
        raise UserError(f"{path}: test has class {strangers[0]!r}, but train has only {', '.join(classes)}")
    train_images, train_labels = _read_split(path / "train", classes)
    test_images, test_labels = _read_split(path / "test", classes)
    _check_sizes({**train_images, **test_images})
    colour = any(image.ndim == 3 for image in (*train_images.values(), *test_images.values()))
    train = Examples(_stack(train_images, colour=colour), train_labels)
    test = Examples(_stack(test_images, colour=colour), test_labels)
    half = (0.5,) * (3 if colour else 1)
    return own_dataset(name, train, test, half, half, str(path))


def _subfolders(split: Path) -> list[str]:
    if not split.is_dir():
        raise UserError(f"there is no folder {split}; wanted are {split.parent}/train/CLASS/*.png and test/CLASS/*.png")
    names = sorted(entry.name for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise UserError(f"{split} has no class folders; wanted are {split}/CLASS/*.png")
    return names


def _read_split(split: Path, classes: list[str]) -> tuple[dict[Path, NDArray[np.uint8]], NDArray[np.int64]]:
    files = [(file, label) for label, name in enumerate(classes) for file in _image_files(split / name)]
    if not files:
        raise UserError(f"{split} holds no images; wanted are {', '.join(sorted(SUFFIXES))} files in its class folders")
    return {file: _image(file) for file, _ in files}, np.array([label for _, label in files], dtype=np.int64)


def _image_files(folder: Path) -> list[Path]:
    if not folder.is_dir():  # a class may have no test images
        return []
    return sorted(
        file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    )


def _image(file: Path) -> NDArray[np.uint8]:
    """Return one image as (height, width) or (height, width, 3)."""
    from PIL import Image  # noqa: PLC0415 (only this source needs it)

    try:
        with warnings.catch_warnings(), Image.open(file) as image:
            warnings.simplefilter("ignore")  # what Pillow only warns of is damage that it can live with
            image.load()
            mode = image.mode
            pixels = np.asarray(image.convert("L" if mode in _GREY else "RGB")) if mode in _GREY | _COLOUR else None
    except Exception as error:
        raise UserError(f"{file} cannot be read as an image ({in_one_line(error)}); replace or remove it") from error
    if pixels is None:
        raise UserError(f"{file}: pixels of mode {mode!r} are not supported; save it as 8-bit grey or RGB")
    return pixels


def _check_sizes(images: dict[Path, NDArray[np.uint8]]) -> None:
    first, expected = next(iter(images.items()))
    for file, image in images.items():
        if image.shape[:2] != expected.shape[:2]:
            raise UserError(f"{file} is {_size(image)} pixels, but {first} is {_size(expected)}; make them one size")


def _size(image: NDArray[np.uint8]) -> str:
    return f"{image.shape[1]}x{image.shape[0]}"


def _stack(images: dict[Path, NDArray[np.uint8]], *, colour: bool) -> NDArray[np.uint8]:
    """Return (records, channels, height, width)."""
    if not colour:
        return np.stack(list(images.values()))[:, np.newaxis]
    as_colour = [
        image if image.ndim == 3 else np.repeat(image[..., np.newaxis], 3, axis=2) for image in images.values()
    ]
    return np.stack(as_colour).transpose(0, 3, 1, 2)
