"""What a PATE labelling costs: the Renyi curve of every query, their sum, and epsilon, for its votes or for any votes.

The unit is one record of the private set: it lies in one teacher's shard, and that teacher's vote may move. A
data-independent epsilon is a guarantee and may be published. A data-dependent one is a function of the votes and as
private as they are (Papernot et al. 2018, section 3): look at it, publish ``smooth_sensitivity.release`` of it.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
from dp_accounting import dp_event
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.privacy.accounting import Bounds, bounds
from fl_sim.privacy.pate import gnmax, lnmax
from fl_sim.privacy.renyi import ORDERS, epsilons_of_curves
from fl_sim.privacy.terms import valid_delta

Counts: TypeAlias = NDArray[np.int64]
"""Votes per query and class, shape (queries, classes); every row adds up to the number of teachers."""

Floats: TypeAlias = NDArray[np.float64]

_ORDERS: Final = np.array(ORDERS)
_CHUNK: Final = 2048  # queries whose curves are in memory at once
_MOST_VOTES: Final = 2**31


class Cost(Protocol):
    """What one query of a mechanism costs, as Renyi curves at the orders asked for."""

    @property
    def pure_epsilon(self) -> float:
        """Epsilon of one query at delta 0; ``inf`` where there is none."""
        ...

    def chance_of_answer(self, counts: Counts) -> Floats:
        """Return each query's probability to be answered, shape (queries,)."""
        ...

    def worst_case(self, orders: Floats) -> Floats:
        """Return the curve of one query whatever the votes are and whether or not it is answered, shape (orders,)."""
        ...

    def events(self) -> tuple[dp_event.DpEvent, ...]:
        """Return all that one query may be charged, whatever the votes are."""
        ...

    def curves(self, counts: Counts, answered: Floats, orders: Floats) -> tuple[Floats, Floats]:
        """Return (data-dependent, data-independent) curves of shape (queries, orders).

        ``answered``: 1 where a query was answered, 0 where not, or the chance of it for an expectation.
        """
        ...

    def least(self, teachers: int, classes: int, orders: Floats) -> Floats:
        """Return a curve that the data-dependent one of no answered query is below, shape (orders,)."""
        ...


@dataclass(frozen=True)
class LNMaxCost:
    """Laplace noise of scale 1 / ``gamma`` on every count."""

    gamma: float

    @property
    def pure_epsilon(self) -> float:
        """2 gamma: one count falls by 1 and another rises by 1."""
        return 2 * self.gamma

    def chance_of_answer(self, counts: Counts) -> Floats:
        """Return ones: every query is answered."""
        return np.ones(len(counts))

    def worst_case(self, orders: Floats) -> Floats:
        """Return the curve of one query whatever the votes are."""
        return lnmax.independent(self.gamma, orders)

    def events(self) -> tuple[dp_event.DpEvent, ...]:
        """Return two Laplace mechanisms: two counts move by 1."""
        return (dp_event.SelfComposedDpEvent(dp_event.LaplaceDpEvent(1 / self.gamma), 2),)

    def curves(self, counts: Counts, answered: Floats, orders: Floats) -> tuple[Floats, Floats]:
        """Return (data-dependent, data-independent) curves; every query is answered."""
        del answered
        dependent = lnmax.dependent(counts, self.gamma, orders)
        return dependent, np.broadcast_to(self.worst_case(orders), dependent.shape)

    def least(self, teachers: int, classes: int, orders: Floats) -> Floats:
        """Return the curve where all teachers agree, as no votes make another label less likely."""
        return np.asarray(lnmax.dependent(_unanimous(teachers, classes), self.gamma, orders)[0])


@dataclass(frozen=True)
class GNMaxCost:
    """Gaussian noise of standard deviation ``sigma`` on every count."""

    sigma: float

    @property
    def pure_epsilon(self) -> float:
        """There is none."""
        return math.inf

    def chance_of_answer(self, counts: Counts) -> Floats:
        """Return ones: every query is answered."""
        return np.ones(len(counts))

    def worst_case(self, orders: Floats) -> Floats:
        """Return the curve of one query whatever the votes are."""
        return gnmax.independent(self.sigma, orders)

    def events(self) -> tuple[dp_event.DpEvent, ...]:
        """Return one Gaussian mechanism: the counts, as one vector, move by sqrt 2."""
        return (dp_event.GaussianDpEvent(self.sigma / math.sqrt(2)),)

    def curves(self, counts: Counts, answered: Floats, orders: Floats) -> tuple[Floats, Floats]:
        """Return (data-dependent, data-independent) curves; every query is answered."""
        del answered
        dependent = gnmax.dependent(counts, self.sigma, orders)
        return dependent, np.broadcast_to(self.worst_case(orders), dependent.shape)

    def least(self, teachers: int, classes: int, orders: Floats) -> Floats:
        """Return the curve where all teachers agree, as no votes make another label less likely."""
        return np.asarray(gnmax.dependent(_unanimous(teachers, classes), self.sigma, orders)[0])


