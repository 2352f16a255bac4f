"""Cost of LNMax, the noisy majority with Laplace noise (Papernot et al. 2017, "Semi-supervised Knowledge Transfer").

Every count gets Laplace noise of scale 1/gamma and the largest wins. One record sits in one teacher's shard and one
teacher has one vote, so one count falls by 1 and another rises by 1: a query is (2 gamma, 0)-private. Votes are counts
of shape (queries, classes); curves are Renyi divergences of shape (queries, orders), in nats.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fl_sim.privacy.renyi import laplace_curve

Floats = NDArray[np.float64]


def log_q(counts: NDArray[np.int64], gamma: float) -> Floats:
    """Return ln of an upper bound on Pr[the label is not the teachers' majority], shape (queries,).

    The union bound of the 2017 paper's lemma 4, at most ln(1 - 1/classes) because no class is likelier than the
    majority.
    """
    gaps = gamma * gaps_to_the_top(counts)
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isinf(gaps), -np.inf, log_beaten(gaps))
    return cap_log_q(logsumexp(terms, axis=1), counts.shape[1])


def log_beaten(gaps: Floats) -> Floats:
    """Return ln Pr[a count that is ``gaps`` >= 0 noise scales behind wins against the top one]."""
    return np.log((2 + gaps) / 4) - gaps


def independent(gamma: float, orders: Floats) -> Floats:
    """Return the curve of one query whatever the votes are, shape (orders,).

    The winner is computed from the noisy counts, of which two move by 1: at most two Laplace mechanisms with epsilon
    gamma (Mironov 2017, proposition 6), less than any bound that knows only that the pair is (2 gamma, 0)-private.
    """
    return np.maximum(2 * laplace_curve(gamma, orders), 0.0)


def independent_2017(gamma: float, orders: Floats) -> Floats:
    """Return the paper's curve of one query whatever the votes are: 2 gamma^2 order, and 2 gamma at most."""
    return np.minimum(2 * gamma**2 * orders, 2 * gamma)


def theorem_3(log_q: Floats, gamma: float, orders: Floats) -> Floats:
    """Return the 2017 paper's data-dependent curves, ``inf`` where theorem 3 does not hold, shape (queries, orders).

    It holds for q < (e^(2 gamma) - 1) / (e^(4 gamma) - 1) = 1 / (e^(2 gamma) + 1); the script published with the paper
    applies it beyond, where it can fall below the truth. A moment of the paper is (order - 1) times the divergence.
    """
    holds = log_q < -np.logaddexp(0.0, 2 * gamma)
    inside = np.where(holds, log_q, -1 - 2 * gamma - np.log(2))[:, None]
    less = orders - 1
    log_stays = np.log1p(-np.exp(inside))
    stays = log_stays + less * (log_stays - np.log1p(-np.exp(inside + 2 * gamma)))
    curves = np.maximum(log_of_sum(stays, inside + 2 * gamma * less) / less, 0.0)
    return np.where(holds[:, None], curves, np.inf)


def dependent(counts: NDArray[np.int64], gamma: float, orders: Floats) -> Floats:
    """Return each query's curve: the smaller of theorem 3 and the data-independent bound, at every order."""
    return np.minimum(theorem_3(log_q(counts, gamma), gamma, orders), independent(gamma, orders))


def gaps_to_the_top(counts: NDArray[np.int64]) -> Floats:
    """Return how many votes each class is behind the first of the largest, which itself is given ``inf``."""
    top = counts.argmax(axis=1)[:, None]
    gaps = (np.take_along_axis(counts, top, axis=1) - counts).astype(np.float64)
    np.put_along_axis(gaps, top, np.inf, axis=1)
    return gaps


def cap_log_q(log_q: Floats, num_classes: int) -> Floats:
    """Return ``log_q``, at most ln(1 - 1/classes)."""
    return np.minimum(log_q, np.log1p(-1 / num_classes))


def log_of_sum(first: Floats, second: Floats) -> Floats:
    """Return ln(e^first + e^second), accurate where the sum is close to 1."""
    small = np.maximum(first, second) < 0.5
    near = np.expm1(np.where(small, first, 0.0)) + np.exp(np.where(small, second, 0.0))
    return np.where(small, np.log1p(near), np.logaddexp(first, second))
