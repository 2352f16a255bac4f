"""Reads image files with Pillow. Images must have equal sizes; they are scaled only if ``data.size`` is set.

A data set is a folder with PATH/train/CLASS/*.png and PATH/test/CLASS/*.png (or .jpg, .tif, .bmp). If ``data.test`` is
set, there is no folder test: a random share of every class in PATH/train/CLASS or PATH/CLASS is for testing.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final, TypeAlias
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.dataset import (
    COLOUR_READ_OFF,
    SIZE_READ_OFF,
    enumerated,
    listed_classes,
    most_bytes,
    own_dataset,
    read_off_classes,
    unlisted,
)
from fl_sim.data.naming import OwnName
from fl_sim.data.table import TestPart, test_part_by_setting
from fl_sim.data.table_file import similar_spellings
from fl_sim.errors import UserError
from fl_sim.mistakes import shortened
from fl_sim.own_code import in_one_line
from fl_sim.types import Dataset, Examples

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp"})

MOST_SIDE: Final = 4096

_GREY, _COLOUR = frozenset({"1", "L"}), frozenset({"P", "RGB", "RGBA"})
_ORIENTATION: Final = 0x0112  # EXIF's tag of the camera's orientation
_DEEP = frozenset({"I", "I;16", "I;16B", "I;16L"})

Pixels: TypeAlias = tuple[NDArray[np.uint8], bool]
"""(pixels, (height, width) or (height, width, 3); True if the image was rotated or mirrored as its EXIF data say)"""


def read_folder(name: str, own: OwnName, path: Path) -> Dataset:
    """Read a folder of images. Classes are the names of the subfolders of train, in alphabetical order.

    If ``data.classes`` is set, it gives the classes and their order. Images have one channel if all are grey, else
    three. The images are normalised by mean 0.5 and standard deviation 0.5, never by statistics of the private training
    images. Raises UserError for a file that cannot be read, and for a class without training images. All images must
    have the size of the first image, otherwise UserError is raised.
    """
    settings, listed, test_part = image_settings(own), listed_classes(own), test_part_by_setting(own)
    root = _training_folder(path, test_part)
    trained = _subfolders(root)
    tested = {} if test_part.share else _subfolders(path / "test")
    classes = _classes(path, trained, tested, listed)
    train = _files(root, trained, classes)
    test = [] if test_part.share else _files(path / "test", tested, classes)
    files = [*train, *test]
    opened = ((str(file), partial(_image, file, settings)) for file, _ in files)
    images, form = stack_images(opened, len(files))
    labels = np.array([label for _, label in files], dtype=np.int64)
    is_test = test_part.drawn(len(labels), labels) if test_part.share else np.arange(len(labels)) >= len(train)
    if not is_test.any():
        raise UserError(
            f"{root} has only one image per class, so data.test finds none for testing; add images, or a folder test"
        )
    first, second = (Examples(images[mask], labels[mask]) for mask in (~is_test, is_test))
    half = (0.5,) * images.shape[1]
    dataset = own_dataset(name, first, second, half, half, str(path), listed=listed)
    folders = [*trained.values(), *tested.values()]
    others = sum(file.suffix.lower() not in SUFFIXES for folder in folders for file in _entries(folder))
    left = f"{others:,} files that are no images by their names are left out" if others else ""
    matched = "" if test_part.share else "; test's are matched by name"
    order = f"{len(classes):,} classes, by the folders of {root.name} in alphabetical order{matched}"
    drawn = f"{test_part.share:g} of every class is for testing, drawn by test_seed {test_part.seed}"
    return replace(
        dataset,
        note="; ".join(filter(None, (settings.described(), drawn if test_part.share else ""))),
        counted=tuple(filter(None, (left, "" if listed else similar_spellings("classes", classes)))),
        classes=classes,
        read_off=(*read_off_classes(listed), *settings.read_off),
        inferred=(*([] if listed else [order]), *form),
    )


@dataclass(frozen=True)
class ImageSettings:
    """The settings ``data.size`` and ``data.values`` for image files.

    ``size``: the (width, height) to which images are scaled; None keeps the original size. ``values``: for images with
    16 bits per pixel, the two pixel values that become 0 and 255; None refuses such images.
    """

    size: tuple[int, int] | None = None
    values: tuple[int, int] | None = None

    def described(self) -> str:
        """Describe the changes that these settings make to images, for ``Dataset.note``; empty if there are none."""
        size = f"images scaled to {self.size[0]}x{self.size[1]}" if self.size else ""
        values = f"values {self.values[0]}..{self.values[1]} of 16 bits became 0..255" if self.values else ""
        return "; ".join(filter(None, (size, values)))

    @property
    def read_off(self) -> tuple[str, ...]:
        """The facts about the private images that decide the model's input shape, for ``Dataset.read_off``.

        Every privacy statement lists these facts: the presence of colour in any image and, without ``size``, the size
        of the images.
        """
        return (COLOUR_READ_OFF,) if self.size else (SIZE_READ_OFF, COLOUR_READ_OFF)


def image_settings(own: OwnName) -> ImageSettings:
    """Return the settings for images from the parsed name of a data set. Raises UserError for an invalid value."""
    size, values = own.option("size"), own.option("values")
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", size)
    if size and (found is None or max(map(int, found.groups())) > MOST_SIDE):
        raise UserError(f"data.size = {size!r}: write WIDTHxHEIGHT in pixels, such as 32x32, at most {MOST_SIDE}")
    ends = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", values)
    if values and (ends is None or int(ends[1]) >= int(ends[2])):
        raise UserError(f"data.values = {values!r}: write LOW..HIGH, two whole numbers, such as 0..65535")
    return ImageSettings(
        (int(found[1]), int(found[2])) if found else None, (int(ends[1]), int(ends[2])) if ends else None
    )


def decoded(content: bytes, where: str, settings: ImageSettings) -> Pixels:
    """Decode the bytes of an image file to grey or RGB pixels. ``where``: the file, for error messages.

    Raises UserError for several pages, transparency and unsupported pixel types. Pillow's warnings are suppressed,
    because they report damage that Pillow tolerates. Pillow receives bytes, not a path, because Pillow 12 rotates a
    memory-mapped TIFF file twice.
    """
    from PIL import Image, ImageOps  # noqa: PLC0415 (only images need it)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(BytesIO(content)) as opened:
            image: Any = opened
            mode, is_deep = image.mode, ";16" in str(getattr(image, "tile", ""))
            if (pages := getattr(image, "n_frames", 1)) > 1:
                raise UserError(f"{where} holds {pages} pages or frames; save each of them as a separate file")
            is_turned = image.getexif().get(_ORIENTATION, 1) in range(2, 9)
            image.load()  # this call rotates TIFF files
            image = ImageOps.exif_transpose(image)
            if _has_transparency(image):
                raise UserError(
                    f"{where} has transparent pixels, which have no colour; save the image on an opaque background"
                )
            if mode in _DEEP:
                image = Image.fromarray(_with_8_bits(image, where, settings.values))
            elif is_deep:
                raise UserError(f"{where}: colour with 16 bits per channel is not supported; save it with 8 bits")
            elif mode in _GREY | _COLOUR:
                image = image.convert("L" if mode in _GREY else "RGB")
            else:
                raise UserError(f"{where}: pixels of mode {mode!r} are not supported; save it as 8-bit grey or RGB")
            if settings.size is not None and image.size != settings.size:
                image = image.resize(settings.size, resample=2)  # bilinear, with antialiasing
            return np.asarray(image), is_turned


def stack_images(
    opened: Iterable[tuple[str, Callable[[], Pixels]]], count: int
) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Read ``count`` images into one array (records, channels, height, width).

    Returns the array, and lines for ``Dataset.inferred``. If all images are grey, the array has one channel, else
    three. ``opened``: for each image, a name for error messages and a function that reads the image. Raises UserError
    if an image has another size than the first, or if the images need more than half of the memory.
    """
    images: list[NDArray[np.uint8]] = []
    first, turned = "", 0
    for where, read in opened:
        image, is_turned = read()
        turned += is_turned
        size = f"{image.shape[1]}x{image.shape[0]}"
        if not images:
            first = where
            if 2 * 3 * count * image.shape[0] * image.shape[1] > most_bytes():
                raise UserError(
                    f"{count:,} images of {size} pixels take more than half of this machine's memory; scale "
                    "them by data.size=WIDTHxHEIGHT, or use fewer images"
                )
        elif image.shape[:2] != images[0].shape[:2]:
            usual = f"{images[0].shape[1]}x{images[0].shape[0]}"
            raise UserError(
                f"{where} has {size} pixels, but {first} has {usual}; give all images one size, or scale them, for "
                f"example with data.size={usual}"
            )
        images.append(image)
    form = f"rotated or mirrored as their EXIF orientation says: {turned:,} of {count:,} images"
    if all(image.ndim == 2 for image in images):
        return np.stack(images)[:, np.newaxis], ("images are grey", form)
    coloured = [image if image.ndim == 3 else np.repeat(image[..., np.newaxis], 3, axis=2) for image in images]
    kept = "images are RGB (in grey images the three channels are equal)"
    return np.stack(coloured).transpose(0, 3, 1, 2), (kept, form)


