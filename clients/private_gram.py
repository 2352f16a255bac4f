"""Private sums of a client's feature products, by one Gaussian mechanism.

The module ``clients.gram`` defines the vector z of a record and the sums G and B. The privacy unit is one record.
Adjacency is zero-out: one record is replaced by nothing, while the numbers of clients and of their records stay public.
The features of all other records do not change (see ``clients.private_moments``).
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
"""The argument ``summands`` of ``clipping_norm_on_grid``. The rounding allowance grows with the square of ``summands``.

The sums are exact. Only the multiplication by sqrt 2 is rounded. For either of two neighbouring data sets, this
rounding changes the sums by at most 2^-53 times the number of records.
"""


def longest_private(num_features: int, num_classes: int, protection: Protection) -> float:
    """Return the largest norm of z with which the sensitivity of the rounded sums is at most ``SENSITIVITY``.

    Raises UserError if the rounding grid of the noise is too coarse for the size of the sums.
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
    """Return a client's sums G and B with noise, in the form of ``clients.gram.packed``.

    The standard deviation of the noise is ``protection.std`` on B and on the diagonal of G, and ``protection.std`` /
    sqrt 2 on the other numbers of G. ``triangle_of`` multiplies these other numbers by sqrt 2 to preserve norms. So all
    numbers of its result have equal noise.
    """
    longest = longest_private(features.shape[1], num_classes, protection)
    gram, by_class = products_of(features, labels, num_classes, clipping_norm, longest)
    total = np.concatenate([triangle_of(gram), by_class.ravel()])
    drawn = noise.gaussian(total.size, protection.std, purpose="products of features", server_round=1)
    triangle, rest = np.split(add_noise(total, protection.std, drawn), [total.size - by_class.size])
    return packed(symmetric(triangle, len(gram)), rest.reshape(by_class.shape))
