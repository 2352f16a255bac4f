"""Class moments: the number, the sum and the sum of outer products of the features in each class.

The moments are stored as vectors, to which noise can be added.
"""

import math
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.importing import torch

Array: TypeAlias = NDArray[np.float64]

LONGEST: Final = math.sqrt(3)
"""The largest norm of a record's contribution (1, u, uu') to the moments, for a feature u with norm at most 1."""


def triangle_of(matrix: Array) -> Array:
    """Return the upper triangle of a symmetric matrix as a vector with the same norm.

    Numbers outside the diagonal are multiplied by sqrt 2, which preserves the norm.

    >>> triangle_of(np.array([[3.0, 4.0], [4.0, 0.0]])).round(3).tolist()
    [3.0, 5.657, 0.0]
    """
    upper, right = np.triu_indices(len(matrix))
    packed: Array = matrix[upper, right] * np.where(upper == right, 1.0, math.sqrt(2))
    return packed


def products(rows: Array) -> Array:
    """Return the outer product of each row with itself as a vector, in the form of ``triangle_of``.

    ``rows``: (n, d). The result has shape (n, d (d + 1) / 2); the norm of each result is the squared norm of its row.
    """
    upper, right = np.triu_indices(rows.shape[1])
    packed: Array = rows[:, upper] * rows[:, right] * np.where(upper == right, 1.0, math.sqrt(2))
    return packed


def symmetric(triangle: Array, size: int) -> Array:
    """Return the symmetric matrix (size, size) from its ``triangle``: the inverse of ``triangle_of``."""
    upper, right = np.triu_indices(size)
    matrix = np.zeros((size, size))
    matrix[upper, right] = triangle / np.where(upper == right, 1.0, math.sqrt(2))
    full: Array = matrix + np.triu(matrix, 1).T
    return full


def shrunk(noisy: Array, std: float, dimension: int) -> Array:
    """Return the noisy numbers ``noisy`` shrunk towards 0 by the estimator of James and Stein (1961).

    The function multiplies by a factor in [0, 1]. The factor is near 0 if ``noisy`` is hardly larger than noise of
    standard deviation ``std`` on ``dimension`` numbers.
    """
    kept: Array = noisy * max(0.0, 1 - dimension * std**2 / max(float((noisy**2).sum()), 1e-300))
    return kept


def num_moments(num_features: int) -> int:
    """Return the number of moments of a class: a count, a sum, and the upper triangle of the sum of outer products."""
    return 1 + num_features + num_features * (num_features + 1) // 2


def moments_of(features: Array, labels: NDArray[np.int64], num_classes: int, weights: Array | None = None) -> Array:
    """Return for each class its number of records, the sum of ``features`` (n, d), and the sum of outer products.

    The outer products are in the form of ``triangle_of``. The result has shape (num_classes, num_moments(d)), with
    zeros for a class without records. The number of records n may be 0. Record i has the weight ``weights[i]``. The
    calibration method CCVR uses the inputs of the model's last layer as features, and computes means and covariances
    from these sums (Luo et al. 2021, section 4.2).
    """
    if weights is None:
        weights = np.ones(len(labels))
    moments = np.zeros((num_classes, num_moments(features.shape[1])))
    for label in np.unique(labels):
        rows, weight = features[labels == label], weights[labels == label]
        weighted = rows * weight[:, None]
        # torch computes the products instead of NumPy, because the run sets torch's number of threads.
        product = (torch.from_numpy(rows).T @ torch.from_numpy(weighted)).numpy()
        moments[label] = np.concatenate([[weight.sum()], weighted.sum(axis=0), triangle_of(product)])
    return moments
