"""Laws of PATE's accounting: bounds above the truth and below the worst case, blind to the order of classes."""

import itertools
import math
from functools import lru_cache

import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fl_sim.errors import UserError
from fl_sim.privacy.accounting import compose, epsilon_of_curve
from fl_sim.privacy.pate import labelling_cost
from fl_sim.privacy.renyi import ORDERS, rdp_curve
from strategies.pate.labelling import ConfidentGNMax, GNMax, LNMax

ALL = np.array(ORDERS)
COSTS = [
    labelling_cost.LNMaxCost(0.05),
    labelling_cost.LNMaxCost(0.9),
    labelling_cost.GNMaxCost(40.0),
    labelling_cost.GNMaxCost(2.0),
    labelling_cost.ConfidentCost(12.0, 9.0, 3.0),
]

vote_rows = st.lists(st.integers(0, 40), min_size=2, max_size=6).filter(any)


def curves(cost: labelling_cost.Cost, *counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return cost.curves(np.array(counts), np.ones(len(counts)), ALL)


@pytest.mark.parametrize("cost", COSTS, ids=str)
@given(votes=vote_rows)
def test_dependent_is_at_most_independent_and_never_negative_or_nan(
    cost: labelling_cost.Cost, votes: list[int]
) -> None:
    dependent, independent = curves(cost, votes)
    assert np.isfinite(dependent).all()
    assert (dependent >= 0).all()
    assert (dependent <= independent).all()
    assert (independent <= cost.worst_case(ALL) * (1 + 1e-12)).all()


@pytest.mark.parametrize("cost", COSTS, ids=str)
@settings(max_examples=25)
@given(votes=vote_rows, data=st.data())
def test_names_of_classes_do_not_matter(cost: labelling_cost.Cost, votes: list[int], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(votes))
    assert curves(cost, votes)[0] == pytest.approx(curves(cost, shuffled)[0], rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("cost", COSTS[:4], ids=str)
@given(votes=vote_rows, more=st.integers(1, 30))
def test_a_wider_gap_costs_no_more(cost: labelling_cost.Cost, votes: list[int], more: int) -> None:
    clearer = list(votes)
    clearer[int(np.argmax(votes))] += more
    assert (curves(cost, clearer)[0] <= curves(cost, votes)[0] * (1 + 1e-9) + 1e-15).all()


@settings(max_examples=30)
@given(votes=st.lists(vote_rows.map(lambda row: (row * 3)[:3]), min_size=1, max_size=8))
def test_queries_add_up(votes: list[list[int]]) -> None:
    cost = COSTS[4]
    total = np.sum([curves(cost, row)[0][0] for row in votes], axis=0)
    analysis = labelling_cost.analyse(np.array(votes), cost, 1e-5, answered=np.ones(len(votes), dtype=bool))
    assert analysis.dependent.curve == pytest.approx(total, rel=1e-12)
    assert analysis.dependent.total == pytest.approx(epsilon_of_curve(total, 1e-5), rel=1e-12, abs=1e-12)
    assert (np.diff(analysis.dependent.cumulative) >= 0).all()
    assert analysis.dependent.per_query[0] == analysis.dependent.cumulative[0]


@pytest.mark.parametrize("cost", [labelling_cost.LNMaxCost(0.9), COSTS[4]], ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 4, 8])
def test_a_bill_does_not_depend_on_how_many_queries_are_looked_at_at_once(
    monkeypatch: pytest.MonkeyPatch, cost: labelling_cost.Cost, chunk: int
) -> None:
    votes = np.array([[20, 0, 0], [9, 9, 2], [12, 8, 0], [7, 7, 6], [19, 1, 0], [10, 9, 1], [15, 5, 0], [14, 3, 3]])
    answered = np.array([True, False, True, True, False, False, True, True])
    whole = labelling_cost.analyse(votes, cost, 1e-5, answered=answered)
    monkeypatch.setattr(labelling_cost, "_CHUNK", chunk)
    found = labelling_cost.analyse(votes, cost, 1e-5, answered=answered)
    for bill, wanted in ((found.dependent, whole.dependent), (found.independent, whole.independent)):
        for name in ("per_query", "cumulative", "curve"):
            assert getattr(bill, name) == pytest.approx(getattr(wanted, name), rel=1e-12)
        numbers = range(1, len(votes) + 1)
        each = [labelling_cost.analyse(votes[:n], cost, 1e-5, answered=answered[:n]) for n in numbers]
        kind = "dependent" if bill is found.dependent else "independent"
        assert bill.cumulative == pytest.approx([getattr(one, kind).total for one in each], rel=1e-12)


def test_of_a_pure_mechanism_as_many_queries_fit_as_its_epsilons_add_up_to() -> None:
    fits = [labelling_cost.queries_within(labelling_cost.LNMaxCost(1.0), 10, 1e-9, target) for target in (1.9, 6, 99.0)]
    assert fits == [0, 3, 10]


def test_no_number_overflows_where_votes_are_as_clear_or_as_unclear_as_can_be() -> None:
    clear, even = [10**9, 0, 0], [10**9, 10**9, 10**9]
    for cost in (*COSTS, labelling_cost.LNMaxCost(50.0), labelling_cost.GNMaxCost(1e-3), labelling_cost.GNMaxCost(1e5)):
        with np.errstate(over="raise", invalid="raise"):
            dependent, independent = curves(cost, clear, even)
        assert np.isfinite(dependent).all()
        assert (dependent <= independent).all()
    assert curves(COSTS[0], clear)[0].max() == 0.0
    assert curves(COSTS[0], even)[0][0] == pytest.approx(COSTS[0].worst_case(ALL))


def test_lnmax_whatever_the_votes_is_two_laplace_mechanisms_and_better_than_the_paper() -> None:
    for gamma in (0.01, 0.05, 0.5, 2.0):
        independent = labelling_cost.LNMaxCost(gamma).worst_case(ALL)
        laplace = 2 * rdp_curve(dp_event.LaplaceDpEvent(1 / gamma))
        assert independent == pytest.approx(laplace, rel=1e-6)
        assert (independent <= labelling_cost.independent_2017(gamma, ALL)).all()
        # What any (2 gamma, 0)-private mechanism can be charged at most: randomised response.
        response = (np.logaddexp(2 * gamma * ALL, 2 * gamma * (1 - ALL)) - np.logaddexp(2 * gamma, 0)) / (ALL - 1)
        assert (independent <= response * (1 + 1e-9)).all()
        # A bound linear in the order (zCDP): what a ledger is charged.
        assert (independent <= ALL * 2 * (gamma + math.expm1(-gamma)) * (1 + 1e-9)).all()


def test_gaussian_costs_are_those_of_gaussian_events() -> None:
    answer, test = dp_event.GaussianDpEvent(40 / math.sqrt(2)), dp_event.GaussianDpEvent(150.0)
    assert labelling_cost.GNMaxCost(40.0).worst_case(ALL) == pytest.approx(rdp_curve(answer))
    assert labelling_cost.ConfidentCost(200, 150.0, 40.0).worst_case(ALL) == pytest.approx(
        compose({answer: 1, test: 1})
    )


@given(st.lists(st.floats(1e-6, 50), min_size=1, max_size=5), st.sampled_from([1e-8, 1e-5, 1e-2]))
def test_epsilon_of_many_curves_is_the_accountants(scales: list[float], delta: float) -> None:
    many = np.array([scale * ALL**power for power, scale in enumerate(scales)])
    assert labelling_cost.epsilon_of_curves(many, delta) == pytest.approx(
        [epsilon_of_curve(row, delta) for row in many]
    )


def test_a_pure_mechanism_never_costs_more_than_its_sum() -> None:
    counts = np.array([[5, 4, 1]] * 3)
    analysis = labelling_cost.analyse(counts, labelling_cost.LNMaxCost(1.0), 1e-9)
    assert analysis.worst_case.rdp == analysis.independent.total == 6.0
    assert analysis.independent.cumulative.tolist() == [2.0, 4.0, 6.0]
    assert analysis.dependent.per_query.max() <= 2.0


def test_unanswered_queries_pay_for_the_test_alone() -> None:
    counts, cost = np.array([[9, 3], [6, 6], [12, 0]]), labelling_cost.ConfidentCost(8.0, 3.0, 2.0)
    none = labelling_cost.analyse(counts, cost, 1e-5, answered=np.zeros(3, dtype=bool))
    every = labelling_cost.analyse(counts, cost, 1e-5, answered=np.ones(3, dtype=bool))
    expected = labelling_cost.analyse(counts, cost, 1e-5)
    assert none.independent.curve == pytest.approx(3 * ALL / (2 * 3.0**2))
    assert every.independent.curve == pytest.approx(3 * ALL * (1 / (2 * 3.0**2) + 1 / 2.0**2))
    assert every.independent.total == pytest.approx(every.worst_case.rdp)
    assert none.independent.total < expected.independent.total < every.independent.total
    assert expected.answers == pytest.approx(stats.norm.cdf((np.array([9, 6, 12]) - 8) / 3).sum())


# The truth, on votes so few that every neighbour can be tried: distributions of the label by quadrature.


@lru_cache(maxsize=4096)
def label_distribution(votes: tuple[int, ...], scale: float, family: str) -> np.ndarray:
    noise = stats.laplace(scale=scale) if family == "laplace" else stats.norm(scale=scale)
    points = np.linspace(-40 * scale, max(votes) + 40 * scale, 40_001)
    below = [noise.cdf(points - count) for count in votes]
    dense = [noise.pdf(points - count) for count in votes]
    product = np.prod(below, axis=0)
    rest = [np.prod([below[k] for k in range(len(votes)) if k != j], axis=0) for j in range(len(votes))]
    assert product[-1] == pytest.approx(1.0)
    chances = np.array([np.trapezoid(density * others, points) for density, others in zip(dense, rest, strict=True)])
    assert chances.sum() == pytest.approx(1.0, abs=1e-6)
    return chances / chances.sum()


def neighbours(votes: tuple[int, ...]) -> list[tuple[int, ...]]:
    found = []
    for loser, winner in itertools.permutations(range(len(votes)), 2):
        if votes[loser]:
            moved = list(votes)
            moved[loser], moved[winner] = moved[loser] - 1, moved[winner] + 1
            found.append(tuple(moved))
    return found


def worst_divergence(votes: tuple[int, ...], scale: float, family: str, order: float) -> float:
    p = label_distribution(votes, scale, family)
    ratios = [(p / label_distribution(other, scale, family)) ** (order - 1) for other in neighbours(votes)]
    return max(float(np.log((p * ratio).sum())) for ratio in ratios) / (order - 1)


@pytest.mark.parametrize("gamma", [0.2, 0.5, 1.5])
@pytest.mark.parametrize("votes", [(3, 0), (2, 2, 1), (6, 1, 1), (8, 0, 0), (3, 3, 0), (12, 1, 0)])
def test_lnmax_bounds_are_above_the_exact_worst_neighbour(votes: tuple[int, ...], gamma: float) -> None:
    exact_q = 1 - label_distribution(votes, 1 / gamma, "laplace")[0]
    assert exact_q <= np.exp(labelling_cost.LNMaxCost(gamma).log_q(np.array([votes]))[0]) + 1e-7
    orders = np.array([1.5, 2.0, 4.0, 9.0, 30.0])
    bound = labelling_cost.LNMaxCost(gamma).dependent(np.array([votes]), orders)[0]
    for order, value in zip(orders, bound, strict=True):
        assert worst_divergence(votes, 1 / gamma, "laplace", order) <= value + 1e-6


@pytest.mark.parametrize("sigma", [0.8, 2.0])
@pytest.mark.parametrize("votes", [(3, 0), (2, 2, 1), (8, 0, 0), (12, 1, 0)])
def test_gnmax_bounds_are_above_the_exact_worst_neighbour(votes: tuple[int, ...], sigma: float) -> None:
    orders = np.array([1.5, 2.0, 4.0, 9.0])
    bound = labelling_cost.GNMaxCost(sigma).dependent(np.array([votes]), orders)[0]
    for order, value in zip(orders, bound, strict=True):
        assert worst_divergence(votes, sigma, "normal", order) <= value + 1e-6


@pytest.mark.parametrize("top", [0, 5, 9, 12, 20])
def test_threshold_bounds_are_above_the_exact_worst_neighbour(top: int) -> None:
    threshold, sigma = 10.0, 2.0
    orders = np.array([1.5, 2.0, 4.0, 9.0])
    bound = labelling_cost.ConfidentCost(threshold, sigma, 1.0).test_curves(np.array([[top, 0]]), orders)[0]

    def chances(largest: int) -> np.ndarray:
        return np.array([stats.norm.cdf(sign * (largest - threshold) / sigma) for sign in (1, -1)])

    for order, value in zip(orders, bound, strict=True):
        worst = max(np.log((chances(top) ** order * chances(top + step) ** (1 - order)).sum()) for step in (-1, 1))
        assert worst / (order - 1) <= value + 1e-12


@pytest.mark.parametrize(
    ("votes", "said"),
    [
        (np.array([1, 2, 3]), r"shape \(3,\)"),
        (np.zeros((0, 3), dtype=int), r"shape \(0, 3\)"),
        (np.ones((3, 1), dtype=int), "2 classes"),
        (np.array([[1.0, 2.0]]), "float64, not whole"),
        (np.array([[1.0, np.nan]]), "NaN in row 0"),
        (np.array([[True, False]]), "bool, not whole"),
        (np.array([[3, 0], [4, -1]]), r"row 1 of the votes is \[4, -1\]"),
        (np.array([[2**64 - 1, 0]], dtype=np.uint64), "row 0 of the votes is"),
        (np.array([[3, 0], [3, 1]]), "adds up to 3 and row 1 to 4"),
        (np.array([[3, 0], [2, 0], [4, 0], [3, 0]]), "adds up to 3 and row 1 to 2"),
        (np.array([[1.0, 2.0], [0.0, np.nan], [np.nan, 0.0]]), "NaN in row 1"),
        (np.array([[1, 2], [2**31 + 1, 2]]), "row 1 of the votes is"),
        (np.ones((2, 2, 2), dtype=int), "shape"),
        (np.zeros((2, 2), dtype=int), "all vote counts are 0"),
    ],
)
def test_what_is_no_vote_is_refused(votes: np.ndarray, said: str) -> None:
    with pytest.raises(UserError, match=said):
        labelling_cost.valid_counts(votes)


def test_votes_of_any_integer_type_are_taken() -> None:
    for kind in ("int8", "uint8", "uint64", "int32"):
        checked = labelling_cost.valid_counts(np.array([[3, 0], [1, 2]], dtype=kind))
        assert checked.dtype == np.int64
        assert checked.tolist() == [[3, 0], [1, 2]]


@pytest.mark.parametrize("mechanism", [LNMax(gamma=0.05), GNMax(sigma=30.0), ConfidentGNMax(threshold=7.0, sigma=30.0)])
def test_what_a_query_costs_is_what_a_run_charges_for_it(mechanism: LNMax | GNMax | ConfidentGNMax) -> None:
    assert mechanism.cost().events() == tuple(one for one in mechanism.charges() if one is not None)


@pytest.mark.parametrize("target", [0.3, 1.0, 3.0])
def test_how_many_queries_fit_does_not_depend_on_the_votes_and_is_never_one_too_many(target: float) -> None:
    cost = labelling_cost.ConfidentCost(8.0, 40.0, 30.0)
    fits = labelling_cost.queries_within(cost, 500, 1e-5, target)
    costs = [epsilon_of_curve(number * cost.worst_case(ALL), 1e-5) for number in (fits, fits + 1)]
    assert costs[0] <= target < costs[1]


@pytest.mark.parametrize("teachers", [8, 20])
@pytest.mark.parametrize(
    "cost", [*COSTS, labelling_cost.ConfidentCost(2.0, 1.0, 3.0), labelling_cost.ConfidentCost(20.0, 2.0, 3.0)], ids=str
)
def test_no_votes_cost_less_than_the_least_that_is_told_beforehand(cost: labelling_cost.Cost, teachers: int) -> None:
    votes = [
        [first, second, teachers - first - second]
        for first in range(teachers + 1)
        for second in range(teachers + 1 - first)
    ]
    told, found = labelling_cost.least_epsilon(cost, teachers, 3, 1e-5), curves(cost, *votes)[0]
    least = float(labelling_cost.epsilon_of_curves(found, 1e-5).min())
    assert 0.75 * least <= told <= least * (1 + 1e-12)
    assert (cost.least(teachers, 3, ALL) <= found * (1 + 1e-12)).all()
    if not isinstance(cost, labelling_cost.ConfidentCost):  # whose test is cheapest at other votes than its answer
        assert told == least


@pytest.mark.parametrize("gamma", [0.05, 0.5, 2.0])
def test_theorem_3_holds_below_its_range_of_q_alone(gamma: float) -> None:
    log_end = -np.log(np.exp(2 * gamma) + 1)
    curves = labelling_cost.theorem_3(log_end + np.array([-1e-3, 1e-3]), gamma, np.array([1.5, 2.0, 9.0]))
    assert np.isfinite(curves[0]).all()
    assert np.isinf(curves[1]).all()


@pytest.mark.parametrize("sigma", [5.0, 40.0])
def test_theorem_6_grows_with_q_wherever_it_speaks_as_only_a_bound_on_q_is_known(sigma: float) -> None:
    log_q, orders = -np.geomspace(600.0, 1e-3, 2000), np.array([1.1, 1.5, 2.0, 4.0, 10.0])
    curves = labelling_cost.theorem_6(log_q, sigma, orders)
    speaks = np.isfinite(curves)
    assert speaks.sum() > 2000
    rises = np.where(speaks, curves, 0.0)
    both = speaks[1:] & speaks[:-1]
    assert (np.diff(rises, axis=0)[both] >= 0).all()


def test_a_certain_answer_costs_nothing() -> None:
    orders = np.array([1.1, 2.0, 10.0])
    assert (labelling_cost.theorem_6(np.array([-np.inf, -1e-9]), 2.0, orders) == [[0.0] * 3, [np.inf] * 3]).all()


def test_a_test_costs_the_same_as_far_below_its_threshold_as_above_it() -> None:
    orders, cost = np.array([1.5, 2.0]), labelling_cost.ConfidentCost(6.0, 0.5, 1.0)
    below, above = cost.test_curves(np.array([[4, 1], [8, 1]]), orders)
    assert (below == above).all()
    assert (below < cost.test.worst_case(orders) / 2).all()
