"""The embedded data set: scikit-learn's 1,797 real handwritten digits of 8x8 pixels (UCI, Alpaydin and Kaynak 1998).

They lie beside this file, in the order of a fixed stratified split (scikit-learn's, random_state 0), since importing
scikit-learn takes longer than a short run. A test holds them against scikit-learn's own.
"""

from pathlib import Path

import numpy as np

from fl_sim.data.known import DIGITS
from fl_sim.types import Dataset, Examples

NUM_TRAIN, NUM_TEST = 1437, 360
MEAN, STD = (0.3054,), (0.3760,)
"""Of the public training part, computed once and written down here like those of the published sets."""


def read() -> Dataset:
    """Return the digits: grey values 0..16 scaled to 0..255, a fixed stratified split of 1,437 and 360 records."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        values, labels = file["values"], file["labels"]
    images = np.rint(values * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    everything = Examples(images, labels.astype(np.int64))
    train, test = np.split(np.arange(NUM_TRAIN + NUM_TEST), [NUM_TRAIN])
    return Dataset(DIGITS, everything.take(train), everything.take(test), 10, MEAN, STD)
