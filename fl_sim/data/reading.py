"""One data set at one place, read; each at most once in a process."""

import hashlib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from fl_sim.data import digits, folder, hub, idx, leaf, medmnist, npz, own, table, uci
from fl_sim.data.checked import known_dataset
from fl_sim.data.features import Features, as_features
from fl_sim.data.known import KNOWN, KnownSet
from fl_sim.data.naming import OwnName, own_name
from fl_sim.data.places import Source, look_for
from fl_sim.data.torchvision_files import download, read_cifar, read_svhn
from fl_sim.types import Dataset, Examples


def load(name: str, data_root: Path | None = None, features: Features = "none") -> Dataset:
    """Return the data set ``name``, one of ``NAMES``, KIND:PLACE (fl_sim.data.naming) or package.module:function.

    Searched in ``data_root``, $FL_SIM_DATA and the user's cache, in this order; a known set that is in none of them is
    downloaded unless FL_SIM_OFFLINE is set. Read once per process; images stay uint8, memory-mapped where the files
    allow. ``features``: what records are turned into. Raises UserError for unknown names, missing or damaged files,
    what is no classification data set, and records that have no such features.
    """
    dataset = _read_once(name, look_for(name, data_root) or download(KNOWN[name], data_root))
    return dataset if features == "none" else _features_once(name, data_root, features)


@lru_cache(maxsize=8)
def fingerprint(name: str, data_root: Path | None, *, with_test: bool = False) -> str:
    """Return a digest of the training and validation records of ``name``, and of its test records where they matter."""
    dataset, digest = load(name, data_root), hashlib.sha256()
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
        return digits.read()
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
    readers = {"idx": idx.read, "cifar": read_cifar, "mat": read_svhn}
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
            return medmnist.read(name, own_files, path)
        case "hf":
            return hub.read(name, own_files, path)


@lru_cache(maxsize=2)
def _features_once(name: str, data_root: Path | None, features: Features) -> Dataset:
    return as_features(load(name, data_root), features, fingerprint(name, data_root, with_test=True))


@lru_cache(maxsize=8)
def _read_once(name: str, source: Source) -> Dataset:
    return read(name, source)
