"""Sums of a client's feature products. From all clients' sums, the server computes a linear head in closed form.

A record's vector z is its feature vector, followed by a constant for the intercept. The norm of z is at most 1. A
client sends G = sum z z' and B = sum z y', where y is the one-hot label (Zhuang et al. 2025, AFL, section 3). The
numbers in z are multiples of ``STEP``, so both sums are exact. Any partition of the records and any order of clients
give the same bits. ``clients.private_gram`` adds noise.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clients.moments import Array
from fl_sim.importing import torch

SENSITIVITY: Final = math.sqrt(2)
"""The L2 norm of a record's products: |z z'|^2 + |z y'|^2 = |z|^4 + |z|^2 <= 2.

The norm of z z' includes each number outside the diagonal twice. The vector form ``clients.moments.triangle_of`` has
the same norm.
"""

STEP: Final = 2.0**-16
MOST_RECORDS: Final = 2**21
"""The largest number of records of all clients together. Up to this number, float64 sums of products are exact."""

CONSTANT: Final = 0.3
"""The constant in each vector for the intercept. The rest of the vector has a norm of at most sqrt(1 - .3^2)."""


def num_products(num_features: int, num_classes: int) -> int:
    """Return the number of values that a client sends: the upper triangle of G, and B."""
    size = num_features + 1
    return size * (size + 1) // 2 + size * num_classes


def scale_of(num_features: int, longest: float = 1.0) -> float:
    """Return the norm to which vectors are scaled before rounding. After rounding, the norm is at most ``longest``."""
    return longest - math.sqrt(num_features + 1) * STEP / 2


def vectors_of(features: Array, clipping_norm: float, longest: float = 1.0) -> Array:
    """Return the vectors z (n, d + 1) of ``features`` (n, d), as whole numbers in units of ``STEP``.

    A feature vector is clipped to the norm ``clipping_norm``. A record whose feature is not finite has the vector 0.
    ``longest``: the largest norm of z.
    """
    norms = np.linalg.norm(features, axis=1)
    there = np.isfinite(norms)
    scaled = np.where(there[:, None], features, 0.0) / np.maximum(np.where(there, norms, 1.0), clipping_norm)[:, None]
    whole = np.concatenate([math.sqrt(1 - CONSTANT**2) * scaled, np.full((len(scaled), 1), CONSTANT)], axis=1)
    vectors: Array = np.rint(whole * (scale_of(features.shape[1], longest) / STEP)) * there[:, None]
    return vectors


def products_of(
    features: Array, labels: NDArray[np.int64], num_classes: int, clipping_norm: float, longest: float = 1.0
) -> tuple[Array, Array]:
    """Return a client's sums of feature products without noise: G (d + 1, d + 1) and B (d + 1, classes).

    ``features``: (n, d); ``labels``: (n,); n may be 0.
    """
    labelled = np.zeros((len(labels), num_classes))
    labelled[np.arange(len(labels)), labels] = 1.0
    # torch computes the products instead of NumPy, because the run sets torch's number of threads.
    # The sums are exact, because all numbers are whole and below 2^53.
    columns = torch.from_numpy(vectors_of(features, clipping_norm, longest)).T
    return (columns @ columns.T).numpy() * STEP**2, (columns @ torch.from_numpy(labelled)).numpy() * STEP


def packed(gram: Array, by_class: Array) -> Array:
    """Return the sums G and B as one row (1, ``num_products``): the upper triangle of G, then B, row by row."""
    return np.concatenate([gram[np.triu_indices(len(gram))], by_class.ravel()])[None]


def unpacked(sums: Array, num_features: int, num_classes: int) -> tuple[Array, Array]:
    """Return G (d + 1, d + 1) and B (d + 1, classes) from one row of ``sums``: the inverse of ``packed``."""
    size = num_features + 1
    upper, rest = np.split(sums[0], [size * (size + 1) // 2])
    gram = np.zeros((size, size))
    gram[np.triu_indices(size)] = upper
    return gram + np.triu(gram, 1).T, rest.reshape(size, num_classes)
