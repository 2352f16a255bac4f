"""Labelling a public pool by PATE: each query is charged before its noise is drawn, and the budget stops in time."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fl_sim.errors import UserError
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.terms import Adjacency, Terms, rounded_up
from fl_sim.settings import OneOf, Settings
from strategies.pate.mechanisms import LNMax, Mechanism, NoNoise

if TYPE_CHECKING:
    from dp_accounting import dp_event

    from fl_sim.privacy.ledger import Ledger, Receipt

UNANSWERED: Final = -1

COVERS: Final = (
    "Everything that is computed from the labels of the public pool, such as the student: whoever sees it learns "
    "little more about any one private record than if that record had been another, or missing from its teacher's "
    "shard (all other records staying where they are)."
)
DOES_NOT_COVER: Final = (
    "The server, which sees the votes before noise; the teachers and the votes themselves. Data-dependent figures, "
    "which are computed from the votes, such as the one on the screen of a run. Choices made by looking at private "
    "data, such as a threshold tuned on it."
)


class Labelling(Settings):
    """How a public pool is labelled, and for how much.

    ``mechanism``: how noise makes one label of the teachers' votes. ``accountant``: whose epsilon is told and held
    against the budget.
    ``epsilon``: the budget of all queries together at ``delta``; labelling stops before the query that would exceed it;
    None sets no limit. ``budget`` "data-dependent" holds the data-dependent epsilon against it: more labels, but then
    that epsilon, and where labelling stopped, are as private as the votes. ``noise`` "secret": a fresh key from the
    operating system, so no two runs agree; "seeded": repeatable, and a guarantee about the method only.
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
            raise ValueError("mechanism none adds no noise and keeps within no epsilon: leave epsilon out")
        if self.budget == "data-dependent" and self.epsilon is None:
            raise ValueError("a data-dependent budget needs an epsilon to stay within")
        return self

    def open_ledger(
        self, path: Path | None, receipt: "Receipt | None" = None, *, holder: str = "this labelling"
    ) -> "Ledger":
        """Return the ledger of the private records; ``path`` is its charge log, None keeps it in memory.

        ``receipt``: the charges that it must begin with, which ``holder`` was paid for with.
        """
        from fl_sim.privacy.ledger import Ledger  # noqa: PLC0415

        budget = self.epsilon if self.budget == "data-independent" else None
        terms = Terms("record", Adjacency.ADD_OR_REMOVE_ONE, self.delta, budget, self.accountant)
        return Ledger(terms, path, receipt=receipt, holder=holder)

    def check_budget(self, num_teachers: int, num_classes: int) -> None:
        """Raise UserError where ``epsilon`` does not afford one query whatever the votes are.

        A data-dependent budget is refused where it affords none for any votes: what it affords is known when votes are
        there.
        """
        if self.epsilon is None:
            return
        if self.budget == "data-dependent":
            from fl_sim.privacy.pate.labelling_cost import least_epsilon  # noqa: PLC0415 (the accountants load slowly)

            cost, votes = (
                least_epsilon(self.mechanism.cost(), num_teachers, num_classes, self.delta),
                ", at the clearest votes",
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
        """Return how many of ``num_queries`` are counted on whatever the votes are: see ``planned``."""
        return num_asked if self.mechanism.charges()[0] is None else num_queries

    def planned(self, num_queries: int, num_asked: int) -> dict["dp_event.DpEvent", int]:
        """Return all releases of a labelling of ``num_queries``, as they are certain before any vote is looked at.

        Where every query is answered, the budget alone decides how many are asked: ``num_asked``. Where some are not,
        how many answers there will be depends on the votes, and so does how far a budget goes: all are counted. A
        data-dependent budget stops by looking at the votes without noise, which no epsilon holds for.
        """
        from dp_accounting import dp_event  # noqa: PLC0415 (the accountants load slowly)

        test, answer = self.mechanism.charges()
        each = Counter([answer] if test is None else [test, answer])  # a test may cost what an answer costs
        times = self.certain_queries(num_queries, num_asked)
        planned = {event: number * times for event, number in each.items() if times}
        return planned if self.budget == "data-independent" else {**planned, dp_event.NonPrivateDpEvent(): 1}


@dataclass(frozen=True)
class Labelled:
    """Noisy labels of the first ``num_asked`` queries: a class, or ``UNANSWERED`` (as are all after them)."""

    labels: NDArray[np.int64]
    num_asked: int

    @property
    def num_answered(self) -> int:
        """Return how many queries have a label."""
        return int((self.labels != UNANSWERED).sum())


def label(counts: NDArray[np.int64], labelling: Labelling, *, ledger: "Ledger", noise: Noise) -> Labelled:
    """Label the queries whose votes are ``counts``, shape (queries, classes), in order, as far as the budget goes.

    Every query is charged before its noise is drawn. The same ledger and noise give the same labels again at no cost,
    if the counts are the same. Raises UserError where the counts are not votes.

    That a query without an answer pays for its test alone is a privacy filter. A budget fixed beforehand bounds the sum
    of Renyi divergences of releases that are chosen one after the other, at any one order (Feldman and Zrnic 2021,
    theorem 4.3). It does so here at all orders at once: the releases are Gaussian, their curves are multiples of each
    other, so the order at which the budget ends is always the same. What is spent in the end depends on how many
    queries were answered, and so on the votes. It can be told, since the labels show who was answered, but it is no
    guarantee: that is the budget, or ``Labelling.planned``, whichever is smaller.
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
    """Return what the ledger calls the answer to a query, from 0."""
    return f"answer to query {query}"


def count_votes(predictions: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """Return the counts, shape (queries, classes), of ``predictions`` of shape (teachers, queries).

    Raises UserError, which does not say whose it is, where a vote is no class.
    """
    if ((predictions < 0) | (predictions >= num_classes)).any():
        raise UserError(f"a vote is for a class that does not exist: classes are 0 to {num_classes - 1}")
    return np.stack([(predictions == label).sum(axis=0) for label in range(num_classes)], axis=1).astype(np.int64)


def _together(test: "dp_event.DpEvent | None", answer: "dp_event.DpEvent") -> "dp_event.DpEvent":
    """Return one event that costs as much as a test and an answer: Gaussians add as 1 / z^2."""
    from dp_accounting import dp_event  # noqa: PLC0415 (the accountants load slowly)

    if test is None:
        return answer
    both = (test.noise_multiplier**-2 + answer.noise_multiplier**-2) ** -0.5
    return dp_event.GaussianDpEvent(both * (1 - 1e-9))  # so that rounding cannot leave a test without its answer


@dataclass
class _DataDependentBudget:
    """Holds the data-dependent epsilon of the queries so far against the budget, where that is asked for."""

    labelling: Labelling
    curve: NDArray[np.float64] | float = field(default=0.0)

    def affords(self, votes: NDArray[np.int64]) -> bool:
        """Return whether a query with these votes could be asked and answered."""
        if self.labelling.budget == "data-independent":
            return True
        from fl_sim.privacy.pate.labelling_cost import epsilon_of_curves  # noqa: PLC0415 (the accountants load slowly)

        assert self.labelling.epsilon is not None
        after = np.atleast_2d(self.curve + self._curve_of(votes, answered=True))
        return float(epsilon_of_curves(after, self.labelling.delta)[0]) <= self.labelling.epsilon

    def take(self, votes: NDArray[np.int64], *, answered: bool) -> None:
        """Add a query."""
        if self.labelling.budget == "data-dependent":
            self.curve = self.curve + self._curve_of(votes, answered=answered)

    def _curve_of(self, votes: NDArray[np.int64], *, answered: bool) -> NDArray[np.float64]:
        from fl_sim.privacy.renyi import ORDERS  # noqa: PLC0415 (the accountants load slowly)

        cost, weight = self.labelling.mechanism.cost(), np.array([float(answered)])
        curve: NDArray[np.float64] = cost.curves(votes[None], weight, np.array(ORDERS))[0][0]
        return curve
