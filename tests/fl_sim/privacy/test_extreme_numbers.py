"""Any valid numbers, however extreme, end in a figure or a message within seconds: no NaN, no traceback, no hanging."""

import contextlib
import json
import math
import time
from itertools import product

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from fl_sim.errors import UserError
from fl_sim.privacy import events, loss_distribution
from fl_sim.privacy.accounting import bounds, epsilon_of_counts, noise_multiplier, steps_that_fit
from fl_sim.privacy.events import amplify_fixed_size, amplify_poisson
from fl_sim.privacy.ledger import Ledger
from fl_sim.privacy.mechanisms import clipping_norm_on_grid
from fl_sim.privacy.renyi import ORDERS, epsilons_of_curves, rdp_curve
from fl_sim.privacy.terms import Adjacency, Terms

NOISES = (1e-300, 1e-200, 1e-3, 0.7, 30.0, 1e5, 1e300)
RATES = (1e-320, 1e-9, 0.01, 0.9, 1.0)
STEPS = (1, 1000, 10**8, 10**18)
DELTAS = (1e-300, 1e-5, 0.999)
SECONDS = 60  # of this process, for one figure: a bound on hanging, not a measurement


def case(generator: np.random.Generator) -> tuple[dp_event.DpEvent, int, float]:
    noise, rate = NOISES[generator.integers(len(NOISES))], RATES[generator.integers(len(RATES))]
    gaussian, kind = dp_event.GaussianDpEvent(noise), generator.integers(4)
    if kind == 0:
        event = amplify_fixed_size(gaussian, max(1, int(rate * 10**9)), 10**9)
    elif kind == 1:
        event = dp_event.LaplaceDpEvent(noise)
    else:
        event = amplify_poisson(gaussian, rate)
    return event, STEPS[generator.integers(len(STEPS))], DELTAS[generator.integers(len(DELTAS))]


def check(event: dp_event.DpEvent, steps: int, delta: float, accountant: str) -> None:
    began = time.process_time()
    found = epsilon_of_counts({event: steps}, delta, accountant=accountant)
    assert found >= 0  # and no NaN
    by_rdp = epsilon_of_counts({event: steps}, delta)
    assert found <= by_rdp <= epsilon_of_counts({event: 10 * steps}, delta)
    assert time.process_time() - began < SECONDS
    json.dumps(events.to_json(event), allow_nan=False)


def test_a_hundred_extreme_questions_have_answers() -> None:
    generator = np.random.default_rng(0)
    for number in range(100):
        check(*case(generator), accountant="pld" if number % 10 == 0 else "rdp")


@pytest.mark.slow
def test_a_thousand_extreme_questions_have_answers() -> None:
    generator = np.random.default_rng(1)
    for number in range(1000):
        check(*case(generator), accountant="pld" if number % 2 == 0 else "rdp")


@pytest.mark.parametrize("delta", DELTAS)
def test_epsilon_never_falls_with_steps_and_rate_and_never_rises_with_noise(delta: float) -> None:
    found = {
        (noise, rate, steps): epsilon_of_counts({amplify_poisson(dp_event.GaussianDpEvent(noise), rate): steps}, delta)
        for noise, rate, steps in product(NOISES, RATES, STEPS)
    }
    for (noise, rate, steps), epsilon in found.items():
        for louder, oftener, more in product(NOISES, RATES, STEPS):
            if louder <= noise and oftener >= rate and more >= steps:
                assert epsilon <= found[louder, oftener, more] * (1 + 1e-9)


def test_a_tiny_divergence_is_not_rounded_to_nothing() -> None:
    # D_2 = log(1 + q^2 (e^(1/z^2) - 1)) = 2.5e-17: in float64 log A itself is 0, and 10^18 steps would cost nothing.
    event = amplify_poisson(dp_event.GaussianDpEvent(1e8), 0.5)
    second = rdp_curve(event)[ORDERS.index(2)]
    assert second == pytest.approx(0.25 * math.expm1(1e-16), rel=1e-9)
    by_dp_accounting = RdpAccountant([2]).compose(event).rdp[0]
    assert by_dp_accounting == 0 or abs(by_dp_accounting / second - 1) > 0.1
    assert epsilon_of_counts({event: 10**18}, 1e-5) > 10


