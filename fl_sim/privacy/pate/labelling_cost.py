"""Privacy cost of a PATE labelling: Renyi curves of queries, their sum and epsilon, for given or for any votes.

The unit is one record of the private set: it lies in one teacher's shard, and that teacher has one vote, so one count
falls by 1 and another rises by 1. A data-independent epsilon is a guarantee and may be published. A data-dependent one
is a function of the votes and as private as they are (Papernot et al. 2018, section 3): look at it, but publish only
``smooth_sensitivity.release`` of it. Curves are Renyi divergences of shape (queries, orders), in nats;
``log_q`` is ln of an upper bound on the probability that the label is not the teachers' majority, shape (queries,).

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
"""Votes per query and class, shape (queries, classes); every row adds up to the number of teachers."""

Floats: TypeAlias = NDArray[np.float64]

_ORDERS: Final = np.array(ORDERS)
_CHUNK: Final = 2048  # queries whose curves are in memory at once
_MOST_VOTES: Final = 2**31


class Cost(ABC):
    """Privacy cost of one query of a mechanism, as Renyi curves at the given orders."""

    @property
    def pure_epsilon(self) -> float:
        """Return the epsilon of one query at delta 0; ``inf`` where there is none."""
        return math.inf

    @abstractmethod
    def worst_case(self, orders: Floats) -> Floats:
        """Return a bound on the curve of one query, answered or not, whatever the votes are, shape (orders,)."""

    @abstractmethod
    def events(self) -> tuple[dp_event.DpEvent, ...]:
        """Return all events that one query may be charged for, whatever the votes are."""

    @abstractmethod
    def chance_of_answer(self, counts: Counts) -> Floats:
        """Return the probability of an answer to each query, shape (queries,)."""

    @abstractmethod
    def curves(self, counts: Counts, answered: Floats, orders: Floats) -> tuple[Floats, Floats]:
        """Return (data-dependent, data-independent) curves of shape (queries, orders).

        ``answered``: shape (queries,), 1 for an answered query and 0 for others; or the probabilities of an answer,
        which give expected curves.
        """

    @abstractmethod
    def least(self, teachers: int, classes: int, orders: Floats) -> Floats:
        """Return a lower bound on the data-dependent curve of every answered query, shape (orders,)."""


class AnswerCost(Cost):
    """Cost of a mechanism that answers every query."""

    @abstractmethod
    def log_q(self, counts: Counts) -> Floats:
        """Return ``log_q`` of each query."""

    @abstractmethod
    def log_q_of_gaps(self, gaps: Floats, num_classes: int) -> Floats:
        """Return ``log_q`` of votes whose other classes are all ``gaps`` votes behind the first; negative: ahead."""

    @abstractmethod
    def divergence(self, log_q: Floats, orders: Floats) -> Floats:
        """Return each query's curve: at every order the smaller of the theorem's bound and the worst case."""

    def dependent(self, counts: Counts, orders: Floats) -> Floats:
        """Return each query's data-dependent curve, shape (queries, orders)."""
        return self.divergence(self.log_q(counts), orders)

    def chance_of_answer(self, counts: Counts) -> Floats:
        """Return ones, shape (queries,): every query is answered."""
        return np.ones(len(counts))

    def curves(self, counts: Counts, answered: Floats, orders: Floats) -> tuple[Floats, Floats]:
        """Return (data-dependent, data-independent) curves; ``answered`` is not used, as all queries are answered."""
        del answered
        dependent = self.dependent(counts, orders)
        return dependent, np.broadcast_to(self.worst_case(orders), dependent.shape)

    def least(self, teachers: int, classes: int, orders: Floats) -> Floats:
        """Return the curve for votes on which all teachers agree: no votes make another label less likely."""
        return np.asarray(self.dependent(np.array([[teachers] + [0] * (classes - 1)]), orders)[0])


