"""Data sets by name: loading (once per process, and again after file changes), verification, and content digests.

Verification compares checksums, sizes, shapes and counts with the published ones. The user's own data set by import
path, ``data=my_package.sets:hospitals``, is a function of the data root.

The content of a data set is a digest of the records in its files. Two names have one content if they are two spellings
of a path, a link or a copy, or differ in label column, ranges, test share, merged classes or features. The order of
lines and records does not count. A table with changed columns, or a part of the records, is other content.
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

from fl_sim.data import hub, leaf, npz, table
from fl_sim.data.dataset import known_dataset, looks_channels_last, tokens_in, with_validation
from fl_sim.data.features import Features, as_features
from fl_sim.data.naming import KNOWN, KnownSet, OwnKind, OwnName, own_name, without_settings
from fl_sim.data.pictures import SUFFIXES, read_folder
from fl_sim.data.places import DataSource, describe_missing, download, find, look_for
from fl_sim.data.public_sets import read_cifar, read_digits, read_idx, read_svhn, read_uci
from fl_sim.errors import UserError
from fl_sim.own_code import load_object, with_place
from fl_sim.seeding import seeded_alone
from fl_sim.store.private import machine_key
from fl_sim.types import Dataset, Examples, records_of

_FOLDERS: Final = (*SUFFIXES, ".csv", ".json", ".jsonl", ".parquet", ".arrow")
_DESCRIPTIONS: Final = frozenset({"dataset_info.json", "dataset_dict.json", "state.json"})
"""Files of Hugging Face's ``datasets`` that lie beside the records."""


def load(name: str, data_root: Path | None = None, features: Features = "none") -> Dataset:
    """Return the data set ``name``: one of ``NAMES``, KIND:PLACE (fl_sim.data.naming), or package.module:function.

    Files are searched in ``data_root``, $FL_SIM_DATA and the user's cache, in this order. A public set that is in none
    of them is downloaded unless FL_SIM_OFFLINE is set. A data set is read once per process, and again after its files
    have changed (a function of the user's own is called once). Images stay uint8, memory-mapped if the files allow it.
    ``features``: the representation of the inputs. Raises UserError for unknown names, missing or damaged files,
    anything but a classification data set, and records without such features.
    """
    source = look_for(name, data_root) or download(KNOWN[name], data_root)
    stamps = _stamps(name, source)
    dataset = _read_once(name, source, stamps)
    return dataset if features == "none" else _features_once(name, source, stamps, features)


def fingerprint(name: str, data_root: Path | None, *, with_test: bool = False) -> str:
    """Return a digest of the training and validation records of ``name``; ``with_test`` includes its test records."""
    source = look_for(name, data_root) or download(KNOWN[name], data_root)
    return _fingerprint_once(name, source, _stamps(name, source), with_test)


def read(name: str, source: DataSource) -> Dataset:
    """Return the data set ``name`` at the location ``source``."""
    path, own = source.path, own_name(name)
    if source.layout == "own":
        return _made(name, path)
    if path is None:
        return read_digits()
    if own:
        return _READERS[own.kind](name, own, path)
    return _read_known(KNOWN[name], source, path)


@dataclass(frozen=True)
class Check:
    """The result of a verification: the location of a data set, the problems found, and a note."""

    name: str
    source: DataSource | None
    problems: tuple[str, ...]
    note: str = ""

    @property
    def ok(self) -> bool:
        """True if the data set was found and has no problems."""
        return self.source is not None and not self.problems


def verify(name: str, data_root: Path | None = None) -> Check:
    """Read all of the data set ``name`` and compare it with the published facts.

    Official files are compared by MD5, npz files by the checksums in the zip (no MD5 is published for them). Shapes,
    counts and labels are always compared. Raises UserError for an unknown name.
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


def content_of(name: str, data_root: Path | None) -> str:
    """Return a digest of the training records of ``name`` in their files, whatever the settings of reading.

    For tables and folders it is a digest of the whole file or folder. The digest reveals one record to anybody who
    knows all other records: it is for this machine alone, see ``sealed_content``. Raises UserError as ``load`` does.
    """
    name = records_of(name)
    own = own_name(name)
    files = _files_of(name, own, data_root)
    if files:
        return _of_files(tuple((file, *_signature(file)) for file in files))
    if own is not None and own.kind == "hf":  # a name on the hub
        return hashlib.sha256(f"hf:{own.place}".encode()).hexdigest()
    source = look_for(name, data_root)
    place = source.path if source and source.layout != "own" else None
    signature = _signature(place) if place else ()
    try:
        return _of_records(without_settings(name), data_root, signature)
    except UserError:  # a file that cannot be read without its settings
        return _of_records(name, data_root, signature)


def contents_of(name: str, data_root: Path | None) -> tuple[str, str]:
    """Return two digests as ``content_of`` does: of the training records of ``name``, and of its test records."""
    own = own_name(records_of(name))
    if own is not None and "test_file" in own.options:
        return content_of(name, data_root), content_of(f"{own.kind}:{own.option('test_file')}", data_root)
    trained = content_of(name, data_root)
    if own is not None and (own.kind in {"csv", "parquet"} or "test" in own.options):
        return trained, trained
    return trained, _of_inputs(load(records_of(name), data_root).test.inputs)


def sealed_content(name: str, data_root: Path | None, *, make_key: bool = True) -> str:
    """Return a keyed hash of ``content_of`` with the secret key of this machine, for results; empty if there is no key.

    The part before the colon identifies the key: hashes with two keys cannot be compared. ``make_key``: the argument
    ``make`` of ``machine_key``; False for a plan, which writes nothing.
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
    "csv": table.read, "parquet": table.read, "npz": npz.read_own, "folder": read_folder, "leaf": leaf.read,
    "medmnist": npz.read_medmnist, "hf": hub.read,
}  # fmt: skip

