"""A folder of images: PATH/train/CLASS/*.png and PATH/test/CLASS/*.png (or .jpg, .tif, .bmp), read with Pillow."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unicodedata import normalize

import numpy as np

from fl_sim.data.checked import listed_classes, own_dataset, read_off_classes, unlisted
from fl_sim.data.columns import told_doubles
from fl_sim.data.naming import OwnName
from fl_sim.data.pictures import Pixels, Wanted, decoded, stacked, wanted_by
from fl_sim.errors import UserError
from fl_sim.import_path import in_one_line
from fl_sim.mistakes import shortened
from fl_sim.types import Dataset, Examples

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp"})


def read(name: str, own: OwnName, path: Path) -> Dataset:
    """Return the images as a data set; classes are train's subfolders, numbered in the order of their names.

    ``data.classes`` lists public classes, in another order. Grey images stay one channel unless any image has colour.
    Normalised by 0.5 and 0.5, never by statistics of the training images: those are the clients' private data. Raises
    UserError naming the file that cannot be read, has another size than the first, or belongs to a class without
    training images.
    """
    wanted, listed, folders = wanted_by(own), listed_classes(own), _subfolders(path / "train")
    tested = _subfolders(path / "test")
    classes = _classes(path, folders, tested, listed)
    train = _files(path / "train", [folders.get(name) for name in classes])
    files = [*train, *_files(path / "test", [tested.get(name) for name in classes])]
    stack = stacked(((str(file), partial(_image, file, wanted)) for file, _ in files), len(files))
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
        counted=tuple(filter(None, (left, "" if listed else told_doubles("classes", classes)))),
        classes=tuple(classes),
        read_off=(*read_off_classes(listed), *wanted.read_off),
        inferred=(*([] if listed else [order]), *stack.inferred()),
    )


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


def _image(file: Path, wanted: Wanted) -> Pixels:
    try:
        return decoded(file.read_bytes(), str(file), wanted)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{file} cannot be read as an image ({in_one_line(error)}); replace or remove it") from error
