"""Labelling of a public pool by PATE (private aggregation of teacher ensembles): noisy majority votes.

The cost of each vote is charged to a privacy ledger before the vote's noise is drawn.

LNMax: Papernot et al. 2017; GNMax and Confident-GNMax: Papernot et al. 2018, algorithm 1. Teachers vote, noise is added
to the counts, and the class of the largest noisy count is the label. Each record is in one teacher's shard, so one
record may change one vote in each query. Two counts then change by 1, and the largest count by at most 1.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fl_sim.errors import UserError
from fl_sim.privacy.mechanisms import Noise, add_noise
from fl_sim.privacy.terms import Adjacency, Terms, rounded_up
from fl_sim.settings import OneOf, Settings

if TYPE_CHECKING:
    from dp_accounting import dp_event

    from fl_sim.privacy.ledger import Ledger, Receipt
    from fl_sim.privacy.pate.labelling_cost import Cost

UNANSWERED: Final = -1
"""The label of a query without an answer."""

COVERS: Final = (
    "Everything that is computed from the labels of the public pool, such as the student: whoever sees it learns "
    "little more about any one private record than if that record were replaced by another, or removed from its "
    "teacher's shard. All other records stay in their shards."
)
DOES_NOT_COVER: Final = (
    "The server, which sees the votes before noise; the teachers and the votes themselves. Data-dependent figures, "
    "which are computed from the votes, such as the epsilon on the screen of a run. Choices made by looking at private "
    "data, such as a threshold tuned on it."
)


class VotingMechanism(Protocol):
    """A noisy majority vote. ``votes``: votes per class, shape (classes,). ``query``: the query's index."""

    def cost(self) -> "Cost":
        """Return the privacy cost of one query as Renyi curves, from which data-dependent epsilons are computed."""
        ...

    def charges(self) -> tuple["dp_event.DpEvent | None", "dp_event.DpEvent"]:
        """Return the privacy events of one query: (event of its test, or None without a test; event of its answer)."""
        ...

    def passes(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> bool:
        """Return True if the teachers agree on the query, by a noisy test. Other queries get no answer."""
        ...

    def winner(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> int:
        """Return the label: the class with the largest noisy count."""
        ...


class _AnswersEveryQuery(Settings):
    def passes(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> bool:
        del votes, noise, query
        return True


class LNMax(_AnswersEveryQuery):
    """Laplace noise of scale 1 / ``gamma`` on every count: (2 gamma, 0)-differentially private per query."""

    kind: Literal["lnmax"] = "lnmax"
    gamma: float = Field(0.05, ge=1e-5)

    def cost(self) -> "Cost":
        """Return the privacy cost of one query as Renyi curves (divergence by order)."""
        from fl_sim.privacy.pate.labelling_cost import LNMaxCost  # noqa: PLC0415 (the accountants load slowly)

        return LNMaxCost(self.gamma)

    def charges(self) -> tuple[None, "dp_event.DpEvent"]:
        """Return (None, event of the answer): LNMax does not test whether the teachers agree.

        The event is one Laplace mechanism for each of the two vote counts that a record changes.
        """
        from dp_accounting import dp_event  # noqa: PLC0415 (the accountants load slowly)

        return None, dp_event.SelfComposedDpEvent(dp_event.LaplaceDpEvent(1 / self.gamma), 2)

    def winner(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> int:
        """Return the label of a query: the class with the largest noisy count of votes."""
        steps = noise.laplace(len(votes), 1 / self.gamma, purpose="pate votes", server_round=query)
        return _largest(votes, 1 / self.gamma, steps)


class GNMax(_AnswersEveryQuery):
    """Gaussian noise of standard deviation ``sigma``, in votes, on every count."""

    kind: Literal["gnmax"] = "gnmax"
    sigma: float = Field(40.0, gt=0, le=1e5)

    def cost(self) -> "Cost":
        """Return the privacy cost of one query as Renyi curves (divergence by order)."""
        from fl_sim.privacy.pate.labelling_cost import GNMaxCost  # noqa: PLC0415 (the accountants load slowly)

        return GNMaxCost(self.sigma)

    def charges(self) -> tuple[None, "dp_event.DpEvent"]:
        """Return (None, event of the answer): GNMax does not test whether the teachers agree.

        The event is a Gaussian mechanism. The L2 sensitivity of the vote counts is sqrt(2).
        """
        from dp_accounting import dp_event  # noqa: PLC0415 (the accountants load slowly)

        return None, dp_event.GaussianDpEvent(self.sigma / math.sqrt(2))

    def winner(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> int:
        """Return the label of a query: the class with the largest noisy count of votes."""
        steps = noise.gaussian(len(votes), self.sigma, purpose="pate votes", server_round=query)
        return _largest(votes, self.sigma, steps)


class ConfidentGNMax(Settings):
    """GNMax for queries on which teachers agree: the largest count, with noise, must reach ``threshold`` votes.

    ``sigma_threshold``: the standard deviation of the noise of that test, in votes. The cost of the test is charged for
    every query. The test's noise is independent of the noise on the counts. ``sigma``: the standard deviation of the
    noise on the counts of an answer, in votes.
    """

    kind: Literal["confident"] = "confident"
    threshold: float = Field(200.0, ge=0)
    sigma_threshold: float = Field(150.0, gt=0, le=1e5)
    sigma: float = Field(40.0, gt=0, le=1e5)

    def cost(self) -> "Cost":
        """Return the privacy cost of one query as Renyi curves (divergence by order)."""
        from fl_sim.privacy.pate.labelling_cost import ConfidentCost  # noqa: PLC0415 (the accountants load slowly)

        return ConfidentCost(self.threshold, self.sigma_threshold, self.sigma)

    def charges(self) -> tuple["dp_event.DpEvent", "dp_event.DpEvent"]:
        """Return the privacy events of a query: (test, of sensitivity 1; answer, of sensitivity sqrt(2))."""
        from dp_accounting import dp_event  # noqa: PLC0415 (the accountants load slowly)

        return dp_event.GaussianDpEvent(self.sigma_threshold), GNMax(sigma=self.sigma).charges()[1]

    def passes(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> bool:
        """Return True if the noisy largest count reaches the threshold."""
        steps = noise.gaussian(1, self.sigma_threshold, purpose="pate threshold", server_round=query)
        largest = np.array([votes.max()], dtype=np.float64)
        return bool(add_noise(largest, self.sigma_threshold, steps)[0] >= self.threshold)

    def winner(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> int:
        """Return the label of a query: the class with the largest noisy count of votes."""
        return GNMax(sigma=self.sigma).winner(votes, noise=noise, query=query)


class NoNoise(_AnswersEveryQuery):
    """The majority vote without noise: no privacy guarantee, for comparisons only."""

    kind: Literal["none"] = "none"

    def cost(self) -> "Cost":
        """Raise UserError: without noise the privacy cost is not finite."""
        raise UserError("mechanism none adds no noise, so no epsilon exists: choose lnmax, gnmax or confident")

    def charges(self) -> tuple[None, "dp_event.DpEvent"]:
        """Return (None, event of the answer): the teachers' agreement is not tested.

        The answer has no noise, so after a charge of this event the ledger guarantees no epsilon.
        """
        from dp_accounting import dp_event  # noqa: PLC0415 (the accountants load slowly)

        return None, dp_event.NonPrivateDpEvent()

    def winner(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> int:
        """Return the class with the most votes; the first such class in a tie."""
        del noise, query
        return int(np.argmax(votes))


Mechanism: TypeAlias = LNMax | GNMax | ConfidentGNMax | NoNoise


class Labelling(Settings):
    """The labelling of a public pool, and its budget.

    ``mechanism``: the rule that turns the teachers' votes on a record into one noisy label. ``accountant``: the
    accountant whose epsilon is reported and compared with the budget. ``epsilon``: the budget of all queries together
    at ``delta``; labelling stops before the query that would exceed this budget; None sets no limit. ``delta``: the
    delta of the guarantee. ``budget`` "data-dependent" compares the data-dependent epsilon with ``epsilon``. This gives
    more labels. But then the data-dependent epsilon and the number of labels must stay as secret as the votes.
    ``noise``: the source of the noise. With "secret" the noise comes from a fresh key of the operating system, so no
    two runs have the same noise. With "seeded" the noise is repeatable, with a guarantee about the method only.
    """

    mechanism: Annotated[Mechanism, OneOf("mechanism")] = LNMax()
    epsilon: float | None = Field(None, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    budget: Literal["data-independent", "data-dependent"] = "data-independent"
    accountant: Literal["rdp", "pld"] = "rdp"
    noise: Literal["secret", "seeded"] = "secret"

    @model_validator(mode="after")
    def _sensible(self) -> "Labelling":
        if isinstance(self.mechanism, NoNoise) and self.epsilon is not None:
            raise ValueError("mechanism none adds no noise, so no epsilon can limit it: leave epsilon out")
        if self.budget == "data-dependent" and self.epsilon is None:
            raise ValueError("a data-dependent budget needs an epsilon: set it")
        return self

    def open_ledger(
        self, path: Path | None, receipt: "Receipt | None" = None, *, holder: str = "this labelling"
    ) -> "Ledger":
        """Return the privacy ledger of the private records: the list of all charged privacy costs.

        ``path``: the file of the ledger; None for a ledger in memory. ``receipt``: number and digest of earlier
        charges. The file must begin with these charges. ``holder``: what these charges paid for, such as "this
        labelling"; it is quoted in error messages.
        """
        from fl_sim.privacy.ledger import Ledger  # noqa: PLC0415

        budget = self.epsilon if self.budget == "data-independent" else None
        terms = Terms("record", Adjacency.ADD_OR_REMOVE_ONE, self.delta, budget, self.accountant)
        return Ledger(terms, path, receipt=receipt, holder=holder)

    def check_budget(self, num_teachers: int, num_classes: int) -> None:
        """Raise UserError if the budget ``epsilon`` does not even cover one query.

        With a data-dependent budget, the cost of a query depends on its votes. The budget is then compared with a lower
        bound on this cost, which holds for all votes.
        """
        if self.epsilon is None:
            return
        if self.budget == "data-dependent":
            from fl_sim.privacy.pate.labelling_cost import least_epsilon  # noqa: PLC0415 (the accountants load slowly)

            cost, votes = (
                least_epsilon(self.mechanism.cost(), num_teachers, num_classes, self.delta),
                ", a lower bound for all votes",
            )
        else:
            from fl_sim.privacy.accounting import epsilon_of_counts  # noqa: PLC0415 (the accountants load slowly)

            event = _together(*self.mechanism.charges())
            cost, votes = epsilon_of_counts({event: 1}, self.delta, accountant=self.accountant), ""
        if cost > self.epsilon:
            raise UserError(
                f"algorithm.labelling.epsilon={self.epsilon:g} does not afford one query, which costs "
                f"{rounded_up(cost)} at delta {self.delta:g}{votes}: take more noise, or a larger epsilon"
            )

    def certain_queries(self, num_queries: int, num_asked: int) -> int:
        """Return the number of queries in the cost that the method ``planned`` returns, whatever the votes are."""
        return num_asked if self.mechanism.charges()[0] is None else num_queries

    def planned(self, num_queries: int, num_asked: int) -> dict["dp_event.DpEvent", int]:
        """Return the privacy cost of labelling ``num_queries`` records, as {event: number}, without reading any vote.

        If the mechanism answers every query, the votes do not change the number of queries within the budget. Then the
        cost is that of the ``num_asked`` queries. If the mechanism leaves queries unanswered, this number depends on
        the votes. Then the cost is that of all ``num_queries`` queries. With a data-dependent budget, votes without
        noise decide when labelling stops. No epsilon covers this decision, so an event without guarantee is added.
        """
        from dp_accounting import dp_event  # noqa: PLC0415 (the accountants load slowly)

        test, answer = self.mechanism.charges()
        each = Counter([answer] if test is None else [test, answer])  # if test and answer are equal: {event: 2}
        times = self.certain_queries(num_queries, num_asked)
        planned = {event: number * times for event, number in each.items() if times}
        return planned if self.budget == "data-independent" else {**planned, dp_event.NonPrivateDpEvent(): 1}


@dataclass(frozen=True)
class Labelled:
    """Noisy labels of all queries: a class or ``UNANSWERED``. Only the first ``num_asked`` queries were asked."""

    labels: NDArray[np.int64]
    num_asked: int

    @property
    def num_answered(self) -> int:
        """Return the number of queries with a label."""
        return int((self.labels != UNANSWERED).sum())


def label(counts: NDArray[np.int64], labelling: Labelling, *, ledger: "Ledger", noise: Noise) -> Labelled:
    """Label the queries whose votes are ``counts``, shape (queries, classes), in order, within the budget.

    The cost of every query is charged to the privacy ledger before the query's noise is drawn. A second call with the
    same ledger, noise and counts returns the same labels at no cost. Raises UserError if ``counts`` cannot be votes.

    A query without an answer costs only its test, so costs depend on the votes. The budget still holds, because it is a
    privacy filter (Feldman and Zrnic 2021, theorem 4.3). A filter fixes a limit beforehand on the summed Renyi
    divergence of releases that are chosen one after the other. The theorem is about one order of the divergence. Here
    the limit holds at all orders: all tests and answers have Gaussian noise, so their Renyi curves are multiples of
    each other. So the budget is always used up at the same order first. The final epsilon depends on the number of
    answered queries, and so on the votes. This epsilon may be reported, since the labels show which queries were
    answered. But this epsilon is not a guarantee. The guarantee is the budget or the cost of ``Labelling.planned``,
    whichever is smaller.
    """
    from fl_sim.privacy.pate.labelling_cost import valid_counts  # noqa: PLC0415 (the accountants load slowly)

    counts, mechanism = valid_counts(counts), labelling.mechanism
    test, answer = mechanism.charges()
    whole = _together(test, answer)
    within = _DataDependentBudget(labelling)
    paid = {charge.release for charge in ledger.charges if charge.noise == noise.identity}
    labels = np.full(len(counts), UNANSWERED, dtype=np.int64)
    num_asked = 0
    for query, votes in enumerate(counts):
        names = f"test of query {query}", answer_to(query)
        if not (within.affords(votes) and (paid.intersection(names) or ledger.affords(whole))):
            break
        num_asked += 1
        if test is not None:
            ledger.charge(test, release=names[0], noise=noise.identity)
        answered = mechanism.passes(votes, noise=noise, query=query)
        within.take(votes, answered=answered)
        if answered:
            ledger.charge(answer, release=names[1], noise=noise.identity)
            labels[query] = mechanism.winner(votes, noise=noise, query=query)
    return Labelled(labels, num_asked)


def answer_to(query: int) -> str:
    """Return the name under which the ledger charges the answer to ``query``. Queries are counted from 0."""
    return f"answer to query {query}"


def count_votes(predictions: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """Return the votes for each class, shape (queries, classes), from ``predictions``, shape (teachers, queries).

    Raises UserError if a vote is not a class; the message does not name the teacher.
    """
    if ((predictions < 0) | (predictions >= num_classes)).any():
        raise UserError(f"a vote is for a class that does not exist: classes are 0 to {num_classes - 1}")
    return np.stack([(predictions == label).sum(axis=0) for label in range(num_classes)], axis=1).astype(np.int64)


def _together(test: "dp_event.DpEvent | None", answer: "dp_event.DpEvent") -> "dp_event.DpEvent":
    """Return one Gaussian event that costs as much as a Gaussian test and a Gaussian answer together.

    Let z be the noise multiplier of an event. The value 1 / z^2 of the joint event is the sum of the values 1 / z^2 of
    both events.
    """
    from dp_accounting import dp_event  # noqa: PLC0415 (the accountants load slowly)

    if test is None:
        return answer
    both = (test.noise_multiplier**-2 + answer.noise_multiplier**-2) ** -0.5
    return dp_event.GaussianDpEvent(both * (1 - 1e-9))  # a margin for rounding errors: slightly less noise


@dataclass
class _DataDependentBudget:
    """Checks before each query that a data-dependent budget covers it. Does nothing for other budgets.

    ``curve``: the data-dependent Renyi divergence of all queries so far, one number for each order alpha.
    """

    labelling: Labelling
    curve: NDArray[np.float64] | float = field(default=0.0)

    def affords(self, votes: NDArray[np.int64]) -> bool:
        if self.labelling.budget == "data-independent":
            return True
        from fl_sim.privacy.pate.labelling_cost import epsilon_of_curves  # noqa: PLC0415 (the accountants load slowly)

        assert self.labelling.epsilon is not None
        after = np.atleast_2d(self.curve + self._curve_of(votes, answered=True))
        return float(epsilon_of_curves(after, self.labelling.delta)[0]) <= self.labelling.epsilon

    def take(self, votes: NDArray[np.int64], *, answered: bool) -> None:
        if self.labelling.budget == "data-dependent":
            self.curve = self.curve + self._curve_of(votes, answered=answered)

    def _curve_of(self, votes: NDArray[np.int64], *, answered: bool) -> NDArray[np.float64]:
        from fl_sim.privacy.renyi import ORDERS  # noqa: PLC0415 (the accountants load slowly)

        cost, weight = self.labelling.mechanism.cost(), np.array([float(answered)])
        curve: NDArray[np.float64] = cost.curves(votes[None], weight, np.array(ORDERS))[0][0]
        return curve


def _largest(votes: NDArray[np.int64], scale: float, steps: NDArray[np.float64]) -> int:
    return int(np.argmax(add_noise(votes.astype(np.float64), scale, steps)))
