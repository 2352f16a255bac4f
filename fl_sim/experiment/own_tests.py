"""Chooses each client's test records: by source (such as a hospital), by class distribution, or from its shard."""

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.seeding import rng
from fl_sim.training.evaluation import OwnTests
from fl_sim.types import Dataset, Examples
from partitions import Parts, label_counts
from partitions.assign import group

FEWEST: Final = 10
"""The smallest number of test records that ``with_class_shares`` gives to a client, if the test set has enough."""

MOST_NAMED: Final = 20
"""The largest number of sources, such as hospitals, for which a table has a column with the name of the source."""


def of_sources(dataset: Dataset, shards: Parts) -> Parts:
    """Return test records for each client, from the same sources (writers, hospitals) as its training records.

    The test records of a source that several clients share are divided equally among them, class by class. The result
    has indices into ``dataset.test``. Raises UserError if the sources are unknown, or if no test record is from a
    source of a client. Also raises UserError if two clients share a source, and one of the two has a further source.
    """
    if dataset.train.groups is None or dataset.test.groups is None:
        raise UserError(
            f"evaluate.clients=own needs the source of each training and test record, but {dataset.name} does not name "
            "them: set evaluate.clients=class-shares or pooled:0.25, or name the sources (docs/data.md)"
        )
    found = OwnTests.of(shards, dataset.train.groups, dataset.test.groups, dataset.test.labels)
    if found is None:
        raise UserError(
            "evaluate.clients=own needs clients with one source each, or sources with one client each, but here "
            "several clients share a source and have other sources, too: set partition=natural or domain, or "
            "evaluate.clients=class-shares"
        )
    if not found.counts.any():
        raise UserError(
            f"evaluate.clients=own: no test record of {dataset.name} is from a source of a client; set "
            "evaluate.clients=class-shares or pooled:0.25"
        )
    return group(np.where(found.owners < 0, len(shards), found.owners), len(shards))


def with_class_shares(dataset: Dataset, shards: Parts, seed: int, *, keeps_sources: bool = False) -> Parts:
    """Return test records for each client, with the class distribution of the client's training records.

    The result has indices into ``dataset.test``. A client with n training records gets about s * n test records, and at
    least ``FEWEST``. The factor s is the same for all clients: for each class, the number of test records is divided by
    the number of training records, and s is the smallest of these ratios. No test record is given to the same client
    twice. Two clients get the same test record only if a class has too few test records. ``keeps_sources``: True if
    each client has training records of one source only, such as a domain. In this case, the rules above hold within
    each source, and a client gets test records of its source only. Raises UserError if ``keeps_sources`` is True and
    the sources are unknown.
    """
    held = label_counts(dataset.train.labels, shards, dataset.num_classes)
    everything = np.arange(len(dataset.test))
    if not keeps_sources:
        return Parts.of(_class_shares(held, everything, dataset.test.labels, rng(seed, "own test records")))
    if dataset.train.groups is None or dataset.test.groups is None:
        raise UserError(
            f"evaluate.clients=class-shares takes test records of each client's own source, but {dataset.name} does "
            "not name the sources of its test records: name them (docs/data.md), or set evaluate.clients=pooled:0.25"
        )
    source_of = _only_sources(shards, dataset.train.groups)
    if source_of is None:
        raise UserError(
            "evaluate.clients=class-shares takes test records of each client's own source, but some clients have "
            "training records of several sources: set evaluate.clients=pooled:0.25"
        )
    records = [everything[:0]] * len(shards)
    for source in np.unique(source_of[shards.sizes > 0]).tolist():
        of_test = np.flatnonzero(dataset.test.groups == source)
        clients = np.flatnonzero((source_of == source) & (shards.sizes > 0))
        coins = rng(seed, "own test records", source)
        drawn = _class_shares(held[clients], of_test, dataset.test.labels[of_test], coins)
        for client, own in zip(clients.tolist(), drawn, strict=True):
            records[client] = own
    return Parts.of(records)


