"""Which records a data set is about, whatever it is called and however it is read: a digest of what its files hold.

Two names have one content where they are two spellings of a path, a link, or a copy; where other columns are the label,
other ranges are set, or another share is for testing; where the classes are merged, or the features are other ones. The
order of lines and records does not count. A table whose columns were changed, or a part of the records, is other
content.
"""

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.naming import KNOWN, OwnName, own_name, without_settings
from fl_sim.data.pictures import SUFFIXES
from fl_sim.data.places import look_for
from fl_sim.data.reading import load
from fl_sim.errors import UserError
from fl_sim.same_records import records_of
from fl_sim.store.secret_key import machine_key

_FOLDERS: Final = (*SUFFIXES, ".csv", ".json", ".jsonl", ".parquet", ".arrow")
_DESCRIPTIONS: Final = frozenset({"dataset_info.json", "dataset_dict.json", "state.json"})
"""What Hugging Face's library writes beside the records."""


def content_of(name: str, data_root: Path | None) -> str:
    """Return a digest of the records that ``name`` trains on as they lie in their files, whoever reads them how.

    Of tables and folders: of all that the file or the folder holds. It tells whoever knows all records but one what
    that one is: it is for this machine alone, see ``sealed_content``. Raises UserError as ``load`` does.
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
    return _of_records(without_settings(name), data_root, _signature(place) if place else ())


def contents_of(name: str, data_root: Path | None) -> tuple[str, str]:
    """Return ``content_of`` the records that ``name`` trains on, and of those that it tests on."""
    own = own_name(records_of(name))
    if own is not None and "test_file" in own.options:
        return content_of(name, data_root), content_of(f"{own.kind}:{own.option('test_file')}", data_root)
    trained = content_of(name, data_root)
    if own is not None and own.kind in {"csv", "parquet"}:
        return trained, trained
    return trained, _of_inputs(load(records_of(name), data_root).test.inputs)


def sealed_content(name: str, data_root: Path | None, *, make_key: bool = True) -> str:
    """Return ``content_of`` under a secret key of this machine, to be told in results; "" where there is no such key.

    The part before the colon tells the key: contents under two keys cannot be compared. ``make_key``: as ``make`` of
    ``machine_key``, for a plan, which writes nothing.
    """
    key = machine_key(make=make_key)
    if not key:
        return ""
    sealed = hmac.new(key, content_of(name, data_root).encode(), hashlib.sha256).hexdigest()
    return f"{hashlib.sha256(key).hexdigest()[:8]}:{sealed[:32]}"


def _files_of(name: str, own: OwnName | None, data_root: Path | None) -> list[Path]:
    """Return the files whose bytes are the content; none where it is that of the arrays that are read from them."""
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
    """Return what changes when a file is written again."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=32)
def _of_files(files: tuple[tuple[Path | int, ...], ...]) -> str:
    paths = [Path(str(path)) for path, *_ in files]
    try:
        digests = [_of_lines(path) if path.suffix.lower() == ".csv" else _of_bytes(path) for path in paths]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}): make it readable") from error
    return digests[0].hex() if len(digests) == 1 else _added(digests).hex()


def _of_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _of_lines(path: Path) -> bytes:
    """Return a digest of a file's lines in any order, whatever ends them."""
    with path.open("rb") as file:
        return _added(hashlib.sha256(line).digest() for line in _lines(file))


def _lines(file: Iterable[bytes]) -> Iterator[bytes]:
    for line in file:
        if text := line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n"):
            yield text


@lru_cache(maxsize=8)
def _of_records(name: str, data_root: Path | None, signature: tuple[int, ...]) -> str:  # noqa: ARG001
    """Return the digest of the training inputs. ``signature``: of the file; one that was written again is another."""
    return _of_inputs(load(name, data_root).train.inputs)


def _of_inputs(inputs: NDArray[Any]) -> str:
    return _added(hashlib.sha256(np.ascontiguousarray(record).data).digest() for record in inputs).hex()


def _added(digests: Iterable[bytes]) -> bytes:
    """Return a digest of several in any order, each as often as it occurs."""
    total, count = 0, 0
    for digest in digests:
        total, count = total + int.from_bytes(digest), count + 1
    return hashlib.sha256(f"{count} {total % 2**256:x}".encode()).digest()
