"""Laws of the accountants: monotone, additive, sound, and never NaN or a false zero."""

import logging
import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from fl_sim.errors import UserError
from fl_sim.privacy import loss_distribution
from fl_sim.privacy.accounting import (
    Bounds,
    bounds,
    compose,
    delta_profile,
    epsilon,
    epsilon_of_counts,
    epsilon_of_curve,
    searching_epsilon,
    supports_pld,
)
from fl_sim.privacy.events import (
    adjacency,
    amplify_fixed_size,
    amplify_poisson,
    single_steps,
    under_replacement,
    unrolled,
)
from fl_sim.privacy.renyi import ORDERS, rdp_curve
from fl_sim.privacy.terms import Adjacency
from fl_sim.testing_fixtures import SetFineness

Gaussian = dp_event.GaussianDpEvent

# Few distinct values: a Renyi curve is computed once per event and remembered.
RATES = (0.001, 0.05, 0.4, 1.0)
NOISES = (0.5, 1.0, 2.0, 10.0)
DELTA = 1e-5


def poisson(rate: float, noise: float) -> dp_event.DpEvent:
    return amplify_poisson(Gaussian(noise), rate)


events = st.builds(poisson, st.sampled_from(RATES), st.sampled_from(NOISES))


@given(events, st.integers(1, 500), st.integers(1, 500))
@settings(deadline=None)
def test_epsilon_never_falls_with_more_steps(event: dp_event.DpEvent, steps: int, more: int) -> None:
    assert epsilon_of_counts({event: steps}, DELTA) <= epsilon_of_counts({event: steps + more}, DELTA)


@given(st.sampled_from(RATES[:-1]), st.sampled_from(NOISES), st.integers(1, 500))
@settings(deadline=None)
def test_epsilon_never_falls_with_the_sampling_rate(rate: float, noise: float, steps: int) -> None:
    higher = RATES[RATES.index(rate) + 1]
    rarely, often = poisson(rate, noise), poisson(higher, noise)
    assert epsilon_of_counts({rarely: steps}, DELTA) <= epsilon_of_counts({often: steps}, DELTA)


@given(st.sampled_from(RATES), st.sampled_from(NOISES[:-1]), st.integers(1, 500))
@settings(deadline=None)
def test_epsilon_never_rises_with_noise(rate: float, noise: float, steps: int) -> None:
    louder = NOISES[NOISES.index(noise) + 1]
    assert epsilon_of_counts({poisson(rate, louder): steps}, DELTA) <= epsilon_of_counts(
        {poisson(rate, noise): steps}, DELTA
    )


@given(
    st.lists(st.builds(poisson, st.sampled_from((0.01, 0.1, 1.0)), st.sampled_from((1.0, 1.5))), min_size=1, max_size=4)
)
@settings(deadline=None, max_examples=5)
def test_composition_is_the_sum_of_the_renyi_curves(schedule: list[dp_event.DpEvent]) -> None:
    ours = epsilon(schedule, DELTA)
    assert ours == pytest.approx(epsilon_of_curve(sum(rdp_curve(event) for event in schedule), DELTA), rel=1e-12)
    together = RdpAccountant(ORDERS)
    logging.getLogger("absl").setLevel(logging.ERROR)
    for event in schedule:
        together.compose(event)
    assert ours == pytest.approx(together.get_epsilon(DELTA), rel=1e-9)


@given(
    st.lists(
        st.builds(poisson, st.sampled_from((0.01, 0.1, 1.0)), st.sampled_from((0.8, 1.5, 3.0))), min_size=1, max_size=5
    )
)
@settings(deadline=None, max_examples=5)
@pytest.mark.usefixtures("coarse_losses")
def test_rdp_is_never_below_pld(schedule: list[dp_event.DpEvent]) -> None:
    assert epsilon(schedule, DELTA, accountant="pld") <= epsilon(schedule, DELTA)