def _classes(
    path: Path, train: Mapping[str, Path], test: Mapping[str, Path], listed: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the classes in order. ``train`` and ``test``: {class: its folder}; ``listed``: ``data.classes``, if set.

    Raises UserError for a class with a test folder but no training folder, and for a class that is not ``listed``.
    """
    if listed:
        if {*train, *test} - {normalize("NFC", name) for name in listed}:
            raise unlisted(str(path))
        return tuple(normalize("NFC", name) for name in listed)
    if strangers := [name for name in test if name not in train]:
        raise UserError(
            f"{path}: test has class {shortened(strangers[0])!r}, but train has only {enumerated(train)}; test has "
            f"{enumerated(test)}; use the same folder names in both"
        )
    return tuple(train)


def _training_folder(path: Path, test_part: TestPart) -> Path:
    """Return the folder that contains the class folders of training images.

    Test images come from a folder test or from the setting ``data.test``. Raises UserError for both or neither of these
    sources.
    """
    train, test = path / "train", path / "test"
    if test_part.share:
        if test.is_dir():
            raise UserError(f"data.test is set, and the folder {test} also exists: remove one of the two")
        return train if train.is_dir() else path
    for split in (train, test):
        if not split.is_dir():
            raise UserError(
                f"there is no folder {split}; put images into {path}/train/CLASS and {path}/test/CLASS. Without test "
                "images, set data.test=0.2 to test on a fifth of every class"
            )
    return train


def _subfolders(split: Path) -> dict[str, Path]:
    """Return {class: its folder}, sorted by class. Names are in Unicode's NFC form, so that they can be compared."""
    found = [entry for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    folders = {normalize("NFC", entry.name): entry for entry in found}
    if not found:
        raise UserError(f"{split} has no class folders; put the images of each class into {split}/CLASS")
    if len(folders) < len(found):
        twice = next(entry for entry in found if entry not in folders.values())
        raise UserError(f"{split} has two folders called {twice.name!r}, in two Unicode encodings; merge them")
    return dict(sorted(folders.items()))


def _files(split: Path, folders: Mapping[str, Path], classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Return (file, label) of every image in the folder ``split``. A class without a folder has no images."""
    files = [
        (file, label)
        for label, name in enumerate(classes)
        if name in folders
        for file in _entries(folders[name])
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise UserError(f"{split} holds no images; its class folders must contain {', '.join(sorted(SUFFIXES))} files")
    return files


def _entries(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if not file.name.startswith("."))


def _image(file: Path, settings: ImageSettings) -> Pixels:
    try:
        return decoded(file.read_bytes(), str(file), settings)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{file} cannot be read as an image ({in_one_line(error)}); replace or remove it") from error


def _has_transparency(image: Any) -> bool:
    if image.mode == "RGBA":
        alpha = image
    elif image.mode in _GREY | _COLOUR and "transparency" in image.info:
        alpha = image.convert("RGBA")
    else:
        return False
    return bool(alpha.getextrema()[3][0] < 255)


def _with_8_bits(image: Any, where: str, values: tuple[int, int] | None) -> NDArray[np.uint8]:
    if values is None:
        raise UserError(
            f"{where} has 16 bits per pixel: set the values that become 0 and 255, for example data.values=0..65535 "
            "(or 0..4095 for a device with 12 bits), or save the image with 8 bits"
        )
    low, high = values
    scaled = (np.clip(np.asarray(image, dtype=np.float64), low, high) - low) * 255 / (high - low)
    return np.rint(scaled).astype(np.uint8)
