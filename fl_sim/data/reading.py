"""One data set at one place, read; each once in a process, and once more after its files have changed."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np

from fl_sim.data import folder, hub, leaf, npz, own, table, uci
from fl_sim.data.checked import known_dataset
from fl_sim.data.features import Features, as_features
from fl_sim.data.naming import KNOWN, KnownSet, OwnName, own_name
from fl_sim.data.places import Source, look_for
from fl_sim.data.public_images import download, read_cifar, read_digits, read_idx, read_svhn
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


@lru_cache(maxsize=32)
def _fingerprint_once(name: str, source: Source, stamps: "_Stamps", with_test: bool) -> str:  # noqa: FBT001 (a key)
    dataset, digest = _read_once(name, source, stamps), hashlib.sha256()
    validation = () if dataset.validation is None else (dataset.validation,)
    for part in (dataset.train, *validation, *((dataset.test,) if with_test else ())):
        for array in part.arrays:
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def read(name: str, source: Source) -> Dataset:
    """Return the data set ``name`` as it now lies at ``source``."""
    path = source.path
    if source.layout == "own":
        return own.read(name, path)
    if path is None:
        return read_digits()
    if own_files := own_name(name):
        return _read_own_files(name, own_files, path)
    return _read_known(KNOWN[name], source, path)


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
            return folder.read(name, own_files, path)
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