@pytest.mark.parametrize(("cohort", "population"), [(1, 100), (10, 100), (49, 100), (50, 100), (99, 100), (100, 100)])
@pytest.mark.parametrize("noise", [1.5, 10.0])
@pytest.mark.usefixtures("coarse_losses")
def test_fixed_size_bounds_are_sound_and_ordered(cohort: int, population: int, noise: float) -> None:
    counts = {amplify_fixed_size(Gaussian(noise), cohort, population): 3}
    by_pld = epsilon_of_counts(counts, DELTA, accountant="pld")
    by_rdp = epsilon_of_counts(counts, DELTA)
    # To replace a client that is always there moves the sum by 2 S: noise z / 2 without amplification.
    without_amplification = epsilon_of_counts({Gaussian(noise / 2): 3}, DELTA)
    # When all the others send zero vectors, fixed-size sampling of the pair S against 0 is Poisson sampling of it.
    instance = epsilon_of_counts({poisson(cohort / population, noise): 3}, DELTA, accountant="pld")
    assert instance <= by_pld * (1 + 1e-6)
    assert by_pld <= by_rdp * (1 + 1e-9)
    assert by_rdp <= without_amplification * (1 + 1e-9)


@pytest.mark.usefixtures("coarse_losses")
def test_full_participation_under_replace_one_has_sensitivity_two() -> None:
    everyone = {amplify_fixed_size(Gaussian(4.0), 100, 100): 10}
    for accountant in ("rdp", "pld"):
        plain = epsilon_of_counts({Gaussian(2.0): 10}, DELTA, accountant=accountant)
        assert epsilon_of_counts(everyone, DELTA, accountant=accountant) == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("order", [1.5, 2.0, 7.0, 30.0])
def test_fixed_size_curve_is_the_divergence_of_its_dominating_pair(order: float) -> None:
    rate, noise = 0.2, 1.3

    def log_density(point: float, shift: float) -> float:
        stays, moves = (
            math.log(1 - rate) - (point / noise) ** 2 / 2,
            math.log(rate) - ((point - shift) / noise) ** 2 / 2,
        )
        most = max(stays, moves)
        return most + math.log1p(math.exp(min(stays, moves) - most)) - math.log(noise * math.sqrt(2 * math.pi))

    def log_integrand(point: float) -> float:
        return order * log_density(point, 2.0) + (1 - order) * log_density(point, -2.0)

    # The farthest bump of the integrand lies at 2 (2 order - 1).
    top = max(log_integrand(point) for point in np.linspace(-20, 4 * order + 15, 2001))
    inner = np.linspace(-18, 4 * order + 13, 40)
    value = integrate.quad(lambda x: math.exp(log_integrand(x) - top), -20, 4 * order + 15, points=inner, limit=2000)[0]
    expected = min((top + math.log(value)) / (order - 1), 2 * order / noise**2)
    ours = rdp_curve(amplify_fixed_size(Gaussian(noise), 20, 100))[ORDERS.index(order)]
    assert ours == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.1, 2.0), (0.3, 0.8), (1.0, 5.0)])
def test_renyi_curve_equals_opacus(rate: float, noise: float) -> None:
    rdp = pytest.importorskip("opacus.accountants.analysis.rdp", exc_type=ImportError)
    integers = [order for order in ORDERS if order == int(order) and order <= 256]
    theirs = rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=17, orders=integers)
    ours = 17 * rdp_curve(poisson(rate, noise))[[ORDERS.index(order) for order in integers]]
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)


def test_orders_go_far_enough_for_strong_privacy_and_near_enough_for_weak() -> None:
    assert max(ORDERS) >= 512
    assert sorted(ORDERS) == list(ORDERS)
    strong = {poisson(0.01, 20.0): 10}
    assert epsilon_of_counts(strong, DELTA) < 1.3 * 0.02
    weak = {Gaussian(0.1): 10}  # zCDP: rho + 2 sqrt(rho log(1/delta))
    assert epsilon_of_counts(weak, DELTA) < 500 + 2 * math.sqrt(500 * math.log(1 / DELTA))