def test_orders_near_one_serve_little_noise_and_large_deltas() -> None:
    little = dp_event.GaussianDpEvent(1e-3)
    rho = 1 / (2 * 1e-6)
    assert epsilon_of_counts({little: 1}, 1e-5) <= 1.001 * (rho + 2 * math.sqrt(rho * math.log(1e5)))
    coarse = np.array(rdp_curve(little))
    coarse[np.array(ORDERS) < 1.01] = math.inf
    assert float(epsilons_of_curves(coarse, 1e-5)) > 1.001 * epsilon_of_counts({little: 1}, 1e-5)


def test_what_has_no_pld_says_why() -> None:
    often = bounds({amplify_poisson(dp_event.GaussianDpEvent(100.0), 0.01): 10**7}, 1e-5)
    assert often.pld is None
    assert "more than 1000000 sampled steps" in often.in_words()
    loud = bounds({dp_event.GaussianDpEvent(0.01): 1}, 1e-5)
    assert "above 200" in loud.in_words()


def test_gaussian_releases_are_one_release_to_the_pld() -> None:
    parts = ((dp_event.GaussianDpEvent(6.0), 4), (dp_event.GaussianDpEvent(12.0), 16))
    ((whole, times),) = loss_distribution.merged(parts)
    assert times == 1
    assert whole.noise_multiplier == pytest.approx((4 / 36 + 16 / 144) ** -0.5)
    fixed = ((amplify_fixed_size(dp_event.GaussianDpEvent(6.0), 9, 9), 4),)
    ((whole, times),) = loss_distribution.merged(fixed)
    assert (whole.noise_multiplier, times) == (pytest.approx(3.0), 1)
    sampled = ((amplify_poisson(dp_event.GaussianDpEvent(6.0), 0.5), 4),)
    assert loss_distribution.merged(sampled) == sampled


@pytest.mark.parametrize("noise", [1e51, 1e160, 1e300])
def test_the_pld_of_noise_whose_square_is_no_number_is_found(noise: float) -> None:
    gaussian = dp_event.GaussianDpEvent(noise)
    for event in (
        gaussian,
        amplify_poisson(gaussian, 0.5),
        amplify_poisson(gaussian, 1e-320),
        amplify_fixed_size(gaussian, 1, 10**9),
        amplify_fixed_size(gaussian, 9, 9),
        dp_event.LaplaceDpEvent(noise),
    ):
        assert 0 <= epsilon_of_counts({event: 3}, 1e-300, accountant="pld") <= 1


def test_planning_answers_or_says_why_not() -> None:
    for target, delta in product((1e-12, 1e12), DELTAS):
        for steps in (1, 10**8):
            with contextlib.suppress(UserError):
                found = noise_multiplier(lambda event: event, steps, target, delta)
                assert epsilon_of_counts({dp_event.GaussianDpEvent(found): steps}, delta) <= target
    with pytest.raises(UserError, match="out of reach"):
        noise_multiplier(lambda event: event, 10**8, 1e-12, 1e-300)
    assert steps_that_fit(dp_event.GaussianDpEvent(1e-300), 8.0, 1e-5) == 0
    with pytest.raises(UserError, match="set the number of steps instead"):
        steps_that_fit(dp_event.GaussianDpEvent(1e300), 8.0, 1e-5)


def test_a_ledger_takes_what_has_no_epsilon_and_refuses_it_under_a_budget() -> None:
    silent = dp_event.GaussianDpEvent(1e-300)
    free = Ledger(Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 1e-300))
    assert free.charge(silent, release="round 1", noise="key") is None
    said = free.statement(covers="", does_not_cover="", simulation_only=False, planned={silent: 10**8})
    json.dumps(said, allow_nan=False)
    assert said["epsilon"] is None
    assert not Ledger(Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 0.999, budget=1e12)).affords(silent)


@pytest.mark.parametrize("std", [1e-300, 1e-200, 1e-7])
def test_noise_that_hides_nothing_is_refused_in_words(std: float) -> None:
    with pytest.raises(UserError, match="hides nothing"):
        clipping_norm_on_grid(1.0, std, 100, summands=10)


def test_a_budget_a_thousandth_too_small_is_too_small() -> None:
    event = amplify_poisson(dp_event.GaussianDpEvent(2.0), 0.1)
    exact = epsilon_of_counts({event: 5}, 1e-5)
    for budget, affords in ((exact, True), (exact * (1 - 1e-9), False), (exact / 1.0005, False)):
        ledger = Ledger(Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 1e-5, budget=budget))
        assert ledger.affords(dp_event.SelfComposedDpEvent(event, 5)) is affords