def _class_shares(
    held: NDArray[np.int64], records: NDArray[np.int64], tested: NDArray[np.int64], coins: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Select test records for each client, with the class distribution of the client's training records.

    Return one array of indices for each client, in ascending order. ``held``: the number of training records, (clients,
    classes). ``records``: the indices of the available test records. ``tested``: the labels of these records.
    """
    there = np.bincount(tested, minlength=held.shape[1])
    usable = held * (there > 0)  # a class without test records is left out
    sizes, of_class = usable.sum(axis=1), usable.sum(axis=0)
    share = float((there[of_class > 0] / of_class[of_class > 0]).min()) if of_class.any() else 0.0
    wanted = np.where(sizes > 0, np.maximum(np.floor(share * sizes), FEWEST), 0)
    exact = usable * (wanted / np.maximum(sizes, 1))[:, None]
    counts = np.minimum(_rounded(exact, np.where(wanted > FEWEST, wanted, 0), there), there)
    drawn = []
    starts = np.zeros(held.shape[1], dtype=np.int64)
    pools = [coins.permutation(records[tested == label]) for label in range(held.shape[1])]
    for row in counts.tolist():
        own = []
        for label, count in enumerate(row):
            if count:
                own.append(pools[label][(starts[label] + np.arange(count)) % len(pools[label])])
                starts[label] += count
        drawn.append(np.sort(np.concatenate(own)) if own else np.zeros(0, dtype=np.int64))
    return drawn


def _rounded(exact: NDArray[np.float64], totals: NDArray[np.float64], there: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round each client's number of test records per class to a whole number.

    ``exact``: the numbers before rounding, (clients, classes). The function rounds the cumulative sums of each row, not
    the numbers, so that a client's total stays the same. ``there``: the number of available test records of each class.
    ``totals``: the number of test records of each large client, above ``FEWEST``; 0 for all other clients. All large
    clients together must not get more records of a class than are available. If rounding leads to more, the large
    clients whose numbers were rounded up most get one record less.
    """
    bounds = np.rint(np.cumsum(exact, axis=1))
    counts = np.diff(bounds, axis=1, prepend=0).astype(np.int64)
    large = totals > 0
    for label in np.flatnonzero(counts[large].sum(axis=0) > there).tolist():
        surplus = int(counts[large, label].sum() - there[label])
        raised = np.where(large & (counts[:, label] > 0), counts[:, label] - exact[:, label], -np.inf)
        counts[np.argsort(-raised, kind="stable")[:surplus], label] -= 1
    return counts


def members(num_clients: int, held_out: int, seed: int) -> NDArray[np.int64]:
    """Return the IDs of the clients that may take part in rounds, in ascending order.

    ``held_out``: the number of randomly chosen clients that never take part.
    """
    return np.sort(rng(seed, "held-out clients").permutation(num_clients)[held_out:])


def sources_of(dataset: Dataset, shards: Parts) -> tuple[str, ...]:
    """Return the name of each client's source, such as a hospital, for a table of results.

    A client without records has the name "". The result is empty for unknown names, for clients with records of several
    sources, for a single source, and for more than ``MOST_NAMED`` sources.
    """
    groups, held = dataset.train.groups, shards.sizes > 0
    if groups is None or not dataset.sources:
        return ()
    source_of = _only_sources(shards, groups)
    if source_of is None or not 2 <= len(np.unique(source_of[held])) <= MOST_NAMED:
        return ()
    return tuple(dataset.sources[number] if has else "" for number, has in zip(source_of, held, strict=True))


def num_shared(tests: Parts) -> int:
    """Return the number of test records that belong to more than one client."""
    _, times = np.unique(tests.records, return_counts=True)
    return int((times > 1).sum())


def merged(dataset: Dataset) -> Dataset:
    """Return a copy of ``dataset`` that also has the test records as training records, as in PFLlib's protocol."""
    parts = (dataset.train, dataset.test)
    groups = [part.groups for part in parts if part.groups is not None]
    train = Examples(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate(groups) if len(groups) == 2 else None,
    )
    return replace(dataset, train=train)


def _only_sources(shards: Parts, groups: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the only source of each client, such as a hospital, as an index, shape (clients,).

    The index is -1 for a client without records. ``groups``: the index of the source of each training record. The
    result is None if a client has records of several sources.
    """
    source_of = np.full(len(shards), -1, dtype=np.int64)
    source_of[shards.owners] = groups[shards.records]
    return source_of if np.array_equal(source_of[shards.owners], groups[shards.records]) else None


def cut(dataset: Dataset, shards: Parts, share: float, seed: int) -> tuple[Dataset, Parts, Parts]:
    """Cut each client's records into training and test records at random.

    Return three values: the data set, each client's training records, and each client's test records. The test set of
    this data set consists of all clients' test records. ``share``: the share of a client's records that become test
    records. The share is rounded to whole records; a client with two or more records gets at least one test record.
    """
    is_test = np.zeros(len(shards.records), dtype=bool)
    for client in np.flatnonzero(shards.sizes > 1).tolist():
        own = is_test[shards.bounds[client] : shards.bounds[client + 1]]
        count = min(max(1, round(share * len(own))), len(own) - 1)
        own[rng(seed, "own test records", client).permutation(len(own))[:count]] = True
    if not is_test.any():
        raise UserError(
            f"evaluate.clients=pooled:{share:g} finds no client with two records: use fewer clients, or "
            "evaluate.clients=class-shares"
        )
    tests = shards.where(is_test)
    cut_out = replace(dataset, test=dataset.train.take(tests.records))
    return cut_out, shards.where(~is_test), Parts(np.arange(len(tests.records)), tests.bounds)
