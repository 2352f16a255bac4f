"""Images as Pillow has them become bytes of one size: nothing is scaled that the settings do not ask for.

A folder of images is PATH/train/CLASS/*.png and PATH/test/CLASS/*.png (or .jpg, .tif, .bmp).
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.dataset import (
    COLOUR_READ_OFF,
    SIZE_READ_OFF,
    listed_classes,
    most_bytes,
    own_dataset,
    read_off_classes,
    unlisted,
)
from fl_sim.data.naming import OwnName
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


def read_folder(name: str, own: OwnName, path: Path) -> Dataset:
    """Return the images as a data set; classes are train's subfolders, numbered in the order of their names.

    ``data.classes`` lists public classes, in another order. Grey images stay one channel unless any image has colour.
    Normalised by 0.5 and 0.5, never by statistics of the training images: those are the clients' private data. Raises
    UserError naming the file that cannot be read, has another size than the first, or belongs to a class without
    training images.
    """
    wanted, listed, folders = image_settings(own), listed_classes(own), _subfolders(path / "train")
    tested = _subfolders(path / "test")
    classes = _classes(path, folders, tested, listed)
    train = _files(path / "train", [folders.get(name) for name in classes])
    files = [*train, *_files(path / "test", [tested.get(name) for name in classes])]
    stack = stack_images(((str(file), partial(_image, file, wanted)) for file, _ in files), len(files))
    images = stack.images
    labels = np.array([label for _, label in files], dtype=np.int64)
    first, second = (Examples(images[rows], labels[rows]) for rows in (slice(len(train)), slice(len(train), None)))
    half = (0.5,) * images.shape[1]
    dataset = own_dataset(name, first, second, half, half, str(path), listed=listed)
    others = sum(map(_num_others, [*folders.values(), *tested.values()]))
    left = f"{others:,} files that are no images by their names are left out" if others else ""
    order = f"{len(classes):,} classes, by the folders of train in alphabetical order; test's are matched by name"
    return replace(
        dataset,
        note=wanted.told(),
        counted=tuple(filter(None, (left, "" if listed else similar_spellings("classes", classes)))),
        classes=tuple(classes),
        read_off=(*read_off_classes(listed), *wanted.read_off),
        inferred=(*([] if listed else [order]), *stack.inferred()),
    )


@dataclass(frozen=True)
class ImageSettings:
    """What images are turned into: ``size`` (width, height), None as they are; ``values``: what becomes 0 and 255.

    The latter is for images of more than 8 bits, None where none is expected.
    """

    size: tuple[int, int] | None = None
    values: tuple[int, int] | None = None

    def told(self) -> str:
        """Say what was done to images, nothing where they are as they were."""
        size = f"images scaled to {self.size[0]}x{self.size[1]}" if self.size else ""
        values = f"values {self.values[0]}..{self.values[1]} of 16 bits became 0..255" if self.values else ""
        return "; ".join(filter(None, (size, values)))

    @property
    def read_off(self) -> tuple[str, ...]:
        """Return what is read off the images: what ``Dataset.read_off`` says of them."""
        return (COLOUR_READ_OFF,) if self.size else (SIZE_READ_OFF, COLOUR_READ_OFF)


def image_settings(own: OwnName) -> ImageSettings:
    """Return what the name of a data set says of images. Raises UserError for what is no size, or no range."""
    return ImageSettings(_size_set(own.option("size")), _values_set(own.option("values")))


@dataclass(frozen=True)
class Pixels:
    """One image, (height, width) or (height, width, 3), turned upright where its EXIF orientation says so."""

    values: NDArray[np.uint8]
    is_turned: bool = False


@dataclass(frozen=True)
class ImageStack:
    """Images of one size, (records, channels, height, width), and how many of them were turned upright."""

    images: NDArray[np.uint8]
    turned: int

    def inferred(self) -> tuple[str, ...]:
        """Return what was taken for granted of the images, a line each."""
        kept = "grey" if self.images.shape[1] == 1 else "RGB (grey images have the same value three times)"
        turned = f"turned as their EXIF orientation says: {self.turned:,} of {len(self.images):,} images"
        return (f"images are {kept}", turned)


def decoded(content: bytes, where: str, wanted: ImageSettings) -> Pixels:
    """Return the pixels of an image file's ``content``. Raises UserError for those that are neither grey nor RGB.

    What Pillow warns of is damage that it can live with. It is given no path: Pillow 12 turns a TIFF file twice that it
    maps into memory.
    """
    from PIL import Image  # noqa: PLC0415 (only images need it)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(BytesIO(content)) as image:
            return pixels(image, where, wanted)


def pixels(image: Any, where: str, wanted: ImageSettings) -> Pixels:
    """Return the pixels of one of Pillow's images. Raises UserError for those that are neither grey nor RGB."""
    from PIL import ImageOps  # noqa: PLC0415 (only images need it)

    mode, is_deep = image.mode, ";16" in str(getattr(image, "tile", ""))
    if (pages := getattr(image, "n_frames", 1)) > 1:
        raise UserError(f"{where} holds {pages} pages or frames; save each as a file of its own")
    is_turned = image.getexif().get(_ORIENTATION, 1) in range(2, 9)
    image.load()  # which turns TIFF files
    image = ImageOps.exif_transpose(image)
    if _has_transparency(image):
        raise UserError(f"{where} has transparent pixels, which have no colour; save it on an opaque background")
    if mode in _DEEP:
        image = _with_8_bits(image, where, wanted.values)
    elif is_deep:
        raise UserError(f"{where}: colour with 16 bits a channel is not supported; save it with 8 bits")
    elif mode in _GREY | _COLOUR:
        image = image.convert("L" if mode in _GREY else "RGB")
    else:
        raise UserError(f"{where}: pixels of mode {mode!r} are not supported; save it as 8-bit grey or RGB")
    if wanted.size is not None and image.size != wanted.size:
        image = image.resize(wanted.size, resample=2)  # bilinear, over all pixels that one takes the place of
    return Pixels(np.asarray(image), is_turned)


