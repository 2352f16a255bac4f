"""Reads folders of images, with a folder for each class, and possibly a folder for each domain.

A data set is a folder with PATH/train/CLASS/*.png and PATH/test/CLASS/*.png (or .jpg, .tif, .bmp). If ``data.test`` is
set, there is no test folder, and a random share of every class in PATH/train/CLASS or PATH/CLASS is for testing. If
``data.domains`` is true, PATH contains one such folder per domain, for example a style of images (PACS, DomainNet).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unicodedata import normalize

import numpy as np

from fl_sim.data.dataset import enumerated, listed_classes, own_dataset, read_off_classes, unlisted
from fl_sim.data.naming import OwnName
from fl_sim.data.pictures import SUFFIXES, ImageSettings, Pixels, decoded, image_settings, stack_images
from fl_sim.data.table import TestPart, test_part_by_setting
from fl_sim.data.table_file import similar_spellings
from fl_sim.errors import UserError
from fl_sim.mistakes import shortened
from fl_sim.own_code import in_one_line
from fl_sim.types import Dataset, Examples


@dataclass(frozen=True)
class _Part:
    """The training or test images of one domain.

    ``root``: the folder that contains the class folders. ``folders``: {class: its folder}. ``domain``: the index of the
    domain; 0 for a folder without domains.
    """

    root: Path
    folders: Mapping[str, Path]
    domain: int
    is_test: bool


def read_folder(name: str, own: OwnName, path: Path) -> Dataset:
    """Read a folder of images. Classes are the names of the class folders, in alphabetical order.

    If ``data.classes`` is set, it gives the classes and their order. If ``data.domains`` is true, each domain is a
    source of records, numbered in alphabetical order; a domain may lack some classes. Images have one channel if all
    are grey, else three. The images are normalised by mean 0.5 and standard deviation 0.5, never by statistics of the
    private training images. Raises UserError for a file that cannot be read, for a class without training images, and
    for an image whose size differs from that of the first image.
    """
    settings, listed, test_part = image_settings(own), listed_classes(own), test_part_by_setting(own)
    has_domains = _has_domains(own)
    domains = _domains(path) if has_domains else {"": path}
    parts = _parts(domains, test_part)
    classes = _classes(path, parts, listed)
    files = [(file, label, part) for part in parts for file, label in _files(part, classes)]
    images, form = stack_images(((str(file), partial(_image, file, settings)) for file, *_ in files), len(files))
    labels = np.array([label for _, label, _ in files], dtype=np.int64)
    sources = np.array([part.domain for *_, part in files], dtype=np.int64)
    is_test = np.array([part.is_test for *_, part in files])
    if test_part.share:
        is_test = test_part.drawn(len(labels), sources * len(classes) + labels)
    if not is_test.any():
        raise UserError(
            f"{path if has_domains else parts[0].root} has only one image per class, so data.test finds none for "
            "testing; add images, or a folder with the name test"
        )
    first, second = (
        Examples(images[mask], labels[mask], sources[mask] if has_domains else None) for mask in (~is_test, is_test)
    )
    half = (0.5,) * images.shape[1]
    dataset = own_dataset(name, first, second, half, half, str(path), listed=listed)
    folders = [folder for part in parts for folder in part.folders.values()]
    others = sum(file.suffix.lower() not in SUFFIXES for folder in folders for file in _entries(folder))
    left = f"{others:,} files without an image suffix are not used" if others else ""
    dataset = replace(
        dataset,
        note="; ".join(filter(None, (settings.described(), _drawn(test_part, has_domains=has_domains)))),
        counted=tuple(filter(None, (left, "" if listed else similar_spellings("classes", classes)))),
        classes=classes,
        read_off=(*read_off_classes(listed), *settings.read_off),
        inferred=(*([] if listed else [_order(parts, len(classes))]), *form),
    )
    return _with_domains(dataset, tuple(domains), path) if has_domains else dataset


def _drawn(test_part: TestPart, *, has_domains: bool) -> str:
    """Describe in words how test records are drawn at random, for ``Dataset.note``.

    The result is empty if a folder contains the test images.
    """
    of_domains = " of every domain" if has_domains else ""
    drawn = f"{test_part.share:g} of every class{of_domains} is for testing, drawn by test_seed {test_part.seed}"
    return drawn if test_part.share else ""


def _order(parts: Sequence[_Part], num_classes: int) -> str:
    """Describe in words how the classes and their order were inferred from the folders, for ``Dataset.inferred``."""
    many = parts[-1].domain > 0
    matched = "; test's are matched by name" if parts[-1].is_test and not many else ""
    within = "all domains" if many else parts[0].root.name
    return f"{num_classes:,} classes, by the folders of {within} in alphabetical order{matched}"


def _has_domains(own: OwnName) -> bool:
    """Return True if ``data.domains`` is true. Raises UserError for a value other than true and false."""
    given = own.option("domains")
    if given not in {"", "true", "false"}:
        raise UserError(f"data.domains = {given!r}: write true if {own.place} contains DOMAIN/CLASS, else leave it out")
    return given == "true"


def _domains(path: Path) -> dict[str, Path]:
    """Return {domain: its folder}, sorted by domain.

    Raises UserError for a single domain, and for a domain with the name "train" or "test".
    """
    folders = _subfolders(path, "domain")
    if parts := [part for part in ("train", "test") if part in folders]:
        raise UserError(
            f"with data.domains=true each folder in {path} is a domain, but {parts[0]!r} is the name of a part: put "
            f"images into {path}/DOMAIN/{parts[0]}/CLASS, or leave data.domains out"
        )
    if len(folders) == 1:
        (only,) = folders
        raise UserError(
            f"data.domains=true finds only one domain in {path}, {only!r}: add another one, or read this one by "
            f"data=folder:{path / only}. If the domains are folders in {only!r}, give this path with data.domains=true"
        )
    return folders


def _with_domains(dataset: Dataset, domains: tuple[str, ...], path: Path) -> Dataset:
    """Return a copy of ``dataset`` that also describes its ``domains``: their order, sizes, and missing classes."""
    sizes, held = [], []
    for part in (dataset.train, dataset.test):
        assert part.groups is not None
        sizes.append(np.bincount(part.groups, minlength=len(domains)))
        cells = part.groups * dataset.num_classes + part.labels
        held.append(np.bincount(cells, minlength=len(domains) * dataset.num_classes).reshape(len(domains), -1))
    numbered = [
        f"{number} {shortened(domain)} ({sizes[0][number]:,} training, {sizes[1][number]:,} test records)"
        for number, domain in enumerate(domains)
    ]
    lacking = [
        f"domain {shortened(domain)} has no training images of {enumerated(names)}"
        for domain, counts in zip(domains, held[0], strict=True)
        if (names := [name for name, count in zip(dataset.classes, counts, strict=True) if not count])
    ]
    untested = [domain for domain, size in zip(domains, sizes[1], strict=True) if not size]
    said = [*lacking, f"domains without test images: {enumerated(untested)}" if untested else ""]
    order = f"{len(domains):,} domains, by the folders of {path.name} in alphabetical order: {enumerated(numbered)}"
    return replace(
        dataset,
        sources=domains,
        counted=tuple(filter(None, (*dataset.counted, *said, similar_spellings("domains", domains)))),
        inferred=(order, *dataset.inferred),
    )


def _parts(domains: Mapping[str, Path], test_part: TestPart) -> list[_Part]:
    """Return the training images of each domain, then the test images of each domain if there are test folders.

    ``domains``: {domain: its folder}.
    """
    train = [_training_folder(folder, test_part) for folder in domains.values()]
    parts = [_Part(root, _subfolders(root), domain, is_test=False) for domain, root in enumerate(train)]
    if not test_part.share:
        test = [folder / "test" for folder in domains.values()]
        parts += [_Part(root, _subfolders(root), domain, is_test=True) for domain, root in enumerate(test)]
    return parts


def _classes(path: Path, parts: Sequence[_Part], listed: tuple[str, ...]) -> tuple[str, ...]:
    """Return the class names of all domains. The index of a name is the label of the class.

    If the setting ``data.classes`` is set, the result is its value, ``listed``, and a class folder with another name
    raises UserError. Else the result is the names of the class folders in alphabetical order, and a class with a test
    folder but no training folder raises UserError.
    """
    train, test = (sorted({name for one in parts if one.is_test == of for name in one.folders}) for of in (False, True))
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

    Raises UserError unless either a folder with the name ``test`` or the setting ``data.test`` defines the test images.
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
                f"images, set data.test=0.2 to test on a fifth of every class{_domain_hint(path)}"
            )
    return train


def _domain_hint(path: Path) -> str:
    """Return advice for a folder that looks like PATH/DOMAIN/CLASS or DOMAIN/train/CLASS; empty for others."""

    def below(folder: Path) -> list[Path]:
        return [entry for entry in _entries(folder) if entry.is_dir()]

    def has_images(folder: Path) -> bool:
        return any(file.suffix.lower() in SUFFIXES for file in _entries(folder))

    folders = below(path)
    if {"train", "test"} & {folder.name for folder in folders}:
        return ""
    if not any(inner.name == "train" or has_images(inner) for folder in folders for inner in below(folder)):
        return ""
    return f". The folders in {path} look like domains with classes in each: if they are, set data.domains=true"


def _subfolders(split: Path, what: str = "class") -> dict[str, Path]:
    """Return {class: its folder}, sorted by class. Names are in Unicode's NFC form, so that equal names compare equal.

    ``what``: the noun for error messages, class or domain.
    """
    found = [entry for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    folders = {normalize("NFC", entry.name): entry for entry in found}
    if not found:
        inside = f"put the images of each {what} into {split}/{what.upper()}"
        raise UserError(f"{split} has no {what} folders; {inside}")
    if len(folders) < len(found):
        twice = next(entry for entry in found if entry not in folders.values())
        raise UserError(f"{split} has two folders called {twice.name!r}, in two Unicode encodings; merge them")
    return dict(sorted(folders.items()))


def _files(part: _Part, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Return (file, label) of every image in the folders of ``part``. A class without a folder has no images."""
    files = [
        (file, label)
        for label, name in enumerate(classes)
        if name in part.folders
        for file in _entries(part.folders[name])
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise UserError(
            f"{part.root} holds no images; its class folders must contain {', '.join(sorted(SUFFIXES))} files"
            f"{_domain_hint(part.root)}"
        )
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
