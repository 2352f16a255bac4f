"""Shards: how the training records of a data set are divided among clients.

Every result of a partition or of an algorithm's own rule is checked here before it is used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.naming import is_own, without_settings
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.fixed_shards import has_moving_shards
from fl_sim.kinds import SettingAside, is_own_kind, kind_of
from fl_sim.own_code import in_one_line
from fl_sim.seeding import rng, seeded_alone
from fl_sim.types import Dataset
from partitions import ByGroup, ByLabels, ByRound, MovingParts, Parts, RecordSkew, Scheme
from strategies.algorithm import Dealing


def shards_of(dataset: Dataset, scheme: Scheme, num_clients: int, seed: int) -> Parts:
    """Return the indices of each client's training records. Raises UserError for an impossible partition."""
    return _split(dataset, np.arange(len(dataset.train)), scheme, num_clients, seed)


def dealt_shards(experiment: Experiment, dataset: Dataset) -> Parts:
    """Return the shards: each client's training records, by the partition or by the algorithm's own rule."""
    algorithm, seed = experiment.algorithm, experiment.seed_of_partition
    if experiment.is_central:
        return Parts.of([np.arange(len(dataset.train))])
    if not isinstance(algorithm, Dealing):
        return shards_of(dataset, experiment.partition, experiment.clients, seed)

    def split(records: NDArray[np.int64]) -> Parts:
        if len(np.unique(records)) < len(records):
            raise UserError(
                f"algorithm {kind_of(algorithm)}: its method deal passes an index of the training set to split more "
                "than once: pass each index at most once"
            )
        return _split(dataset, records, experiment.partition, experiment.clients, seed)

    try:
        with seeded_alone(seed, "partition"):
            shards = algorithm.deal(dataset, split, seed)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"algorithm {kind_of(algorithm)}: deal failed with {in_one_line(error)}") from error
    return _checked(shards, experiment.num_clients, len(dataset.train), f"algorithm {kind_of(algorithm)}")


def moving_shards(experiment: Experiment, dataset: Dataset) -> MovingParts | None:
    """Return the shards of all rounds; None if shards do not depend on the round."""
    if not (isinstance(experiment.partition, ByRound) and has_moving_shards(experiment)):
        return None
    return moving_of(dataset, experiment.partition, experiment.clients, experiment.seed_of_partition)


def without_forgotten(forgotten: Sequence[int], shards: Parts) -> Parts:
    """Return ``shards`` without the records of the clients in ``forgotten``.

    Raises UserError if no record is left.
    """
    if not forgotten:
        return shards
    left = shards.where(np.repeat(~np.isin(np.arange(len(shards)), forgotten), shards.sizes))
    if not len(left.records):
        raise UserError(
            f"forgotten={'+'.join(map(str, forgotten))} removes the records of all clients that have "
            "records: leave at least one of these clients out of the list"
        )
    return left


def without_left_out(experiment: Experiment, shards: Parts) -> Parts:
    """Return ``shards`` without the records that the setting ``left_out`` leaves out.

    A random number decides for each record. This number depends on the seed and the record's index, not on the
    partition. Raises UserError if no record is left. Also raises UserError if a run promises privacy for the user's own
    records, because its published seed would reveal which records were left out.
    """
    if not experiment.left_out:
        return shards
    what = f"left_out={experiment.left_out:g}"
    if experiment.is_private and is_own(experiment.data):
        raise UserError(
            f"{what} follows from the seed, which is published, and this run promises privacy for the records of "
            f"{without_settings(experiment.data)}: the seed would reveal which of them trained the model; remove "
            "the setting left_out, or use a public data set"
        )
    coins = rng(experiment.seed, "left out").random(1 + int(shards.records.max()))
    left = shards.where(coins[shards.records] >= experiment.left_out)
    if not len(left.records):
        raise UserError(f"{what} leaves no training record to any client: use a smaller number")
    return left


def server_records(experiment: Experiment, dataset: Dataset) -> NDArray[np.int64]:
    """Return the indices of the training records that the server keeps for itself, in ascending order.

    The settings ``forgotten`` and ``left_out`` do not change these indices. Raises UserError if clients would have no
    records left.
    """
    held, counts = len(dataset.train), dict[str, int]()
    for name in ("aggregator", "algorithm"):
        if isinstance(part := getattr(experiment, name), SettingAside) and part.num_set_aside:
            counts[f"{name} {kind_of(part)}"] = part.num_set_aside
    if len(counts) > 1:
        raise UserError(
            f"{' and '.join(counts)} both set training records aside for the server, but it has one set of records: "
            "leave one of them out"
        )
    count = sum(counts.values())
    if count >= held:
        raise UserError(
            f"{''.join(counts)} sets {count:,} training records aside, and {dataset.name} has {held:,}: "
            "set fewer records aside, so that clients have records, too"
        )
    drawn = rng(experiment.seed_of_partition, "records of the server")
    return np.sort(drawn.choice(held, count, replace=False)) if count else np.zeros(0, dtype=np.int64)


