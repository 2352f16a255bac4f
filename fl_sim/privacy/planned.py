"""The cost of releases that are fixed before a run begins, by the accountant that will charge them."""

from collections import Counter
from collections.abc import Mapping

from dp_accounting import dp_event

from fl_sim.privacy import events
from fl_sim.privacy.bill import Payment
from fl_sim.privacy.ledger import Ledger, Terms


def payment_of(terms: Terms, releases: Mapping[dp_event.DpEvent, int], identity: str, *, is_simulated: bool) -> Payment:
    """Return what ``releases`` cost under ``terms``; ``identity`` is by which bills know them again."""
    said = Ledger(terms).statement(covers="", does_not_cover="", simulation_only=is_simulated, planned=releases)
    epsilon = said["epsilon"]
    # Of the releases as many as the budget is good for, where that is certain.
    plan = (Counter({events.from_json(one["event"]): one["times"] for one in said["planned_events"]}),)
    charged = () if epsilon is not None and epsilon == terms.budget else plan
    return Payment(terms.unit, identity, epsilon, terms.delta, terms.adjacency, charged, is_simulated, plan=plan)
