"""Publication of a data-dependent cost, with noise scaled to the smooth sensitivity (Papernot et al. 2018, app. B).

The published number is an upper bound on B, the sum of the data-dependent divergences of all queries at ONE order that
is chosen without looking at the votes. One changed vote shifts every gap by at most 2. The effect of a shift on a tail
probability is concave, so q changes at most as much as for votes whose gaps are all equal. Let t(votes) be the equal
gap that gives the same bound q. Then each query's divergence is a falling function beta(t), neighbours are at most 2
apart in t, and at distance d the local sensitivity is at most the largest beta(t' - 2) - beta(t') over t' in
[t - 2d, t + 2d + 2]. The maximum is taken over small cells of t, with an upper bound in each, which assumes only that
beta falls.

Confident-GNMax also pays for its test of the largest count, which one changed vote shifts by at most 1: all counts
within d votes are examined one by one. The mask of answered queries is taken as given, as it is known from the labels.

The publication has a cost of its own: with few queries or teachers the published epsilon can be above the
data-independent one.
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
_SHIFT: Final = 2 * _CELLS_PER_VOTE + 1  # how many cells one vote moves a gap by, at most; one is for rounding
_ORDERS: Final = (4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 40.0, 80.0)  # what ``planned`` tries: order,
_PRODUCTS: Final = (0.05, 0.1, 0.2)  # order times smoothness,
_NOISES: Final = (3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)  # noise
_LEAST: Final = 1e-9  # keeps the logarithm of the sensitivity finite; a constant is as smooth as can be


@dataclass(frozen=True)
class PublicationTerms:
    """Terms of the publication of a cost, fixed without looking at the votes.

    ``order``: the Renyi order of the divergence. ``smoothness``: kappa, the discount of distant votes; its product with
    ``order`` must stay well below 1/2. ``noise``: the noise on B in smooth sensitivities, and on the logarithm of the
    sensitivity (which bounds the error of B for the reader) in units of kappa.
    """

    order: float = 20.0
    smoothness: float = 0.01
    noise: float = 12.0

    def __post_init__(self) -> None:
        if self.order <= 1 or min(self.smoothness, self.noise) <= 0:
            raise UserError(f"{self}: the order must be above 1, the others above 0")
        if self._stretch() <= 0:
            raise UserError(
                f"smoothness {self.smoothness:g} is too large for order {self.order:g}: the release would have no "
                f"bound; choose at most {0.2 / self.order:.2g}"
            )

    def divergence(self) -> float:
        """Return the Renyi divergence of the publication itself, at ``order``: that of both noisy numbers.

        For N(B, (noise S)^2) against N(B', (noise S')^2) with |B - B'| <= min(S, S') and S within e^(+-kappa) of S'
        (the paper's theorem 23, here without its rounding up of the Gaussians' divergence).
        """
        order, kappa = self.order, self.smoothness
        scale = max(_scale_divergence(order, -kappa), _scale_divergence(order, kappa))
        shift = order / (2 * self.noise**2 * self._stretch())
        return scale + shift + order / (2 * self.noise**2)

    def curve(self, orders: Floats) -> Floats:
        """Return the Renyi divergence of the publication itself at each of ``orders``; ``inf`` for no bound."""
        costs = np.full(len(orders), np.inf)
        for place, order in enumerate(orders):
            with suppress(UserError):  # the smoothness is too large for this order
                costs[place] = replace(self, order=float(order)).divergence()
        return costs

    def _stretch(self) -> float:
        return float(self.order - (self.order - 1) * np.exp(2 * self.smoothness))


@dataclass(frozen=True)
class PublishedCost:
    """A cost that may be shown to anybody.

    ``epsilon`` at ``delta`` covers the labels AND this publication. It holds for the given votes unless the noise was
    beyond its quantile, which has probability ``failure``. ``divergence``: the bound on the Renyi divergence of both at
    ``order``.
    """

    epsilon: float
    delta: float
    order: float
    divergence: float
    failure: float


def planned(cost: PublishableCost, delta: float, *, queries: int, teachers: int, classes: int) -> PublicationTerms:
    """Return the terms that would publish the least epsilon if all teachers always agreed; they use no vote.

    Every query counts as answered.
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
    """Publish an upper bound on the data-dependent cost of labelling ``counts``.

    ``answered``: the mask of answered queries, shape (queries,); None: all. A second call with other noise is a second
    release: it costs ``terms.divergence()`` once more.
    """
    answers = np.ones(len(counts), dtype=bool) if answered is None else answered
    total = float(cost.curves(counts, answers.astype(np.float64), np.array([terms.order]))[0].sum())
    normal = noise.standard_normal(2, purpose="pate cost", server_round=server_round)
    sensitivity = smooth_sensitivity(counts, cost, terms, answers)
    return _published(total, sensitivity, delta, terms, (float(normal[0]), float(normal[1])))


