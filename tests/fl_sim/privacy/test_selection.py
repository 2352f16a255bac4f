"""The bill of a private selection: against exact divergences by integration, and against the paper's closed form."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from numpy.typing import NDArray
from scipy import stats
from scipy.special import logsumexp

from fl_sim.errors import UserError
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.renyi import ORDERS, rdp_curve
from fl_sim.privacy.selection import (
    NegativeBinomialTrials,
    PoissonTrials,
    Trials,
    epsilon_of_selection,
    most_likely_at_most,
    noise_of_selection,
    selection_curve,
)

PLACES = np.array(ORDERS)
LAWS: list[Trials] = [
    NegativeBinomialTrials(10.0), NegativeBinomialTrials(10.0, 0.0), NegativeBinomialTrials(3.0, -0.5),
    NegativeBinomialTrials(30.0, 3.0), PoissonTrials(10.0), PoissonTrials(1.0),
]  # fmt: skip


def gaussian(noise: float) -> NDArray[np.float64]:
    return rdp_curve(dp_event.GaussianDpEvent(noise))


def exact_divergences(trials: Trials, noise: float, shift: float, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divergences of the largest of K numbers N(shift, noise^2) from that of K numbers N(0, noise^2).

    The largest of k numbers with the density p and the distribution function F has the density k F^(k - 1) p. The sums
    over k are those of the probabilities, so no formula of a generating function is used.
    """
    points = np.linspace(-12 * noise, 80 * noise, 1_501)
    weights = trials.probabilities(600)
    counts = np.arange(1, len(weights))

    def log_density(mean: float) -> NDArray[np.float64]:
        one = stats.norm(mean, noise)
        steps = np.log(np.maximum(weights[1:], 1e-300) * counts)
        below = one.logcdf(points)
        return np.asarray(logsumexp(steps[:, None] + np.outer(counts - 1, below), axis=0) + one.logpdf(points))

    first, second, step = log_density(shift), log_density(0.0), points[1] - points[0]
    found = []
    for order in orders:
        integral = logsumexp(order * first + (1 - order) * second) + math.log(step)
        found.append(np.logaddexp(integral, math.log(weights[0]) if weights[0] else -math.inf) / (order - 1))
    return np.array(found)


@pytest.mark.parametrize("trials", LAWS, ids=str)
def test_the_bill_covers_the_exact_divergence_and_that_of_one_run_does_not(trials: Trials) -> None:
    noise, orders = 2.0, np.array([1.1, 2.0, 8.0, 32.0])
    bound = selection_curve(gaussian(noise), trials)[[ORDERS.index(order) for order in orders]]
    exact = np.maximum(*(exact_divergences(trials, noise, shift, orders) for shift in (1.0, -1.0)))
    assert (exact <= bound).all()
    if trials.mean > 1:
        assert (exact[:2] > orders[:2] / (2 * noise**2)).any()  # so a bill of one run would be too small


@pytest.mark.parametrize("trials", LAWS, ids=str)
def test_numbers_of_trials_have_their_mean(trials: Trials) -> None:
    shares = trials.probabilities(20_000)
    assert shares.sum() == pytest.approx(1.0, abs=1e-9)
    assert shares @ np.arange(len(shares)) == pytest.approx(trials.mean, rel=1e-6)
    most = most_likely_at_most(trials, 0.99)
    assert shares[: most + 1].sum() >= 0.99 > shares[:most].sum()


@pytest.mark.parametrize("eta", [-0.5, 0.0, 1.0, 5.0])
def test_of_gaussian_noise_the_bill_is_the_closed_form_of_the_paper(eta: float) -> None:
    """Corollary 4: with rho = 1 / (2 z^2), order a costs rho a + (1 + eta) (2 sqrt(rho log(1/gamma)) - rho) + ...."""
    trials, rho = NegativeBinomialTrials(20.0, eta), 1 / 18
    exact = rho * PLACES + (1 + eta) * (2 * math.sqrt(rho * math.log(1 / trials.gamma)) - rho)
    exact += math.log(20) / (PLACES - 1)
    best = np.minimum.accumulate(exact[::-1])[::-1]
    found = selection_curve(gaussian(3.0), trials)
    assert (found >= best * (1 - 1e-9)).all()
    assert found == pytest.approx(best, rel=1e-3)


def test_a_geometric_number_of_pure_runs_costs_three_times_their_epsilon() -> None:
    curve = selection_curve(rdp_curve(dp_event.LaplaceDpEvent(10.0)), NegativeBinomialTrials(1e4))  # epsilon 0.1
    assert 0.25 < curve[-1] < 0.3 + math.log(1e4) / 1023 + 2 * math.log(1e4) / 1024


@pytest.mark.parametrize("noise", [0.7, 4.0, 50.0])
def test_a_selection_never_costs_less_than_one_run_and_never_less_with_more_trials(noise: float) -> None:
    run = {dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(noise)): 20}
    single = epsilon_of_counts(run, 1e-5)
    assert epsilon_of_selection(run, NegativeBinomialTrials(1.0), 1e-5) == single
    for kind in (NegativeBinomialTrials, PoissonTrials, lambda mean: NegativeBinomialTrials(mean, 0.0)):
        costs = [epsilon_of_selection(run, kind(mean), 1e-5) for mean in (1.0, 1.001, 2.0, 10.0, 1e3)]
        assert costs[0] >= single
        assert costs == sorted(costs)
    assert (selection_curve(gaussian(noise), PoissonTrials(1.0)) >= gaussian(noise)).all()
    assert math.isinf(epsilon_of_selection({dp_event.NonPrivateDpEvent(): 1}, PoissonTrials(9.0), 1e-5))


def test_the_least_noise_meets_its_epsilon_and_less_does_not() -> None:
    trials = NegativeBinomialTrials(15.0, 0.0)
    noise = noise_of_selection(lambda z: {dp_event.GaussianDpEvent(z): 10}, trials, 3.0, 1e-6)
    assert epsilon_of_selection({dp_event.GaussianDpEvent(noise): 10}, trials, 1e-6) <= 3.0
    assert epsilon_of_selection({dp_event.GaussianDpEvent(0.999 * noise): 10}, trials, 1e-6) > 3.0


@pytest.mark.parametrize("make", [lambda: PoissonTrials(0.5), lambda: NegativeBinomialTrials(math.nan)])
def test_fewer_than_one_trial_is_refused(make: object) -> None:
    with pytest.raises(UserError, match="give a number from 1"):
        make()  # type: ignore[operator]
    with pytest.raises(UserError, match="choose 1"):
        NegativeBinomialTrials(2.0, -1.0)