@dataclass(frozen=True)
class LNMaxCost(AnswerCost):
    """Laplace noise of scale 1 / ``gamma`` on every count, the largest gives the label: (2 gamma, 0)-private."""

    gamma: float

    @property
    def pure_epsilon(self) -> float:
        """Return 2 gamma: one count falls by 1 and another rises by 1."""
        return 2 * self.gamma

    def worst_case(self, orders: Floats) -> Floats:
        """Return the curve of one query whatever the votes are.

        The label is computed from the noisy counts, of which two move by 1. So the curve is at most that of two Laplace
        mechanisms with epsilon gamma (Mironov 2017, proposition 6), less than any bound from (2 gamma, 0)-privacy
        alone.
        """
        return np.maximum(2 * laplace_curve(self.gamma, orders), 0.0)

    def events(self) -> tuple[dp_event.DpEvent, ...]:
        """Return two Laplace mechanisms: two counts move by 1."""
        return (dp_event.SelfComposedDpEvent(dp_event.LaplaceDpEvent(1 / self.gamma), 2),)

    def log_q(self, counts: Counts) -> Floats:
        """Return ``log_q`` by the union bound of the 2017 paper's lemma 4, at most ln(1 - 1/classes)."""
        gaps = self.gamma * _gaps_to_the_top(counts)
        with np.errstate(invalid="ignore"):
            terms = np.where(np.isinf(gaps), -np.inf, _log_beaten(gaps))
        return _capped(logsumexp(terms, axis=1), counts.shape[1])

    def log_q_of_gaps(self, gaps: Floats, num_classes: int) -> Floats:
        """Return ``log_q`` of votes whose gaps are all equal, at most ln(1 - 1/classes)."""
        tail = _log_beaten(self.gamma * np.abs(gaps))
        return _capped(np.log(num_classes - 1) + np.where(gaps < 0, np.log1p(-np.exp(tail)), tail), num_classes)

    def divergence(self, log_q: Floats, orders: Floats) -> Floats:
        """Return the curves: the smaller of theorem 3 and the worst case, at every order."""
        return np.minimum(theorem_3(log_q, self.gamma, orders), self.worst_case(orders))


@dataclass(frozen=True)
class GNMaxCost(AnswerCost):
    """Gaussian noise of standard deviation ``sigma`` on every count; the label has the largest noisy count."""

    sigma: float

    def worst_case(self, orders: Floats) -> Floats:
        """Return the curve of one query whatever the votes are: two counts move by 1 (proposition 8)."""
        return orders / self.sigma**2

    def events(self) -> tuple[dp_event.DpEvent, ...]:
        """Return one Gaussian mechanism: the counts, as one vector, move by sqrt 2."""
        return (dp_event.GaussianDpEvent(self.sigma / math.sqrt(2)),)

    def log_q(self, counts: Counts) -> Floats:
        """Return ``log_q`` by the bound of proposition 7, at most ln(1 - 1/classes)."""
        gaps = _gaps_to_the_top(counts)
        return _capped(logsumexp(log_ndtr(-gaps / (np.sqrt(2) * self.sigma)), axis=1), counts.shape[1])

    def log_q_of_gaps(self, gaps: Floats, num_classes: int) -> Floats:
        """Return ``log_q`` of votes whose gaps are all equal, at most ln(1 - 1/classes)."""
        log_beaten = log_ndtr(-gaps / (np.sqrt(2) * self.sigma))
        return _capped(np.log(num_classes - 1) + log_beaten, num_classes)

    def divergence(self, log_q: Floats, orders: Floats) -> Floats:
        """Return the curves: the smaller of theorem 6 and the worst case, at every order."""
        return np.minimum(theorem_6(log_q, self.sigma, orders), self.worst_case(orders))


