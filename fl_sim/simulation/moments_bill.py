"""What the private moments of features cost a record, and how that is said."""

from typing import Final

from clients.dafl.settings import DaFl
from clients.policy import open_ledger
from clients.private_moments import Protection, charge_name
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.job import Job
from fl_sim.privacy.accounting import Adjacency, none_if_infinite
from fl_sim.privacy.ledger import Ledger, Terms
from fl_sim.simulation.client_ledgers import Together, all_together, ledger_path, together_in_words
from fl_sim.simulation.summaries import release_name
from fl_sim.types import Params

_COVERS: Final = (
    "the moments of features that each client sends once, after training, and what is computed from nothing but them "
    "and the model of the last round. Each record of each client is protected; clients are disjoint, so the figure "
    "holds for each of them."
)
_NOT_TRAINING: Final = (
    "Training itself is NOT private: in every round clients train on their raw records and send updates without noise, "
    "so the model whose head is trained again, and the features, may show any record."
)
_TRAINING_ELSEWHERE: Final = (
    "Training on synthetic records, whose cost is in the other statement: both together cost the sum at most."
)
_PUBLIC: Final = "How many records a client holds is treated as public."


def statement(job: Job, protection: Protection, identity: str, together: Together | None) -> dict[str, object]:
    """Return what ``result.json`` says: what one client's release costs each of its records.

    ``identity``: of this run's releases, by which bills know them again. ``together``: what all releases about the same
    records cost, None where that is not known here.
    """
    preprocess, delta = job.experiment.preprocess, protection.delta
    on_synthetic = isinstance(preprocess, DaFl) and preprocess.train_on == "synthetic"
    limits = f"{_TRAINING_ELSEWHERE if on_synthetic else _NOT_TRAINING} {_PUBLIC}"
    ledger = Ledger(Terms("record", Adjacency.ADD_OR_REMOVE_ONE, delta))
    ledger.charge(protection.event, release="class moments", noise="")
    said = ledger.statement(
        covers=_COVERS,
        does_not_cover=limits,
        simulation_only=protection.noise == "seeded",
        planned={protection.event: 1},
    )
    others = together is None or together.shares > 1
    return said | {
        "ledger": identity,
        "epsilon_together": together and none_if_infinite(together.epsilon),
        "shares_together": together and together.shares,
        "guarantee": str(said["guarantee"]) + (together_in_words(together, delta) if others else ""),
    }


def paid_together(job: Job, protection: Protection, params: Params) -> Together | None:
    """Return what the clients' ledgers hold about the job's records, None where they do not hold what was released.

    ``params``: the model under which clients were asked for moments. A client elsewhere has its ledger with it.
    """
    try:
        for client, shard in enumerate(job.shards):
            path = ledger_path(job, client)
            charged = charge_name(release_name(job.experiment, client, params))
            if len(shard) and not (path.exists() and charged in {one.release for one in open_ledger(path).charges}):
                return None
        return all_together(job, protection.delta)
    except (RunError, UserError):
        return None
