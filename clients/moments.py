"""Moments of features by class, and sums of outer products as vectors that noise may be added to."""

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.importing import torch

Array: TypeAlias = NDArray[np.float64]


def triangle_of(matrix: Array) -> Array:
    """Return the upper triangle of a symmetric matrix, off-diagonals times sqrt 2: as long as the matrix is.

    >>> triangle_of(np.array([[3.0, 4.0], [4.0, 0.0]])).round(3).tolist()
    [3.0, 5.657, 0.0]
    """
    upper, right = np.triu_indices(len(matrix))
    packed: Array = matrix[upper, right] * np.where(upper == right, 1.0, math.sqrt(2))
    return packed


def products(rows: Array) -> Array:
    """Return ``triangle_of`` each row's outer product with itself, whose length is that of the row squared."""
    upper, right = np.triu_indices(rows.shape[1])
    packed: Array = rows[:, upper] * rows[:, right] * np.where(upper == right, 1.0, math.sqrt(2))
    return packed


def symmetric(triangle: Array, size: int) -> Array:
    """Return the symmetric matrix (size, size) of a triangle: the inverse of ``triangle_of``."""
    upper, right = np.triu_indices(size)
    matrix = np.zeros((size, size))
    matrix[upper, right] = triangle / np.where(upper == right, 1.0, math.sqrt(2))
    full: Array = matrix + np.triu(matrix, 1).T
    return full


def shrunk(noisy: Array, std: float, dimension: int) -> Array:
    """Return ``noisy`` shrunk to zero as far as it may be noise of ``dimension`` numbers (James, Stein 1961)."""
    kept: Array = noisy * max(0.0, 1 - dimension * std**2 / max(float((noisy**2).sum()), 1e-300))
    return kept


def num_moments(num_features: int) -> int:
    """Return the number of moments of a class: a count, a sum, and the upper triangle of the sum of outer products."""
    return 1 + num_features + num_features * (num_features + 1) // 2


def moments_of(features: Array, labels: NDArray[np.int64], num_classes: int, weights: Array | None = None) -> Array:
    """Return each class's number of records, sum of ``features`` (n, d), and sum of their outer products as a triangle.

    Shape (num_classes, num_moments(d)), zeros for a class without records. n may be 0. Record i counts ``weights[i]``
    times. In CCVR features are the inputs of the model's last layer, and means and covariances follow by a division
    (Luo et al. 2021, section 4.2).
    """
    if weights is None:
        weights = np.ones(len(labels))
    moments = np.zeros((num_classes, num_moments(features.shape[1])))
    for label in np.unique(labels):
        rows, weight = features[labels == label], weights[labels == label]
        weighted = rows * weight[:, None]
        # By torch, whose number of threads, on which last bits depend, is the run's.
        product = (torch.from_numpy(rows).T @ torch.from_numpy(weighted)).numpy()
        moments[label] = np.concatenate([[weight.sum()], weighted.sum(axis=0), triangle_of(product)])
    return moments
