"""Finds the files of a data set in the search directories, and downloads missing public data sets."""

import contextlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_sim.data.naming import (
    DIGITS,
    DOMAINS,
    KNOWN,
    NAMES,
    OTHER_NAMES,
    OWN,
    PLACES,
    KnownSet,
    Layout,
    OwnKind,
    OwnName,
    own_name,
    parts_of,
)
from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.own_code import IMPORT_PATH

_STALL_SECONDS = 30.0


@dataclass(frozen=True)
class Root:
    """A directory that is searched for data sets.

    ``origin``: the option or environment variable that names the directory, such as ``--data-root``.
    """

    path: Path
    origin: str


@dataclass(frozen=True)
class DataSource:
    """The location of a data set that was found.

    ``layout``: the file format, "own" for a user's own Python function, or "domains" for several joined data sets.
    ``path``: the file or folder to read; None for the digits, which need no data folder. With the layouts "own" and
    "domains", ``path`` is the data root (or None): the user's function gets this folder as argument, and joined data
    sets are first searched there.
    """

    layout: Layout | OwnKind
    path: Path | None


def roots(data_root: Path | None) -> tuple[Root, ...]:
    """Return the directories to search for data, in order: ``data_root``, $FL_SIM_DATA, the user's cache folder."""
    named = os.environ.get("FL_SIM_DATA")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    found = [
        *([Root(_absolute(data_root), "--data-root")] if data_root else []),
        *([Root(_absolute(named), "$FL_SIM_DATA")] if named else []),
        Root(_absolute(Path(cache) / "fl-sim"), "the user's cache"),
    ]
    unique: dict[Path, Root] = {}
    for root in found:
        unique.setdefault(root.path, root)
    return tuple(unique.values())


def find(name: str, data_root: Path | None = None) -> DataSource | None:
    """Return the location of the data set ``name``; None if its files are not on this machine.

    Raises UserError for an invalid name. Valid names are the public ``NAMES``, KIND:PLACE for the user's own data, and
    package.module:function for the user's own Python function.
    """
    if name == DIGITS:
        return DataSource("embedded", None)
    if own := own_name(name):
        return _found_parts(name, data_root) if own.kind == DOMAINS else _found_own(own)
    if (known := KNOWN.get(name)) is None:
        if IMPORT_PATH.fullmatch(name):
            return DataSource("own", data_root)
        called = OTHER_NAMES.get(name.lower())
        meant = f" (here: data={called})" if called else guess(name, NAMES, cutoff=0.6)
        raise UserError(
            f"unknown data set {shortened(name)!r}{meant}; valid: {', '.join(NAMES)}, {OWN}, or your own "
            "function as package.module:function"
        )
    for root in roots(data_root):
        if all((root.path / file).is_file() for file in known.files):
            return DataSource(known.layout, root.path)
        for file in known.npz_names:
            if (root.path / file).is_file():
                return DataSource("npz", root.path / file)
    return None


def _found_own(own: OwnName) -> DataSource | None:
    path = _absolute(own.place)
    # os.path.isdir is used because Path.is_dir raises an error for a long name
    is_there = os.path.isdir if own.kind in PLACES else os.path.isfile
    # data of kind hf can be a local folder, or a name on Hugging Face's hub
    found = path if is_there(path) else Path(own.place) if own.kind == "hf" else None
    return DataSource(own.kind, found) if found else None


def _found_parts(name: str, data_root: Path | None) -> DataSource:
    """Return the location of the data set ``name``, which joins several data sets (parts).

    Each part may be in another search directory. Raises UserError for fewer than two parts, for a repeated part, for a
    part that itself joins data sets, for an invalid name of a part, and if files of the user's own data are missing.
    """
    parts = parts_of(name)
    if len(parts) < 2 or "" in parts:
        raise UserError(
            f"data={shortened(name)} must join two data sets or more, such as domains:mnist+digits; for a single "
            "data set, write only its name"
        )
    if twice := [part for part in parts if parts.count(part) > 1]:
        raise UserError(f"data={shortened(name)} names {shortened(twice[0])} twice: name each data set once")
    if nested := [part for part in parts if (own := own_name(part)) and own.kind == DOMAINS]:
        raise UserError(f"data={shortened(name)} joins {shortened(nested[0])}, which has parts itself: list all parts")
    for part in parts:
        look_for(part, data_root)
    return DataSource(DOMAINS, data_root)


