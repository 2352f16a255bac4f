"""The embedded data set: scikit-learn's 1,797 real handwritten digits of 8x8 pixels (UCI, Alpaydin and Kaynak 1998).

Its file is read where scikit-learn lies, and split as ``sklearn.model_selection.train_test_split`` does (stratified,
random_state 0): importing scikit-learn for that would take longer than a short run. A test holds both against it.
"""

import gzip
import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.naming import DIGITS
from fl_sim.errors import UserError
from fl_sim.types import Dataset, Examples

NUM_TRAIN, NUM_TEST = 1437, 360
MEAN, STD = (0.3054,), (0.3760,)
"""Of the public training part, computed once and written down here like those of the published sets."""


def read() -> Dataset:
    """Return the digits: grey values 0..16 scaled to 0..255, a fixed stratified split of 1,437 and 360 records."""
    with gzip.open(_file()) as file:
        table = np.loadtxt(file, dtype=np.uint8, delimiter=",")
    values, labels = table[:, :-1], table[:, -1].astype(np.int64)
    images = np.rint(values * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    train, test = _split(labels)
    everything = Examples(images, labels)
    return Dataset(DIGITS, everything.take(train), everything.take(test), 10, MEAN, STD)


def _file() -> Path:
    found = importlib.util.find_spec("sklearn")
    for folder in found.submodule_search_locations or [] if found else []:
        if (path := Path(folder) / "datasets/data/digits.csv.gz").is_file():
            return path
    raise UserError("data=digits lies in scikit-learn, which is not installed or not whole: pip install scikit-learn")


def _split(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the training and of the test part: of every class the same share, then shuffled."""
    coins = np.random.RandomState(0)
    held = np.bincount(labels)
    for_training = _shares(held, NUM_TRAIN, coins)
    for_testing = _shares(held - for_training, NUM_TEST, coins)
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