@dataclass(frozen=True)
class ConfidentCost(Cost):
    """GNMax with ``sigma`` for queries whose largest count, with noise ``sigma_threshold``, reaches ``threshold``.

    The test releases one number that moves by 1; its cost is paid whether or not the query is then answered.
    """

    threshold: float
    sigma_threshold: float
    sigma: float

    @property
    def test(self) -> GNMaxCost:
        """Return a GNMax cost whose curve is that of the test: order / (2 sigma_threshold^2)."""
        return GNMaxCost(np.sqrt(2) * self.sigma_threshold)

    @property
    def answer(self) -> GNMaxCost:
        """Return the GNMax cost of an answer."""
        return GNMaxCost(self.sigma)

    def worst_case(self, orders: Floats) -> Floats:
        """Return the curve of a test and an answer together, whatever the votes are."""
        return self.test.worst_case(orders) + self.answer.worst_case(orders)

    def events(self) -> tuple[dp_event.DpEvent, ...]:
        """Return the events of the test, whose one number moves by 1, and of the answer."""
        return (dp_event.GaussianDpEvent(self.sigma_threshold), *self.answer.events())

    def chance_of_answer(self, counts: Counts) -> Floats:
        """Return the probability of each query to pass the test, shape (queries,)."""
        distance = (counts.max(axis=1) - self.threshold) / self.sigma_threshold
        return np.exp(np.asarray(log_ndtr(distance), dtype=np.float64))

    def test_curves(self, counts: Counts, orders: Floats) -> Floats:
        """Return each test's data-dependent curve: theorem 6 for two outcomes, the rarer with probability q."""
        distance = np.abs(counts.max(axis=1) - self.threshold) / self.sigma_threshold
        return self.test.divergence(np.asarray(log_ndtr(-distance), dtype=np.float64), orders)

    def curves(self, counts: Counts, answered: Floats, orders: Floats) -> tuple[Floats, Floats]:
        """Return (data-dependent, data-independent) curves: a query pays its test, and its answer if answered."""
        dependent = self.test_curves(counts, orders) + answered[:, None] * self.answer.dependent(counts, orders)
        independent = answered[:, None] * self.answer.worst_case(orders)
        return dependent, independent + self.test.worst_case(orders)

    def least(self, teachers: int, classes: int, orders: Floats) -> Floats:
        """Return the sum of the least curve of an answer and the least curve of a test.

        The answer's curve is least where all teachers agree; the test's curve is least where its outcome is clearest:
        where the largest count has its largest or its smallest possible value.
        """
        tests = self.test_curves(np.array([[teachers], [-(-teachers // classes)]]), orders)
        return np.asarray(tests.min(axis=0) + self.answer.least(teachers, classes, orders))


@dataclass(frozen=True)
class QueryCosts:
    """Epsilon at one delta of the queries of a labelling.

    ``per_query``: of each query alone, shape (queries,). ``cumulative``: of all queries up to each, shape (queries,).
    ``curve``: the Renyi curve of all queries together at ``ORDERS``.
    """

    per_query: Floats
    cumulative: Floats
    curve: Floats

    @property
    def total(self) -> float:
        """Return the epsilon of all queries together."""
        return float(self.cumulative[-1])


@dataclass(frozen=True)
class Analysis:
    """The costs of a labelling; ``answers`` is the number of answered queries, or its expectation.

    ``dependent``: the data-dependent costs, which are PRIVATE, since they are computed from the votes. ``independent``:
    the data-independent costs. ``worst_case``: the epsilon of all queries whatever the votes and the number of answers
    are, by both accountants: the only epsilon that a plan may promise.
    """

    dependent: QueryCosts
    independent: QueryCosts
    worst_case: Bounds
    answers: float


def analyse(counts: Counts, cost: Cost, delta: float, *, answered: NDArray[np.bool_] | None = None) -> Analysis:
    """Return the cost of labelling ``counts`` at ``delta``.

    ``answered``: the mask of answered queries, shape (queries,). Without the mask the cost of an answer is weighted by
    the answer's probability, as in the published analysis: the result is an expectation, not a bound.
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
    """Return the number of ``queries`` within epsilon ``target``, whatever the votes are: all count as answered."""
    each = np.arange(1, queries + 1)
    total = epsilon_of_curves(each[:, None] * cost.worst_case(_ORDERS), delta)
    return int((np.minimum(total, each * cost.pure_epsilon) <= target).sum())


def least_epsilon(cost: Cost, teachers: int, classes: int, delta: float) -> float:
    """Return a lower bound on the data-dependent epsilon of an answered query, whatever its votes are."""
    return float(epsilon_of_curves(cost.least(teachers, classes, _ORDERS)[None], delta)[0])


def epsilon_of_curves(curves: Floats, delta: float) -> Floats:
    """Return the epsilon that each curve, a row over ``ORDERS``, proves at ``delta``, shape (rows,)."""
    assert not np.isnan(curves).any()
    assert (curves >= 0).all()
    return epsilons_of_curves(curves, delta)


def valid_counts(counts: NDArray[np.generic]) -> Counts:
    """Return ``counts`` as int64. Raises UserError for anything but votes of the same teachers on every query."""
    shape = "an integer array of shape (queries, classes) with at least 1 query and 2 classes"
    if counts.ndim != 2 or len(counts) == 0 or counts.shape[1] < 2:
        raise UserError(f"votes have shape {counts.shape}: give {shape}")
    if counts.dtype.kind == "f" and np.isnan(counts).any():
        raise UserError(f"votes hold NaN in row {int(np.isnan(counts).any(axis=1).argmax())}: give {shape}")
    if counts.dtype.kind not in "iu":
        raise UserError(f"votes are {counts.dtype}, not whole numbers: give {shape}, such as votes.astype('int64')")
    checked = counts.astype(np.int64)  # an unsigned number beyond int64 turns negative, and is refused as such
    if (outside := (checked < 0) | (checked > _MOST_VOTES)).any():
        row = int(outside.any(axis=1).argmax())
        raise UserError(f"row {row} of the votes holds {counts[row].tolist()}: a class has 0 to {_MOST_VOTES} votes")
    totals = checked.sum(axis=1)
    if (totals != totals[0]).any():
        row = int((totals != totals[0]).argmax())
        raise UserError(
            f"row 0 of the votes adds up to {totals[0]} and row {row} to {totals[row]}: every teacher votes once on "
            "every query, so all rows add up to the number of teachers"
        )
    if totals[0] == 0:
        raise UserError("the votes add up to 0 teachers: give at least one")
    return checked


def independent_2017(gamma: float, orders: Floats) -> Floats:
    """Return the 2017 paper's curve of one query whatever the votes are: 2 gamma^2 order, at most 2 gamma."""
    return np.minimum(2 * gamma**2 * orders, 2 * gamma)


def theorem_3(log_q: Floats, gamma: float, orders: Floats) -> Floats:
    """Return the 2017 paper's data-dependent curves, ``inf`` where theorem 3 does not hold, shape (queries, orders).

    It holds for q < (e^(2 gamma) - 1) / (e^(4 gamma) - 1) = 1 / (e^(2 gamma) + 1); the script published with the paper
    applies it beyond that range, where the result can be too small. A moment of the paper is (order - 1) times the
    divergence.
    """
    holds = log_q < -np.logaddexp(0.0, 2 * gamma)
    inside = np.where(holds, log_q, -1 - 2 * gamma - np.log(2))[:, None]
    less = orders - 1
    log_stays = np.log1p(-np.exp(inside))
    stays = log_stays + less * (log_stays - np.log1p(-np.exp(inside + 2 * gamma)))
    curves = np.maximum(_log_of_sum(stays, inside + 2 * gamma * less) / less, 0.0)
    return np.where(holds[:, None], curves, np.inf)


def theorem_6(log_q: Floats, sigma: float, orders: Floats) -> Floats:
    """Return data-dependent curves of a mechanism that costs order / sigma^2; ``inf`` where theorem 6 does not hold.

    ``log_q``: ln of a bound on the probability of all outcomes but the likeliest, shape (queries,). mu_1 and mu_2 are
    those of proposition 10. The theorem needs order <= mu_1, and q in the range where its bound grows with q, since
    only a bound on q is known.
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
    curves = np.maximum(_log_of_sum(stays + less * a, q + less * b) / less, 0.0)
    curves = np.where(holds[:, None] & (orders <= most), curves, np.inf)
    return np.where(np.isneginf(log_q)[:, None], 0.0, curves)


def _gaps_to_the_top(counts: Counts) -> Floats:
    """Return the number of votes that each class is behind the first largest class, ``inf`` for that class."""
    top = counts.argmax(axis=1)[:, None]
    gaps = (np.take_along_axis(counts, top, axis=1) - counts).astype(np.float64)
    np.put_along_axis(gaps, top, np.inf, axis=1)
    return gaps


def _log_beaten(gaps: Floats) -> Floats:
    """Return ln Pr[the noisy count of a class that is ``gaps`` >= 0 noise scales behind exceeds that of the top]."""
    return np.log((2 + gaps) / 4) - gaps


def _capped(log_q: Floats, num_classes: int) -> Floats:
    """Return ``log_q``, at most ln(1 - 1/classes)."""
    return np.minimum(log_q, np.log1p(-1 / num_classes))


def _log_of_sum(first: Floats, second: Floats) -> Floats:
    """Return ln(e^first + e^second), accurate where the sum is close to 1."""
    small = np.maximum(first, second) < 0.5
    near = np.expm1(np.where(small, first, 0.0)) + np.exp(np.where(small, second, 0.0))
    return np.where(small, np.log1p(near), np.logaddexp(first, second))
