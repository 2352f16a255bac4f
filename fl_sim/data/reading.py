"""Loads data sets by name, verifies them against published checksums, and computes digests of their content.

A data set is read once per process, and again after its files have changed. A data set can also come from a user's own
Python function: ``data=my_package.sets:hospitals``.

A digest of the content (``content_of``) identifies the records, so that a privacy ledger can add up the privacy costs
of all outputs about the same records. The digest does not depend on the path of a file, on the order of records, or on
the settings for reading (label column, ranges, test share, merged classes, features). A table with changed columns, or
a subset of the records, has another digest.
"""

import hashlib
import hmac
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.data import hub, leaf, npz, texts
from fl_sim.data.dataset import known_dataset, looks_channels_last, with_validation
from fl_sim.data.domains import joined
from fl_sim.data.features import Features, as_features
from fl_sim.data.folders import read_folder
from fl_sim.data.naming import DOMAINS, KNOWN, KnownSet, OwnKind, OwnName, own_name, parts_of, without_settings
from fl_sim.data.pictures import SUFFIXES
from fl_sim.data.places import DataSource, describe_missing, download, find, look_for
from fl_sim.data.public_sets import read_cifar, read_digits, read_idx, read_svhn, read_uci
from fl_sim.data.tokens import place_of, tokens_in
from fl_sim.errors import UserError
from fl_sim.own_code import load_object, with_place
from fl_sim.seeding import seeded_alone
from fl_sim.store.private import machine_key
from fl_sim.types import Dataset, Examples, records_of

_FOLDERS: Final = (*SUFFIXES, ".csv", ".json", ".jsonl", ".parquet", ".arrow")
_DESCRIPTIONS: Final = frozenset({"dataset_info.json", "dataset_dict.json", "state.json"})
"""Files with metadata that Hugging Face's ``datasets`` stores with the records.

Such files do not count as content.
"""


def load(name: str, data_root: Path | None = None, features: Features = "none") -> Dataset:
    """Load the data set ``name``: a public name (``NAMES``), KIND:PLACE (``own_name``), or package.module:function.

    Files are searched in ``data_root``, $FL_SIM_DATA and the user's cache folder, in this order. A missing public data
    set is downloaded unless FL_SIM_OFFLINE is set. A data set is read once per process, and again after its files have
    changed; a user's function is called only once. Images stay uint8, and are memory-mapped if possible. ``features``:
    the representation of images. Raises UserError for an unknown name, for missing or damaged files, for data without
    classes, and if ``features`` cannot be computed for these records.
    """
    source = look_for(name, data_root) or download(KNOWN[name], data_root)
    stamps = _stamps(name, source)
    dataset = _read_once(name, source, stamps)
    return dataset if features == "none" else _features_once(name, source, stamps, features)


def fingerprint(name: str, data_root: Path | None, *, with_test: bool = False) -> str:
    """Return a SHA-256 digest of the training and validation records of ``name``, as ``load`` returns them.

    ``with_test``: True to include the test records.
    """
    source = look_for(name, data_root) or download(KNOWN[name], data_root)
    return _fingerprint_once(name, source, _stamps(name, source), with_test)


def read(name: str, source: DataSource) -> Dataset:
    """Read the data set ``name`` from its location ``source``, without the cache of ``load``."""
    path, own = source.path, own_name(name)
    if source.layout == "own":
        return _made(name, path)
    if own and source.layout == DOMAINS:
        return joined(name, own, [load(part, path) for part in parts_of(name)])
    if path is None:
        return read_digits()
    if own:
        return _READERS[own.kind](name, own, path)
    return _read_known(KNOWN[name], source, path)


@dataclass(frozen=True)
class Check:
    """The result of the function ``verify`` for one data set: the comparison of its files with the published facts.

    ``source``: the location of the data set, None if it was not found. ``problems``: the differences from the
    published facts, as messages. ``note``: ``Dataset.note``.
    """

    name: str
    source: DataSource | None
    problems: tuple[str, ...]
    note: str = ""

    @property
    def ok(self) -> bool:
        """True if the data set was found and has no problems."""
        return self.source is not None and not self.problems


def verify(name: str, data_root: Path | None = None) -> Check:
    """Read the whole data set ``name`` and compare it with the published facts.

    The MD5 of each official file is compared with the published MD5. An npz file is checked against the checksums that
    it contains. Shapes, numbers of records and labels are always checked. Raises UserError for an unknown name.
    """
    source = find(name, data_root)
    if source is None:
        return Check(name, None, (describe_missing(name, data_root),))
    if source.layout == DOMAINS:
        parts = [verify(part, data_root) for part in parts_of(name)]
        problems = [problem for part in parts for problem in part.problems]
    else:
        problems = _checksums(name, source)
    if problems:  # damaged files are not read, because SciPy's .mat parser can crash the process
        return Check(name, source, tuple(problems))
    try:
        return Check(name, source, (), read(name, source).note)
    except UserError as error:
        return Check(name, source, (str(error),))


