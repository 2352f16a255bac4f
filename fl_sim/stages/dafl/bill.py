"""The privacy cost of DA-FL's pool of synthetic records, and the privacy statement about it.

A record belongs to only one client, and only the outputs of this client reveal something about the record. So the
privacy cost of the pool, for any record, is at most the highest cost of a client.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

from dp_accounting import dp_event

from clients.dafl.settings import AnyGenerator, DaFl
from fl_sim.experiment.experiment import Experiment
from fl_sim.kinds import is_none, kind_of
from fl_sim.privacy import events
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.ledger import Ledger
from fl_sim.privacy.terms import Adjacency, Terms, none_if_infinite, rounded_up
from fl_sim.simulation.client_ledgers import joint_cost_in_words
from fl_sim.stages.dafl.pool import Pool
from fl_sim.stages.dafl.stage import settings_of
from strategies.global_dp import GlobalDP

NOT_PER_CLIENT = (
    " The pool of synthetic records that clients released before training: it is protected per record, not per client."
)
"""A sentence that is added to client-level privacy statements if there is a pool of synthetic records."""


def statement(pool: Pool, experiment: Experiment) -> dict[str, object]:
    """Return the record-level privacy statement about the pool, for ``result.json``.

    All fields state the costs of the client with the highest cost. Field ``epsilon``: the privacy cost of this pool;
    ``fl_sim.report.payments.with_whole_run`` adds the cost of the whole run. Field ``epsilon_together``: the cost of
    all sets of synthetic records in the clients' privacy ledgers that come from this data set. Field
    ``shares_together``: the largest number of such sets about one record. The last two fields are None if not all
    privacy ledgers are on this machine.
    """
    settings = settings_of(experiment)
    bills = [
        bill
        for part in pool.parts
        if part.facts and (bill := _bill_of(json.dumps(part.facts, sort_keys=True), settings.delta))
    ]
    if not bills:
        bills = [_Bill({}, 0.0, 0.0, 0.0)]
    worst = max(bills, key=lambda bill: bill.epsilon)
    ledger = Ledger(Terms("record", Adjacency.ADD_OR_REMOVE_ONE, settings.delta))
    for release, event in worst.events.items():
        ledger.charge(event, release=release, noise="")
    said = ledger.statement(
        covers=_covers(experiment, settings),
        does_not_cover=_does_not_cover(experiment, settings),
        simulation_only=settings.noise == "seeded",
        planned=Counter(worst.events.values()),
    )
    generator = worst.events.get("generator")
    inner = generator.event if isinstance(generator, dp_event.SelfComposedDpEvent) else None
    finite = math.isfinite(worst.epsilon)
    together = pool.together
    others = together is None or together.shares > len(worst.events) // 2
    if together and not others:
        together = replace(together, epsilon=worst.epsilon)
    return said | {
        "ledger": pool.path.stem if worst.events else "",
        "epsilon": worst.epsilon if finite else None,
        "accountant": "rdp",
        "epsilon_together": together and none_if_infinite(together.epsilon),
        "shares_together": together and together.shares,
        "epsilon_labels": worst.labels if finite else None,
        "epsilon_generator": worst.generator if finite else None,
        "epsilon_sum": worst.labels + worst.generator if finite else None,
        "noise_multiplier": None if inner is None else events.noise_multiplier(inner),
        "sampling_rate": None if inner is None else events.sampling_rate(inner),
        "budget": settings.epsilon if math.isfinite(settings.epsilon) else None,
        "guarantee": _guarantee(worst, settings) + (joint_cost_in_words(together, settings.delta) if others else ""),
    }


@dataclass(frozen=True)
class _Bill:
    """The privacy cost of one client's synthetic records. The privacy unit is one record of this client.

    The costs are epsilons at the delta of the settings. ``events``: {name of a private output: privacy event}.
    ``labels``: the cost of the label selection. ``generator``: the cost of the generator's training. ``epsilon``: the
    joint cost of label selection and training.
    """

    events: dict[str, dp_event.DpEvent]
    labels: float
    generator: float
    epsilon: float


@lru_cache(maxsize=1024)
def _bill_of(facts_json: str, delta: float) -> _Bill:
    facts = json.loads(facts_json)
    labels = events.from_json(facts["labels"])
    generator = dp_event.SelfComposedDpEvent(events.from_json(facts["generator"]), facts["generator_steps"])
    alone = epsilon_of_counts({generator.event: generator.count}, delta)
    joint = epsilon_of_counts(Counter({labels: 1}) + Counter({generator.event: generator.count}), delta)
    # There are two upper bounds of the joint cost: the sum of both epsilons, and the epsilon of the sum of both Renyi
    # divergences. The smaller bound is used.
    together = min(joint, alone + facts["labels_epsilon"])
    return _Bill({"labels": labels, "generator": generator}, facts["labels_epsilon"], alone, together)


def _covers(experiment: Experiment, settings: DaFl) -> str:
    if settings.train_on == "synthetic":
        moments = not is_none(experiment.calibrate)
        but = " but the moments of features, which another statement covers" if moments else ""
        return (
            f"everything this run releases of its training records{but}: clients release synthetic records under this "
            "guarantee, and all models are trained only on these synthetic records (post-processing). Each record of "
            "each client is protected; clients are disjoint, so the figure is the largest over clients."
        )
    return (
        "the pool of synthetic records alone, and all results that are computed only from this pool. Each record of "
        "each client is protected; clients are disjoint, so the figure is the largest over clients."
    )


def _does_not_cover(experiment: Experiment, settings: DaFl) -> str:
    public = "The number of a client's records, gamma and the range of the label selection are treated as public."
    if type(settings.generator) not in get_args(AnyGenerator):
        public += (
            f" The generator {kind_of(settings.generator)} is not part of fl-sim. fl-sim has not proved the privacy "
            "cost that the generator's author states."
        )
    if settings.train_on == "synthetic":
        return public
    if not is_none(experiment.local.privacy):
        task = "The rounds train on raw records; another statement covers the messages of the clients in these rounds."
    elif isinstance(experiment.aggregator, GlobalDP):
        task = "The main task trains on raw records; another statement covers its global models, per client."
    else:
        task = (
            "The main task is NOT private: after the pool is shared, clients train on their raw records and send "
            "updates without noise."
        )
    return f"{task} {public}"


def _guarantee(worst: _Bill, settings: DaFl) -> str:
    if not worst.events:
        return "complete: no client released a synthetic record"
    if not math.isfinite(worst.epsilon):
        return "none: the synthetic records were made without noise (epsilon inf), so they may reveal any record"
    labels, generator, both = (
        rounded_up(cost) for cost in (worst.labels, worst.generator, worst.labels + worst.generator)
    )
    return (
        f"({rounded_up(worst.epsilon)}, {settings.delta:g})-differential privacy of the synthetic records under adding "
        f"or removing one record: labels {labels} ({settings.labels.composition} composition over classes), generator "
        f"{generator}. The sum of both is {both}; epsilon is the smaller of this sum and the joint RDP bound"
    )
