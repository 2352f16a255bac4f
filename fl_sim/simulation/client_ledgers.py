"""Where simulated clients keep the ledgers of what they released: apart from the pools, which anybody may delete.

In $FL_SIM_LEDGERS, else in the user's state. A ledger is named by its records: the content of their data set, how it
was dealt (split, number of clients, seed), and which client holds them. So other settings, other generators or a
deleted pool find the same ledger; and all deals of one data set lie side by side, so that another seed, which deals the
same records in another way, is added up as well.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clients.policy import RECORD_TERMS
from fl_sim.data import fingerprint
from fl_sim.experiment.job import Job
from fl_sim.privacy.accounting import compose, epsilon_of_curve
from fl_sim.privacy.ledger import Charge, Ledger
from fl_sim.privacy.rounding import rounded_up
from fl_sim.same_records import records_of
from fl_sim.store.files import folder_of


@dataclass(frozen=True)
class Together:
    """What all releases about a data set's records cost a record together.

    ``shares``: the most releases that one record can be in; a share of a pool is one.
    """

    epsilon: float
    shares: int


def ledgers_root() -> Path:
    """Return where ledgers are kept: $FL_SIM_LEDGERS, else the user's state."""
    return folder_of("FL_SIM_LEDGERS", "XDG_STATE_HOME", "~/.local/state", "ledgers")


def ledger_path(job: Job, client: int) -> Path:
    """Return where the ledger of one client of ``job`` is, or will be."""
    experiment = job.experiment  # whatever else is drawn by another seed, one split of the records has one ledger
    dealt = {**experiment.chosen("partition", "clients"), "seed": experiment.seed_of_partition}
    if records_of(experiment.data) != experiment.data:
        dealt["data"] = experiment.data  # other labels deal the same records in another way
    deal = json.dumps(dealt, sort_keys=True)
    name = hashlib.sha256(deal.encode()).hexdigest()[:16]
    return _folder(job) / name / f"client-{client}.jsonl"


def all_together(job: Job, delta: float) -> Together:
    """Return what every release cost that the ledgers know about the job's data set, whatever its settings.

    A record is with one client of each deal, so a deal costs it no more than the dearest Renyi curve of its clients,
    order by order, and the deals' curves add. Raises RunError where a ledger is damaged.
    """
    total, shares = compose({}), 0
    for deal in sorted(_folder(job).glob("*/")):
        ledgers = list(_ledgers(deal))
        charged = [Counter(charge.event for charge in ledger.charges) for ledger in ledgers]
        if charged:
            total = total + np.max([compose(counts) for counts in charged], axis=0)
            shares += max(sum(map(_begins_share, ledger.charges)) for ledger in ledgers)
    return Together(epsilon_of_curve(total, delta), shares)


def together_in_words(together: Together | None, delta: float) -> str:
    """Return what a statement about one release must add; ``together`` None: it is not known here."""
    if together is None:
        return (
            ". What all releases about the same records cost together is not known here: a client's ledger is with the "
            "client, or cannot be read"
        )
    cost = f"cost epsilon {rounded_up(together.epsilon)}" if math.isfinite(together.epsilon) else "have no epsilon"
    return (
        f". The clients' ledgers hold up to {together.shares} releases about the same records (of other settings or "
        f"seeds, or of pools that were deleted, too): together they {cost} at delta {delta:g}"
    )


def _begins_share(charge: Charge) -> bool:
    # The labels and the generator of a pool are charged one by one.
    return not charge.release.startswith("generator ")


def _folder(job: Job) -> Path:
    return ledgers_root() / f"records-{fingerprint(records_of(job.experiment.data), job.root)[:20]}"


def _ledgers(deal: Path) -> Iterator[Ledger]:
    return (Ledger(RECORD_TERMS, path) for path in sorted(deal.glob("client-*.jsonl")))
