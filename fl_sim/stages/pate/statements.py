"""The record-level privacy statements of PATE: guarantee, spent cost, planned cost, and published epsilon."""

import hashlib
import json
from collections import Counter
from dataclasses import replace
from typing import Any, Final

import numpy as np
from dp_accounting import dp_event

from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.privacy.accounting import compose, epsilon_of_curve, noise_beyond
from fl_sim.privacy.bill import Payment, payment_of
from fl_sim.privacy.pate import labelling_cost
from fl_sim.privacy.renyi import ORDERS, Curve
from fl_sim.privacy.statement import Coverage, promised_releases, statement
from fl_sim.privacy.terms import Adjacency, Terms, none_if_infinite, rounded_up
from fl_sim.stages.pate.noisy_labels import Released, Votes, publish_cost, votes_key
from partitions import Dirichlet, FeatureNoise, Iid, LabelK, Natural, Quantity, Scheme, Shards
from partitions.group_skew import Domain, OverSplit
from strategies.pate.labelling import COVERS, DOES_NOT_COVER, UNANSWERED, Labelling, NoNoise
from strategies.pate.settings import Pate

OTHER_RELEASES: Final = (
    " Other labellings of a pool by teachers of the same records, under other settings or another seed: each is a "
    "separate release, and their epsilons add up. (Runs that differ in the student alone share one labelling.)"
)
PUBLISHED_COVERS: Final = (
    "The labels, all results that are computed from the labels, and epsilon_data_dependent itself: a noisy upper bound "
    "on the data-dependent epsilon of the labels, for the votes of this run."
)

_BY_NUMBER: Final = (Iid, Quantity, FeatureNoise)
"""The partitions that depend only on the number of records."""

_BY_CLASS: Final = (LabelK, Dirichlet, Shards)
"""The partitions that depend only on the number of records of each class."""

_CLASSES_ARE_PUBLIC: Final = (
    " The number of records of each class is treated as public, because the partition over teachers depends on it. One "
    "record of another class would move other records between teachers."
)
_GROUPS_ARE_PUBLIC: Final = (
    " The groups of records are treated as public, because the partition assigns whole groups to teachers. A record "
    "that is alone in its group would move other groups between teachers."
)
_DOMAINS_ARE_PUBLIC: Final = (
    " The number of records of each class in each domain is treated as public, because the partition over teachers "
    "depends on it. One record of another domain or class would move other records between teachers."
)


def statements_of(experiment: Experiment, settings: Pate, votes: Votes, released: Released) -> list[dict[str, Any]]:
    """Return the privacy statements for ``result.json``. The first statement covers the labels and the student.

    If one record is replaced or removed, only the teacher with this record changes, so at most one vote changes in each
    query. The privacy cost is therefore the same for the adjacencies "replace one record" and "add or remove one". The
    partition determines which adjacency the statement names. In an IID partition, one additional record would change
    the shuffle, and so every teacher. The adjacency is then to replace one record, and the number of records is public.
    """
    ledger, labelling = released.ledger, settings.labelling
    relation, public = neighbours(experiment.partition)
    terms = replace(ledger.terms, adjacency=relation)
    pool = (
        f" The public pool, {settings.pool_in_words}: its records are treated as public, and the student may reveal "
        "them."
    )
    limits = DOES_NOT_COVER + public + pool + OTHER_RELEASES
    planned = labelling.planned(len(released.labelled.labels), released.labelled.num_asked)
    if settings.keep_private:
        limits += " This run directory: its votes and private.json have no noise, because of the setting keep_private."
    charges = [(charge.release, charge.event) for charge in ledger.charges]
    words = Coverage(COVERS, limits, simulation_only=labelling.noise == "seeded")
    labels = {"ledger": ledger.identity, **statement(terms, charges, planned, words)}
    if not settings.publish_cost:
        return [labels]
    certain = promised_releases(terms, charges, planned)
    apart = " The published data-dependent epsilon: another statement covers this epsilon and the labels together."
    return [
        labels | {"does_not_cover": labels["does_not_cover"] + apart},
        _published(settings, votes, released, labels, certain),
    ]