_Stamps: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""Path, size in bytes, time of the last change in nanoseconds, and inode of every file of a data set."""


@lru_cache(maxsize=2)
def _features_once(name: str, source: DataSource, stamps: _Stamps, features: Features) -> Dataset:
    digest = _fingerprint_once(name, source, stamps, with_test=True)
    return as_features(_read_once(name, source, stamps), features, digest)


@lru_cache(maxsize=8)
def _read_once(name: str, source: DataSource, stamps: _Stamps) -> Dataset:
    del stamps  # a part of the key: changed files are read again
    return read(name, source)


def _stamps(name: str, source: DataSource) -> _Stamps:
    """Return path, size, time and inode of every file of ``name``; empty if files are unknown or embedded."""
    found = ((path, os.stat(path)) for path in _files(name, source))  # noqa: PTH116 (a folder may hold a million)
    return tuple((path, now.st_size, now.st_mtime_ns, now.st_ino) for path, now in found)


def _files(name: str, source: DataSource) -> Iterator[str]:
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
    """Return the data set that the function at the import path ``name`` returns for ``data_root`` (or None).

    The function must return the same ``fl_sim.types.Dataset`` in every process. Raises UserError for anything else.
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


def _checksums(name: str, source: DataSource) -> list[str]:
    known, path = KNOWN.get(name), source.path
    if path is None:
        return []
    if source.layout in {"npz", "medmnist"}:
        try:
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
        except (zipfile.BadZipFile, OSError):
            return []  # reading it fails too, with a better message
        return [f"{path}: {bad} does not match its checksum; fetch or write the file again"] if bad else []
    problems = []
    for file, published in (_published(known) if known else {}).items():
        with (path / file).open("rb") as opened:
            actual = hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if actual != published:
            problems.append(f"{path / file}: MD5 is {actual}, the official file's is {published}")
    return problems


def _published(known: KnownSet) -> dict[str, str]:
    """Return {file: published MD5}."""
    if own := {file: md5 for file, md5 in known.files.items() if md5 is not None}:
        return own
    dataset = known.in_torchvision()
    if known.layout == "mat":
        return {file: md5 for _, file, md5 in dataset.split_list.values() if file in known.files}
    meta = (dataset.meta["filename"], dataset.meta["md5"])
    return {f"{dataset.base_folder}/{file}": md5 for file, md5 in (*dataset.train_list, *dataset.test_list, meta)}


def _files_of(name: str, own: OwnName | None, data_root: Path | None) -> list[Path]:
    """Return the files whose bytes are the content of ``name``; empty if the content is the arrays in the files."""
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
    """Return numbers that change when the file is written again; empty if the file is missing."""
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
                if path.suffix.lower() == ".csv":  # lines in any order, whatever ends them
                    lines = (line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n") for line in file)
                    digests.append(_added(hashlib.sha256(line).digest() for line in lines if line))
                else:
                    digests.append(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise UserError(f"{error.filename} cannot be read ({error.strerror}): make it readable") from error
    return digests[0].hex() if len(digests) == 1 else _added(digests).hex()


@lru_cache(maxsize=8)
def _of_records(name: str, data_root: Path | None, signature: tuple[int, ...]) -> str:  # noqa: ARG001
    """Return the digest of the training inputs. ``signature``: of the file; only a part of the cache key."""
    return _of_inputs(load(name, data_root).train.inputs)


def _of_inputs(inputs: NDArray[Any]) -> str:
    return _added(hashlib.sha256(np.ascontiguousarray(record).data).digest() for record in inputs).hex()


def _added(digests: Iterable[bytes]) -> bytes:
    """Return a digest of a multiset of digests; their order does not count."""
    total, count = 0, 0
    for digest in digests:
        total, count = total + int.from_bytes(digest), count + 1
    return hashlib.sha256(f"{count} {total % 2**256:x}".encode()).digest()
