"""A model of your own: a function of the shape of a record and the number of classes that returns a fresh module.

    fl-sim run model=two_layers:two_layers

The module takes records, (n, *input shape), and returns a score for each class, (n, classes).
"""

import math

from torch import nn


def two_layers(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a perceptron with 32 hidden units; the initial weights are drawn from the run's seed."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 32), nn.Tanh(), nn.Linear(32, num_classes))
