"""A normal distribution whose draws have given moments after they were clamped, not before.

Pixels end at black and white. Images that are drawn from a normal distribution and then clamped have other moments than
it has: backgrounds are too light, and strokes too pale. So it is drawn from another one, which is found by trial: what
clamping takes from the mean is added to it, and what it takes from the covariance is put back by the linear map that
moves the one to the other with the least effort (Olkin and Pukelsheim 1982), half of both in every round.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from clients.symmetric import Array

_TRIES: Final = 1000  # at least, and four for each number of a draw
_ROUNDS: Final = 12
_SHARE: Final = 0.5  # of what is missing that a round makes up for
_MOST: Final = 1.4  # by what factor a round may stretch a direction, or shorten it
_LEAST: Final = 1e-4  # of the mean variance, added to every direction: some may have none at all
_TOO_MANY: Final = 400  # numbers a draw, beyond which this would take minutes


def before_clamping(mean: Array, root: Array, clamp: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Return mean (d,) and root (d, d) of N(mean, root root^T) whose draws have the given ones once clamped.

    ``clamp``: draws (n, d) -> the same draws clamped. Where no normal distribution gets there, one that comes near.
    More than 400 numbers a draw, and draws that are all alike, are left as they were given.
    """
    wanted, size = root @ root.T, len(mean)
    variance = float(np.trace(wanted)) / size
    if variance <= 0 or size > _TOO_MANY:
        return mean, root
    least = _LEAST * variance * np.eye(size)
    target = _power(wanted + least, 0.5)
    always_the_same = np.random.default_rng(0)
    tries = _standardised(always_the_same.standard_normal((max(_TRIES, 4 * size), size)))
    center, spread = mean, target
    for _ in range(_ROUNDS):
        seen = clamp(center + tries @ spread.T)
        inner = target @ (np.cov(seen.T).reshape(size, size) + least) @ target
        spread = _power(target @ _power(inner, -0.5) @ target, _SHARE, _MOST) @ spread
        center = center + _SHARE * (mean - seen.mean(axis=0))
    return center, spread


def _standardised(draws: Array) -> Array:
    """Return draws whose own mean is 0 and whose own covariance is the identity: chance must not look like a moment."""
    centered = draws - draws.mean(axis=0)
    lower = np.linalg.cholesky(np.cov(centered.T).reshape(draws.shape[1], draws.shape[1]))
    standard: Array = np.linalg.solve(lower, centered.T).T
    return standard


def _power(matrix: Array, exponent: float, most: float = np.inf) -> Array:
    """Return a positive definite matrix to the power, with factors between 1 / ``most`` and ``most``."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    factors = np.maximum(values, 1e-12 * values[-1]) ** exponent
    raised: Array = (vectors * np.clip(factors, 1 / most, most)) @ vectors.T
    return raised