def stack_images(opened: Iterable[tuple[str, Callable[[], Pixels]]], count: int) -> ImageStack:
    """Return ``count`` images as (records, channels, height, width): one channel unless any image has colour.

    ``opened``: (where it is, a function that reads it) of each. Raises UserError where one has another size than the
    first, or all of them would take too much memory.
    """
    images: list[NDArray[np.uint8]] = []
    first, turned = "", 0
    for where, read in opened:
        found = read()
        image, turned = found.values, turned + found.is_turned
        if not images:
            first = where
            if 2 * 3 * count * image.shape[0] * image.shape[1] > most_bytes():
                raise UserError(
                    f"{count:,} images of {_size(image)} pixels take more than half of this machine's memory; scale "
                    "them by data.size=WIDTHxHEIGHT, or take fewer"
                )
        elif image.shape[:2] != images[0].shape[:2]:
            raise UserError(
                f"{where} is {_size(image)} pixels, but {first} is {_size(images[0])}; make them one size, or have all "
                f"scaled to one, for example by data.size={_size(images[0])}"
            )
        images.append(image)
    if all(image.ndim == 2 for image in images):
        return ImageStack(np.stack(images)[:, np.newaxis], turned)
    return ImageStack(np.stack([_coloured(image) for image in images]).transpose(0, 3, 1, 2), turned)


