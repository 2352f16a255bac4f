"""What a run will release about its records and what that costs, as far as it is fixed before the run begins."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping

from dp_accounting import dp_event

from clients.dafl.settings import DaFl
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.kinds import short_form
from fl_sim.privacy.accounting import Adjacency
from fl_sim.privacy.bill import Paid, Payment
from fl_sim.privacy.ledger import Ledger, Terms
from fl_sim.simulation.dafl.synthesis import pool_key
from fl_sim.simulation.pate.ensemble import votes_key
from fl_sim.simulation.pate.statements import neighbours
from strategies.ccvr import CCVR
from strategies.global_dp import GlobalDP
from strategies.pate.settings import Pate
from strategies.private import planned_charges, terms_of


def planned(job: Job) -> Paid:
    """Return what a run of ``job`` will have paid. Takes seconds where it is private: the PLD is computed here."""
    experiment = job.experiment
    split = "centralized" if experiment.is_central else short_form(experiment.partition)
    bare = not (
        isinstance(experiment.algorithm, Pate)
        or isinstance(experiment.aggregator, GlobalDP)
        or (isinstance(experiment.preprocess, DaFl) and experiment.preprocess.train_on == "synthetic")
    )
    pate = experiment.algorithm
    unknown = isinstance(pate, Pate) and pate.publish_cost  # a figure that is computed from the votes
    payments = None if unknown else tuple(_payments(job))
    return Paid(experiment.data, f"{split}, {experiment.clients} clients", payments, bare=bare)


def _payments(job: Job) -> Iterator[Payment]:
    experiment = job.experiment
    if isinstance(experiment.aggregator, GlobalDP):
        yield _of_rounds(experiment, experiment.aggregator)
    if isinstance(experiment.algorithm, Pate):
        yield _of_labels(job, experiment.algorithm)
    if isinstance(experiment.preprocess, DaFl):  # its events depend on clients' numbers of records; the budget does not
        yield _of_budget(pool_key(job), experiment.preprocess)
    if isinstance(experiment.calibrate, CCVR) and (protection := experiment.calibrate.protection) is not None:
        terms = Terms("record", Adjacency.ADD_OR_REMOVE_ONE, protection.delta)
        yield _payment(terms, {protection.event: 1}, "", is_simulated=protection.noise == "seeded")


def _of_rounds(experiment: Experiment, aggregator: GlobalDP) -> Payment:
    charges = planned_charges(aggregator, experiment.sampler, experiment.num_clients, experiment.rounds)
    terms = terms_of(aggregator, experiment.sampler)
    return _payment(terms, charges, "", is_simulated=aggregator.noise == "seeded")


def _of_labels(job: Job, pate: Pate) -> Payment:
    """Return the cost of labels, which runs that differ in the student alone share."""
    labelling, seed = pate.labelling, job.experiment.seed
    queries = min(pate.queries, len(pate.public_split(job.dataset, job.experiment.seed_of_partition).pool))
    told = [votes_key(job), labelling.model_dump(mode="json"), pate.queries, pate.asking, seed]
    identity = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    budget = labelling.epsilon if labelling.budget == "data-independent" else None
    adjacency, _ = neighbours(job.experiment.partition)
    terms = Terms("record", adjacency, labelling.delta, budget, labelling.accountant)
    return _payment(terms, labelling.planned(queries, queries), identity, is_simulated=labelling.noise == "seeded")


def _of_budget(identity: str, settings: DaFl) -> Payment:
    epsilon = settings.epsilon if math.isfinite(settings.epsilon) else None
    simulated = settings.noise == "seeded"
    return Payment("record", identity, epsilon, settings.delta, Adjacency.ADD_OR_REMOVE_ONE, simulation_only=simulated)


def _payment(terms: Terms, releases: Mapping[dp_event.DpEvent, int], identity: str, *, is_simulated: bool) -> Payment:
    said = Ledger(terms).statement(covers="", does_not_cover="", simulation_only=is_simulated, planned=releases)
    epsilon = said["epsilon"]
    charged = () if epsilon is not None and epsilon == terms.budget else (Counter(releases),)
    return Payment(terms.unit, identity, epsilon, terms.delta, terms.adjacency, charged, is_simulated)
