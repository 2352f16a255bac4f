"""Privacy cost of labels by PATE: the Renyi divergences of each query, their sum, and the epsilon of the sum.

A cost is data-dependent (for the given votes) or data-independent (for any votes).

The privacy unit is one record of the private set. The record lies in one teacher's shard, and this teacher has one vote
per query. So a changed record changes one vote of a query: the count of one class falls by 1, and the count of another
class rises by 1.

A data-independent epsilon is a guarantee and may be published. A data-dependent epsilon is computed from the votes, so
it can reveal private records, like the votes (Papernot et al. 2018, section 3). Publish only the result of
``smooth_sensitivity.release``.

A Renyi curve contains the Renyi divergences of one query at several orders, in nats. ``log_q`` is ln(q), of shape
(queries,). q is an upper bound on the probability that the label is not the class with the most votes.

LNMax: Papernot et al. 2017, "Semi-supervised Knowledge Transfer". GNMax and Confident-GNMax: Papernot et al. 2018,
"Scalable Private Learning with PATE".
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from dp_accounting import dp_event
from numpy.typing import NDArray
from scipy.special import log_ndtr, logsumexp

from fl_sim.errors import UserError
from fl_sim.privacy.accounting import Bounds, bounds
from fl_sim.privacy.renyi import ORDERS, epsilons_of_curves, laplace_curve
from fl_sim.privacy.terms import valid_delta

Counts: TypeAlias = NDArray[np.int64]
"""Votes per query and class, shape (queries, classes). The sum of every row is the number of teachers."""

Floats: TypeAlias = NDArray[np.float64]

_ORDERS: Final = np.array(ORDERS)
_CHUNK: Final = 2048  # number of queries in a batch; the curves of a batch must fit in memory
_MOST_VOTES: Final = 2**31


class Cost(ABC):
    """Privacy cost of one query to a PATE mechanism, as Renyi divergences at given orders."""

    @property
    def pure_epsilon(self) -> float:
        """Return the epsilon of one query at delta 0; ``inf`` if the mechanism has no guarantee at delta 0."""
        return math.inf

    @abstractmethod
    def worst_case(self, orders: Floats) -> Floats:
        """Return an upper bound on the Renyi divergences of one query, shape (orders,).

        The bound holds for any votes, and for answered and unanswered queries.
        """

    @abstractmethod
    def events(self) -> tuple[dp_event.DpEvent, ...]:
        """Return the privacy events of one answered query. No query costs more, for any votes."""

    @abstractmethod
    def chance_of_answer(self, counts: Counts) -> Floats:
        """Return, for each query, the probability that the mechanism answers it; shape (queries,)."""

    @abstractmethod
    def curves(self, counts: Counts, answered: Floats, orders: Floats) -> tuple[Floats, Floats]:
        """Return (data-dependent, data-independent) Renyi curves of shape (queries, orders).

        ``answered``: shape (queries,), 1 for an answered query and 0 for others. If it contains the probabilities of
        answers instead, the result is the expected curves.
        """

    @abstractmethod
    def least(self, teachers: int, classes: int, orders: Floats) -> Floats:
        """Return a lower bound on the data-dependent Renyi divergences of an answered query, for any votes.

        Shape: (orders,).
        """


class AnswerCost(Cost):
    """Privacy cost of a mechanism that answers every query."""

    @abstractmethod
    def log_q(self, counts: Counts) -> Floats:
        """Return ln(q) of each query, shape (queries,).

        q is an upper bound on the probability that the label is not the class with the most votes.
        """

    @abstractmethod
    def log_q_of_gaps(self, gaps: Floats, num_classes: int) -> Floats:
        """Return ln(q) for votes in which the first class has ``gaps`` more votes than each other class.

        ``gaps``: an array of such differences. A negative gap means that the other classes have more votes. The method
        ``log_q`` defines q.
        """

    @abstractmethod
    def divergence(self, log_q: Floats, orders: Floats) -> Floats:
        """Return the Renyi curve of each query, computed from its ln(q). Each value is the smaller of two bounds.

        The first bound is a theorem in the paper of the mechanism. The second bound is ``worst_case``, for any votes.
        """

    def dependent(self, counts: Counts, orders: Floats) -> Floats:
        """Return the data-dependent Renyi curve of each query, shape (queries, orders)."""
        return self.divergence(self.log_q(counts), orders)

    def chance_of_answer(self, counts: Counts) -> Floats:
        """Return the probability 1 for each query, shape (queries,), because this mechanism answers every query."""
        return np.ones(len(counts))

    def curves(self, counts: Counts, answered: Floats, orders: Floats) -> tuple[Floats, Floats]:
        """Return (data-dependent, data-independent) Renyi curves. ``answered`` is ignored: every query is answered."""
        del answered
        dependent = self.dependent(counts, orders)
        return dependent, np.broadcast_to(self.worst_case(orders), dependent.shape)

    def least(self, teachers: int, classes: int, orders: Floats) -> Floats:
        """Return a lower bound on the Renyi curve of a query: the curve if all teachers agree."""
        return np.asarray(self.dependent(np.array([[teachers] + [0] * (classes - 1)]), orders)[0])


@dataclass(frozen=True)
class LNMaxCost(AnswerCost):
    """Cost of LNMax: Laplace noise of scale 1 / ``gamma`` on every count; the largest noisy count gives the label.

    One query is (2 gamma, 0)-private.
    """

    gamma: float

    @property
    def pure_epsilon(self) -> float:
        """Return 2 gamma. One record changes two vote counts by 1 each, and each change costs an epsilon of gamma."""
        return 2 * self.gamma

    def worst_case(self, orders: Floats) -> Floats:
        """Return an upper bound on the Renyi curve of one query, for any votes.

        The label is computed from the noisy counts. A changed record changes two of the counts by 1. So the curve is at
        most the sum of the curves of two Laplace mechanisms (Mironov 2017, proposition 6). Each of these mechanisms has
        the epsilon gamma, the inverse of the noise scale. This bound is lower than any bound that uses only the epsilon
        of 2 gamma.
        """
        return np.maximum(2 * laplace_curve(self.gamma, orders), 0.0)

    def events(self) -> tuple[dp_event.DpEvent, ...]:
        """Return the events of two Laplace mechanisms of sensitivity 1: one record changes two counts by 1 each."""
        return (dp_event.SelfComposedDpEvent(dp_event.LaplaceDpEvent(1 / self.gamma), 2),)

    def log_q(self, counts: Counts) -> Floats:
        """Return ln(q) of each query: the union bound in lemma 4 of Papernot et al. 2017, at most ln(1 - 1/classes)."""
        gaps = self.gamma * _gaps_to_the_top(counts)
        with np.errstate(invalid="ignore"):
            terms = np.where(np.isinf(gaps), -np.inf, _log_beaten(gaps))
        return _capped(logsumexp(terms, axis=1), counts.shape[1])

    def log_q_of_gaps(self, gaps: Floats, num_classes: int) -> Floats:
        """Return ln(q) for votes in which the first class has ``gaps`` more votes than each other class.

        The result is at most ln(1 - 1/classes).
        """
        tail = _log_beaten(self.gamma * np.abs(gaps))
        return _capped(np.log(num_classes - 1) + np.where(gaps < 0, np.log1p(-np.exp(tail)), tail), num_classes)

    def divergence(self, log_q: Floats, orders: Floats) -> Floats:
        """Return the Renyi curve of each query: at each order, the smaller of two bounds.

        The bounds are theorem 3 of Papernot et al. 2017, and ``worst_case``.
        """
        return np.minimum(theorem_3(log_q, self.gamma, orders), self.worst_case(orders))


@dataclass(frozen=True)
class GNMaxCost(AnswerCost):
    """Cost of GNMax: Gaussian noise of standard deviation ``sigma`` on every count.

    The largest noisy count gives the label.
    """

    sigma: float

    def worst_case(self, orders: Floats) -> Floats:
        """Return an upper bound on the Renyi curve of one query, for any votes.

        The bound is proposition 8 of Papernot et al. 2018.
        """
        return orders / self.sigma**2

    def events(self) -> tuple[dp_event.DpEvent, ...]:
        """Return the event of one Gaussian mechanism. The L2 sensitivity of the vote counts is sqrt 2."""
        return (dp_event.GaussianDpEvent(self.sigma / math.sqrt(2)),)

    def log_q(self, counts: Counts) -> Floats:
        """Return ln(q) of each query: the bound in proposition 7 of Papernot et al. 2018, at most ln(1 - 1/classes)."""
        gaps = _gaps_to_the_top(counts)
        return _capped(logsumexp(log_ndtr(-gaps / (np.sqrt(2) * self.sigma)), axis=1), counts.shape[1])

    def log_q_of_gaps(self, gaps: Floats, num_classes: int) -> Floats:
        """Return ln(q) for votes in which the first class has ``gaps`` more votes than each other class.

        The result is at most ln(1 - 1/classes).
        """
        log_beaten = log_ndtr(-gaps / (np.sqrt(2) * self.sigma))
        return _capped(np.log(num_classes - 1) + log_beaten, num_classes)

    def divergence(self, log_q: Floats, orders: Floats) -> Floats:
        """Return the Renyi curve of each query: at each order, the smaller of two bounds.

        The bounds are theorem 6 of Papernot et al. 2018, and ``worst_case``.
        """
        return np.minimum(theorem_6(log_q, self.sigma, orders), self.worst_case(orders))


@dataclass(frozen=True)
class ConfidentCost(Cost):
    """Cost of Confident-GNMax: a noisy test of each query, then GNMax for the queries that pass the test.

    The test adds Gaussian noise with standard deviation ``sigma_threshold`` to the largest count. A query passes if the
    noisy count reaches ``threshold``. The result of the test is published. One record changes the largest count by at
    most 1. Every query has the cost of its test, even if it gets no answer. ``sigma``: the noise of GNMax.
    """

    threshold: float
    sigma_threshold: float
    sigma: float

    @property
    def test(self) -> GNMaxCost:
        """Return the cost of the test of a query, as the cost of a GNMax query.

        At each order, the Renyi divergence of this GNMax query is order / (2 sigma_threshold^2).
        """
        return GNMaxCost(np.sqrt(2) * self.sigma_threshold)

    @property
    def answer(self) -> GNMaxCost:
        """Return the cost of an answer to a query: the cost of a GNMax query with noise ``sigma``."""
        return GNMaxCost(self.sigma)

    def worst_case(self, orders: Floats) -> Floats:
        """Return an upper bound on the Renyi curve of one test plus one answer, for any votes."""
        return self.test.worst_case(orders) + self.answer.worst_case(orders)

    def events(self) -> tuple[dp_event.DpEvent, ...]:
        """Return the privacy event of the test, which has sensitivity 1, and the events of the answer."""
        return (dp_event.GaussianDpEvent(self.sigma_threshold), *self.answer.events())

    def chance_of_answer(self, counts: Counts) -> Floats:
        """Return, for each query, the probability that it passes the noisy test and is answered; shape (queries,)."""
        distance = (counts.max(axis=1) - self.threshold) / self.sigma_threshold
        return np.exp(np.asarray(log_ndtr(distance), dtype=np.float64))

    def test_curves(self, counts: Counts, orders: Floats) -> Floats:
        """Return the data-dependent Renyi curve of each query's test, by theorem 6 of Papernot et al. 2018.

        The test has two outcomes. q is the probability of the less likely outcome.
        """
        distance = np.abs(counts.max(axis=1) - self.threshold) / self.sigma_threshold
        return self.test.divergence(np.asarray(log_ndtr(-distance), dtype=np.float64), orders)

    def curves(self, counts: Counts, answered: Floats, orders: Floats) -> tuple[Floats, Floats]:
        """Return (data-dependent, data-independent) Renyi curves of tests and answers.

        Each query has the cost of its test. An answered query has the cost of its answer, too.
        """
        dependent = self.test_curves(counts, orders) + answered[:, None] * self.answer.dependent(counts, orders)
        independent = answered[:, None] * self.answer.worst_case(orders)
        return dependent, independent + self.test.worst_case(orders)

    def least(self, teachers: int, classes: int, orders: Floats) -> Floats:
        """Return the sum of the smallest Renyi curve of an answer and the smallest Renyi curve of a test.

        The curve of an answer is smallest if all teachers agree. The curve of a test is smallest if the outcome of the
        test is most certain: if the largest vote count has its largest or its smallest possible value.
        """
        tests = self.test_curves(np.array([[teachers], [-(-teachers // classes)]]), orders)
        return np.asarray(tests.min(axis=0) + self.answer.least(teachers, classes, orders))


@dataclass(frozen=True)
class QueryCosts:
    """The epsilons of all queries, at one delta.

    ``per_query``: epsilon of each single query, shape (queries,). ``cumulative``: joint epsilon of each query and all
    queries before it, shape (queries,). ``curve``: the joint Renyi curve of all queries at ``ORDERS``.
    """

    per_query: Floats
    cumulative: Floats
    curve: Floats

    @property
    def total(self) -> float:
        """Return the joint epsilon of all queries."""
        return float(self.cumulative[-1])


@dataclass(frozen=True)
class Analysis:
    """The privacy costs of labelling all queries with the votes of the teachers.

    ``dependent``: the data-dependent costs, which are PRIVATE, because they are computed from the votes.
    ``independent``: the data-independent costs. ``worst_case``: the epsilon for any votes and any number of answers, by
    both accountants. Only this epsilon may be promised before the votes are counted. ``answers``: the number of
    answered queries, or the expected number.
    """

    dependent: QueryCosts
    independent: QueryCosts
    worst_case: Bounds
    answers: float


def analyse(counts: Counts, cost: Cost, delta: float, *, answered: NDArray[np.bool_] | None = None) -> Analysis:
    """Return the privacy costs at ``delta`` of labelling the queries with the votes ``counts``.

    ``answered``: the mask of answered queries, shape (queries,). Without the mask, the cost of each answer is weighted
    by the probability of the answer, as in the papers. The result is then an expected cost, not an upper bound.
    """
    valid_delta(delta)
    queries, pure = len(counts), cost.pure_epsilon
    weights = cost.chance_of_answer(counts) if answered is None else answered.astype(np.float64)
    both = [QueryCosts(np.zeros(queries), np.zeros(queries), np.zeros(len(ORDERS))) for _ in range(2)]
    for start in range(0, queries, _CHUNK):
        rows = slice(start, min(start + _CHUNK, queries))
        for one, curves in zip(both, cost.curves(counts[rows], weights[rows], _ORDERS), strict=True):
            running = one.curve + np.cumsum(curves, axis=0)
            numbers = np.arange(rows.start + 1, rows.start + 1 + len(curves))
            one.per_query[rows] = np.minimum(epsilon_of_curves(curves, delta), pure)
            one.cumulative[rows] = np.minimum(epsilon_of_curves(running, delta), pure * numbers)
            one.curve[:] = running[-1]
    worst = bounds({event: times * queries for event, times in Counter(cost.events()).items()}, delta)
    return Analysis(both[0], both[1], worst, float(weights.sum()))


def queries_within(cost: Cost, queries: int, delta: float, target: float) -> int:
    """Return the largest number of queries, up to ``queries``, that cost at most epsilon ``target`` at ``delta``.

    The cost of each query is the upper bound for any votes, including the cost of an answer.
    """
    each = np.arange(1, queries + 1)
    total = epsilon_of_curves(each[:, None] * cost.worst_case(_ORDERS), delta)
    return int((np.minimum(total, each * cost.pure_epsilon) <= target).sum())


def least_epsilon(cost: Cost, teachers: int, classes: int, delta: float) -> float:
    """Return a lower bound, for any votes, on the data-dependent epsilon of one answered query."""
    return float(epsilon_of_curves(cost.least(teachers, classes, _ORDERS)[None], delta)[0])


def epsilon_of_curves(curves: Floats, delta: float) -> Floats:
    """Convert each Renyi curve, a row with one value per order, to an epsilon at ``delta``; shape (rows,)."""
    assert not np.isnan(curves).any()
    assert (curves >= 0).all()
    return epsilons_of_curves(curves, delta)


def valid_counts(counts: NDArray[np.generic]) -> Counts:
    """Return the vote counts as int64. Raises UserError unless every row (query) has one vote of each teacher."""
    shape = "an integer array of shape (queries, classes) with at least 1 query and 2 classes"
    if counts.ndim != 2 or len(counts) == 0 or counts.shape[1] < 2:
        raise UserError(f"votes have shape {counts.shape}: give {shape}")
    if counts.dtype.kind == "f" and np.isnan(counts).any():
        raise UserError(f"the votes contain NaN in row {int(np.isnan(counts).any(axis=1).argmax())}: give {shape}")
    if counts.dtype.kind not in "iu":
        raise UserError(f"votes are {counts.dtype}, not whole numbers: give {shape}, such as votes.astype('int64')")
    checked = counts.astype(np.int64)  # unsigned numbers that are too large for int64 become negative, and are refused
    if (outside := (checked < 0) | (checked > _MOST_VOTES)).any():
        row = int(outside.any(axis=1).argmax())
        raise UserError(f"row {row} of the votes is {counts[row].tolist()}: a class has 0 to {_MOST_VOTES} votes")
    totals = checked.sum(axis=1)
    if (totals != totals[0]).any():
        row = int((totals != totals[0]).argmax())
        raise UserError(
            f"row 0 of the votes adds up to {totals[0]} and row {row} to {totals[row]}: every teacher votes once on "
            "every query, so all rows add up to the number of teachers"
        )
    if totals[0] == 0:
        raise UserError("all vote counts are 0: give the votes of at least one teacher")
    return checked


def independent_2017(gamma: float, orders: Floats) -> Floats:
    """Return the bound of Papernot et al. 2017 on the Renyi curve of any query: min(2 gamma^2 order, 2 gamma)."""
    return np.minimum(2 * gamma**2 * orders, 2 * gamma)


def theorem_3(log_q: Floats, gamma: float, orders: Floats) -> Floats:
    """Return data-dependent Renyi curves by theorem 3 of Papernot et al. 2017; ``inf`` where the theorem does not hold.

    Shape: (queries, orders). The theorem holds for q < (e^(2 gamma) - 1) / (e^(4 gamma) - 1) = 1 / (e^(2 gamma) + 1).
    The script of the paper also applies the theorem to larger q. The results of this script can then be too small. The
    paper states log moments. A log moment is (order - 1) times the Renyi divergence.
    """
    holds = log_q < -np.logaddexp(0.0, 2 * gamma)
    inside = np.where(holds, log_q, -1 - 2 * gamma - np.log(2))[:, None]
    less = orders - 1
    log_stays = np.log1p(-np.exp(inside))
    stays = log_stays + less * (log_stays - np.log1p(-np.exp(inside + 2 * gamma)))
    curves = np.maximum(_log_of_sum(stays, inside + 2 * gamma * less) / less, 0.0)
    return np.where(holds[:, None], curves, np.inf)


def theorem_6(log_q: Floats, sigma: float, orders: Floats) -> Floats:
    """Return data-dependent Renyi curves by theorem 6 of Papernot et al. 2018; ``inf`` where the theorem does not hold.

    Shape: (queries, orders). The mechanism costs order / sigma^2 for any votes. ``log_q``: ln(q), shape (queries,). q
    is an upper bound on the total probability of all outcomes except the most likely one. mu_1 and mu_2 are defined in
    proposition 10 of the same paper. The theorem needs order <= mu_1. It is applied only where its result increases
    with q, because only the upper bound q of the probability is known.
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
    # If q is so small that it underflows to 0, theorem 6 is not applied, and the Renyi curve is 0.
    holds &= np.isfinite(log_a) & np.isfinite(log_b)
    stays, q, a, b, most = (np.where(holds, value, 0.0)[:, None] for value in (log_stays, log_q, log_a, log_b, mu_1))
    less = orders - 1
    curves = np.maximum(_log_of_sum(stays + less * a, q + less * b) / less, 0.0)
    curves = np.where(holds[:, None] & (orders <= most), curves, np.inf)
    return np.where(np.isneginf(log_q)[:, None], 0.0, curves)