@dataclass(frozen=True)
class ConfidentCost:
    """GNMax with ``sigma`` for queries whose largest count, with noise ``sigma_threshold``, reaches ``threshold``."""

    threshold: float
    sigma_threshold: float
    sigma: float

    @property
    def pure_epsilon(self) -> float:
        """There is none."""
        return math.inf

    def chance_of_answer(self, counts: Counts) -> Floats:
        """Return each query's probability to pass the test."""
        return np.exp(gnmax.log_answered(counts, self.threshold, self.sigma_threshold))

    def worst_case(self, orders: Floats) -> Floats:
        """Return the curve of the test and an answer, whatever the votes are."""
        return gnmax.threshold_independent(self.sigma_threshold, orders) + gnmax.independent(self.sigma, orders)

    def events(self) -> tuple[dp_event.DpEvent, ...]:
        """Return the test, whose one number moves by 1, and the answer."""
        return (dp_event.GaussianDpEvent(self.sigma_threshold), *GNMaxCost(self.sigma).events())

    def curves(self, counts: Counts, answered: Floats, orders: Floats) -> tuple[Floats, Floats]:
        """Return (data-dependent, data-independent) curves: every query pays the test, an answered one its answer."""
        test = gnmax.threshold_dependent(counts, self.threshold, self.sigma_threshold, orders)
        dependent = test + answered[:, None] * gnmax.dependent(counts, self.sigma, orders)
        independent = answered[:, None] * gnmax.independent(self.sigma, orders)
        return dependent, independent + gnmax.threshold_independent(self.sigma_threshold, orders)

    def least(self, teachers: int, classes: int, orders: Floats) -> Floats:
        """Return the answer's curve where all teachers agree, and the test's where its outcome is clearest.

        That is where the largest count is as large as it can be, or as small.
        """
        answer = GNMaxCost(self.sigma).least(teachers, classes, orders)
        largest = np.array([[teachers], [-(-teachers // classes)]])
        tests = gnmax.threshold_dependent(largest, self.threshold, self.sigma_threshold, orders)
        return np.asarray(tests.min(axis=0) + answer)


@dataclass(frozen=True)
class Bill:
    """Epsilon at one delta: of each query alone and of all queries up to each; and their Renyi curve at ``ORDERS``."""

    per_query: Floats
    cumulative: Floats
    curve: Floats

    @property
    def total(self) -> float:
        """Return the epsilon of all queries together."""
        return float(self.cumulative[-1])


@dataclass(frozen=True)
class Analysis:
    """Both bills of a labelling. ``answers``: how many queries were answered, or the expected number of them.

    ``dependent`` is PRIVATE: it is computed from the votes. ``worst_case`` is the epsilon of all queries whatever the
    votes are and however many are answered, by both accountants: the only one that a plan may promise.
    """

    dependent: Bill
    independent: Bill
    worst_case: Bounds
    answers: float


def analyse(counts: Counts, cost: Cost, delta: float, *, answered: NDArray[np.bool_] | None = None) -> Analysis:
    """Return what labelling ``counts`` costs at ``delta``.

    ``answered``, of shape (queries,), says which queries were answered. Without it an answer's cost is weighted by
    its probability, as the published analysis does: an expectation, not a bound.
    """
    valid_delta(delta)
    weights = cost.chance_of_answer(counts) if answered is None else answered.astype(np.float64)
    bills = [_OpenBill(len(counts), cost.pure_epsilon, delta) for _ in range(2)]
    for rows in _chunks(len(counts)):
        for bill, curves in zip(bills, cost.curves(counts[rows], weights[rows], _ORDERS), strict=True):
            bill.add(rows, curves)
    worst = bounds({event: times * len(counts) for event, times in Counter(cost.events()).items()}, delta)
    return Analysis(bills[0].close(), bills[1].close(), worst, float(weights.sum()))


def queries_within(cost: Cost, queries: int, delta: float, target: float) -> int:
    """Return how many of ``queries`` fit epsilon ``target`` whatever the votes are: each is tested and answered."""
    each = np.arange(1, queries + 1)
    total = epsilon_of_curves(each[:, None] * cost.worst_case(_ORDERS), delta)
    return int((np.minimum(total, each * cost.pure_epsilon) <= target).sum())


def least_epsilon(cost: Cost, teachers: int, classes: int, delta: float) -> float:
    """Return an epsilon that the data-dependent one of an answered query is never below, whatever its votes are."""
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


class _OpenBill:
    def __init__(self, queries: int, pure_epsilon: float, delta: float) -> None:
        self._bill = Bill(np.zeros(queries), np.zeros(queries), np.zeros(len(ORDERS)))
        self._sum = self._bill.curve
        self._pure_epsilon, self._delta = pure_epsilon, delta

    def add(self, rows: slice, curves: Floats) -> None:
        running = self._sum + np.cumsum(curves, axis=0)
        numbers = np.arange(rows.start + 1, rows.start + 1 + len(curves))
        pure = self._pure_epsilon
        self._bill.per_query[rows] = np.minimum(epsilon_of_curves(curves, self._delta), pure)
        self._bill.cumulative[rows] = np.minimum(epsilon_of_curves(running, self._delta), pure * numbers)
        self._sum = running[-1]

    def close(self) -> Bill:
        return Bill(self._bill.per_query, self._bill.cumulative, self._sum)


def _unanimous(teachers: int, classes: int) -> Counts:
    return np.array([[teachers] + [0] * (classes - 1)])


def _chunks(queries: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, queries)) for start in range(0, queries, _CHUNK))
