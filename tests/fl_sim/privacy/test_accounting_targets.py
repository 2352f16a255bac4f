"""Planning never spends more than it was given, and wastes little."""

import math
from functools import partial

import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_sim.errors import UserError
from fl_sim.privacy import accounting
from fl_sim.privacy.accounting import (
    epsilon_of_counts,
    least_noise,
    noise_beyond,
    noise_multiplier,
    searching_epsilon,
    steps_that_fit,
)
from fl_sim.privacy.events import amplify_fixed_size, amplify_poisson
from fl_sim.privacy.terms import Accountant

pytestmark = pytest.mark.usefixtures("quick_accounting")  # which figure it is that is kept to is tested elsewhere

Gaussian = dp_event.GaussianDpEvent
DELTA = 1e-5


@given(st.sampled_from([0.01, 0.1, 1.0]), st.integers(1, 2000), st.floats(0.1, 50))
@settings(deadline=None, max_examples=8)
def test_the_noise_found_keeps_the_target_and_a_little_less_would_not(rate: float, steps: int, target: float) -> None:
    amplify = partial(amplify_poisson, sampling_rate=rate)
    found = noise_multiplier(amplify, steps, target, DELTA)
    assert epsilon_of_counts({amplify(Gaussian(found)): steps}, DELTA) <= target
    assert epsilon_of_counts({amplify(Gaussian(found * (1 - 2e-4))): steps}, DELTA) > target


def test_noise_that_is_planned_by_pld_is_less_and_keeps_its_target_over_all_steps() -> None:
    amplify, steps, target = partial(amplify_poisson, sampling_rate=0.1), 30, 2.0

    def spent(noise: float, by: Accountant) -> float:
        return epsilon_of_counts({amplify(Gaussian(noise)): steps}, DELTA, accountant=by)

    for found in (
        noise_multiplier(amplify, steps, target, DELTA, accountant="pld"), least_noise(spent, target, "pld"),
    ):  # fmt: skip
        assert spent(found, "pld") <= target < spent(found * (1 - 2e-4), "pld")
    by_rdp = least_noise(spent, target, "rdp")
    assert spent(by_rdp, "rdp") <= target < spent(by_rdp * (1 - 2e-4), "rdp")


def test_noise_beyond_a_budget_is_beyond_it_by_little() -> None:
    found = noise_beyond(2.0, DELTA)
    costs = [epsilon_of_counts({Gaussian(noise): 1}, DELTA) for noise in (found, found * 1.005)]
    assert costs[0] > 2.0 >= costs[1]


@given(st.floats(1e-4, 0.999), st.floats(0.3, 30), st.integers(1, 10**5), st.floats(1e-9, 0.1))
@settings(deadline=None, max_examples=25)
def test_what_a_search_goes_by_is_never_less_than_what_is_spent(
    rate: float, noise: float, steps: int, delta: float
) -> None:
    event = amplify_poisson(Gaussian(noise), rate)
    found, spent = searching_epsilon(event, steps, delta), epsilon_of_counts({event: steps}, delta)
    assert spent <= found <= 1.1 * spent or spent > 1000


@given(st.sampled_from([0.01, 0.1, 1.0]), st.sampled_from([0.8, 1.0, 3.0]), st.floats(0.05, 30))
@settings(deadline=None, max_examples=30)
def test_one_step_more_than_fits_would_not_fit(rate: float, noise: float, target: float) -> None:
    event = amplify_poisson(Gaussian(noise), rate)
    steps = steps_that_fit(event, target, DELTA)
    assert steps == 0 or epsilon_of_counts({event: steps}, DELTA) <= target
    assert epsilon_of_counts({event: steps + 1}, DELTA) > target


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_fixed_size_sampling_is_planned_too(accountant: Accountant) -> None:
    event = amplify_fixed_size(Gaussian(4.0), 30, 1000)
    steps = steps_that_fit(event, 2.0, DELTA, accountant=accountant)
    assert epsilon_of_counts({event: steps}, DELTA, accountant=accountant) <= 2.0
    assert epsilon_of_counts({event: steps + 1}, DELTA, accountant=accountant) > 2.0
    amplify = partial(amplify_fixed_size, cohort=30, population=1000)
    assert noise_multiplier(amplify, steps, 2.0, DELTA) >= (4.0 if accountant == "pld" else 3.99)


