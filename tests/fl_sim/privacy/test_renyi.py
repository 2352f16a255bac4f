"""Curves of single releases against closed forms, next to where one formula takes over from another."""

import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray
from scipy.special import logsumexp

from fl_sim.privacy import renyi
from fl_sim.privacy.events import amplify_fixed_size, amplify_poisson
from fl_sim.privacy.renyi import ORDERS, checked, laplace_curve, rdp_curve

Gaussian = dp_event.GaussianDpEvent
PLACES = np.array(ORDERS)


@pytest.mark.parametrize("epsilon", [1e-3, 0.05, 0.5])
def test_laplace_noise_has_the_divergence_of_its_closed_form(epsilon: float) -> None:
    exact = np.log1p(2 / 3 * np.expm1(epsilon) + 1 / 3 * np.expm1(-2 * epsilon))  # at order 2
    assert laplace_curve(epsilon, np.array([2.0]))[0] == pytest.approx(exact, rel=1e-9)


def test_next_to_no_laplace_noise_is_not_rounded_to_none() -> None:
    found = laplace_curve(1e-17, np.array([1.5, 2.0, 64.0]))
    assert found == pytest.approx(np.array([1.5, 2.0, 64.0]) * 1e-34 / 2, rel=1e-6, abs=0.0)


@pytest.mark.parametrize("noise", [0.8, 5.0])
def test_sampling_never_costs_more_than_taking_all_and_less_where_few_are_drawn(noise: float) -> None:
    for rate, is_less in ((999, False), (1, True)):
        for sampled, whole in (
            (amplify_poisson(Gaussian(noise), rate / 1000), PLACES / (2 * noise**2)),
            (amplify_fixed_size(Gaussian(noise), rate, 1000), 2 * PLACES / noise**2),
        ):
            curve = rdp_curve(sampled)
            assert (curve <= whole * (1 + 1e-12)).all()
            assert (curve < whole / 2).any() or not is_less


@pytest.mark.parametrize("rate", [1e-6, 1e-4, 0.01, 0.3, 0.99])
@pytest.mark.parametrize("noise", [0.1, 0.7, 3.0, 100.0])
def test_a_sampled_gaussian_has_the_divergence_of_sixty_digits_and_never_less(rate: float, noise: float) -> None:
    curve = rdp_curve(amplify_poisson(Gaussian(noise), rate))
    with mpmath.workdps(60):
        q, z = mpmath.mpf(rate), mpmath.mpf(noise)
        for order in (2, 5, 16, 64, 256):
            moment = mpmath.fsum(
                mpmath.binomial(order, k) * (1 - q) ** (order - k) * q**k * mpmath.exp(k * (k - 1) / (2 * z**2))
                for k in range(order + 1)
            )
            exact = min(mpmath.log(moment) / (order - 1), order / (2 * z**2))
            assert curve[ORDERS.index(order)] == pytest.approx(float(exact), rel=1e-12, abs=0.0)


def test_where_a_quadrature_would_take_too_many_points_nothing_is_amplified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renyi, "_MOST_POINTS", 1000)
    assert rdp_curve(amplify_fixed_size(Gaussian(1.0), 3, 1000))[-1] == 2 * ORDERS[-1]


def test_rounding_of_the_series_and_of_the_quadrature_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    event, order = amplify_poisson(Gaussian(1.0), 0.01), 1.5
    added = rdp_curve(event)[ORDERS.index(order)] - RdpAccountant([order]).compose(event).rdp[0]
    assert added == pytest.approx(1e-12 / (order - 1), rel=1e-3)

    found = renyi._mixture_divergence(order, 0.01, 1.0)
    monkeypatch.setattr(renyi, "_QUADRATURE_ERROR", 1e-3)
    assert renyi._mixture_divergence(order, 0.01, 1.0) - found == pytest.approx(1e-3 / (order - 1), rel=1e-6)


def test_the_quadrature_has_the_value_of_a_far_finer_one_where_there_is_little_noise() -> None:
    order, rate, shift = 1.5, 0.2, 40.0
    points, step = np.linspace(-shift - 12, 2 * shift + 12, 2**20, retstep=True)

    def logs(at: float) -> NDArray[np.float64]:
        return np.logaddexp(np.log(1 - rate) - points**2 / 2, np.log(rate) - (points - at) ** 2 / 2)

    exact = logsumexp(order * logs(shift) - (order - 1) * logs(-shift)) + np.log(step / np.sqrt(2 * np.pi))
    assert renyi._mixture_divergence(order, rate, shift) == pytest.approx(exact / (order - 1), rel=1e-11)


def test_rounding_below_zero_is_lifted_to_zero() -> None:
    assert checked(np.array([-1e-10, 0.0, 1.0])).tolist() == [0.0, 0.0, 1.0]