def test_no_guarantee_is_infinite_and_nothing_is_zero() -> None:
    assert epsilon([], DELTA) == 0.0
    silent, loud = amplify_fixed_size(Gaussian(0.0), 3, 10), amplify_fixed_size(Gaussian(1.0), 3, 10)
    for event, other in (
        (dp_event.NonPrivateDpEvent(), poisson(0.1, 1.0)),
        (Gaussian(0.0), poisson(0.1, 1.0)),
        (silent, loud),
    ):
        for accountant in ("rdp", "pld"):
            assert epsilon([event, other], DELTA, accountant=accountant) == math.inf


def test_nan_and_negative_divergences_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in (math.nan, -0.5):
        curve = np.full(len(ORDERS), 1.0)
        curve[7] = bad
        with pytest.raises(ArithmeticError, match="no epsilon is known"):
            epsilon_of_curve(curve, DELTA)


def test_one_order_without_a_bound_is_left_out() -> None:
    curve = np.array(rdp_curve(poisson(0.1, 1.0)))
    whole = epsilon_of_curve(curve, DELTA)
    curve[-1] = math.inf
    assert epsilon_of_curve(curve, DELTA) == whole


def test_orders_at_which_the_series_does_not_converge_have_a_larger_bound(caplog: pytest.LogCaptureFixture) -> None:
    rdp_curve.cache_clear()
    series = RdpAccountant(ORDERS).compose(poisson(0.3, 0.3)).rdp
    assert np.isinf(series).any()
    caplog.clear()
    curve = rdp_curve(poisson(0.3, 0.3))
    assert np.isfinite(curve).all()
    assert (np.diff(curve) >= 0).all()
    assert (curve <= np.array(ORDERS) / (2 * 0.3**2)).all()
    assert not caplog.records


def test_repeats_of_repeats_multiply_and_add_up_with_single_releases() -> None:
    nested = dp_event.SelfComposedDpEvent(dp_event.SelfComposedDpEvent(Gaussian(2.0), 3), 4)
    assert unrolled(nested) == (Gaussian(2.0), 12)
    counts = {nested: 2, Gaussian(2.0): 5, Gaussian(3.0): 1, dp_event.SelfComposedDpEvent(Gaussian(4.0), 0): 3}
    assert single_steps(counts) == {Gaussian(2.0): 29, Gaussian(3.0): 1}
    assert compose(counts) == pytest.approx(29 * rdp_curve(Gaussian(2.0)) + rdp_curve(Gaussian(3.0)))
    with pytest.raises(UserError, match="-1 releases"):
        unrolled(dp_event.SelfComposedDpEvent(Gaussian(2.0), -1))


def test_what_stays_within_delta_at_the_lowest_orders_costs_nothing_and_a_bit_more_costs_something() -> None:
    """By the divergence of Kullback and Leibler, 1 / (2 z^2) of Gaussian noise, against the square of delta."""
    assert epsilon([Gaussian(1e5)], DELTA) == 0
    assert epsilon([Gaussian(5e4)], DELTA) > 0
    assert epsilon([Gaussian(1e3)], DELTA) > 0
    assert epsilon([Gaussian(1.29)], 0.5) == 0  # though neither that divergence nor any price says so alone
    assert bounds({Gaussian(1e14): 1}, 1e-12) == Bounds(0.0, 0.0)


def test_of_two_bounds_the_smaller_one_holds_and_is_told_by_its_accountant() -> None:
    told = {(one.least, one.accountant) for one in (Bounds(1.0, 2.0), Bounds(1.0, None, "why"), Bounds(1.0, 1.0))}
    assert told == {(1.0, "rdp")}
    assert (Bounds(2.0, 1.0).least, Bounds(2.0, 1.0).accountant) == (1.0, "pld")


def test_a_pld_that_came_out_above_the_other_bound_is_lowered_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_distribution, "epsilon", lambda *_: 99.0)
    found = bounds({Gaussian(1.0): 1}, DELTA)
    assert found == Bounds(found.rdp, found.rdp)