def neighbours(partition: Scheme) -> tuple[Adjacency, str]:
    """Return the adjacency for which one record affects only one teacher, and a text on the facts assumed public."""
    if isinstance(partition, OverSplit):  # the change of a record depends only on the group of its teacher
        return neighbours(partition.over)
    if isinstance(partition, Domain):
        neighbours(partition.over)  # raises UserError if the inner partition is user-defined
        return Adjacency.ADD_OR_REMOVE_ONE, _DOMAINS_ARE_PUBLIC
    if type(partition) in _BY_NUMBER:
        return Adjacency.REPLACE_ONE, ""
    if type(partition) is Natural:
        return Adjacency.ADD_OR_REMOVE_ONE, _GROUPS_ARE_PUBLIC
    assert type(partition) in _BY_CLASS, f"no adjacency is known for the partition {partition}"
    return Adjacency.ADD_OR_REMOVE_ONE, _CLASSES_ARE_PUBLIC


def data_dependent(settings: Pate, votes: Votes, released: Released) -> float | None:
    """Return the epsilon of the labels for the actual votes, which is PRIVATE; None if there is no guarantee."""
    labelled = released.labelled
    if isinstance(settings.labelling.mechanism, NoNoise) or not labelled.num_asked:
        return None
    answered = labelled.labels[: labelled.num_asked] != UNANSWERED
    counts = votes.counts[: labelled.num_asked]
    cost, delta = settings.labelling.mechanism.cost(), settings.labelling.delta
    return labelling_cost.analyse(counts, cost, delta, answered=answered).dependent.total


def _published(
    settings: Pate, votes: Votes, released: Released, labels: dict[str, Any], certain: Counter[dp_event.DpEvent]
) -> dict[str, Any]:
    """Return the privacy statement that covers both the labels and the published data-dependent epsilon.

    The statement contains one joint guarantee, and the published epsilon. ``certain``: {privacy event: count}, the
    largest possible cost of the queries, for any votes. The cost in the privacy ledger is not used, because it depends
    on which queries were answered.
    """
    published, terms = publish_cost(settings, votes, released)
    delta = settings.labelling.delta
    together = _curve_of_labels(settings.labelling, certain) + terms.curve(np.array(ORDERS))
    epsilon = none_if_infinite(epsilon_of_curve(together, delta))
    if epsilon is None:
        guarantee = "none: the query at which labelling stops depends on votes without noise"
    else:
        guarantee = (
            f"({rounded_up(epsilon)}, {delta:g})-differential privacy of the labels and the published epsilon "
            "together, for any votes"
        )
    return {
        "ledger": f"{labels['ledger']}, published",
        "unit": "record",
        "epsilon": epsilon,
        "epsilon_data_dependent": published["epsilon"],
        "delta": delta,
        "adjacency": labels["adjacency"],
        "guarantee": (
            f"{guarantee}. The published epsilon: {rounded_up(published['epsilon'])}, by the data-dependent "
            "analysis, with noise scaled to its smooth sensitivity. It is the cost for the votes of this run, but not "
            f"a guarantee: with probability {published['failure']:g} it is too low"
        ),
        "simulation_only": labels["simulation_only"],
        "covers": PUBLISHED_COVERS,
        "does_not_cover": labels["does_not_cover"],
        "published": published,
    }


def _curve_of_labels(labelling: Labelling, certain: Counter[dp_event.DpEvent]) -> Curve:
    """Return a Renyi curve that bounds the privacy cost of the labels.

    The result is the minimum of two bounds. The first bound is the curve of the events ``certain``, {privacy event:
    count}: the largest possible cost of the queries, for any votes. The second bound follows from the privacy budget:
    the threshold tests and the answers of queries are Gaussian mechanisms, and their joint cost is within the
    budget. So they cost less than a single Gaussian mechanism that exceeds the budget. The curve of this mechanism is
    the second bound.
    """
    curve = compose(certain)
    test, _ = labelling.mechanism.charges()
    if test is None or labelling.epsilon is None or labelling.budget != "data-independent":
        return curve
    beyond = noise_beyond(labelling.epsilon, labelling.delta, accountant=labelling.accountant)
    return np.minimum(curve, compose({dp_event.GaussianDpEvent(beyond): 1}))


def cost_of_labels(job: Job, pate: Pate) -> Payment:
    """Return the planned privacy cost of the labels. Runs that differ only in the student share this cost."""
    labelling, seed = pate.labelling, job.experiment.seed
    queries = min(pate.queries, len(pate.public_split(job.dataset, job.experiment.seed_of_partition).pool))
    told = [votes_key(job), labelling.model_dump(mode="json"), pate.queries, pate.asking, seed]
    identity = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    budget = labelling.epsilon if labelling.budget == "data-independent" else None
    adjacency, _ = neighbours(job.experiment.partition)
    terms = Terms("record", adjacency, labelling.delta, budget, labelling.accountant)
    return payment_of(terms, labelling.planned(queries, queries), identity, is_simulated=labelling.noise == "seeded")