def look_for(name: str, data_root: Path | None = None) -> DataSource | None:
    """Return the location of the data set ``name``; None for a public data set that is not on this machine.

    Raises UserError for an invalid name, and if the user's own files are missing.
    """
    source = find(name, data_root)
    if source is None and name not in KNOWN:
        raise UserError(describe_missing(name, data_root))
    return source


def describe_missing(name: str, data_root: Path | None = None) -> str:
    """Return the error message for a data set that was not found.

    The message contains the expected files, the directories that were searched, and advice.
    """
    known = KNOWN.get(name)
    if known is None:
        own = own_name(name)
        assert own is not None
        what = "folder" if own.kind in PLACES else "file"
        return f"{shortened(name)}: there is no {what} {shortened(str(_absolute(own.place)))}; correct the path"
    looked = ", ".join(f"{root.path} ({root.origin}{_lack(root.path, known)})" for root in roots(data_root))
    return (
        f"{name} was not found in {looked}; put {wanted_files(name)}, into one of these directories, or use the "
        f"embedded data={DIGITS}"
    )


def wanted_files(name: str) -> str:
    """Return the files of the public data set ``name``, relative to a search directory, as text for messages."""
    known = KNOWN[name]
    folder, slash, _ = next(iter(known.files)).rpartition("/")
    files = ", ".join(file.removeprefix(folder + slash) for file in known.files)
    listing = f"{folder}/{{{files}}}" if slash else files
    return f"{listing}, or {known.npz_names[0]} (x_train, y_train, x_test, y_test)" if known.npz_names else listing


def download(known: KnownSet, data_root: Path | None) -> DataSource:
    """Download a public data set with torchvision into the first writable search directory; return its location.

    Raises UserError if FL_SIM_OFFLINE is set, if torchvision lacks the data set, or if the download fails.
    """
    missing = describe_missing(known.name, data_root)
    if not known.torchvision_class:
        raise UserError(f"{missing}; it is not downloaded automatically: fetch it from archive.ics.uci.edu")
    if os.environ.get("FL_SIM_OFFLINE", "") not in {"", "0"}:
        raise UserError(f"{missing}; it was not downloaded because FL_SIM_OFFLINE is set")
    root = next((root.path for root in roots(data_root) if _writable(root.path)), None)
    if root is None:
        raise UserError(f"{missing}; it was not downloaded because none of these directories can be written")
    dataset = known.in_torchvision()
    from http.client import HTTPException  # noqa: PLC0415 (with TLS and mail, a fifth of the time of settings)

    splits: list[dict[str, Any]] = [{"split": "train"}, {"split": "test"}] if known.layout == "mat" else [{}]
    stall = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_STALL_SECONDS)  # torchvision itself sets no timeout for downloads
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the command's result only
            for split in splits:
                dataset(root, download=True, **split)
    except (OSError, RuntimeError, HTTPException) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{missing}; downloading it to {root} failed ({reason})") from error
    finally:
        socket.setdefaulttimeout(stall)
    return DataSource(known.layout, root)


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()


def _lack(root: Path, known: KnownSet) -> str:
    if not root.is_dir():
        return ", no such directory"
    absent = [file for file in known.files if not (root / file).is_file()]
    return f", which lacks {', '.join(absent)}" if len(absent) < len(known.files) else ""


def _writable(path: Path) -> bool:
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    return nearest.is_dir() and os.access(nearest, os.W_OK)
