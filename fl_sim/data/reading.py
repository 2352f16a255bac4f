"""One data set at one place: read once in a process, and once more after its files have changed; or verified.

Verified: whether its files are what they should be, by checksums, sizes, shapes and counts. The user's own data set by
import path, ``data=my_package.sets:hospitals``, is a function of the data root.
"""

import hashlib
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np

from fl_sim.data import hub, leaf, npz, table, uci
from fl_sim.data.checked import known_dataset, looks_channels_last, tokens_in, with_validation
from fl_sim.data.features import Features, as_features
from fl_sim.data.naming import KNOWN, KnownSet, OwnName, own_name
from fl_sim.data.pictures import read_folder
from fl_sim.data.places import Source, describe_missing, find, look_for
from fl_sim.data.public_images import download, read_cifar, read_digits, read_idx, read_svhn
from fl_sim.errors import UserError
from fl_sim.own_code import load_object, with_place
from fl_sim.seeding import seeded_alone
from fl_sim.types import Dataset, Examples


def load(name: str, data_root: Path | None = None, features: Features = "none") -> Dataset:
    """Return the data set ``name``, one of ``NAMES``, KIND:PLACE (fl_sim.data.naming) or package.module:function.

    Searched in ``data_root``, $FL_SIM_DATA and the user's cache, in this order; a known set that is in none of them is
    downloaded unless FL_SIM_OFFLINE is set. Read once per process, and again where its files have changed since (what a
    function of the user's own makes: once); images stay uint8, memory-mapped where the files allow. ``features``: what
    records are turned into. Raises UserError for unknown names, missing or damaged files, what is no classification
    data set, and records that have no such features.
    """
    source = look_for(name, data_root) or download(KNOWN[name], data_root)
    stamps = _stamps(name, source)
    dataset = _read_once(name, source, stamps)
    return dataset if features == "none" else _features_once(name, source, stamps, features)


def fingerprint(name: str, data_root: Path | None, *, with_test: bool = False) -> str:
    """Return a digest of the training and validation records of ``name``, and of its test records where they matter."""
    source = look_for(name, data_root) or download(KNOWN[name], data_root)
    return _fingerprint_once(name, source, _stamps(name, source), with_test)


def read(name: str, source: Source) -> Dataset:
    """Return the data set ``name`` as it now lies at ``source``."""
    path = source.path
    if source.layout == "own":
        return _made(name, path)
    if path is None:
        return read_digits()
    if own_files := own_name(name):
        return _read_own_files(name, own_files, path)
    return _read_known(KNOWN[name], source, path)


@dataclass(frozen=True)
class Check:
    """The outcome for one data set: where it is, what is wrong (nothing: ``ok``), and what else a reader must know."""

    name: str
    source: Source | None
    problems: tuple[str, ...]
    note: str = ""

    @property
    def ok(self) -> bool:
        """Return whether the set was found and nothing is wrong with it."""
        return self.source is not None and not self.problems


def verify(name: str, data_root: Path | None = None) -> Check:
    """Read all of ``name`` and compare it with what is published.

    Official files: MD5; npz files: the zip's checksums (nobody publishes an MD5 for them); all: shapes, counts, labels.
    Raises UserError for an unknown name.
    """
    source = find(name, data_root)
    if source is None:
        return Check(name, None, (describe_missing(name, data_root),))
    problems = _checksums(name, source)
    if problems:  # and no reading: SciPy's .mat parser can take the process down on a damaged file
        return Check(name, source, tuple(problems))
    try:
        return Check(name, source, (), read(name, source).note)
    except UserError as error:
        return Check(name, source, (str(error),))