def _split(dataset: Dataset, records: NDArray[np.int64], scheme: Scheme, num_clients: int, seed: int) -> Parts:
    """Partition the training records with the indices ``records`` by the rule ``scheme``.

    The result has one array for each client: the positions of the client's records in the array ``records``.
    """
    labels, groups, giver = dataset.train.labels[records], dataset.train.groups, f"partition {kind_of(scheme)}"

    def drawn() -> Parts:
        def draw(coins: np.random.Generator) -> object:
            if groups is not None and isinstance(scheme, ByGroup):
                return scheme.split_groups(labels, groups[records], num_clients, coins)
            return scheme.split(labels, num_clients, coins)

        return _checked(_drawn(dataset, scheme, num_clients, seed, draw), num_clients, len(labels), giver)

    parts = drawn()
    again = drawn() if is_own_kind(scheme) else parts
    if not _are_equal(parts, again):
        raise UserError(_not_repeated(giver, "split"))
    return parts


def moving_of(dataset: Dataset, scheme: ByRound, num_clients: int, seed: int) -> MovingParts:
    """Return the shards of all rounds, for a partition whose shards depend on the round.

    Raises UserError for an impossible partition.
    """
    giver, num_records = f"partition {kind_of(scheme)}", len(dataset.train)

    def drawn() -> MovingParts:
        def draw(coins: np.random.Generator) -> object:
            return scheme.moving(dataset.train.labels, dataset.train.groups, num_clients, coins)

        found = _drawn(dataset, scheme, num_clients, seed, draw)
        if not isinstance(found, MovingParts):
            raise UserError(f"{giver}: moving gave {type(found).__name__}; it must give partitions.MovingParts")
        rounds = np.asarray(found.rounds)
        if rounds.shape != (num_records,) or rounds.dtype.kind not in "iu":
            raise UserError(
                f"{giver}: moving gave rounds of shape {rounds.shape} and type {rounds.dtype}; it must give one whole "
                f"number for each of {num_records:,} records"
            )
        first, last = (_checked(parts, num_clients, num_records, giver) for parts in (found.first, found.last))
        return MovingParts(first, last, rounds)

    moving = drawn()
    again = drawn() if is_own_kind(scheme) else moving
    same = _are_equal(moving.first, again.first) and _are_equal(moving.last, again.last)
    if not (same and np.array_equal(moving.rounds, again.rounds)):
        raise UserError(_not_repeated(giver, "moving"))
    return moving


def _drawn(
    dataset: Dataset,
    scheme: Scheme | ByRound,
    num_clients: int,
    seed: int,
    draw: Callable[[np.random.Generator], object],
) -> object:
    """Return the result of ``draw``, a function that calls a method of the partition ``scheme`` with a generator.

    Raises UserError if the partition is impossible for ``dataset``, or if its code fails.
    """
    giver = f"partition {kind_of(scheme)}"
    if isinstance(scheme, ByLabels) and scheme.uses_labels and not dataset.has_labels:
        raise UserError(
            f"partition={kind_of(scheme)} divides records by their labels, and {without_settings(dataset.name)} has no "
            "labels: set data.label=COLUMN, or set partition=iid, natural (by the column data.client) or quantity:0.5"
        )
    try:
        if isinstance(scheme, RecordSkew) and num_clients > 1:
            scheme.check_records(dataset.input_shape, dataset.num_classes)
        coins = rng(seed, "partition")
        with seeded_alone(seed, "partition"):
            return draw(coins)
    except ValueError as error:
        raise UserError(f"{giver} of {dataset.name} over {num_clients} clients: {error}") from error
    except Exception as error:
        raise UserError(f"{giver} failed with {in_one_line(error)}") from error


def _are_equal(parts: Parts, others: Parts) -> bool:
    return np.array_equal(parts.records, others.records) and np.array_equal(parts.bounds, others.bounds)


def _not_repeated(giver: str, method: str) -> str:
    return (
        f"{giver} gave different shards in two calls with the same seed: take random numbers from the generator that "
        f"{method} receives, or from the global generators of torch, NumPy or Python, which are seeded"
    )


def _checked(parts: object, num_clients: int, num_records: int, giver: str) -> Parts:
    """Check ``parts``, the result of a partition, and return them as shards.

    Raises UserError if ``parts`` are not disjoint arrays of record indices, one per client. ``giver``: the name of the
    partition or algorithm that made the parts, for the error message.
    """
    if isinstance(parts, Parts):
        laid_out = parts
    else:
        wanted = "it must give a list of arrays of record indices, one for each client"
        if isinstance(parts, Mapping | str) or not isinstance(parts, Sequence | np.ndarray):
            way = ": return list(parts.values())" if isinstance(parts, Mapping) else ""
            raise UserError(f"{giver} gave {type(parts).__name__}; {wanted}{way}")
        try:
            laid_out = Parts.of([np.asarray(part) for part in parts])
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{giver} gave shards that cannot be arrays of indices ({in_one_line(error)}); {wanted}"
            ) from error
    if len(laid_out) != num_clients:
        raise UserError(f"{giver} gave {len(laid_out)} shards for {num_clients} clients: it must give one for each")
    indices = laid_out.records
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or not ((indices >= 0) & (indices < num_records)).all():
        raise UserError(f"{giver} gave shards that are not arrays of record indices from 0 to {num_records - 1}")
    if len(indices) and (counts := np.bincount(indices)).max() > 1:
        raise UserError(f"{giver} gave record {int(counts.argmax())} to several clients: shards must be disjoint")
    if not len(indices):
        raise UserError(f"{giver} gave no record to any of {num_clients} clients: give records to at least one client")
    return replace(laid_out, records=indices.astype(np.int64, copy=False))
