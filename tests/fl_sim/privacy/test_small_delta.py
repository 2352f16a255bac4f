"""At small delta the PLD is mostly rounding: what is printed is held against integrals that have none of it."""

import math
from collections.abc import Callable
from types import ModuleType

import pytest
from dp_accounting import NeighboringRelation, dp_event
from scipy import stats

from fl_sim.cli.privacy.plan import BudgetRequest, Sampling, answer, in_words
from fl_sim.privacy import loss_distribution
from fl_sim.privacy.accounting import (
    bounds,
    delta_profile,
    epsilon_of_counts,
    noise_multiplier,
    searching_epsilon,
    steps_that_fit,
)
from fl_sim.privacy.events import amplify_poisson

Gaussian = dp_event.GaussianDpEvent
SAMPLED = [
    (0.004, 1.3, 3600), (0.02, 4.0, 20_000), (0.0143, 2.518, 534_320), (0.004, 1.64, 55_000), (0.014, 1.65, 7700),
    (0.5, 8.0, 1000), (0.01, 0.78, 24_000),
]  # fmt: skip
DELTAS = [1e-5, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12, 1e-13, 3e-14, 1e-14]
PURE = [(0.05, 2000), (0.1, 400)]


def sampled(rate: float, noise: float) -> dp_event.DpEvent:
    return amplify_poisson(Gaussian(noise), rate)