def test_pld_fits_at_least_as_many_steps_as_rdp() -> None:
    event = amplify_poisson(Gaussian(1.0), 0.1)
    assert steps_that_fit(event, 4.0, DELTA, accountant="pld") > steps_that_fit(event, 4.0, DELTA)


def test_not_even_one_step_may_fit() -> None:
    assert steps_that_fit(Gaussian(0.5), 1.0, DELTA) == 0


def test_a_generous_budget_needs_almost_no_noise() -> None:
    assert noise_multiplier(partial(amplify_poisson, sampling_rate=1.0), 1, 1e6, DELTA) <= 0.01


@pytest.mark.parametrize("needed", [0.0101, 0.0113, 0.0116, 0.02, 0.3, 1.0, 2.5, 60.0, 150.0, 5e6])
def test_noise_is_at_most_a_ten_thousandth_above_what_is_needed_wherever_that_lies(needed: float) -> None:
    found = least_noise(lambda noise, _: 2 * needed / noise, 2.0, "rdp")
    assert needed <= found <= needed * (1 + 1e-4)
    assert found == needed or needed != 1.0  # the first one that is tried costs just what is given


def test_no_noise_is_below_a_hundredth_or_above_ten_millions() -> None:
    for needed in (1e-9, 0.0099, 0.01):
        assert least_noise(lambda noise, _, needed=needed: 2 * needed / noise, 2.0, "rdp") == 0.01  # type: ignore[misc]
    with pytest.raises(UserError, match="out of reach"):
        least_noise(lambda noise, _: 4e7 / noise, 2.0, "rdp")


def test_noise_is_found_between_a_cost_without_bound_and_none() -> None:
    found = [
        least_noise(lambda noise, _: 5.2 / noise if noise > 2.5 else math.inf, 2.0, "rdp"),
        least_noise(lambda noise, _: max(5.2 / noise - 1.5, 0.0), 0.5, "rdp"),
    ]
    assert found == pytest.approx([2.6, 2.6], rel=1e-4)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_steps_fit_that_cost_just_the_target(monkeypatch: pytest.MonkeyPatch, accountant: Accountant) -> None:
    prices = {"rdp": 0.5, "pld": 0.25}
    monkeypatch.setattr(
        accounting,
        "epsilon_of_counts",
        lambda counts, delta, *, accountant="rdp": prices[accountant] * counts.popitem()[1],
    )
    for fit in (0, 1, 2, 3, 4, 7, 8, 15, 31, 32, 33, 100, 1023, 1024, 5000, 10**6 + 1):
        for rest in (0.0, 0.125):
            target = prices[accountant] * fit + rest
            if target:
                assert steps_that_fit(Gaussian(1.0), target, DELTA, accountant=accountant) == fit


def test_impossible_and_senseless_targets_are_refused() -> None:
    plain = partial(amplify_poisson, sampling_rate=1.0)
    for target in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="target epsilon"):
            noise_multiplier(plain, 10, target, DELTA)
        with pytest.raises(UserError, match="target epsilon"):
            steps_that_fit(Gaussian(1.0), target, DELTA)
    with pytest.raises(UserError, match="0 steps"):
        noise_multiplier(plain, 0, 1.0, DELTA)
    with pytest.raises(UserError, match="out of reach"):
        noise_multiplier(plain, 10**6, 1e-9, 1e-12)
    with pytest.raises(UserError, match="more than"):
        steps_that_fit(amplify_poisson(Gaussian(1000.0), 1e-9), 8.0, DELTA)
