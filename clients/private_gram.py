"""Private sums of products of a client's features, by one Gaussian mechanism.

The module ``clients.gram`` defines the vector z of a record and the sums G and B. The privacy unit is one record.
Adjacency is zero-out: one record is replaced by nothing, while the numbers of clients and of their records stay public.
See ``clients.private_moments`` for the features of the other records, which do not change.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clients.gram import MOST_RECORDS, SENSITIVITY, num_products, packed, products_of
from clients.moments import Array, symmetric, triangle_of
from clients.private_moments import Protection
from fl_sim.privacy.mechanisms import Noise, add_noise, clipping_norm_on_grid

_SUMMANDS: Final = math.isqrt(MOST_RECORDS) + 1
"""The number of summands for the allowance of float64's rounding (``clipping_norm_on_grid``), which is quadratic in it.

The sums are exact. Only a product by sqrt 2 is rounded, by at most 2^-53 times the number of records in each world.
"""


def longest_private(num_features: int, num_classes: int, protection: Protection) -> float:
    """Return the largest norm of a vector z for which the sums keep their sensitivity when they are rounded.

    Raises UserError if the noise is too coarse for so many numbers.
    """
    size = num_products(num_features, num_classes)
    return clipping_norm_on_grid(SENSITIVITY, protection.std, size, summands=_SUMMANDS) / SENSITIVITY


def private_products(
    features: Array,
    labels: NDArray[np.int64],
    num_classes: int,
    clipping_norm: float,
    protection: Protection,
    noise: Noise,
) -> Array:
    """Return a client's sums with noise, in the form of ``clients.gram.packed``.

    The standard deviation of the noise is ``protection.std`` on B and on the diagonal of G. On the rest of G it is this
    number divided by sqrt 2. So all numbers in the form of ``triangle_of``, which preserves norms, have equal noise.
    """
    longest = longest_private(features.shape[1], num_classes, protection)
    gram, by_class = products_of(features, labels, num_classes, clipping_norm, longest)
    total = np.concatenate([triangle_of(gram), by_class.ravel()])
    drawn = noise.gaussian(total.size, protection.std, purpose="products of features", server_round=1)
    triangle, rest = np.split(add_noise(total, protection.std, drawn), [total.size - by_class.size])
    return packed(symmetric(triangle, len(gram)), rest.reshape(by_class.shape))
