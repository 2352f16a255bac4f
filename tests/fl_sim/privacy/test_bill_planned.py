"""What is foretold without a PLD is never less than what is stated with one."""

import pytest
from dp_accounting.dp_event import DpEvent, GaussianDpEvent, PoissonSampledDpEvent

from fl_sim.privacy import loss_distribution
from fl_sim.privacy.accounting import bounds, epsilon_of_counts
from fl_sim.privacy.bill import RunPayments, bills, payment_of
from fl_sim.privacy.loss_distribution import NoTimeError, begun_only_if
from fl_sim.privacy.terms import Adjacency, Terms

ROUNDS: dict[DpEvent, int] = {PoissonSampledDpEvent(0.1, GaussianDpEvent(1.1)): 50}


def terms(budget: float | None = None) -> Terms:
    return Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 1e-5, budget, "pld")


@pytest.fixture(autouse=True)
def _nothing_known() -> None:
    loss_distribution.epsilon.cache_clear()


@pytest.mark.usefixtures("quick_accounting")
def test_without_time_for_a_pld_a_payment_is_that_of_the_rdp_accountant() -> None:
    with begun_only_if(lambda: False):
        rough = payment_of(terms(), ROUNDS, "", is_simulated=False)
        [rough_bill] = bills([RunPayments("digits", "iid", (rough, rough), bare=False)])
    exact = payment_of(terms(), ROUNDS, "", is_simulated=False)
    [exact_bill] = bills([RunPayments("digits", "iid", (exact, exact), bare=False)])
    assert rough.epsilon == epsilon_of_counts(ROUNDS, 1e-5)
    assert exact.epsilon is not None
    assert rough.epsilon > exact.epsilon
    assert rough.charged == exact.charged
    assert rough_bill.epsilon > exact_bill.epsilon > exact.epsilon


@pytest.mark.usefixtures("quick_accounting")
def test_without_time_for_a_pld_a_budget_that_is_less_than_all_releases_is_what_they_cost() -> None:
    """How many of them it is good for takes PLDs to count: to take fewer for granted would be an under-count."""
    with begun_only_if(lambda: False):
        payment = payment_of(terms(1.0), ROUNDS, "", is_simulated=False)
    assert (payment.epsilon, payment.charged) == (1.0, ())


@pytest.mark.usefixtures("quick_accounting")
def test_a_pld_that_is_known_takes_no_time_and_outside_of_forecasts_each_has_its_time() -> None:
    with begun_only_if(lambda: False), pytest.raises(NoTimeError):
        bounds(ROUNDS, 1e-5)
    known = bounds(ROUNDS, 1e-5)
    with begun_only_if(lambda: False):
        assert bounds(ROUNDS, 1e-5) == known
    assert known.pld is not None
