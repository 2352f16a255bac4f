"""The public sets of images as they lie on disk: digits, MNIST's idx files, CIFAR and SVHN; and their download.

The digits are embedded: scikit-learn's 1,797 real handwritten digits of 8x8 pixels (UCI, Alpaydin and Kaynak 1998).
Their file is read where scikit-learn lies, and split as ``sklearn.model_selection.train_test_split`` does (stratified,
random_state 0): importing scikit-learn for that would take longer than a short run. A test holds both against it.
Idx files (LeCun, Cortes, Burges) are memory-mapped after a look at the header and the file's size. CIFAR and SVHN are
read as torchvision stores them.
"""

import contextlib
import gzip
import importlib.util
import math
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.checked import as_labels
from fl_sim.data.naming import DIGITS, KnownSet
from fl_sim.data.places import Source, describe_missing, roots
from fl_sim.errors import UserError
from fl_sim.own_code import in_one_line
from fl_sim.types import Dataset, Examples

_NUM_TRAIN, _NUM_TEST = 1437, 360
_MEAN, _STD = (0.3054,), (0.3760,)
"""Of the public training part, computed once and written down here like those of the published sets."""

_STALL_SECONDS = 30.0


def read_digits() -> Dataset:
    """Return the digits: grey values 0..16 scaled to 0..255, a fixed stratified split of 1,437 and 360 records."""
    with gzip.open(_digits_file()) as file:
        table = np.loadtxt(file, dtype=np.uint8, delimiter=",")
    values, labels = table[:, :-1], table[:, -1].astype(np.int64)
    images = np.rint(values * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    train, test = _split(labels)
    everything = Examples(images, labels)
    return Dataset(DIGITS, everything.take(train), everything.take(test), 10, _MEAN, _STD)


def read_idx(root: Path, known: KnownSet) -> tuple[Examples, Examples]:
    """Return (training, test) records; images stay on disk until they are used."""
    train_images, train_labels, test_images, test_labels = (root / file for file in known.files)
    return _idx_examples(train_images, train_labels), _idx_examples(test_images, test_labels)


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


def _digits_file() -> Path:
    found = importlib.util.find_spec("sklearn")
    for folder in found.submodule_search_locations or [] if found else []:
        if (path := Path(folder) / "datasets/data/digits.csv.gz").is_file():
            return path
    raise UserError("data=digits lies in scikit-learn, which is not installed or not whole: pip install scikit-learn")


def _split(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the training and of the test part: of every class the same share, then shuffled."""
    coins = np.random.RandomState(0)
    held = np.bincount(labels)
    for_training = _shares(held, _NUM_TRAIN, coins)
    for_testing = _shares(held - for_training, _NUM_TEST, coins)
    shuffled = [np.flatnonzero(labels == label)[coins.permutation(count)] for label, count in enumerate(held)]
    bounds = list(zip(shuffled, for_training, for_training + for_testing, strict=True))
    train, test = [own[:middle] for own, middle, _ in bounds], [own[middle:end] for own, middle, end in bounds]
    return coins.permutation(np.concatenate(train)), coins.permutation(np.concatenate(test))


def _shares(held: NDArray[np.int64], total: int, coins: np.random.RandomState) -> NDArray[np.int64]:
    """Return ``total`` dealt in proportion to ``held``; what rounding leaves goes to the largest remainders."""
    exact = held / held.sum() * total
    whole = np.floor(exact)
    remainder, left = exact - whole, int(total - whole.sum())
    while left > 0:
        largest = np.flatnonzero(remainder == remainder.max())
        chosen = coins.choice(largest, size=min(len(largest), left), replace=False)
        whole[chosen] += 1
        remainder[largest] = -1.0
        left -= len(chosen)
    dealt: NDArray[np.int64] = whole.astype(np.int64)
    return dealt


def _idx_examples(images: Path, labels: Path) -> Examples:
    return Examples(_idx_mapped(images, 3)[:, np.newaxis], _idx_mapped(labels, 1).astype(np.int64))


def _idx_mapped(path: Path, num_dimensions: int) -> NDArray[np.uint8]:
    """Map an idx file of bytes: 0, 0, 8, the number of dimensions, each as a big-endian uint32, then the data."""
    header_size = 4 + 4 * num_dimensions
    with path.open("rb") as file:
        header = file.read(header_size)
    if header[:4] != bytes((0, 0, 8, num_dimensions)):
        raise UserError(
            f"{path} is no idx file of bytes in {num_dimensions} dimensions (it starts with 0x{header[:4].hex()}, "
            f"not 0x000008{num_dimensions:02x}); delete it and fetch it again"
        )
    if len(header) < header_size:
        raise _wrong_size(path, header_size)
    shape = struct.unpack(f">{num_dimensions}I", header[4:])
    expected = header_size + math.prod(shape)
    if path.stat().st_size != expected:
        raise _wrong_size(path, expected)
    if 0 in shape:
        raise UserError(f"{path} holds no records (shape {shape}); delete it and fetch it again")
    return np.memmap(path, np.uint8, "r", header_size, shape).view(np.ndarray)


def _wrong_size(path: Path, expected: int) -> UserError:
    actual = path.stat().st_size
    state = "truncated" if actual < expected else "too long"
    return UserError(f"{path} is {state}: {actual} bytes, expected {expected}; delete it and fetch it again")


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
