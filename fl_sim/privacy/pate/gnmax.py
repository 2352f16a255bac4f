"""Cost of GNMax and of Confident-GNMax's test (Papernot et al. 2018, "Scalable Private Learning with PATE").

GNMax adds N(0, sigma^2) to every count and the largest wins: two counts move by 1, so a query costs order / sigma^2
(proposition 8). The confident variant first asks whether the largest count plus N(0, sigma_1^2) reaches a threshold:
one number that moves by 1, order / (2 sigma_1^2), paid whether or not the query is then answered. Votes are counts of
shape (queries, classes); curves are Renyi divergences of shape (queries, orders).
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, logsumexp

from fl_sim.privacy.pate.lnmax import cap_log_q, gaps_to_the_top, log_of_sum

Floats = NDArray[np.float64]


def log_q(counts: NDArray[np.int64], sigma: float) -> Floats:
    """Return ln of an upper bound on Pr[the label is not the majority] (proposition 7), shape (queries,)."""
    gaps = gaps_to_the_top(counts)
    return cap_log_q(logsumexp(log_ndtr(-gaps / (np.sqrt(2) * sigma)), axis=1), counts.shape[1])


def independent(sigma: float, orders: Floats) -> Floats:
    """Return the curve of one answer whatever the votes are, shape (orders,)."""
    return orders / sigma**2


def dependent(counts: NDArray[np.int64], sigma: float, orders: Floats) -> Floats:
    """Return each answer's curve: the smaller of theorem 6 and the data-independent bound, at every order."""
    return np.minimum(theorem_6(log_q(counts, sigma), sigma, orders), independent(sigma, orders))


def theorem_6(log_q: Floats, sigma: float, orders: Floats) -> Floats:
    """Return the data-dependent curves of a mechanism that costs order / sigma^2, ``inf`` where the theorem is silent.

    ``log_q``: ln of a bound on the chance of any but the likeliest outcome, shape (queries,). mu_1 and mu_2 are those
    of proposition 10. It needs order <= mu_1, and q in the range where the bound grows with q, since only a bound on q
    is known.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        mu_2 = sigma * np.sqrt(-log_q)
        mu_1 = mu_2 + 1
        epsilon_1, epsilon_2 = mu_1 / sigma**2, mu_2 / sigma**2
        steepest = (mu_2 - 1) * epsilon_2 - mu_2 * (np.log1p(1 / (mu_1 - 1)) + np.log1p(1 / (mu_2 - 1)))
        log_stays = np.log1p(-np.exp(log_q))
        log_a = log_stays - np.log1p(-np.exp((log_q + epsilon_2) * (1 - 1 / mu_2)))
        log_b = epsilon_1 - log_q / (mu_1 - 1)
        holds = (mu_2 > 1) & (log_q <= steepest) & (log_q + epsilon_2 < 0)
    holds &= np.isfinite(log_a) & np.isfinite(log_b)  # not where the votes are so clear that q underflows
    stays, q, a, b, most = (np.where(holds, value, 0.0)[:, None] for value in (log_stays, log_q, log_a, log_b, mu_1))
    less = orders - 1
    curves = np.maximum(log_of_sum(stays + less * a, q + less * b) / less, 0.0)
    curves = np.where(holds[:, None] & (orders <= most), curves, np.inf)
    return np.where(np.isneginf(log_q)[:, None], 0.0, curves)


def log_answered(counts: NDArray[np.int64], threshold: float, sigma_threshold: float) -> Floats:
    """Return ln Pr[the noisy largest count reaches the threshold], shape (queries,)."""
    return np.asarray(log_ndtr((counts.max(axis=1) - threshold) / sigma_threshold), dtype=np.float64)


def threshold_independent(sigma_threshold: float, orders: Floats) -> Floats:
    """Return the curve of one test whatever the votes are, shape (orders,)."""
    return independent(np.sqrt(2) * sigma_threshold, orders)


def threshold_dependent(counts: NDArray[np.int64], threshold: float, sigma_threshold: float, orders: Floats) -> Floats:
    """Return each test's curve: theorem 6 for two outcomes, of which the rarer has probability q."""
    distance = np.abs(counts.max(axis=1) - threshold) / sigma_threshold
    rarer = np.asarray(log_ndtr(-distance), dtype=np.float64)
    sigma = np.sqrt(2) * sigma_threshold
    return np.minimum(theorem_6(rarer, sigma, orders), independent(sigma, orders))
