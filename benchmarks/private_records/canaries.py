"""The records of audits and attacks on DP-SGD, and the linear model of audits, which fl-sim reads by import paths.

The model has one row of weights for each of two classes, no bias, and begins at zero. A canary record is zero but for
one feature, which no other canary has. So the gradients of two canaries are orthogonal in every step. They are far
longer than the clipping norm: each canary that joins a step moves its sum by exactly the clipping norm. A record of
zeros has a gradient of zeros. So it is the canary "replaced by nothing", and the number of records does not change.
"""

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fl_sim.types import Dataset, Examples

FILE: Final = "canaries.npz"
"""The file in the data root with the records: ``inputs`` (records, features), ``labels`` and ``clients`` (records,)."""

LENGTH: Final = 100.0
"""The only number of a canary that is not zero: its gradient at a zero model is 70 times as long as 1."""


def records(root: Path | None) -> Dataset:
    """Return the records of all clients, as ``store`` wrote them; the groups are the numbers of the clients."""
    assert root is not None
    with np.load(root / FILE) as stored:
        train = Examples(stored["inputs"], stored["labels"], stored["clients"])
    return Dataset("canaries", train, train.take(np.array([0])), int(train.labels.max()) + 1, (0.0,), (1.0,))


def store(root: Path, inputs: NDArray[np.float32], labels: NDArray[np.int64], clients: NDArray[np.int64]) -> None:
    """Write records of shape (records, features), their labels, and the client that holds each of them."""
    np.savez(root / FILE, inputs=inputs, labels=labels, clients=clients)


def linear(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a linear model without bias, with weights of zero."""
    layer = nn.Linear(*input_shape, num_classes, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(layer)


def plant(root: Path, taking_part: NDArray[np.bool_], companions: int) -> None:
    """Write the canaries of all clients into ``root``; those that do not take part are records of zeros.

    ``taking_part``: shape (clients, canaries of each). ``companions``: the number of further records of each client,
    with the opposite gradient of its first canary.
    """
    clients, canaries = taking_part.shape
    count = canaries + companions
    inputs = np.zeros((clients, count, canaries), np.float32)
    inputs[:, np.arange(canaries), np.arange(canaries)] = LENGTH * taking_part
    inputs[:, canaries:, 0] = LENGTH
    labels = np.tile(np.repeat([1, 0], [canaries, companions]), clients).astype(np.int64)
    numbers = np.repeat(np.arange(clients), count)
    store(root, inputs.reshape(-1, canaries), labels, numbers)
