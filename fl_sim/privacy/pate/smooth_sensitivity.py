"""Publication of a data-dependent PATE cost, with noise that is proportional to the cost's smooth sensitivity.

The method is from Papernot et al. 2018, appendix B. The published number is an upper bound on B. B is the sum of the
data-dependent divergences of all queries at ONE Renyi order, which is chosen without looking at the votes.

The sensitivity of B is bounded as follows. A gap is the difference between the votes of two classes. One changed vote
changes every gap by at most 2. The effect of a changed gap on a tail probability is concave, so q (see
``labelling_cost``) changes at most as much as for votes whose gaps are all equal. For each query, let t be the number
for which votes with all gaps equal to t have the same q as the query's votes. Then each query's divergence is a
decreasing function beta(t), and the values of t for two neighbouring data sets differ by at most 2. At distance d the
local sensitivity is at most the largest beta(t' - 2) - beta(t') over t' in [t - 2d, t + 2d + 2]. The range of t is
divided into small cells, and each cell gets an upper bound. The bounds assume only that beta is decreasing.

The cost of Confident-GNMax includes its test of the largest count. One changed vote changes the largest count by at
most 1. For this test, every count within d votes is examined. The mask of answered queries needs no protection, because
the published labels show the answered queries.

The publication itself has a privacy cost. With few queries or teachers the published epsilon can exceed the
data-independent epsilon.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from fl_sim.errors import UserError
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.pate.labelling_cost import AnswerCost, ConfidentCost, Counts, Floats

Answered: TypeAlias = NDArray[np.bool_]
PublishableCost: TypeAlias = AnswerCost | ConfidentCost

_CELLS_PER_VOTE: Final = 8
# One changed vote changes a gap by at most 2 votes, and so by at most this number of cells. One cell is for rounding.
_SHIFT: Final = 2 * _CELLS_PER_VOTE + 1
# The function ``planned`` tries all these values: Renyi orders, products of order and smoothness, and noise.
_ORDERS: Final = (4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 40.0, 80.0)
_PRODUCTS: Final = (0.05, 0.1, 0.2)
_NOISES: Final = (3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
_LEAST: Final = 1e-9  # a lower bound on the sensitivity, which keeps its logarithm finite and does not depend on votes


@dataclass(frozen=True)
class PublicationTerms:
    """Settings of the publication of a PATE cost B (see the module), fixed without looking at the votes.

    ``order``: the Renyi order of the divergences in B. ``smoothness``: kappa. In the smooth sensitivity, votes at
    distance d are weighted by the factor e^(-kappa d). ``order`` times kappa must stay well below 1/2. ``noise``: the
    standard deviation of the noise on B, as a multiple of the smooth sensitivity. The logarithm of the smooth
    sensitivity is published, too, with a standard deviation of ``noise`` * kappa. Readers need this logarithm to bound
    the error of B.
    """

    order: float = 20.0
    smoothness: float = 0.01
    noise: float = 12.0

    def __post_init__(self) -> None:
        if self.order <= 1 or min(self.smoothness, self.noise) <= 0:
            raise UserError(f"{self}: the order must be above 1, the other settings above 0")
        if self._stretch() <= 0:
            raise UserError(
                f"smoothness {self.smoothness:g} is too large for order {self.order:g}: the release would have no "
                f"bound; choose at most {0.2 / self.order:.2g}"
            )

    def divergence(self) -> float:
        """Return the Renyi divergence at ``order`` of the publication, which consists of two noisy numbers.

        The result is the divergence of N(B, (noise S)^2) and N(B', (noise S')^2) with |B - B'| <= min(S, S') and S
        within e^(+-kappa) of S', plus the divergence of the noisy logarithm of S. Here S is the smooth sensitivity, and
        B' and S' are the values for a neighbouring data set. The bound is theorem 23 of Papernot et al. 2018, but the
        divergence of the Gaussians is not rounded up as there.
        """
        order, kappa = self.order, self.smoothness
        scale = max(_scale_divergence(order, -kappa), _scale_divergence(order, kappa))
        shift = order / (2 * self.noise**2 * self._stretch())
        return scale + shift + order / (2 * self.noise**2)

    def curve(self, orders: Floats) -> Floats:
        """Return the Renyi divergence of the publication at each of ``orders``; ``inf`` if no bound is known."""
        costs = np.full(len(orders), np.inf)
        for place, order in enumerate(orders):
            with suppress(UserError):  # UserError: the smoothness is too large for this order
                costs[place] = replace(self, order=float(order)).divergence()
        return costs

    def _stretch(self) -> float:
        return float(self.order - (self.order - 1) * np.exp(2 * self.smoothness))


@dataclass(frozen=True)
class PublishedCost:
    """A data-dependent PATE cost that may be published.

    ``epsilon`` at ``delta`` covers the labels AND this publication. This epsilon holds for the given votes, except with
    probability ``failure``: the probability that the noise exceeds its quantile. ``divergence``: the published bound on
    the joint Renyi divergence of labels and publication, at ``order``.
    """

    epsilon: float
    delta: float
    order: float
    divergence: float
    failure: float


def planned(cost: PublishableCost, delta: float, *, queries: int, teachers: int, classes: int) -> PublicationTerms:
    """Return the settings (terms) of a publication, chosen for a small epsilon without looking at the votes.

    Of all settings that are tried, the result gives the smallest epsilon if all teachers agree on every query, and if
    all queries are answered.
    """
    unanimous = np.array([[teachers, *[0] * (classes - 1)]])

    def expected(terms: PublicationTerms) -> float:
        total = queries * float(cost.curves(unanimous, np.ones(1), np.array([terms.order]))[0][0, 0])
        return _published(total, queries * sensitivity, delta, terms, (0.0, 0.0)).epsilon

    best, least = PublicationTerms(), np.inf
    for order, scale in product(_ORDERS, _PRODUCTS):
        sensitivity = smooth_sensitivity(unanimous, cost, PublicationTerms(order, scale / order))
        for noise in _NOISES:
            terms = PublicationTerms(order, scale / order, noise)
            if (epsilon := expected(terms)) < least:
                best, least = terms, epsilon
    return best


def release(
    counts: Counts,
    cost: PublishableCost,
    delta: float,
    terms: PublicationTerms,
    *,
    noise: Noise,
    server_round: int = 0,
    answered: Answered | None = None,
) -> PublishedCost:
    """Publish an upper bound on the data-dependent cost of labelling the queries with the votes ``counts``.

    ``answered``: the mask of answered queries, shape (queries,); None if all queries were answered. A second call with
    other noise publishes a second number, and costs ``terms.divergence()`` once more.
    """
    answers = np.ones(len(counts), dtype=bool) if answered is None else answered
    total = float(cost.curves(counts, answers.astype(np.float64), np.array([terms.order]))[0].sum())
    normal = noise.standard_normal(2, purpose="pate cost", server_round=server_round)
    sensitivity = smooth_sensitivity(counts, cost, terms, answers)
    return _published(total, sensitivity, delta, terms, (float(normal[0]), float(normal[1])))


def smooth_sensitivity(
    counts: Counts, cost: PublishableCost, terms: PublicationTerms, answered: Answered | None = None
) -> float:
    """Return the smooth sensitivity S of the data-dependent cost B of all queries. S is PRIVATE, like the votes.

    B is the sum of the queries' Renyi divergences at the order of ``terms``. S is the maximum over d of e^(-kappa
    d) times a bound on the local sensitivity of B within d votes of ``counts``. ``answered``: as in ``release``.
    """
    num_teachers = int(counts[0].sum())
    if isinstance(cost, ConfidentCost):
        given = counts if answered is None else counts[answered]
        parts = [_test_part(counts, cost, terms.order)]
        parts += [_label_part(given, cost.answer, terms.order)] if len(given) else []
    else:
        parts = [_label_part(counts, cost, terms.order)]
    most = 0.0
    for distance in range(num_teachers + 1):
        local = [next(part.local) for part in parts]
        discount = float(np.exp(-terms.smoothness * distance))
        moved = sum(float(one[part.states] @ part.queries) for one, part in zip(local, parts, strict=True))
        most = max(most, discount * moved)
        farthest = sum(float(one.max()) * part.queries.sum() for one, part in zip(local, parts, strict=True))
        if discount * farthest <= most:
            break
    return most


@dataclass(frozen=True)
class _CostPart:
    """One part of the privacy cost B of all queries: the cost of the labels, or the cost of the tests.

    A query's state is an integer, such as the index of the cell that contains its gap. The query's sensitivity depends
    only on this state. ``local``: an iterator over the distances 0, 1, 2, .... It yields an array with a bound for each
    state: the largest local sensitivity of one query in this state. ``states``: the states that occur. ``queries``: the
    number of queries in each of these states.
    """

    local: Iterator[Floats]
    states: NDArray[np.int64]
    queries: NDArray[np.int64]


def _label_part(counts: Counts, cost: AnswerCost, order: float) -> _CostPart:
    """Return the part of the privacy cost for the labels.

    A query's state is the index of the cell that contains the query's gap t.

    The gap t of a query is defined by its q: q would be the same if the first class had t more votes than each other
    class.
    """
    num_teachers, num_classes = int(counts[0].sum()), counts.shape[1]
    gaps = np.arange(0, num_teachers * _CELLS_PER_VOTE + 1) / _CELLS_PER_VOTE
    log_q = cost.log_q_of_gaps(gaps, num_classes)
    # log q decreases with the gap, and each query is assigned to the cell that contains the query's t.
    # If several cells have the same q, such as the largest possible q, the query is assigned to the last of them.
    found = len(gaps) - 1 - np.searchsorted(log_q[::-1], cost.log_q(counts), side="left")
    cells, queries = np.unique(np.clip(found, 0, len(gaps) - 2), return_counts=True)
    orders = np.array([order])
    before = cost.divergence(cost.log_q_of_gaps(gaps - 2, num_classes), orders)[:, 0]
    return _CostPart(_local_sensitivities(before, cost.divergence(log_q, orders)[:, 0]), cells, queries)


def _test_part(counts: Counts, cost: ConfidentCost, order: float) -> _CostPart:
    """Return the part of the privacy cost for Confident-GNMax's tests of queries.

    A query's state is its largest vote count, minus the smallest possible value of the largest count.
    """
    num_teachers, num_classes = int(counts[0].sum()), counts.shape[1]
    least = -(-num_teachers // num_classes)
    largest = np.arange(least, num_teachers + 1)[:, None]
    beta = cost.test_curves(largest, np.array([order]))[:, 0]
    rise = np.abs(np.diff(beta))  # the change of the divergence if the largest vote count grows by 1

    def local() -> Iterator[Floats]:
        here = np.maximum(np.append(rise, 0.0), np.append(0.0, rise))
        while True:
            yield here
            here = np.max([_from(here, step) for step in (-1, 0, 1)], axis=0)

    states, queries = np.unique(counts.max(axis=1) - least, return_counts=True)
    return _CostPart(local(), states, queries)


def _local_sensitivities(before: Floats, beta: Floats) -> Iterator[Floats]:
    """Yield, for distance 0, 1, 2, ..., an array with a bound on one query's local sensitivity for each cell of gaps.

    ``beta``: the query's divergence at every boundary of the cells. ``before``: the query's divergence for a gap that
    is 2 votes smaller.
    """
    if (np.diff(beta) > 1e-12).any():
        raise ArithmeticError("the data-dependent divergence rises with the gap: its sensitivity is not known")
    rise = np.maximum(before[:-1] - beta[1:], 0.0)
    local = np.max([_from(rise, ahead) for ahead in range(_SHIFT + 1)], axis=0)
    while True:
        yield local
        local = np.max([_from(local, step) for step in (-_SHIFT, 0, _SHIFT)], axis=0)


def _published(
    total: float, sensitivity: float, delta: float, terms: PublicationTerms, normal: tuple[float, float]
) -> PublishedCost:
    """Return the published cost from the exact cost ``total``, its sensitivity, and two standard normal samples.

    Two noisy numbers are published. For each, the noise exceeds its assumed quantile with probability delta / 2.
    """
    sensitivity, quantile = max(sensitivity, _LEAST), float(-ndtri(delta / 2))
    at_most = sensitivity * np.exp(terms.smoothness * terms.noise * (normal[0] + quantile))
    bound = max(total + terms.noise * (sensitivity * normal[1] + at_most * quantile), 0.0)
    spent = float(bound + terms.divergence())
    epsilon = spent + np.log1p(-1 / terms.order) - np.log(delta * terms.order) / (terms.order - 1)
    return PublishedCost(max(float(epsilon), 0.0), delta, terms.order, spent, failure=delta)


def _from(values: Floats, ahead: int) -> Floats:
    """Return ``values`` shifted by ``ahead`` positions: element i is values[i + ahead].

    Beyond an end, the last value is repeated.
    """
    return np.asarray(values[np.clip(np.arange(len(values)) + ahead, 0, len(values) - 1)])


def _scale_divergence(order: float, log_ratio: float) -> float:
    """Return the Renyi divergence D_order(N(0, 1) || N(0, r^2)) of two Gaussians, where ln r = ``log_ratio``."""
    mixed = order * np.exp(2 * log_ratio) + 1 - order
    return float(log_ratio + (2 * log_ratio - np.log(mixed)) / (2 * (order - 1)))