def _gaps_to_the_top(counts: Counts) -> Floats:
    """Return the gap of each class, shape (queries, classes): the largest vote count minus the count of the class.

    The gap of the class with the most votes is set to ``inf``. If several classes have the most votes, only the first
    of them gets ``inf``.
    """
    top = counts.argmax(axis=1)[:, None]
    gaps = (np.take_along_axis(counts, top, axis=1) - counts).astype(np.float64)
    np.put_along_axis(gaps, top, np.inf, axis=1)
    return gaps


def _log_beaten(gaps: Floats) -> Floats:
    """Return ln(probability that a smaller vote count exceeds the largest one after Laplace noise on both counts).

    ``gaps`` >= 0: the differences of the two counts, divided by the scale of the noise.
    """
    return np.log((2 + gaps) / 4) - gaps


def _capped(log_q: Floats, num_classes: int) -> Floats:
    return np.minimum(log_q, np.log1p(-1 / num_classes))


def _log_of_sum(first: Floats, second: Floats) -> Floats:
    """Return ln(e^first + e^second), with high precision even if e^first + e^second is close to 1."""
    small = np.maximum(first, second) < 0.5
    near = np.expm1(np.where(small, first, 0.0)) + np.exp(np.where(small, second, 0.0))
    return np.where(small, np.log1p(near), np.logaddexp(first, second))
