"""Networks of published workloads, for ours and for the peers: needs PyTorch alone.

Each is a function from (input shape, classes) to a fresh module, as ``model=peers.networks:NAME`` wants it.
"""

from collections.abc import Callable

from torch import nn

Shape = tuple[int, ...]


def niid_cnn(input_shape: Shape, num_classes: int) -> nn.Sequential:
    """Return NIID-Bench's CNN, named as in ``fl_sim.models``."""
    channels, side, _ = input_shape
    left = ((side - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * left**2, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, num_classes),
    )  # fmt: skip


def logistic(input_shape: Shape, num_classes: int) -> nn.Sequential:
    """Return multinomial logistic regression."""
    channels, height, width = input_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, num_classes))


def dropout_cnn(input_shape: Shape, num_classes: int) -> nn.Sequential:
    """Return the CNN of pfl's CIFAR-10 benchmark, which is that of FedML's FEMNIST for grey images.

    Two 3x3 convolutions with 32 and 64 filters, pooling, dropout of a quarter, 128 units, dropout of a half: 1.63
    million parameters on CIFAR-10.
    """
    channels, side, _ = input_shape
    left = (side - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * left**2, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, num_classes),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[Shape, int], nn.Sequential]] = {
    "niid_cnn": niid_cnn,
    "logistic": logistic,
    "dropout_cnn": dropout_cnn,
}