@lru_cache(maxsize=32)
def _fingerprint_once(name: str, source: Source, stamps: "_Stamps", with_test: bool) -> str:  # noqa: FBT001 (a key)
    dataset, digest = _read_once(name, source, stamps), hashlib.sha256()
    validation = () if dataset.validation is None else (dataset.validation,)
    for part in (dataset.train, *validation, *((dataset.test,) if with_test else ())):
        for array in part.arrays:
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _read_known(known: KnownSet, source: Source, path: Path) -> Dataset:
    if known.finer:
        return _merged(_read_known(KNOWN[known.finer], source, path), known)
    if source.layout == "uci":
        return uci.read(path, known)
    if source.layout == "npz":
        return npz.read_known(path, known)
    readers = {"idx": read_idx, "cifar": read_cifar, "mat": read_svhn}
    train, test = readers[source.layout](path, known)
    return known_dataset(known, train, test, str(path / next(iter(known.files)).rpartition("/")[0]))


def _merged(finer: Dataset, known: KnownSet) -> Dataset:
    """Return the records of ``finer`` under the labels of ``known``."""
    classes = np.array(known.merged)
    train, test = (Examples(part.inputs, classes[part.labels], part.groups) for part in (finer.train, finer.test))
    return replace(finer, name=known.name, train=train, test=test, num_classes=known.num_classes)


def _read_own_files(name: str, own_files: OwnName, path: Path) -> Dataset:
    match own_files.kind:
        case "csv" | "parquet":
            return table.read(name, own_files, path)
        case "npz":
            return npz.read_own(name, own_files, path)
        case "folder":
            return read_folder(name, own_files, path)
        case "leaf":
            return leaf.read(name, own_files, path)
        case "medmnist":
            return npz.read_medmnist(name, own_files, path)
        case "hf":
            return hub.read(name, own_files, path)


