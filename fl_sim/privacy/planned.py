"""The cost of releases that are fixed before a run begins, by the accountant that will charge them."""

from collections import Counter
from collections.abc import Mapping

from dp_accounting import dp_event

from fl_sim.privacy import events
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.bill import Payment
from fl_sim.privacy.events import single_steps
from fl_sim.privacy.ledger import Ledger
from fl_sim.privacy.loss_distribution import NoTimeError
from fl_sim.privacy.terms import Terms, none_if_infinite


def payment_of(terms: Terms, releases: Mapping[dp_event.DpEvent, int], identity: str, *, is_simulated: bool) -> Payment:
    """Return what ``releases`` cost under ``terms``; ``identity`` is by which bills know them again.

    By the RDP accountant alone, which is never below, where there is no time for a PLD.
    """
    try:
        said = Ledger(terms).statement(covers="", does_not_cover="", simulation_only=is_simulated, planned=releases)
    except NoTimeError:
        return _by_rdp(terms, releases, identity, is_simulated=is_simulated)
    epsilon = said["epsilon"]
    # Of the releases as many as the budget is good for, where that is certain.
    plan = (Counter({events.from_json(one["event"]): one["times"] for one in said["planned_events"]}),)
    charged = () if epsilon is not None and epsilon == terms.budget else plan
    return Payment(terms.unit, identity, epsilon, terms.delta, terms.adjacency, charged, is_simulated, plan=plan)


def _by_rdp(terms: Terms, releases: Mapping[dp_event.DpEvent, int], identity: str, *, is_simulated: bool) -> Payment:
    """Return the cost of all releases, or the budget where that is less: how many it is good for is not counted."""
    plan = (single_steps(releases),)
    spent, budget = epsilon_of_counts(releases, terms.delta), terms.budget
    holds = budget is not None and budget < spent
    epsilon = budget if holds else none_if_infinite(spent)
    charged = () if holds else plan
    return Payment(terms.unit, identity, epsilon, terms.delta, terms.adjacency, charged, is_simulated, plan=plan)
