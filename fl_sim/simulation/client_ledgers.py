"""The privacy ledgers of simulated clients.

The ledgers are in the folder $FL_SIM_LEDGERS, else in the user's state folder. They are not in the folder of the pools
of synthetic records: a user may delete a pool, but must keep the ledgers. One folder contains all privacy ledgers about
one data file, no matter how the file is read. A deal is one way to read the file and to assign its records to clients.
The folder of the data file has one subfolder for each deal, named by a digest of the deal. Most settings do not change
the deal: a run with another model or generator, or after the deletion of a pool, uses the same ledgers. Another seed,
label column, range of records or test part changes the deal. The privacy costs of all deals are added up.

Earlier versions gave other names to these folders and subfolders. Old ledgers are still used. When a run needs a
client's ledger in an old folder, the run writes the name of the old folder into the subfolder ``earlier``. From then
on, the privacy costs in the old folder are included, too.
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
    """The total privacy cost of one record, from all releases (published outputs) of all runs on a data set.

    ``shares``: the largest number of releases about one record. A client's synthetic records for one pool count as one
    release.
    """

    epsilon: float
    shares: int


def ledgers_root() -> Path:
    """Return the folder of all privacy ledgers: $FL_SIM_LEDGERS, else a folder in the user's state folder."""
    return user_folder("FL_SIM_LEDGERS", "XDG_STATE_HOME", "~/.local/state", "ledgers")


def ledger_path(job: Job, client: int) -> Path:
    """Return the path of the file with the privacy ledger of the client with the ID ``client``."""
    name, earlier = f"client-{client}.jsonl", _earlier_deal(job)
    if (earlier / name).exists():
        _link_earlier(_folder(job), earlier.parent)
        return earlier / name
    return _folder(job) / _deal(job) / name


def names_of_deal(job: Job) -> tuple[str, str]:
    """Return two names of the job's deal (assignment of records to clients): the present name, and the old name.

    Earlier versions of fl-sim used the old name.
    """
    earlier = _earlier_deal(job)
    return f"{_folder(job).name}-{_deal(job)}", f"{earlier.parent.name}-{earlier.name}"


def joint_cost(job: Job, delta: float) -> JointCost:
    """Return the joint privacy cost of all ledger entries about the job's data set, from runs with any settings.

    A deal is one assignment of the records to clients. In each deal, a record belongs to one client. So the Renyi
    divergence of a record in a deal, at each Renyi order, is at most the maximum over the clients. The divergences of
    all deals are added. The job is one experiment with its data. Raises RunError if a ledger is damaged.
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
    """Return a sentence on the joint privacy cost, for the privacy statement about one set of synthetic records.

    ``together``: the joint privacy cost of all published outputs about the same records, or None. It is None if this
    machine does not have all clients' privacy ledgers.
    """
    if together is None:
        return (
            ". The joint cost of all releases about the same records is not known here: a client's ledger is with the "
            "client, or cannot be read"
        )
    cost = (
        f"cost epsilon {rounded_up(together.epsilon)}" if math.isfinite(together.epsilon) else "have no finite epsilon"
    )
    return (
        f". The clients' ledgers hold up to {together.shares} releases about the same records (including runs with "
        f"other settings or seeds, and deleted pools): together they {cost} at delta {delta:g}, if no release "
        "was chosen by the result of an earlier one"
    )


def _begins_share(charge: Charge) -> bool:
    # A ledger has two entries (charges) for a client's synthetic records: one for the labels, one for the generator.
    # Both entries together count as one release (published output).
    return not charge.release.startswith("generator ")


def _folder(job: Job) -> Path:
    return ledgers_root() / f"records-{content_of(job.experiment.data, job.root)[:20]}"


def _folders(job: Job) -> set[Path]:
    """Return all folders that may contain privacy ledgers about the job's records.

    These include the folders that earlier versions of fl-sim used.
    """
    folder, earlier = _folder(job), _earlier_deal(job).parent
    joined = (one.name for one in (folder / _EARLIER).glob("records-*"))
    return {folder, earlier, *(ledgers_root() / name for name in joined)}


def _link_earlier(folder: Path, earlier: Path) -> None:
    """Write the name of ``earlier`` into ``folder``. Both folders have ledgers about the same records."""
    mark = folder / _EARLIER / earlier.name
    if earlier != folder and not mark.exists():
        for place in (folder.parent, folder, mark.parent):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch(mode=0o600)


def _deal(job: Job) -> str:
    """Return the digest of the deal: how the data set is read, and how its records are assigned to clients."""
    data = job.experiment.data
    digest = hashlib.sha256(f"{data if records_of(data) != data else ''} {fingerprint(data, job.root)}".encode())
    for array in (job.shards.records, job.shards.bounds):
        digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
    return digest.hexdigest()[:16]


def _earlier_deal(job: Job) -> Path:
    """Return the folder in which earlier versions of fl-sim stored the ledgers of the job's clients."""
    experiment = job.experiment
    dealt = {**experiment.chosen("partition", "clients"), "seed": experiment.seed_of_partition}
    if records_of(experiment.data) != experiment.data:
        dealt["data"] = experiment.data
    name = hashlib.sha256(json.dumps(dealt, sort_keys=True).encode()).hexdigest()[:16]
    return ledgers_root() / f"records-{fingerprint(records_of(experiment.data), job.root)[:20]}" / name


def _ledgers(deal: Path) -> Iterator[Ledger]:
    return (Ledger(RECORD_TERMS, path) for path in sorted(deal.glob("client-*.jsonl")))
