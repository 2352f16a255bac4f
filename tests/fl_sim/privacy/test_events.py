"""Bounded losses cost what their definitions say: sums, Renyi divergences of two explicit distributions, PLDs."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given
from hypothesis import strategies as st

from fl_sim.privacy.accounting import delta_profile, epsilon, epsilon_of_counts
from fl_sim.privacy.events import BoundedRangeDpEvent, adjacency, pure_epsilon
from fl_sim.privacy.renyi import ORDERS, bounded_loss_curve, rdp_curve
from fl_sim.privacy.terms import Adjacency

EPSILONS = (1e-3, 0.1, 1.0, 5.0)
GAUSSIAN = dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(1.5))


def geometric(value: float) -> dp_event.DpEvent:
    return dp_event.DiscreteLaplaceDpEvent(value, 1)


@pytest.mark.parametrize("value", EPSILONS)
@pytest.mark.parametrize("order", [1.01, 1.5, 2.0, 8.0, 64.0])
def test_the_geometric_curve_is_the_divergence_of_two_neighbouring_counts(value: float, order: float) -> None:
    points = np.arange(-int(60 / value) - 5, int(60 / value) + 6)
    logs = [-value * np.abs(points - shift) + math.log(math.tanh(value / 2)) for shift in (0, 1)]
    terms = order * logs[0] + (1 - order) * logs[1]
    exact = math.log(math.fsum(np.exp(terms - terms.max()))) + terms.max()
    ours = float(bounded_loss_curve(geometric(value), np.array([order]))[0])
    assert ours == pytest.approx(exact / (order - 1), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("value", EPSILONS)
def test_curves_rise_from_small_orders_and_stay_below_epsilon(value: float) -> None:
    for event in (geometric(value), BoundedRangeDpEvent(value)):
        curve = rdp_curve(event)
        assert (np.diff(curve) >= -1e-15).all()
        assert curve[-1] <= value * (1 + 1e-12)
    orders = np.array(ORDERS)
    assert (rdp_curve(BoundedRangeDpEvent(value)) <= value**2 / 8 * orders * (1 + 1e-12)).all()
    assert (rdp_curve(geometric(value)) <= value**2 / 2 * orders * (1 + 1e-12)).all()
    # Near the order 1 a bounded range is worth up to four times as much as the same pure epsilon.
    if value <= 0.1:
        assert rdp_curve(geometric(value))[0] == pytest.approx(4 * rdp_curve(BoundedRangeDpEvent(value))[0], rel=0.02)


@given(st.lists(st.tuples(st.sampled_from(EPSILONS), st.booleans()), min_size=1, max_size=5))
def test_pure_releases_cost_at_most_their_sum(releases: list[tuple[float, bool]]) -> None:
    events = [BoundedRangeDpEvent(value) if ranged else geometric(value) for value, ranged in releases]
    total = math.fsum(value for value, _ in releases)
    assert epsilon(events, 1e-12) <= total * (1 + 1e-12)
    assert epsilon(events[:1], 1e-300) == releases[0][0]


def test_many_small_releases_cost_less_than_their_sum() -> None:
    for event, share in ((BoundedRangeDpEvent(0.1), 0.3), (geometric(0.1), 0.55)):
        by_rdp = epsilon_of_counts({event: 400}, 1e-5)
        assert by_rdp < share * 40
        assert epsilon_of_counts({event: 400}, 1e-5, accountant="pld") <= 40


@pytest.mark.parametrize("event", [BoundedRangeDpEvent(0.7), geometric(0.7)])
def test_the_pld_is_that_of_randomised_response(event: dp_event.DpEvent) -> None:
    told, truth = delta_profile([event], [0.0, 0.3, 0.7]), 1 / (1 + math.exp(-0.7))
    for value, claimed in zip((0.0, 0.3, 0.7), told, strict=True):
        assert claimed == pytest.approx(truth - math.exp(value) * (1 - truth), abs=2e-4)
    assert epsilon([event], 1e-5, accountant="pld") <= 0.7


@pytest.mark.parametrize("event", [BoundedRangeDpEvent(0.1), geometric(0.1)])
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_beside_a_gaussian_the_joint_value_is_below_the_sum(event: dp_event.DpEvent, accountant: str) -> None:
    alone = epsilon_of_counts({GAUSSIAN: 200}, 1e-5, accountant=accountant)
    joint = epsilon_of_counts({GAUSSIAN: 200, event: 1}, 1e-5, accountant=accountant)
    assert alone < joint < alone + 0.1


def test_pure_events_are_stated_under_add_or_remove() -> None:
    assert adjacency(BoundedRangeDpEvent(1.0)) is adjacency(geometric(1.0)) is Adjacency.ADD_OR_REMOVE_ONE
    assert pure_epsilon(dp_event.DiscreteLaplaceDpEvent(0.5, 3)) == 1.5
    assert pure_epsilon(GAUSSIAN) == math.inf


def test_at_next_to_no_delta_pure_releases_cost_the_sum_of_all_their_epsilons() -> None:
    counts = {dp_event.LaplaceDpEvent(2.0): 3, dp_event.LaplaceDpEvent(4.0): 2, BoundedRangeDpEvent(0.125): 4}
    assert epsilon_of_counts(counts, 1e-300) == 3 / 2 + 2 / 4 + 4 / 8
