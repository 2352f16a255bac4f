"""Property inference on a pool of synthetic records: an attacker estimates the class proportions of each client.

Property inference (Ateniese et al. 2015; Wang et al. 2019 for federated learning) attacks a property of a client's
whole set of records. In a method such as DA-FL, each client publishes synthetic records. Except for noise, the number
of synthetic records of a class is proportional to the client's number of real records of this class. So the attacker
reads the class proportions from the pool. The epsilon of the pool does not prevent this, because it protects single
records. The proportions depend on all n records of a client. For n records together, the guarantee is only n times
epsilon (group privacy; Dwork, Roth 2014, theorem 2.2).
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.kinds import kind_of
from fl_sim.threats.finished import FinishedRun


@runtime_checkable
class SelectsLabels(Protocol):
    """The interface of the settings of a preprocessing stage in which each client publishes synthetic records.

    The labels of these records are selected with differential privacy. In ``result.json``,
    ``preprocess.clients[i].counts`` contains the number of published records of client i in each class.
    """

    def labels_epsilon(self, num_classes: int) -> float | None:
        """Return the epsilon, per record and at delta 0, of the selection of labels; None without noise."""


@dataclass(frozen=True)
class Guessed:
    """The success of property inference over K clients with records, and of baselines that do not use the pool.

    ``clients``: K. ``silent``: the number of clients without synthetic records; for these, the attacker guesses the
    proportions of the whole pool. ``held``: the fraction of pairs (client, class) for which the attacker guesses
    correctly whether the client holds the class. ``held_by_chance``: the same for a baseline that guesses "always" or
    "never", whichever is better. ``largest``: the fraction of clients whose largest class is guessed correctly.
    ``largest_by_chance``: the same for a baseline that guesses one class for all clients, the class that is right most
    often. ``distance``: the mean total variation distance between guessed and true proportions, in [0, 1].
    ``distance_by_chance``: the same for a baseline that guesses the class proportions of all clients' records.
    """

    clients: int
    silent: int
    held: float
    held_by_chance: float
    largest: float
    largest_by_chance: float
    distance: float
    distance_by_chance: float


def pool_of(finished: FinishedRun) -> tuple[SelectsLabels, NDArray[np.int64]]:
    """Return the settings of the preprocessing, and the number of published synthetic records, (clients, classes).

    Raises UserError if no client of the run published synthetic records.
    """
    settings = finished.job.experiment.preprocess
    if not isinstance(settings, SelectsLabels):
        raise UserError(
            f"the run in {finished.out} has preprocess={kind_of(settings)}, and this attack reads a pool of synthetic "
            "records: give a run with preprocess=da-fl"
        )
    counts = np.array([one["counts"] for one in finished.facts["preprocess"]["clients"]], dtype=np.int64)
    if not counts.any():
        raise UserError(f"no client of {finished.out} published a synthetic record: there is nothing to attack")
    return settings, counts


def held_by_clients(finished: FinishedRun) -> NDArray[np.int64]:
    """Return the true numbers of each client's records in each class, (clients, classes). These numbers are private."""
    num_classes, runtime = finished.job.dataset.num_classes, finished.runtime
    clients = range(finished.job.experiment.num_clients)
    return np.array([runtime.own_records(client).class_counts(num_classes) for client in clients], dtype=np.int64)


def infer(published: NDArray[np.int64], held: NDArray[np.int64]) -> Guessed:
    """Return the success of the attacker.

    ``published``: numbers of synthetic records, (clients, classes). ``held``: the clients' true numbers of records,
    (clients, classes). Clients without records are left out. Both arrays must contain at least one record.
    """
    there = held.sum(1) > 0
    published, held = published[there], held[there]
    silent = published.sum(1) == 0
    guessed = np.where(silent[:, np.newaxis], published.sum(0), published)
    share, truth = guessed / guessed.sum(1, keepdims=True), held / held.sum(1, keepdims=True)
    of_all = held.sum(0) / held.sum()
    holds, largest = held > 0, held.argmax(1)
    return Guessed(
        clients=len(held),
        silent=int(silent.sum()),
        held=float(((guessed > 0) == holds).mean()),
        held_by_chance=float(max(holds.mean(), 1 - holds.mean())),
        largest=float((guessed.argmax(1) == largest).mean()),
        largest_by_chance=float(np.bincount(largest).max() / len(largest)),
        distance=float(np.abs(share - truth).sum(1).mean() / 2),
        distance_by_chance=float(np.abs(of_all - truth).sum(1).mean() / 2),
    )