def content_of(name: str, data_root: Path | None) -> str:
    """Return a digest that identifies the training records of ``name``, independent of the settings for reading.

    For tables and folders, the result is a digest of the whole file or folder. The digest must not leave this machine:
    a person who knows all other records could guess values of one record until the digests are equal. Result files
    contain the keyed hash of ``sealed_content`` instead. Raises UserError as ``load`` does.
    """
    name = records_of(name)
    own = own_name(name)
    if len(parts := parts_of(name)) > 1:
        return _combined(bytes.fromhex(content_of(part, data_root)) for part in parts).hex()
    files = _files_of(name, own, data_root)
    if files:
        return _of_files(tuple((file, *_signature(file)) for file in files))
    if own is not None and own.kind == "hf":  # a data set on Hugging Face's hub is identified by its name
        return hashlib.sha256(f"hf:{own.place}".encode()).hexdigest()
    source = look_for(name, data_root)
    place = source.path if source and source.layout != "own" else None
    signature = _signature(place) if place else ()
    try:
        return _of_records(without_settings(name), data_root, signature)
    except UserError:  # the file cannot be read without the settings in ``name``, such as the label column
        return _of_records(name, data_root, signature)


def contents_of(name: str, data_root: Path | None) -> tuple[str, str]:
    """Return the digests (see ``content_of``) of the training records and of the test records of ``name``.

    Both digests are equal if one table contains training and test records, or if ``data.test`` draws the test records.
    """
    own = own_name(records_of(name))
    if own is not None and "test_file" in own.options:
        return content_of(name, data_root), content_of(f"{own.kind}:{own.option('test_file')}", data_root)
    trained = content_of(name, data_root)
    if own is not None and (own.kind in {"csv", "parquet"} or "test" in own.options):
        return trained, trained
    return trained, _of_inputs(load(records_of(name), data_root).test.inputs)


def sealed_content(name: str, data_root: Path | None, *, make_key: bool = True) -> str:
    """Return a keyed hash (HMAC) of ``content_of``, for result files; empty if there is no key.

    The key is secret and stays on this machine. The part of the result before the colon identifies the key. Hashes with
    different keys cannot be compared. ``make_key``: True creates a missing key. False writes no file, for example in a
    forecast of a run's privacy cost.
    """
    key = machine_key(make=make_key)
    if not key:
        return ""
    sealed = hmac.new(key, content_of(name, data_root).encode(), hashlib.sha256).hexdigest()
    return f"{hashlib.sha256(key).hexdigest()[:8]}:{sealed[:32]}"


@lru_cache(maxsize=32)
def _fingerprint_once(name: str, source: DataSource, stamps: "_Stamps", with_test: bool) -> str:  # noqa: FBT001 (a key)
    dataset, digest = _read_once(name, source, stamps), hashlib.sha256()
    validation = () if dataset.validation is None else (dataset.validation,)
    for part in (dataset.train, *validation, *((dataset.test,) if with_test else ())):
        for array in part.arrays:
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _read_known(known: KnownSet, source: DataSource, path: Path) -> Dataset:
    if known.finer:
        finer, classes = _read_known(KNOWN[known.finer], source, path), np.array(known.merged)
        train, test = (Examples(part.inputs, classes[part.labels], part.groups) for part in (finer.train, finer.test))
        return replace(finer, name=known.name, train=train, test=test, num_classes=known.num_classes)
    if source.layout == "uci":
        return read_uci(path, known)
    if source.layout == "npz":
        return npz.read_known(path, known)
    readers = {"idx": read_idx, "cifar": read_cifar, "mat": read_svhn}
    train, test = readers[source.layout](path, known)
    return known_dataset(known, train, test, str(path / next(iter(known.files)).rpartition("/")[0]))


_READERS: Final[Mapping[OwnKind, Callable[[str, OwnName, Path], Dataset]]] = {
    "csv": texts.read, "parquet": texts.read, "npz": npz.read_own, "folder": read_folder, "leaf": leaf.read,
    "medmnist": npz.read_medmnist, "hf": hub.read,
}  # fmt: skip

