"""CIFAR and SVHN as torchvision stores them, and the download of what is missing."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fl_sim.data.checked import as_labels
from fl_sim.data.naming import KnownSet
from fl_sim.data.places import Source, describe_missing, roots
from fl_sim.errors import UserError
from fl_sim.import_path import in_one_line
from fl_sim.types import Examples

_STALL_SECONDS = 30.0


def read_cifar(root: Path, known: KnownSet) -> tuple[Examples, Examples]:
    """Return (training, test) records of the pickled batches below ``root``.

    These files are pickles, which can run code when read: torchvision compares each file's MD5 with the published one
    before it opens any, and refuses a set with a file that differs.
    """
    cifar = _dataset_class(known)
    try:
        parts = [cifar(root, train=train) for train in (True, False)]
    except RuntimeError as error:
        folder = root / next(iter(known.files)).partition("/")[0]
        raise UserError(
            f"{folder}: a file is not the published one ({error}); delete the folder and fetch it again"
        ) from error
    train, test = (Examples(part.data.transpose(0, 3, 1, 2), np.array(part.targets, dtype=np.int64)) for part in parts)
    return train, test


def read_svhn(root: Path, known: KnownSet) -> tuple[Examples, Examples]:
    """Return (training, test) records of the two .mat files (Netzer et al. 2011), where label 10 means the digit 0."""
    train, test = (_read_mat(root / file) for file in known.files)
    return train, test


def download(known: KnownSet, data_root: Path | None) -> Source:
    """Fetch ``known`` with torchvision into the first root that can be written, unless FL_SIM_OFFLINE is set.

    Raises UserError that names the files, the places and the embedded alternative.
    """
    missing = describe_missing(known.name, data_root)
    if not known.torchvision_class:
        raise UserError(f"{missing}; it comes from archive.ics.uci.edu and is not downloaded by itself")
    if os.environ.get("FL_SIM_OFFLINE", "") not in {"", "0"}:
        raise UserError(f"{missing}; it was not downloaded because FL_SIM_OFFLINE is set")
    root = next((root.path for root in roots(data_root) if _writable(root.path)), None)
    if root is None:
        raise UserError(f"{missing}; it was not downloaded because none of them can be written")
    dataset = _dataset_class(known)
    from http.client import HTTPException  # noqa: PLC0415 (with TLS and mail, a fifth of what settings take)

    splits: list[dict[str, Any]] = [{"split": "train"}, {"split": "test"}] if known.layout == "mat" else [{}]
    try:
        # torchvision may print; standard output belongs to the command's result.
        with _network_deadline(), contextlib.redirect_stdout(sys.stderr):
            for split in splits:
                dataset(root, download=True, **split)
    except (OSError, RuntimeError, HTTPException) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{missing}; downloading it to {root} failed ({reason})") from error
    return Source(known.layout, root)


def _dataset_class(known: KnownSet) -> Any:
    from torchvision import datasets  # noqa: PLC0415 (seconds to import)

    return getattr(datasets, known.torchvision_class)


def _read_mat(path: Path) -> Examples:
    from scipy.io import loadmat  # noqa: PLC0415 (only SVHN needs it)

    try:
        content = loadmat(path, variable_names=("X", "y"))
        images, labels = content["X"], content["y"]
    except KeyError as error:
        raise UserError(f"{path} has no array {error}; SVHN's files hold X (32, 32, 3, records) and y") from error
    except Exception as error:
        raise UserError(
            f"{path} is no readable .mat file ({in_one_line(error)}); truncated? Delete it and fetch it again"
        ) from error
    if images.ndim != 4 or images.dtype != np.uint8:
        raise UserError(f"{path}: X is {images.dtype} {images.shape}, SVHN's is uint8 (32, 32, 3, records)")
    digits = as_labels(labels, f"{path}: y")
    return Examples(images.transpose(3, 2, 0, 1), np.where(digits == 10, 0, digits))


def _writable(path: Path) -> bool:
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    return nearest.is_dir() and os.access(nearest, os.W_OK)


@contextlib.contextmanager
def _network_deadline() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_STALL_SECONDS)  # torchvision sets none and would wait for ever
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
