"""What the labels of PATE will cost, as far as it is fixed before the vote."""

import hashlib
import json

from fl_sim.experiment.job import Job
from fl_sim.privacy.bill import Payment
from fl_sim.privacy.planned import payment_of
from fl_sim.privacy.terms import Terms
from fl_sim.stages.pate.ensemble import votes_key
from fl_sim.stages.pate.statements import neighbours
from strategies.pate.settings import Pate


def cost_of_labels(job: Job, pate: Pate) -> Payment:
    """Return the cost of labels, which runs that differ in the student alone share."""
    labelling, seed = pate.labelling, job.experiment.seed
    queries = min(pate.queries, len(pate.public_split(job.dataset, job.experiment.seed_of_partition).pool))
    told = [votes_key(job), labelling.model_dump(mode="json"), pate.queries, pate.asking, seed]
    identity = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    budget = labelling.epsilon if labelling.budget == "data-independent" else None
    adjacency, _ = neighbours(job.experiment.partition)
    terms = Terms("record", adjacency, labelling.delta, budget, labelling.accountant)
    return payment_of(terms, labelling.planned(queries, queries), identity, is_simulated=labelling.noise == "seeded")
