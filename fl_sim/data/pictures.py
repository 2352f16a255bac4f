"""Image files, read by Pillow, as bytes of one size; nothing is scaled unless the settings ask for it.

A folder of images has the form PATH/train/CLASS/*.png and PATH/test/CLASS/*.png (or .jpg, .tif, .bmp). With
``data.test`` it has the form PATH/train/CLASS/*.png or PATH/CLASS/*.png, and a share of every class is drawn for
testing.
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
_ORIENTATION: Final = 0x0112  # the tag of EXIF
_DEEP = frozenset({"I", "I;16", "I;16B", "I;16L"})

Pixels: TypeAlias = tuple[NDArray[np.uint8], bool]
"""An image, (height, width) or (height, width, 3), and True if its EXIF orientation made a rotation necessary."""


def read_folder(name: str, own: OwnName, path: Path) -> Dataset:
    """Return the data set in a folder of images; classes are the subfolders of train, in the order of their names.

    ``data.classes`` lists public classes, in another order. Images have one channel if all are grey, else three. They
    are normalised by 0.5 and 0.5, never by statistics of the training images: those are the clients' private data.
    Raises UserError for a file that cannot be read, that has another size than the first, or that belongs to a class
    without training images.
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
            f"{root} has one image a class: data.test leaves none for testing; add images, or a folder test"
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
    """The settings of images: ``size`` (width, height), None for the original size; and ``values``.

    ``values``: the two pixel values of images with more than 8 bits that become 0 and 255; None if no such image is
    expected.
    """

    size: tuple[int, int] | None = None
    values: tuple[int, int] | None = None

    def described(self) -> str:
        """Return a description of the changes to images; empty if there are none."""
        size = f"images scaled to {self.size[0]}x{self.size[1]}" if self.size else ""
        values = f"values {self.values[0]}..{self.values[1]} of 16 bits became 0..255" if self.values else ""
        return "; ".join(filter(None, (size, values)))

    @property
    def read_off(self) -> tuple[str, ...]:
        """The facts that are read off the images, for ``Dataset.read_off``."""
        return (COLOUR_READ_OFF,) if self.size else (SIZE_READ_OFF, COLOUR_READ_OFF)


def image_settings(own: OwnName) -> ImageSettings:
    """Return the settings of images in a data set's name. Raises UserError for an invalid size or range."""
    size, values = own.option("size"), own.option("values")
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", size)
    if size and (found is None or max(map(int, found.groups())) > MOST_SIDE):
        raise UserError(f"data.size = {size!r}: it is WIDTHxHEIGHT in pixels, such as 32x32, at most {MOST_SIDE}")
    ends = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", values)
    if values and (ends is None or int(ends[1]) >= int(ends[2])):
        raise UserError(f"data.values = {values!r}: it is LOW..HIGH, two whole numbers, such as 0..65535")
    return ImageSettings(
        (int(found[1]), int(found[2])) if found else None, (int(ends[1]), int(ends[2])) if ends else None
    )


def decoded(content: bytes, where: str, settings: ImageSettings) -> Pixels:
    """Return the pixels of an image file with this ``content``. Raises UserError unless it is grey or RGB.

    Pillow's warnings are suppressed: they are about damage that Pillow tolerates. Pillow gets no path, because Pillow
    12 rotates a memory-mapped TIFF file twice.
    """
    from PIL import Image, ImageOps  # noqa: PLC0415 (only images need it)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(BytesIO(content)) as opened:
            image: Any = opened
            mode, is_deep = image.mode, ";16" in str(getattr(image, "tile", ""))
            if (pages := getattr(image, "n_frames", 1)) > 1:
                raise UserError(f"{where} holds {pages} pages or frames; save each as a file of its own")
            is_turned = image.getexif().get(_ORIENTATION, 1) in range(2, 9)
            image.load()  # which turns TIFF files
            image = ImageOps.exif_transpose(image)
            if _has_transparency(image):
                raise UserError(
                    f"{where} has transparent pixels, which have no colour; save it on an opaque background"
                )
            if mode in _DEEP:
                image = Image.fromarray(_with_8_bits(image, where, settings.values))
            elif is_deep:
                raise UserError(f"{where}: colour with 16 bits a channel is not supported; save it with 8 bits")
            elif mode in _GREY | _COLOUR:
                image = image.convert("L" if mode in _GREY else "RGB")
            else:
                raise UserError(f"{where}: pixels of mode {mode!r} are not supported; save it as 8-bit grey or RGB")
            if settings.size is not None and image.size != settings.size:
                image = image.resize(settings.size, resample=2)  # bilinear, over all pixels of a new one's area
            return np.asarray(image), is_turned