def smooth_sensitivity(
    counts: Counts, cost: PublishableCost, terms: PublicationTerms, answered: Answered | None = None
) -> float:
    """Return S, the smooth sensitivity of B at ``counts``. PRIVATE.

    S is the maximum over d of e^(-kappa d) times a bound on the local sensitivity of B within d votes of ``counts``.
    ``answered``: as in ``release``.
    """
    num_teachers = int(counts[0].sum())
    if isinstance(cost, ConfidentCost):
        given = counts if answered is None else counts[answered]
        parts = [_of_tests(counts, cost, terms.order)]
        parts += [_of_labels(given, cost.answer, terms.order)] if len(given) else []
    else:
        parts = [_of_labels(counts, cost, terms.order)]
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
class _Part:
    """A part of the cost of each query: that of its label, or of its test.

    ``local`` yields, for distance 0, 1, 2, ..., bounds on one query's local sensitivity, one bound for each state.
    ``states``: the states that occur; ``queries``: the number of queries in each of them.
    """

    local: Iterator[Floats]
    states: NDArray[np.int64]
    queries: NDArray[np.int64]


def _of_labels(counts: Counts, cost: AnswerCost, order: float) -> _Part:
    """Return the part of the labels; the state of a query is the cell of its equivalent gap."""
    num_teachers, num_classes = int(counts[0].sum()), counts.shape[1]
    gaps = np.arange(0, num_teachers * _CELLS_PER_VOTE + 1) / _CELLS_PER_VOTE
    log_q = cost.log_q_of_gaps(gaps, num_classes)
    # log q falls with the gap: the cell in which a query's equivalent gap lies, the last one where q is at its cap.
    found = len(gaps) - 1 - np.searchsorted(log_q[::-1], cost.log_q(counts), side="left")
    cells, queries = np.unique(np.clip(found, 0, len(gaps) - 2), return_counts=True)
    orders = np.array([order])
    before = cost.divergence(cost.log_q_of_gaps(gaps - 2, num_classes), orders)[:, 0]
    return _Part(_local_sensitivities(before, cost.divergence(log_q, orders)[:, 0]), cells, queries)


def _of_tests(counts: Counts, cost: ConfidentCost, order: float) -> _Part:
    """Return the part of Confident-GNMax's tests; a query's state is its largest count minus the least possible."""
    num_teachers, num_classes = int(counts[0].sum()), counts.shape[1]
    least = -(-num_teachers // num_classes)
    largest = np.arange(least, num_teachers + 1)[:, None]
    beta = cost.test_curves(largest, np.array([order]))[:, 0]
    rise = np.abs(np.diff(beta))  # from each count to the next one

    def local() -> Iterator[Floats]:
        here = np.maximum(np.append(rise, 0.0), np.append(0.0, rise))
        while True:
            yield here
            here = np.max([_from(here, step) for step in (-1, 0, 1)], axis=0)

    states, queries = np.unique(counts.max(axis=1) - least, return_counts=True)
    return _Part(local(), states, queries)


def _local_sensitivities(before: Floats, beta: Floats) -> Iterator[Floats]:
    """Yield, for distance 0, 1, 2, ..., bounds on one query's local sensitivity, one for each cell of its gap.

    ``beta``: the query's divergence at every boundary of the cells. ``before``: its divergence at a gap 2 votes
    smaller.
    """
    if (np.diff(beta) > 1e-12).any():
        raise ArithmeticError("the data-dependent divergence does not fall with the gap: its sensitivity is not known")
    rise = np.maximum(before[:-1] - beta[1:], 0.0)
    local = np.max([_from(rise, ahead) for ahead in range(_SHIFT + 1)], axis=0)
    while True:
        yield local
        local = np.max([_from(local, step) for step in (-_SHIFT, 0, _SHIFT)], axis=0)


def _published(
    total: float, sensitivity: float, delta: float, terms: PublicationTerms, normal: tuple[float, float]
) -> PublishedCost:
    """Return the published cost: each of the two noises is beyond ``quantile`` with probability delta / 2."""
    sensitivity, quantile = max(sensitivity, _LEAST), float(-ndtri(delta / 2))
    at_most = sensitivity * np.exp(terms.smoothness * terms.noise * (normal[0] + quantile))
    bound = max(total + terms.noise * (sensitivity * normal[1] + at_most * quantile), 0.0)
    spent = float(bound + terms.divergence())
    epsilon = spent + np.log1p(-1 / terms.order) - np.log(delta * terms.order) / (terms.order - 1)
    return PublishedCost(max(float(epsilon), 0.0), delta, terms.order, spent, failure=delta)


def _from(values: Floats, ahead: int) -> Floats:
    """Return the values ``ahead`` cells further along; the first and last values stand for all beyond them."""
    return np.asarray(values[np.clip(np.arange(len(values)) + ahead, 0, len(values) - 1)])


def _scale_divergence(order: float, log_ratio: float) -> float:
    """Return D_order(N(0, 1) || N(0, r^2)) for ln r = ``log_ratio``."""
    mixed = order * np.exp(2 * log_ratio) + 1 - order
    return float(log_ratio + (2 * log_ratio - np.log(mixed)) / (2 * (order - 1)))