def test_a_small_epsilon_is_smaller_by_pld_and_none_at_all_is_infinite_by_both() -> None:
    found = bounds({Gaussian(20.0): 1}, DELTA)
    assert found.pld is not None
    assert 0 < found.pld < found.rdp < 1
    assert bounds({dp_event.NonPrivateDpEvent(): 1}, DELTA) == Bounds(math.inf, math.inf)
    assert epsilon([dp_event.NonPrivateDpEvent(), dp_event.ZCDpEvent(0.1)], DELTA, accountant="pld") == math.inf


def test_adjacency_is_stated_by_the_event_and_never_mixed() -> None:
    assert adjacency(poisson(0.1, 1.0)) is Adjacency.ADD_OR_REMOVE_ONE
    assert adjacency(amplify_fixed_size(Gaussian(1.0), 3, 10)) is Adjacency.REPLACE_ONE
    assert adjacency(dp_event.ZCDpEvent(0.1)) is None
    with pytest.raises(UserError, match="cannot be added up"):
        epsilon([poisson(0.1, 1.0), amplify_fixed_size(Gaussian(1.0), 3, 10)], DELTA)


def test_curves_are_shared_and_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        rdp_curve(poisson(0.1, 1.0))[0] = 0.0
    total = compose({poisson(0.1, 1.0): 2})
    np.testing.assert_array_equal(total, 2 * rdp_curve(poisson(0.1, 1.0)))


def test_the_profile_of_a_gaussian_is_the_closed_form() -> None:
    noise = 1.3
    for value, delta in zip((0.0, 0.5, 1.0, 2.0), delta_profile([Gaussian(noise)], (0.0, 0.5, 1.0, 2.0)), strict=True):
        exact = stats.norm.cdf(0.5 / noise - value * noise) - math.exp(value) * stats.norm.cdf(
            -0.5 / noise - value * noise
        )
        assert delta == pytest.approx(exact, rel=1e-3)


def test_the_profile_leaves_room_for_rounding_where_next_to_nothing_is_left() -> None:
    (delta,) = delta_profile([Gaussian(1.3)], (60.0,))
    assert 2.0**-40 <= delta < 2.0**-39


def test_pld_stays_an_upper_bound_when_its_grid_is_coarse(set_fineness: SetFineness) -> None:
    counts = {poisson(0.1, 1.0): 50}
    fine = epsilon_of_counts(counts, DELTA, accountant="pld")
    set_fineness(losses=100)
    assert fine < epsilon_of_counts(counts, DELTA, accountant="pld") <= 1.05 * fine


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_bad_sampling_rates_are_refused(rate: float) -> None:
    with pytest.raises(UserError, match="sampling rate"):
        amplify_poisson(Gaussian(1.0), rate)


@pytest.mark.parametrize(("cohort", "population"), [(0, 10), (11, 10)])
def test_bad_cohorts_are_refused(cohort: int, population: int) -> None:
    with pytest.raises(UserError, match="does not fit"):
        amplify_fixed_size(Gaussian(1.0), cohort, population)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_bad_deltas_are_refused(delta: float) -> None:
    for accountant in ("rdp", "pld"):
        with pytest.raises(UserError, match="delta"):
            epsilon([Gaussian(1.0)], delta, accountant=accountant)


def test_only_gaussian_noise_is_amplified() -> None:
    for event in (dp_event.LaplaceDpEvent(1.0), poisson(0.1, 1.0)):
        with pytest.raises(UserError, match="Gaussian mechanism only"):
            amplify_poisson(event, 0.1)
        with pytest.raises(UserError, match="Gaussian mechanism only"):
            amplify_fixed_size(event, 1, 10)
    nothing = dp_event.NonPrivateDpEvent()
    assert amplify_poisson(nothing, 0.1) == nothing
    assert amplify_fixed_size(nothing, 1, 10) == nothing


def test_truncated_poisson_is_not_mistaken_for_fixed_size() -> None:
    with pytest.raises(UserError, match="fixed size"):
        rdp_curve(dp_event.TruncatedSubsampledGaussianDpEvent(100, 0.1, 10, 1.0))


