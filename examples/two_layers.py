"""A model of your own: a function of the shape of a record and the number of classes that returns a new module.

    fl-sim run model=two_layers:two_layers

The inputs of the module are records, shape (n, *input shape). Its outputs are logits, shape (n, classes).
"""

import math

from torch import nn


def two_layers(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a perceptron with 32 hidden units. fl-sim seeds torch, so the run's seed decides the initial weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 32), nn.Tanh(), nn.Linear(32, num_classes))