def stack_images(
    opened: Iterable[tuple[str, Callable[[], Pixels]]], count: int
) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Return ``count`` images as (records, channels, height, width), and the assumptions as text lines.

    There is one channel unless any image has colour. ``opened``: for each image its name for messages and a function
    that reads it. Raises UserError if an image has another size than the first, or if all images take too much memory.
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
                    "them by data.size=WIDTHxHEIGHT, or take fewer"
                )
        elif image.shape[:2] != images[0].shape[:2]:
            usual = f"{images[0].shape[1]}x{images[0].shape[0]}"
            raise UserError(
                f"{where} is {size} pixels, but {first} is {usual}; make them one size, or have all "
                f"scaled to one, for example by data.size={usual}"
            )
        images.append(image)
    form = f"turned as their EXIF orientation says: {turned:,} of {count:,} images"
    if all(image.ndim == 2 for image in images):
        return np.stack(images)[:, np.newaxis], ("images are grey", form)
    coloured = [image if image.ndim == 3 else np.repeat(image[..., np.newaxis], 3, axis=2) for image in images]
    kept = "images are RGB (grey images have the same value three times)"
    return np.stack(coloured).transpose(0, 3, 1, 2), (kept, form)


def _classes(
    path: Path, train: Mapping[str, Path], test: Mapping[str, Path], listed: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the classes in order.

    Raises UserError for a test folder without a training folder, or for a folder that ``listed``, if given, lacks.
    """
    if listed:
        if {*train, *test} - {normalize("NFC", name) for name in listed}:
            raise unlisted(str(path))
        return tuple(normalize("NFC", name) for name in listed)
    if strangers := [name for name in test if name not in train]:
        raise UserError(
            f"{path}: test has class {shortened(strangers[0])!r}, but train has only {enumerated(train)}, and test "
            f"{enumerated(test)}; rename the folders alike"
        )
    return tuple(train)


def _training_folder(path: Path, test_part: TestPart) -> Path:
    """Return the folder of the training classes. Raises UserError unless exactly one setting defines the test part."""
    train, test = path / "train", path / "test"
    if test_part.share:
        if test.is_dir():
            raise UserError(f"data.test holds out test images, and there is {test}, too: leave one of them out")
        return train if train.is_dir() else path
    for split in (train, test):
        if not split.is_dir():
            raise UserError(
                f"there is no folder {split}; wanted are {path}/train/CLASS/*.png and test/CLASS/*.png, or no folder "
                "test, and data.test=0.2, which holds a fifth of every class out"
            )
    return train


def _subfolders(split: Path) -> dict[str, Path]:
    """Return {class: its folder}, sorted by class; names are in Unicode's composed form (NFC)."""
    found = [entry for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    folders = {normalize("NFC", entry.name): entry for entry in found}
    if not found:
        raise UserError(f"{split} has no class folders; wanted are {split}/CLASS/*.png")
    if len(folders) < len(found):
        twice = next(entry for entry in found if entry not in folders.values())
        raise UserError(f"{split} has two folders called {twice.name!r}, in two spellings of Unicode; merge them")
    return dict(sorted(folders.items()))


def _files(split: Path, folders: Mapping[str, Path], classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Return (file, label) of every image in a part. A class without test images may have no folder."""
    files = [
        (file, label)
        for label, name in enumerate(classes)
        if name in folders
        for file in _entries(folders[name])
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise UserError(f"{split} holds no images; wanted are {', '.join(sorted(SUFFIXES))} files in its class folders")
    return files


def _entries(folder: Path) -> list[Path]:
    """Return all entries of ``folder`` that are not hidden, sorted by name."""
    return sorted(file for file in folder.iterdir() if not file.name.startswith("."))


def _image(file: Path, settings: ImageSettings) -> Pixels:
    try:
        return decoded(file.read_bytes(), str(file), settings)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{file} cannot be read as an image ({in_one_line(error)}); replace or remove it") from error


def _has_transparency(image: Any) -> bool:
    """Return True if a pixel is transparent, by its alpha value or by a colour that the file declares transparent."""
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
            f"{where} has 16 bits a pixel: say which values become 0 and 255, data.values=0..65535 or what the device "
            "has (0..4095), or save it with 8 bits"
        )
    low, high = values
    scaled = (np.clip(np.asarray(image, dtype=np.float64), low, high) - low) * 255 / (high - low)
    return np.rint(scaled).astype(np.uint8)