def test_pld_says_what_it_does_not_know() -> None:
    assert supports_pld(poisson(0.1, 1.0))
    assert not supports_pld(dp_event.ZCDpEvent(0.1))
    with pytest.raises(UserError, match="use the RDP accountant"):
        epsilon([dp_event.ZCDpEvent(0.1)], DELTA, accountant="pld")


@pytest.mark.parametrize(
    ("rate", "noise", "steps"), [(256 / 6000, 1.25, 2000), (0.1, 1.0, 100), (0.5, 8.0, 1000), (0.01, 0.7, 300)]
)
def test_a_search_goes_by_the_very_epsilon_at_ordinary_budgets(rate: float, noise: float, steps: int) -> None:
    event = amplify_poisson(dp_event.GaussianDpEvent(noise), rate)
    expected = epsilon_of_counts({event: steps}, 1e-5)
    assert searching_epsilon(event, steps, 1e-5) == expected
    assert searching_epsilon(dp_event.SelfComposedDpEvent(event, 10), steps // 10, 1e-5) == expected


def _delta_where_replaced(rate: float, noise: float, claimed: float, apart: float) -> float:
    """Return delta at ``claimed`` of one step in which a unit sends 1 or ``apart``, and is sampled with ``rate``."""

    def density(x: float, mean: float) -> float:
        return math.exp(-(((x - mean) / noise) ** 2) / 2) / (noise * math.sqrt(2 * math.pi))

    def excess(x: float, one: float, other: float) -> float:
        first, second = ((1 - rate) * density(x, 0) + rate * density(x, at) for at in (one, other))
        return max(first - math.exp(claimed) * second, 0.0)

    ends = -1 - 12 * noise, 1 + 12 * noise
    found = [
        integrate.quad(excess, *ends, args=pair, limit=400, points=(-1, 0, 1))[0] for pair in ((1, apart), (apart, 1))
    ]
    return float(max(found))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("noise", [0.7, 1.5, 4.0])
def test_a_unit_that_changes_is_not_told_by_more_than_its_replacement_costs(
    rate: float, noise: float, set_fineness: SetFineness
) -> None:
    set_fineness(losses=1 if rate == 1 else 10)  # at most 3e-4 above the finest bound, in a fifth of the time
    event = under_replacement(poisson(rate, noise))
    assert adjacency(event) is Adjacency.REPLACE_ONE
    claimed = epsilon_of_counts({event: 1}, DELTA, accountant="pld")
    for apart in (-1.0, -0.5, 0.5):
        assert _delta_where_replaced(rate, noise, claimed, apart) <= DELTA * (1 + 1e-3)
    if rate == 1:  # then it is the Gaussian mechanism of twice the sensitivity, and nothing less will do
        assert _delta_where_replaced(rate, noise, claimed * 0.999, -1.0) > DELTA
        assert claimed == pytest.approx(epsilon_of_counts({Gaussian(noise / 2): 1}, DELTA, accountant="pld"), rel=1e-3)


def test_replacement_keeps_how_often_and_what_is_stated_so_already() -> None:
    fixed = amplify_fixed_size(Gaussian(2.0), 3, 10)
    assert under_replacement(fixed) == fixed
    assert under_replacement(dp_event.NonPrivateDpEvent()) == dp_event.NonPrivateDpEvent()
    for times in (2, 7):
        often = under_replacement(dp_event.SelfComposedDpEvent(Gaussian(2.0), times))
        assert often == dp_event.SelfComposedDpEvent(amplify_fixed_size(Gaussian(2.0), 1, 1), times)
    with pytest.raises(UserError, match="LaplaceDpEvent under replace-one adjacency is not known"):
        under_replacement(dp_event.LaplaceDpEvent(1.0))


@pytest.mark.parametrize("rate", [0.1, 0.3, 1e-7, 1 - 1e-9, 3 * 2.0**-20])
def test_a_replaced_unit_is_never_sampled_less_often_than_it_is(rate: float) -> None:
    # Rounded to the nearest of 2^-20 steps, .1 would become less than .1.
    event = under_replacement(poisson(rate, 2.0))
    found = event.truncated_batch_size / event.dataset_size
    assert rate <= found < rate + 2.0**-20
