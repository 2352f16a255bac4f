"""The ledgers of simulated clients, in a folder apart from the pools, which anybody may delete.

In $FL_SIM_LEDGERS, else in the user's state. A ledger belongs to records as they lie in their file: all deals of one
content (``fl_sim.data.content_of``) lie side by side and are added up, whoever reads the file how. A deal is named by
what was read and by which client holds which record. So other settings, other generators or a deleted pool find the
same ledger; another seed, label column, range or test part is a deal beside it.

Earlier versions named the folder by what was read, and the deal by its settings. Ledgers that lie there are still used,
and are added up with the others as soon as one of their clients is asked for again: ``earlier`` lists such folders.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from clients.policy import RECORD_TERMS
from fl_sim.data import content_of, fingerprint
from fl_sim.experiment.job import Job
from fl_sim.privacy.accounting import compose, epsilon_of_curve
from fl_sim.privacy.ledger import Charge, Ledger
from fl_sim.privacy.terms import rounded_up
from fl_sim.store.files import user_folder
from fl_sim.types import records_of

_EARLIER: Final = "earlier"


@dataclass(frozen=True)
class JointCost:
    """The joint cost of all releases about a data set's records to one record.

    ``shares``: the most releases about one record; a share of a pool is one.
    """

    epsilon: float
    shares: int


def ledgers_root() -> Path:
    """Return the folder of all ledgers: $FL_SIM_LEDGERS, else a folder in the user's state."""
    return user_folder("FL_SIM_LEDGERS", "XDG_STATE_HOME", "~/.local/state", "ledgers")


def ledger_path(job: Job, client: int) -> Path:
    """Return the path of the ledger of one client of ``job``."""
    name, earlier = f"client-{client}.jsonl", _earlier_deal(job)
    if (earlier / name).exists():
        _join(_folder(job), earlier.parent)
        return earlier / name
    return _folder(job) / _deal(job) / name


def names_of_deal(job: Job) -> tuple[str, str]:
    """Return the name of a folder of the job's deal, and its name in earlier versions."""
    earlier = _earlier_deal(job)
    return f"{_folder(job).name}-{_deal(job)}", f"{earlier.parent.name}-{earlier.name}"


def joint_cost(job: Job, delta: float) -> JointCost:
    """Return the joint cost of all releases in the ledgers about the job's data set, whatever their settings.

    A record is with one client of each deal, so a deal costs it no more than the dearest Renyi curve of its clients,
    order by order, and the deals' curves add. Raises RunError where a ledger is damaged.
    """
    total, shares = compose({}), 0
    for deal in sorted(deal for folder in _folders(job) for deal in folder.glob("*/")):
        ledgers = list(_ledgers(deal))
        charged = [Counter(charge.event for charge in ledger.charges) for ledger in ledgers]
        if charged:
            total = total + np.max([compose(counts) for counts in charged], axis=0)
            shares += max(sum(map(_begins_share, ledger.charges)) for ledger in ledgers)
    return JointCost(epsilon_of_curve(total, delta), shares)


def joint_cost_in_words(together: JointCost | None, delta: float) -> str:
    """Return the addition to a statement about one release; ``together`` None: it is not known here."""
    if together is None:
        return (
            ". What all releases about the same records cost together is not known here: a client's ledger is with the "
            "client, or cannot be read"
        )
    cost = f"cost epsilon {rounded_up(together.epsilon)}" if math.isfinite(together.epsilon) else "have no epsilon"
    return (
        f". The clients' ledgers hold up to {together.shares} releases about the same records (of other settings or "
        f"seeds, or of pools that were deleted, too): together they {cost} at delta {delta:g}, where none was "
        "chosen by what an earlier one showed"
    )


def _begins_share(charge: Charge) -> bool:
    # The labels and the generator of a pool are charged one by one.
    return not charge.release.startswith("generator ")


def _folder(job: Job) -> Path:
    return ledgers_root() / f"records-{content_of(job.experiment.data, job.root)[:20]}"


def _folders(job: Job) -> set[Path]:
    """Return all folders with ledgers of the job's records."""
    folder, earlier = _folder(job), _earlier_deal(job).parent
    joined = (one.name for one in (folder / _EARLIER).glob("records-*"))
    return {folder, earlier, *(ledgers_root() / name for name in joined)}


def _join(folder: Path, earlier: Path) -> None:
    """Record that ``earlier`` has ledgers of the same records as ``folder``."""
    mark = folder / _EARLIER / earlier.name
    if earlier != folder and not mark.exists():
        for place in (folder.parent, folder, mark.parent):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch(mode=0o600)


def _deal(job: Job) -> str:
    """Return a digest of the data and of the assignment of records to clients."""
    data = job.experiment.data
    told = hashlib.sha256(f"{data if records_of(data) != data else ''} {fingerprint(data, job.root)}".encode())
    for array in (job.shards.records, job.shards.bounds):
        told.update(np.ascontiguousarray(array, dtype=np.int64).data)
    return told.hexdigest()[:16]


def _earlier_deal(job: Job) -> Path:
    """Return the folder of the ledgers of the job's clients in earlier versions."""
    experiment = job.experiment
    dealt = {**experiment.chosen("partition", "clients"), "seed": experiment.seed_of_partition}
    if records_of(experiment.data) != experiment.data:
        dealt["data"] = experiment.data
    name = hashlib.sha256(json.dumps(dealt, sort_keys=True).encode()).hexdigest()[:16]
    return ledgers_root() / f"records-{fingerprint(records_of(experiment.data), job.root)[:20]}" / name


def _ledgers(deal: Path) -> Iterator[Ledger]:
    return (Ledger(RECORD_TERMS, path) for path in sorted(deal.glob("client-*.jsonl")))