_Stamps: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""(path, size in bytes, time of the last change in nanoseconds, inode) of every file of a data set."""


@lru_cache(maxsize=2)
def _features_once(name: str, source: DataSource, stamps: _Stamps, features: Features) -> Dataset:
    digest = _fingerprint_once(name, source, stamps, with_test=True)
    return as_features(_read_once(name, source, stamps), features, digest)


@lru_cache(maxsize=8)
def _read_once(name: str, source: DataSource, stamps: _Stamps) -> Dataset:
    del stamps  # only a part of the cache key: a changed file has other stamps, so the file is read again
    return read(name, source)


def _stamps(name: str, source: DataSource) -> _Stamps:
    """Return size, time and inode of each file of the data set ``name``, to detect changes; empty without files."""
    found = ((path, os.stat(path)) for path in _files(name, source))  # noqa: PTH116 (a folder may hold a million)
    return tuple((path, now.st_size, now.st_mtime_ns, now.st_ino) for path, now in found)


def _files(name: str, source: DataSource) -> Iterator[str]:
    path = source.path
    if source.layout == DOMAINS:
        for part in parts_of(name):
            yield from _files(part, look_for(part, path) or download(KNOWN[part], path))
        return
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
    own = own_name(name)
    if own and (beside := own.option("test_file")):
        yield str(Path(beside).expanduser().absolute())
    if own and (tokenizer := place_of(own.option("tokenizer"))):
        yield str(tokenizer)


def _made(name: str, data_root: Path | None) -> Dataset:
    """Call the user's function with the import path ``name``. Its argument is ``data_root`` (or None).

    The function must return the same ``fl_sim.types.Dataset`` in every process. Raises UserError if the function fails
    or returns another type.
    """
    factory = load_object(name, "data set")
    if not callable(factory):
        raise UserError(f"data set {name!r} is {type(factory).__name__}; it must be a function of the data root")
    try:
        with seeded_alone(0, "data set"):
            made = factory(data_root)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"data set {name!r} failed with {with_place(error)}") from error
    if not isinstance(made, Dataset):
        raise UserError(f"data set {name!r} returned {type(made).__name__}; it must return a fl_sim.types.Dataset")
    _check_dataset(made, f"data set {name!r}")
    return replace(made, name=name)


def _check_dataset(made: Dataset, where: str) -> None:
    validation = () if made.validation is None else (("validation", made.validation),)
    for split, part in (("train", made.train), ("test", made.test), *validation):
        _check_part(part, made.num_classes, f"{where}, {split}")
        if made.vocabulary:
            tokens_in(f"{where}, {split}", part.inputs.astype(np.int64), made.vocabulary)
    if made.train.inputs.shape[1:] != made.test.inputs.shape[1:] or made.train.inputs.dtype != made.test.inputs.dtype:
        raise UserError(
            f"{where}: training and test records differ in shape or type; give them the same shape and type"
        )
    channels = made.input_shape[0] if len(made.input_shape) == 3 else 1
    for what, values in (("mean", made.mean), ("std", made.std)):
        if len(values) != channels or not np.isfinite(values).all() or (what == "std" and min(values) <= 0):
            raise UserError(f"{where}: {what} is {values}; it must be {channels} finite numbers, std above 0")
    with_validation(made, made.validation, where)
    groups = made.train.groups
    if made.sources and (groups is None or not 0 <= groups.min() <= groups.max() < len(made.sources)):
        raise UserError(
            f"{where}: sources are {len(made.sources)} names, and the groups of training records are "
            f"{'none' if groups is None else f'{groups.min()} to {groups.max()}'}; a group is the index of its name"
        )


def _check_part(part: Examples, num_classes: int, where: str) -> None:
    inputs, labels = part.inputs, part.labels
    if not (isinstance(inputs, np.ndarray) and isinstance(labels, np.ndarray)):
        raise UserError(f"{where}: inputs and labels must be NumPy arrays")
    is_image, is_table = inputs.dtype == np.uint8 and inputs.ndim == 4, inputs.dtype == np.float32 and inputs.ndim == 2
    if not (is_image or is_table):
        raise UserError(
            f"{where}: inputs are {inputs.dtype} of shape {inputs.shape}; they must be uint8 images (records, "
            "channels, height, width), or float32 features or tokens (records, numbers)"
        )
    if is_image and looks_channels_last(inputs.shape):
        raise UserError(
            f"{where}: images of shape {inputs.shape} look like channels last; they must be (records, channels, "
            "height, width): inputs.transpose(0, 3, 1, 2)"
        )
    if labels.dtype != np.int64 or labels.shape != (len(inputs),) or not len(labels):
        raise UserError(
            f"{where}: labels are {labels.dtype} of shape {labels.shape}; they must be int64, one for each of "
            f"{len(inputs)} records, and at least one"
        )
    if part.groups is not None and (part.groups.dtype != np.int64 or part.groups.shape != labels.shape):
        raise UserError(
            f"{where}: groups are {part.groups.dtype} of shape {part.groups.shape}; they must be int64, one for each "
            f"of {len(inputs)} records"
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UserError(
            f"{where}: labels run from {labels.min()} to {labels.max()}; they must be from 0 to {num_classes - 1}"
        )
    if is_table and not np.isfinite(inputs).all():
        raise UserError(
            f"{where}: {np.count_nonzero(~np.isfinite(inputs).all(axis=1))} records are not finite; remove them, or "
            "replace their infinite and missing numbers"
        )


def _checksums(name: str, source: DataSource) -> list[str]:
    known, path = KNOWN.get(name), source.path
    if path is None:
        return []
    if source.layout in {"npz", "medmnist"}:
        try:
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
        except (zipfile.BadZipFile, OSError):
            return []  # the file is damaged: the reader, called next, raises an error with a better message
        return [f"{path}: {bad} does not match its checksum; fetch or write the file again"] if bad else []
    problems = []
    for file, published in (_published(known) if known else {}).items():
        with (path / file).open("rb") as opened:
            actual = hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if actual != published:
            problems.append(f"{path / file}: MD5 is {actual}, but the official file has {published}; fetch it again")
    return problems


def _published(known: KnownSet) -> dict[str, str]:
    if own := {file: md5 for file, md5 in known.files.items() if md5 is not None}:
        return own
    dataset = known.in_torchvision()
    if known.layout == "mat":
        return {file: md5 for _, file, md5 in dataset.split_list.values() if file in known.files}
    meta = (dataset.meta["filename"], dataset.meta["md5"])
    return {f"{dataset.base_folder}/{file}": md5 for file, md5 in (*dataset.train_list, *dataset.test_list, meta)}


def _files_of(name: str, own: OwnName | None, data_root: Path | None) -> list[Path]:
    """Return the files that ``content_of`` hashes; empty if ``content_of`` hashes the loaded arrays."""
    if own is None:
        known = KNOWN.get(name)
        source = look_for(name, data_root) if known else None
        if known is None or source is None or source.layout != "uci" or source.path is None:
            return []
        return [source.path / next(iter(known.files))]
    place = Path(own.place).expanduser().absolute()
    if own.kind in {"csv", "parquet"}:
        return [place]
    if own.kind == "folder" or (own.kind == "hf" and place.is_dir()):
        return sorted(
            file for file in place.rglob("*") if file.suffix.lower() in _FOLDERS and file.name not in _DESCRIPTIONS
        )
    return []


def _signature(path: Path) -> tuple[int, ...]:
    """Return device, inode, size and time of change of a file, to detect changes; empty for a missing file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=32)
