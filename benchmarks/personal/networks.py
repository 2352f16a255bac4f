"""Networks of the papers whose tables are repeated in this folder.

Each is a function from (input shape, classes) to a fresh module: ``model=personal.networks:NAME`` with
``PYTHONPATH=benchmarks`` in the project's folder.
"""

from torch import nn


def pfllib_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return PFLlib's 4-layer CNN: conv5x5(32)-pool-conv5x5(64)-pool-512-classes, without padding."""
    channels, height, width = input_shape
    pixels = ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * pixels, 512), nn.ReLU(), nn.Linear(512, num_classes),
    )  # fmt: skip


def one_hidden(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return IFCA's perceptron for rotated MNIST, with one hidden layer of 200 units (Ghosh et al. 2020, section 6)."""
    size = 1
    for one in input_shape:
        size *= one
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 200), nn.ReLU(), nn.Linear(200, num_classes))


def niid_cnn_batch_norm(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return NIID-Bench's CNN (``niid-cnn``) with BatchNorm after each convolution, for FedBN (Li et al. 2021)."""
    channels, height, width = input_shape
    pixels = ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * pixels, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes),
    )  # fmt: skip