@pytest.fixture(scope="module")
def exact(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    """Return the integrals."""
    return load_benchmark("loss_integral")


@pytest.mark.parametrize("mean", [0.5, 2.0])
@pytest.mark.parametrize("times", [1, 16])
def test_the_integral_is_the_closed_form_of_a_gaussian_in_the_far_tail_too(
    exact: ModuleType, mean: float, times: int
) -> None:
    for at in (0.5, 3.0, 9.0):
        closed = stats.norm.cdf(mean / 2 - at / mean) - math.exp(at) * stats.norm.cdf(-mean / 2 - at / mean)
        for losses in exact.poisson_gaussian(1.0, math.sqrt(times) / mean):
            # The closed form cancels: of a tiny delta float64 keeps few digits.
            assert exact.delta_of(losses, times, at) == pytest.approx(closed, rel=1e-7)


def test_the_integral_is_the_closed_form_of_one_sampled_release(exact: ModuleType) -> None:
    rate, noise, at = 0.5, 1.0, 1.5
    place = 0.5 + noise**2 * math.log((math.exp(at) - 1 + rate) / rate)  # where the loss is ``at``
    closed = rate * stats.norm.sf(place, 1, noise) + (1 - rate - math.exp(at)) * stats.norm.sf(place, 0, noise)
    assert exact.delta_of(exact.poisson_gaussian(rate, noise)[0], 1, at) == pytest.approx(closed, rel=1e-6)


@pytest.mark.parametrize("point", SAMPLED, ids=str)
def test_no_printed_epsilon_of_sampled_releases_is_below_the_truth(
    exact: ModuleType, point: tuple[float, float, int]
) -> None:
    rate, noise, steps = point
    pair = exact.poisson_gaussian(rate, noise)
    for delta in DELTAS:
        claimed = bounds({sampled(rate, noise): steps}, delta)
        assert exact.larger_delta(pair, steps, claimed.least) <= delta
        if delta >= 1e-8:  # where it is sound, the PLD is told, and is tight
            assert claimed.pld is not None
            assert exact.larger_delta(pair, steps, claimed.pld * 0.99) > delta
        assert claimed.least <= claimed.rdp


@pytest.mark.parametrize(("epsilon", "times"), PURE)
def test_no_printed_epsilon_of_laplace_and_geometric_noise_is_below_the_truth(
    exact: ModuleType, epsilon: float, times: int
) -> None:
    for delta in DELTAS:
        by_laplace = bounds({dp_event.LaplaceDpEvent(1 / epsilon): times}, delta).least
        assert exact.larger_delta(exact.laplace(epsilon), times, by_laplace) <= delta
        by_geometric = bounds({dp_event.DiscreteLaplaceDpEvent(epsilon, 1): times}, delta).least
        assert exact.randomised_response_delta(epsilon, times, by_geometric) <= delta
        assert by_laplace < by_geometric <= epsilon * times


def test_a_few_releases_of_much_noise_round_as_well() -> None:
    # By the integral, at a fineness of 40 points a standard deviation: epsilon 0.0217071356 holds, and nothing less.
    event, truth = sampled(0.0018, 2.57), 0.0217071356
    steps = ((event, 10),)
    shown = loss_distribution.composed(steps, NeighboringRelation.ADD_OR_REMOVE_ONE, truth).get_delta(truth)
    assert 1e-12 - loss_distribution.rounding_error(steps) / 10 < shown < 1e-12
    assert bounds({event: 10}, 1e-12).least > truth


@pytest.mark.parametrize("point", SAMPLED, ids=str)
def test_what_rounding_takes_off_delta_is_a_small_part_of_its_bound(
    exact: ModuleType, point: tuple[float, float, int]
) -> None:
    rate, noise, steps = point
    counts = {sampled(rate, noise): steps}
    error = loss_distribution.rounding_error(tuple(counts.items()))
    at = epsilon_of_counts(counts, 1e-9)
    [shown] = delta_profile([dp_event.SelfComposedDpEvent(sampled(rate, noise), steps)], [at])
    truth = exact.larger_delta(exact.poisson_gaussian(rate, noise), steps, at)
    assert truth <= shown  # the claim that an audit tests has the bound on top
    assert abs(shown - error - truth) <= error / 10 + truth * 0.01


def test_below_the_floor_the_pld_is_left_out_and_that_is_said() -> None:
    event = sampled(0.02, 4.0)
    floor = 2 * loss_distribution.rounding_error(((event, 20_000),))
    assert 1e-12 < floor < 1e-10
    above, below = (bounds({event: 20_000}, floor * times) for times in (1.01, 0.99))
    assert above.pld is not None
    assert above.least < above.rdp
    assert below.pld is None
    assert below.least == below.rdp == epsilon_of_counts({event: 20_000}, floor * 0.99, accountant="pld")
    assert "rounding errors, up to" in below.in_words()
    asked = BudgetRequest(Sampling("record", 0.02, None, None), 4.0, 20_000, None, 1e-13, "rdp")
    plan = answer(asked)
    assert plan["epsilon_pld"] is None
    assert plan["epsilon_least"] == plan["epsilon_rdp"]
    assert "by RDP; no PLD was computed, because its rounding errors" in in_words(plan).splitlines()[0]
    assert "two sound bounds" not in in_words(plan)


@pytest.mark.usefixtures("quick_accounting")
def test_planning_by_pld_at_small_delta_keeps_to_what_is_true(exact: ModuleType) -> None:
    found = noise_multiplier(lambda event: amplify_poisson(event, 0.02), 20_000, 5.0, 1e-13, accountant="pld")
    assert exact.larger_delta(exact.poisson_gaussian(0.02, found), 20_000, 5.0) <= 1e-13
    event = sampled(0.02, 4.0)
    fits = steps_that_fit(event, 5.0, 1e-13, accountant="pld")
    assert exact.larger_delta(exact.poisson_gaussian(0.02, 4.0), fits, 5.0) <= 1e-13
    assert searching_epsilon(event, fits, 1e-13) >= epsilon_of_counts({event: fits}, 1e-13)


def test_errors_of_several_kinds_of_events_add_up() -> None:
    one, other = (sampled(0.02, 4.0), 300), (dp_event.LaplaceDpEvent(9.0), 200)
    apart = [loss_distribution.rounding_error((each,)) for each in (one, other)]
    assert loss_distribution.rounding_error((one, other)) == pytest.approx(sum(apart))
    assert apart[0] > apart[1] > 0