def _of_files(files: tuple[tuple[Path | int, ...], ...]) -> str:
    digests = []
    for path in (Path(str(path)) for path, *_ in files):
        try:
            with path.open("rb") as file:
                # The digest of a csv file depends neither on the order of its lines nor on its line endings.
                if path.suffix.lower() == ".csv":
                    lines = (line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n") for line in file)
                    digests.append(_combined(hashlib.sha256(line).digest() for line in lines if line))
                else:
                    digests.append(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise UserError(f"{error.filename} cannot be read ({error.strerror}): make it readable") from error
    return digests[0].hex() if len(digests) == 1 else _combined(digests).hex()


@lru_cache(maxsize=8)
def _of_records(name: str, data_root: Path | None, signature: tuple[int, ...]) -> str:  # noqa: ARG001
    """Return a digest of the training inputs of the data set ``name``, for ``content_of``.

    ``signature`` describes the file (size, time of change). ``signature`` is only a part of the cache key, so that the
    digest of a changed file is computed again.
    """
    return _of_inputs(load(name, data_root).train.inputs)


def _of_inputs(inputs: NDArray[Any]) -> str:
    return _combined(hashlib.sha256(np.ascontiguousarray(record).data).digest() for record in inputs).hex()


def _combined(digests: Iterable[bytes]) -> bytes:
    """Combine the ``digests`` of records to one digest that does not depend on the order of the records."""
    total, count = 0, 0
    for digest in digests:
        total, count = total + int.from_bytes(digest), count + 1
    return hashlib.sha256(f"{count} {total % 2**256:x}".encode()).digest()
