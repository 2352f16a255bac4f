"""Publishing a data-dependent cost: the sensitivity is smooth and bounds what a vote moves; the noise is paid for."""

import itertools

import numpy as np
import pytest
from scipy import integrate, stats

from fl_sim.errors import UserError
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.pate import labelling_cost
from fl_sim.privacy.pate.smooth_sensitivity import (
    PublicationTerms,
    PublishableCost,
    _local_sensitivities,
    planned,
    release,
    smooth_sensitivity,
)

COSTS = [
    labelling_cost.GNMaxCost(1.0),
    labelling_cost.GNMaxCost(2.5),
    labelling_cost.LNMaxCost(0.7),
    labelling_cost.LNMaxCost(0.2),
    labelling_cost.ConfidentCost(6.0, 2.0, 1.5),
    labelling_cost.ConfidentCost(4.0, 0.8, 2.5),
]
CLASSES, TEACHERS = 3, 9
EVERY = [
    (first, second, TEACHERS - first - second)
    for first, second in itertools.product(range(TEACHERS + 1), repeat=2)
    if first + second <= TEACHERS
]


def moves(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many teachers must change their vote."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) // 2


def divergence(cost: PublishableCost, votes: tuple[int, ...], order: float, answered: float = 1.0) -> float:
    return float(cost.curves(np.array([votes]), np.array([answered]), np.array([order]))[0][0, 0])


@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize("terms", [PublicationTerms(4.0, 0.02), PublicationTerms(12.0, 0.01)], ids=str)
def test_it_bounds_the_exact_smooth_sensitivity_and_is_smooth(cost: PublishableCost, terms: PublicationTerms) -> None:
    check(cost, terms, answered=True)


@pytest.mark.parametrize("threshold", [2.0, 6.0, 9.0])
def test_a_query_that_is_not_answered_moves_by_its_test_alone(threshold: float) -> None:
    check(labelling_cost.ConfidentCost(threshold, 1.2, 1.5), PublicationTerms(4.0, 0.02), answered=False)


def check(cost: PublishableCost, terms: PublicationTerms, *, answered: bool) -> None:
    values = {votes: divergence(cost, votes, terms.order, float(answered)) for votes in EVERY}
    local = {
        votes: max(abs(values[votes] - values[other]) for other in EVERY if moves(votes, other) == 1) for votes in EVERY
    }
    bounds = {votes: smooth_sensitivity(np.array([votes]), cost, terms, np.array([answered])) for votes in EVERY}
    for votes in EVERY:
        exact = max(local[other] * np.exp(-terms.smoothness * moves(votes, other)) for other in EVERY)
        assert exact <= bounds[votes] * (1 + 1e-9)
        for other in EVERY:
            if moves(votes, other) == 1:
                assert bounds[votes] <= bounds[other] * np.exp(terms.smoothness) * (1 + 1e-9)
    assert max(bounds.values()) <= 2.5 * max(local.values())  # above, but not absurdly


@pytest.mark.parametrize("cost", COSTS[:4], ids=str)
@pytest.mark.parametrize("terms", [PublicationTerms(2.0, 0.3), PublicationTerms(4.0, 0.1)], ids=str)
@pytest.mark.parametrize("teachers", [6, 21])
def test_with_two_classes_where_it_is_tight_it_still_bounds_what_a_vote_moves(
    cost: PublishableCost, terms: PublicationTerms, teachers: int
) -> None:
    values = np.array([divergence(cost, (first, teachers - first), terms.order) for first in range(teachers + 1)])
    rise = np.abs(np.diff(values))
    local = np.maximum(np.append(rise, 0.0), np.append(0.0, rise))
    for first in range(teachers + 1):
        exact = float((local * np.exp(-terms.smoothness * np.abs(np.arange(teachers + 1) - first))).max())
        bound = smooth_sensitivity(np.array([[first, teachers - first]]), cost, terms)
        assert exact * (1 - 1e-9) <= bound <= 2 * exact


@pytest.mark.parametrize("threshold", [3.0, 7.0])
def test_of_the_test_alone_it_is_the_exact_smooth_sensitivity(threshold: float) -> None:
    """Ten votes on three classes: the largest count is 4 at least, and a vote moves it by 1."""
    cost, terms = labelling_cost.ConfidentCost(threshold, 1.2, 1.5), PublicationTerms(4.0, 0.1)
    largest = np.arange(4, 11)
    rest = 10 - largest
    values = np.array(
        [
            divergence(cost, (top, left - left // 2, left // 2), 4.0, 0.0)
            for top, left in zip(largest, rest, strict=True)
        ]
    )
    rise = np.abs(np.diff(values))
    local = np.maximum(np.append(rise, 0.0), np.append(0.0, rise))
    for place, (top, left) in enumerate(zip(largest, rest, strict=True)):
        exact = (local * np.exp(-terms.smoothness * np.abs(np.arange(len(local)) - place))).max()
        votes = np.array([[top, left - left // 2, left // 2]])
        assert smooth_sensitivity(votes, cost, terms, np.array([False])) == pytest.approx(exact, rel=1e-9)


def test_a_divergence_that_rises_with_the_gap_has_no_sensitivity() -> None:
    with pytest.raises(ArithmeticError, match="rises with the gap"):
        next(_local_sensitivities(np.zeros(3), np.array([1.0, 0.2, 0.5])))


def test_queries_add_up_because_one_teacher_votes_on_all_of_them() -> None:
    cost, terms = labelling_cost.GNMaxCost(2.0), PublicationTerms(8.0, 0.02)
    one = smooth_sensitivity(np.array([[9, 0, 0]]), cost, terms)
    assert smooth_sensitivity(np.array([[9, 0, 0], [0, 0, 9]]), cost, terms) == pytest.approx(2 * one)


@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize("smoothness", [0.1, 0.3])
def test_a_further_query_never_lowers_the_sensitivity(cost: PublishableCost, smoothness: float) -> None:
    """Of one that is close and one that many votes away from a change, the first decides at distance 0."""
    terms, close, clear = PublicationTerms(2.0, smoothness), (16, 13, 1), (30, 0, 0)
    alone = [smooth_sensitivity(np.array([votes]), cost, terms) for votes in (close, clear)]
    assert smooth_sensitivity(np.array([close, clear]), cost, terms) >= max(alone) > 0


def test_tests_and_answers_add_up_over_the_queries_that_have_them() -> None:
    cost, terms = labelling_cost.ConfidentCost(6.0, 2.0, 1.0), PublicationTerms(4.0, 0.02)
    votes = np.array([[9, 0, 0], [5, 4, 0]])

    none, first, second, both = (
        smooth_sensitivity(votes, cost, terms, np.array(answered))
        for answered in itertools.product([False, True], repeat=2)
    )
    assert none < min(first, second)
    assert max(first, second) < both == smooth_sensitivity(votes, cost, terms)


@pytest.mark.parametrize("terms", [PublicationTerms(4.0, 0.05, 3.0), PublicationTerms(20.0, 0.01, 12.0)], ids=str)
def test_the_release_costs_what_it_says(terms: PublicationTerms) -> None:
    paid = terms.divergence() - terms.order / (2 * terms.noise**2)  # less the noise on the sensitivity
    worst = 0.0
    for ratio in np.exp(np.linspace(-1, 1, 9) * terms.smoothness):
        mine, other = stats.norm(0, terms.noise), stats.norm(min(1.0, ratio), terms.noise * ratio)

        def integrand(x: float, mine: object = mine, other: object = other) -> float:
            log = terms.order * mine.logpdf(x) + (1 - terms.order) * other.logpdf(x)  # type: ignore[attr-defined]
            return float(np.exp(log))

        mass = integrate.quad(integrand, -60 * terms.noise, 60 * terms.noise, points=[0.0], limit=500)[0]
        worst = max(worst, float(np.log(mass)) / (terms.order - 1))
    assert worst <= paid * (1 + 1e-6)
    assert paid <= 1.5 * worst


def test_what_is_published_is_above_the_truth_and_covers_its_own_cost() -> None:
    counts, cost, delta = np.array([[240, 10], [200, 50], [130, 120]] * 30), labelling_cost.GNMaxCost(40.0), 1e-3
    terms = planned(cost, delta, queries=90, teachers=250, classes=2)
    total = float(cost.curves(counts, np.ones(90), np.array([terms.order]))[0].sum())
    found = [release(counts, cost, delta, terms, noise=Noise.seeded(seed)) for seed in range(200)]
    assert all(each.divergence >= total + terms.divergence() for each in found)
    assert len({each.epsilon for each in found}) == 200
    curve = found[0].divergence + np.log1p(-1 / terms.order) - np.log(delta * terms.order) / (terms.order - 1)
    assert found[0].epsilon == pytest.approx(curve)
    assert found[0].failure == delta


@pytest.mark.parametrize("delta", [0.2, 1e-4])
def test_both_noises_are_in_smooth_sensitivities_and_each_is_beyond_its_quantile_in_half_of_the_failures(
    delta: float,
) -> None:
    counts, cost, terms = (
        np.array([[24, 6], [20, 10]] * 5),
        labelling_cost.GNMaxCost(8.0),
        PublicationTerms(8.0, 0.02, 3.0),
    )
    total = float(cost.curves(counts, np.ones(10), np.array([8.0]))[0].sum())
    sensitivity, quantile = smooth_sensitivity(counts, cost, terms), float(stats.norm.isf(delta / 2))
    assert sensitivity > 0.01
    for server_round in range(3):
        noise = Noise.seeded(0)
        first, second = noise.standard_normal(2, purpose="pate cost", server_round=server_round)
        at_most = sensitivity * np.exp(terms.smoothness * terms.noise * (first + quantile))
        bound = max(total + terms.noise * (sensitivity * second + at_most * quantile), 0.0)
        found = release(counts, cost, delta, terms, noise=noise, server_round=server_round)
        assert found.divergence == pytest.approx(bound + terms.divergence())


def test_a_published_epsilon_is_never_negative() -> None:
    cost, terms = labelling_cost.GNMaxCost(40.0), PublicationTerms(4.0, 0.0125, 24.0)
    found = release(np.array([[30, 0]]), cost, 0.9, terms, noise=Noise.seeded(0))
    assert found.divergence + np.log1p(-1 / 4) - np.log(0.9 * 4) / 3 < 0 == found.epsilon


def test_terms_are_planned_without_the_votes_and_help_where_teachers_agree() -> None:
    cost = labelling_cost.LNMaxCost(0.05)
    counts = np.array([[250, 0, 0, 0]] * 1000)
    terms = planned(cost, 1e-5, queries=1000, teachers=250, classes=4)
    published = release(counts, cost, 1e-5, terms, noise=Noise.seeded(0)).epsilon
    analysis = labelling_cost.analyse(counts, cost, 1e-5)
    assert analysis.dependent.total < published < analysis.worst_case.least


@pytest.mark.parametrize(
    "terms",
    [(1.0, 0.01, 4.0), (20.0, 0.0, 4.0), (20.0, 0.1, 4.0), (20.0, 0.038, 4.0), (20.0, 0.01, 0.0)],
    ids=str,
)
def test_terms_that_bound_nothing_are_refused(terms: tuple[float, float, float]) -> None:
    with pytest.raises(UserError):
        PublicationTerms(*terms)
