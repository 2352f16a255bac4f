"""What CCVR asks of a client after training: how many features each class has, their sum, and that of their products.

Features are what enters the model's last layer (Luo et al. 2021, section 4.2, which sends means and covariances: the
same after a division).
"""

import numpy as np
from numpy.typing import NDArray

from clients.symmetric import Array, triangle_of
from fl_sim.importing import torch


def num_moments(num_features: int) -> int:
    """Return how many numbers a class has: a count, a sum, and the upper triangle of the sum of outer products."""
    return 1 + num_features + num_features * (num_features + 1) // 2


def moments_of(features: Array, labels: NDArray[np.int64], num_classes: int) -> Array:
    """Return each class's number of records, sum of ``features`` (n, d), and sum of their outer products as a triangle.

    Shape (num_classes, num_moments(d)), zeros for a class without records. n may be 0.
    """
    return weighted_moments(features, np.ones(len(labels)), labels, num_classes)


def weighted_moments(features: Array, weights: Array, labels: NDArray[np.int64], num_classes: int) -> Array:
    """Return the same where record i counts ``weights[i]`` times."""
    moments = np.zeros((num_classes, num_moments(features.shape[1])))
    for label in np.unique(labels):
        rows, weight = features[labels == label], weights[labels == label]
        weighted = rows * weight[:, None]
        moments[label] = np.concatenate([[weight.sum()], weighted.sum(axis=0), triangle_of(_product(rows, weighted))])
    return moments


def _product(left: Array, right: Array) -> Array:
    # By torch, as its number of threads, on which last bits depend, is the run's.
    product: Array = (torch.from_numpy(left).T @ torch.from_numpy(right)).numpy()
    return product