def _classes(
    path: Path, train: Mapping[str, Path], test: Mapping[str, Path], listed: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the classes in order. Raises UserError for a folder in test that is none in train, or not ``listed``."""
    if listed:
        if {*train, *test} - {normalize("NFC", name) for name in listed}:
            raise unlisted(str(path))
        return tuple(normalize("NFC", name) for name in listed)
    if strangers := [name for name in test if name not in train]:
        raise UserError(
            f"{path}: test has class {shortened(strangers[0])!r}, but train has only {_some([*train])}, and test "
            f"{_some([*test])}; rename the folders alike"
        )
    return tuple(train)


def _subfolders(split: Path) -> dict[str, Path]:
    """Return {class: its folder} in order; two ways in which Unicode writes a name are one."""
    if not split.is_dir():
        raise UserError(f"there is no folder {split}; wanted are {split.parent}/train/CLASS/*.png and test/CLASS/*.png")
    found = [entry for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    folders = {normalize("NFC", entry.name): entry for entry in found}
    if not found:
        raise UserError(f"{split} has no class folders; wanted are {split}/CLASS/*.png")
    if len(folders) < len(found):
        twice = next(entry for entry in found if entry not in folders.values())
        raise UserError(f"{split} has two folders called {twice.name!r}, in two spellings of Unicode; merge them")
    return dict(sorted(folders.items()))


def _files(split: Path, folders: Iterable[Path | None]) -> list[tuple[Path, int]]:
    """Return (file, label) of every image in a part; a class may have no test images, and so no folder."""
    files = [(file, label) for label, one in enumerate(folders) if one for file in _image_files(one)]
    if not files:
        raise UserError(f"{split} holds no images; wanted are {', '.join(sorted(SUFFIXES))} files in its class folders")
    return files


def _image_files(folder: Path) -> list[Path]:
    return [file for file in _entries(folder) if file.suffix.lower() in SUFFIXES]


def _entries(folder: Path) -> list[Path]:
    """Return all in ``folder`` that is not hidden, in order."""
    return sorted(file for file in folder.iterdir() if not file.name.startswith("."))


def _num_others(folder: Path) -> int:
    """Return how many files in the folder of a class have no image's name."""
    return sum(entry.suffix.lower() not in SUFFIXES for entry in _entries(folder))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"{', '.join(map(shortened, names[:20]))}{more}"


def _image(file: Path, wanted: ImageSettings) -> Pixels:
    try:
        return decoded(file.read_bytes(), str(file), wanted)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{file} cannot be read as an image ({in_one_line(error)}); replace or remove it") from error


def _has_transparency(image: Any) -> bool:
    """Say whether a pixel is transparent: by its own alpha, or as a colour that the file declares to be."""
    if image.mode == "RGBA":
        alpha = image
    elif image.mode in _GREY | _COLOUR and "transparency" in image.info:
        alpha = image.convert("RGBA")
    else:
        return False
    return bool(alpha.getextrema()[3][0] < 255)


def _coloured(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return image if image.ndim == 3 else np.repeat(image[..., np.newaxis], 3, axis=2)


def _with_8_bits(image: Any, where: str, values: tuple[int, int] | None) -> Any:
    from PIL import Image  # noqa: PLC0415 (only images need it)

    if values is None:
        raise UserError(
            f"{where} has 16 bits a pixel: say which values become 0 and 255, data.values=0..65535 or what the device "
            "has (0..4095), or save it with 8 bits"
        )
    low, high = values
    scaled = (np.clip(np.asarray(image, dtype=np.float64), low, high) - low) * 255 / (high - low)
    return Image.fromarray(np.rint(scaled).astype(np.uint8))


def _size(image: NDArray[np.uint8]) -> str:
    return f"{image.shape[1]}x{image.shape[0]}"


def _size_set(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if found is None or max(map(int, found.groups())) > MOST_SIDE:
        raise UserError(f"data.size = {text!r}: it is WIDTHxHEIGHT in pixels, such as 32x32, at most {MOST_SIDE}")
    return int(found[1]), int(found[2])


def _values_set(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise UserError(f"data.values = {text!r}: it is LOW..HIGH, two whole numbers, such as 0..65535")
    return int(found[1]), int(found[2])
