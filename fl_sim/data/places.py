"""Locations of data sets: the directories to search, the files found there, and the download of missing files."""

import contextlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_sim.data.naming import DIGITS, KNOWN, NAMES, OTHER_NAMES, OWN, PLACES, KnownSet, Layout, OwnKind, own_name
from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.own_code import IMPORT_PATH

_STALL_SECONDS = 30.0


@dataclass(frozen=True)
class Root:
    """A directory to search, and the setting that named it (``origin``)."""

    path: Path
    origin: str


@dataclass(frozen=True)
class DataSource:
    """A data set that was found: the layout of its files, and the path to read (None for embedded data).

    With the layout "own", the data set is a function of the user's own, and the path is its argument (a data root or
    None).
    """

    layout: Layout | OwnKind
    path: Path | None


def roots(data_root: Path | None) -> tuple[Root, ...]:
    """Return the directories to search, in order: ``data_root``, $FL_SIM_DATA, the user's cache."""
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
    """Return the location of the data set ``name``; None if it is not on this machine.

    Raises UserError for a name that is neither one of ``NAMES``, nor KIND:PLACE of the user's own files, nor
    package.module:function.
    """
    if name == DIGITS:
        return DataSource("embedded", None)
    if own := own_name(name):
        path = _absolute(own.place)
        is_there = os.path.isdir if own.kind in PLACES else os.path.isfile  # (Path's raise an error for a long name)
        found = path if is_there(path) else Path(own.place) if own.kind == "hf" else None  # hf: a name on the hub
        return DataSource(own.kind, found) if found else None
    if (known := KNOWN.get(name)) is None:
        if IMPORT_PATH.fullmatch(name):
            return DataSource("own", data_root)
        called = OTHER_NAMES.get(name.lower())
        meant = f" (here: data={called})" if called else guess(name, NAMES, cutoff=0.6)
        raise UserError(
            f"unknown data set {shortened(name)!r}{meant}; valid: {', '.join(NAMES)}, {OWN}, or your own "
            "as package.module:function"
        )
    for root in roots(data_root):
        if all((root.path / file).is_file() for file in known.files):
            return DataSource(known.layout, root.path)
        for file in known.npz_names:
            if (root.path / file).is_file():
                return DataSource("npz", root.path / file)
    return None


def look_for(name: str, data_root: Path | None = None) -> DataSource | None:
    """Return the location of the data set ``name``; None for a known set that must be downloaded first.

    Raises UserError as ``find`` does, and for missing files of the user's own.
    """
    source = find(name, data_root)
    if source is None and name not in KNOWN:
        raise UserError(describe_missing(name, data_root))
    return source


def describe_missing(name: str, data_root: Path | None = None) -> str:
    """Return a message with the missing files of ``name``, the directories searched, and an alternative."""
    known = KNOWN.get(name)
    if known is None:
        own = own_name(name)
        assert own is not None
        what = "folder" if own.kind in PLACES else "file"
        return f"{shortened(name)}: there is no {what} {shortened(str(_absolute(own.place)))}"
    looked = ", ".join(f"{root.path} ({root.origin}{_lack(root.path, known)})" for root in roots(data_root))
    return (
        f"{name} was not found in {looked}; put {wanted_files(name)}, into one of these directories, or use the "
        f"embedded data={DIGITS}"
    )


def wanted_files(name: str) -> str:
    """Return the files, relative to a root, that the known data set ``name`` consists of, as text."""
    known = KNOWN[name]
    folder, slash, _ = next(iter(known.files)).rpartition("/")
    files = ", ".join(file.removeprefix(folder + slash) for file in known.files)
    listing = f"{folder}/{{{files}}}" if slash else files
    return f"{listing}, or {known.npz_names[0]} (x_train, y_train, x_test, y_test)" if known.npz_names else listing


def download(known: KnownSet, data_root: Path | None) -> DataSource:
    """Download ``known`` with torchvision into the first writable root, unless FL_SIM_OFFLINE is set.

    Returns the location. Raises UserError, with the files, the directories and the embedded alternative, on failure.
    """
    missing = describe_missing(known.name, data_root)
    if not known.torchvision_class:
        raise UserError(f"{missing}; it comes from archive.ics.uci.edu and is not downloaded by itself")
    if os.environ.get("FL_SIM_OFFLINE", "") not in {"", "0"}:
        raise UserError(f"{missing}; it was not downloaded because FL_SIM_OFFLINE is set")
    root = next((root.path for root in roots(data_root) if _writable(root.path)), None)
    if root is None:
        raise UserError(f"{missing}; it was not downloaded because none of them can be written")
    dataset = known.in_torchvision()
    from http.client import HTTPException  # noqa: PLC0415 (with TLS and mail, a fifth of the time of settings)

    splits: list[dict[str, Any]] = [{"split": "train"}, {"split": "test"}] if known.layout == "mat" else [{}]
    stall = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_STALL_SECONDS)  # torchvision sets none and would wait for ever
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output belongs to the command's result
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