_Stamps: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""The path, size, time of the last change in nanoseconds and number of every file that a data set is read from."""


@lru_cache(maxsize=2)
def _features_once(name: str, source: Source, stamps: _Stamps, features: Features) -> Dataset:
    digest = _fingerprint_once(name, source, stamps, with_test=True)
    return as_features(_read_once(name, source, stamps), features, digest)


@lru_cache(maxsize=8)
def _read_once(name: str, source: Source, stamps: _Stamps) -> Dataset:
    del stamps  # a part of the key: files that have changed are read again
    return read(name, source)


def _stamps(name: str, source: Source) -> _Stamps:
    """Return the stamps of the files of ``name``; none where nobody knows them, or they are embedded."""
    found = ((path, os.stat(path)) for path in _files(name, source))  # noqa: PTH116 (a folder may hold a million)
    return tuple((path, now.st_size, now.st_mtime_ns, now.st_ino) for path, now in found)


def _files(name: str, source: Source) -> Iterator[str]:
    path = source.path
    if path is None or source.layout in {"own", "embedded"}:
        return
    if path.is_file():
        yield str(path)
    elif name in KNOWN:
        yield from (str(path / file) for file in KNOWN[name].files)
    else:
        for folder, below, files in os.walk(path):
            below.sort()
            yield from (f"{folder}/{file}" for file in sorted(files))
    if (own := own_name(name)) and (beside := own.option("test_file")):
        yield str(Path(beside).expanduser().absolute())


def _made(name: str, data_root: Path | None) -> Dataset:
    """Return what the function at the import path ``name`` makes of ``data_root`` (None where none was given), checked.

    It must return the same ``fl_sim.types.Dataset`` in every process. Raises UserError for anything else.
    """
    factory = load_object(name, "data set")
    if not callable(factory):
        raise UserError(f"data set {name!r} is {type(factory).__name__}, not a function of the data root")
    try:
        with seeded_alone(0, "data set"):
            made = factory(data_root)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"data set {name!r} failed with {with_place(error)}") from error
    if not isinstance(made, Dataset):
        raise UserError(f"data set {name!r} returned {type(made).__name__}, not a fl_sim.types.Dataset")
    _check_dataset(made, f"data set {name!r}")
    return replace(made, name=name)


def _check_dataset(made: Dataset, where: str) -> None:
    validation = () if made.validation is None else (("validation", made.validation),)
    for split, part in (("train", made.train), ("test", made.test), *validation):
        _check_part(part, made.num_classes, f"{where}, {split}")
        if made.vocabulary:
            tokens_in(f"{where}, {split}", part.inputs.astype(np.int64), made.vocabulary)
    if made.train.inputs.shape[1:] != made.test.inputs.shape[1:] or made.train.inputs.dtype != made.test.inputs.dtype:
        raise UserError(f"{where}: training and test records differ in shape or type")
    channels = made.input_shape[0] if len(made.input_shape) == 3 else 1
    for what, values in (("mean", made.mean), ("std", made.std)):
        if len(values) != channels or not np.isfinite(values).all() or (what == "std" and min(values) <= 0):
            raise UserError(f"{where}: {what} is {values}, wanted are {channels} finite numbers, std above 0")
    with_validation(made, made.validation, where)


def _check_part(part: Examples, num_classes: int, where: str) -> None:
    inputs, labels = part.inputs, part.labels
    if not (isinstance(inputs, np.ndarray) and isinstance(labels, np.ndarray)):
        raise UserError(f"{where}: inputs and labels must be NumPy arrays")
    is_image, is_table = inputs.dtype == np.uint8 and inputs.ndim == 4, inputs.dtype == np.float32 and inputs.ndim == 2
    if not (is_image or is_table):
        raise UserError(
            f"{where}: inputs are {inputs.dtype} of shape {inputs.shape}; wanted are uint8 images (records, channels, "
            "height, width), or float32 features or tokens (records, numbers)"
        )
    if is_image and looks_channels_last(inputs.shape):
        raise UserError(
            f"{where}: images of shape {inputs.shape} look like channels last; wanted is (records, channels, height, "
            "width): inputs.transpose(0, 3, 1, 2)"
        )
    if labels.dtype != np.int64 or labels.shape != (len(inputs),) or not len(labels):
        raise UserError(
            f"{where}: labels are {labels.dtype} of shape {labels.shape}; wanted is int64, one for each of "
            f"{len(inputs)} records, of which there is at least one"
        )
    if part.groups is not None and (part.groups.dtype != np.int64 or part.groups.shape != labels.shape):
        raise UserError(
            f"{where}: groups are {part.groups.dtype} of shape {part.groups.shape}; wanted is int64, one for each of "
            f"{len(inputs)} records"
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UserError(f"{where}: labels run from {labels.min()} to {labels.max()}, wanted are 0 to {num_classes - 1}")
    if is_table and not np.isfinite(inputs).all():
        raise UserError(f"{where}: {np.count_nonzero(~np.isfinite(inputs).all(axis=1))} records are not finite")


def _checksums(name: str, source: Source) -> list[str]:
    known = KNOWN.get(name)
    if source.path is None:
        return []
    if source.layout in {"npz", "medmnist"}:
        return _zip_checksums(source.path)
    if known is None:
        return []
    return [
        f"{source.path / file}: MD5 is {actual}, the official file's is {published}"
        for file, published in _published(known).items()
        if (actual := _md5(source.path / file)) != published
    ]


def _zip_checksums(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, OSError):
        return []  # reading it fails too, and says more
    return [f"{path}: {bad} does not match its checksum; fetch or write the file again"] if bad else []


def _published(known: KnownSet) -> dict[str, str]:
    """Return {file: MD5}."""
    held = {file: md5 for file, md5 in known.files.items() if md5 is not None}
    if held:
        return held
    from torchvision import datasets  # noqa: PLC0415 (seconds to import)

    dataset = getattr(datasets, known.torchvision_class)
    if known.layout == "mat":
        return {file: md5 for _, file, md5 in dataset.split_list.values() if file in known.files}
    meta = (dataset.meta["filename"], dataset.meta["md5"])
    return {f"{dataset.base_folder}/{file}": md5 for file, md5 in (*dataset.train_list, *dataset.test_list, meta)}


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
