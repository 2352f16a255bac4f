"""Sums of outer products that may be noisy: as vectors of the same length, and back."""

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

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
    """Undo ``triangle_of``: return the symmetric matrix (size, size)."""
    upper, right = np.triu_indices(size)
    matrix = np.zeros((size, size))
    matrix[upper, right] = triangle / np.where(upper == right, 1.0, math.sqrt(2))
    full: Array = matrix + np.triu(matrix, 1).T
    return full


def shrunk(noisy: Array, std: float, dimension: int) -> Array:
    """Return ``noisy`` shrunk to zero as far as it may be noise of ``dimension`` numbers (James, Stein 1961)."""
    kept: Array = noisy * max(0.0, 1 - dimension * std**2 / max(float((noisy**2).sum()), 1e-300))
    return kept
