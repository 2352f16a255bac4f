"""The cost of a release that is fixed before a run begins, by the accountant that will charge it."""

from collections import Counter
from collections.abc import Mapping

from dp_accounting import dp_event

from fl_sim.experiment.experiment import Experiment
from fl_sim.privacy import events
from fl_sim.privacy.bill import Payment
from fl_sim.privacy.ledger import Ledger, Terms
from strategies.global_dp import GlobalDP, releases_beforehand
from strategies.private import planned_charges, terms_of, told_beforehand


def cost_of_rounds(experiment: Experiment, aggregator: GlobalDP) -> Payment:
    """Return the cost of all rounds under Global DP, and of a private start before them. Takes seconds by PLD."""
    beforehand = releases_beforehand(experiment.preprocess, aggregator)
    charges = planned_charges(aggregator, experiment.sampler, experiment.num_clients, experiment.rounds, beforehand)
    terms = terms_of(aggregator, experiment.sampler)
    return payment_of(terms, charges, "", is_simulated=aggregator.noise == "seeded")


def payment_of(terms: Terms, releases: Mapping[dp_event.DpEvent, int], identity: str, *, is_simulated: bool) -> Payment:
    """Return what ``releases`` cost under ``terms``; ``identity`` is by which bills know them again."""
    said = Ledger(terms).statement(covers="", does_not_cover="", simulation_only=is_simulated, planned=releases)
    epsilon = said["epsilon"]
    # Of the releases as many as the budget is good for, where that is certain.
    plan = (Counter({events.from_json(one["event"]): one["times"] for one in said["planned_events"]}),)
    charged = () if epsilon is not None and epsilon == terms.budget else plan
    return Payment(terms.unit, identity, epsilon, terms.delta, terms.adjacency, charged, is_simulated, plan=plan)


def told_of(experiment: Experiment) -> tuple[str, ...]:
    """Return what is said beforehand of the privacy of a run's rounds, beside what they cost; sentences."""
    return tuple(told_beforehand(experiment)) if isinstance(experiment.aggregator, GlobalDP) else ()
