"""The embedded data set: scikit-learn's 1,797 real handwritten digits of 8x8 pixels (UCI, Alpaydin and Kaynak 1998)."""

import numpy as np

from fl_sim.data.known import DIGITS
from fl_sim.types import Dataset, Examples

NUM_TRAIN, NUM_TEST = 1437, 360
MEAN, STD = (0.3054,), (0.3760,)
"""Of the public training part, computed once and written down here like those of the published sets."""


def read() -> Dataset:
    """Return the digits: grey values 0..16 scaled to 0..255, a fixed stratified split of 1,437 and 360 records."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 (a second to import)
    from sklearn.model_selection import train_test_split  # noqa: PLC0415

    values, labels = load_digits(return_X_y=True)
    images = np.rint(values * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    train, test = train_test_split(np.arange(len(labels)), test_size=NUM_TEST, stratify=labels, random_state=0)
    everything = Examples(images, labels.astype(np.int64))
    return Dataset(DIGITS, everything.take(train), everything.take(test), 10, MEAN, STD)
