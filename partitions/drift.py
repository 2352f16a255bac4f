"""Drift: the clients' data change during a run, because records move from one client to another."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from partitions.assign import STRICT
from partitions.group_skew import AnyPartition, check_inner
from partitions.label_skew import LabelK
from partitions.moving import MovingParts, owner_of
from partitions.quantity import Iid
from partitions.scheme import ByGroup, ImpossibleSplit, Indices, Parts, Scheme, uses_labels

_IID = Iid()
_TWO_CLASSES = LabelK(k=2)


@dataclass(frozen=True)
class Drift:
    """The shards drift from one partition to another: each record moves once, from its old client to its new client.

    ``over``: the partition at the start. ``to``: the partition at the end, for the same clients. ``first_round``: the
    last round before the first move. ``last_round``: the first round in which all records have moved. ``to_seed``: 0
    means that ``to`` gives the same shards as in a run with the partition ``to`` and the same seed; any other number
    gives another draw. For example, ``dirichlet:0.1`` may drift to another draw of ``dirichlet:0.1``.

    In round t, a share s = (t - first round) / (last round - first round), clipped to [0, 1], of the records has moved.
    This is true for each pair of clients: of m records that go from client i to client k, s m have moved, rounded up or
    down. The records of a pair move in a random order. So client i has about the share 1 - s of its first shard and the
    share s of its last shard. No record moves back, and in each round a record belongs to at most one client. The seed
    of the partition determines all shards. This rule is fl-sim's own; the literature has no common definition.

    Only training records move; the test set stays the same. Client accuracies use the class distributions of the round.
    Client states, such as SCAFFOLD's control variates, come from earlier shards. Settings that need fixed shards are
    refused. Runs that promise privacy are also refused: one client's epsilon would not cover a record that two clients
    have had.
    """

    kind: Literal["drift"] = field(default="drift", kw_only=True)
    over: Annotated[Scheme, AnyPartition()] = _IID
    to: Annotated[Scheme, AnyPartition()] = _TWO_CLASSES
    first_round: int = 5
    last_round: int = 15
    to_seed: int = 0

    title: ClassVar[str] = "drift"
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        for name, inner in (("over", self.over), ("to", self.to)):
            check_inner("drift", inner, name)
        if not 1 <= self.first_round < self.last_round:
            raise ImpossibleSplit(
                f"drift: first_round={self.first_round} and last_round={self.last_round}: take rounds from 1 with "
                "first_round below last_round; for a sudden change set two successive rounds"
            )
        if self.to_seed < 0:
            raise ImpossibleSplit(f"drift: to_seed={self.to_seed} must be at least 0")

    @property
    def uses_labels(self) -> bool:
        """True if one of the partitions ``over`` and ``to`` uses labels (see ``ByLabels``)."""
        return uses_labels(self.over) or uses_labels(self.to)

    def remarks(self, experiment: Any) -> list[str]:
        """Return warnings for the user if no record moves, or if the run ends before the last move."""
        found = list[str]()
        if getattr(experiment.algorithm, "is_central", False):  # a single client has all records, and no record moves
            return found
        if self.over == self.to and not self.to_seed:
            found.append(
                "partition.to equals partition.over, so no record moves: set partition.to_seed=1 for another draw"
            )
        if (rounds := experiment.rounds) < self.last_round:
            found.append(
                f"partition.last_round={self.last_round} is after the last round, {rounds}: the run ends with "
                f"{100 * self.share_in(rounds):.3g} % of the drift"
            )
        return found

    def share_in(self, server_round: int) -> float:
        """Return the share of records that have moved before or in round ``server_round``, in [0, 1]."""
        done = (server_round - self.first_round) / (self.last_round - self.first_round)
        return min(1.0, max(0.0, done))

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Sequence[Indices]:
        """Return the record indices of every client before the first move, as ``over`` assigns them."""
        return self.moving(labels, None, num_partitions, rng).first

    def split_groups(self, labels: Indices, groups: Indices, num_partitions: int, rng: Generator) -> Sequence[Indices]:
        """Return the record indices of every client before the first move, as ``over`` assigns them.

        ``groups``: the source ID of each record, used only by partitions with the interface ``ByGroup``.
        """
        return self.moving(labels, groups, num_partitions, rng).first

    def moving(self, labels: Indices, groups: Indices | None, num_partitions: int, rng: Generator) -> MovingParts:
        """Return the shards of all rounds (see ``ByRound``).

        Raises ImpossibleSplit if ``over`` or ``to`` cannot assign the records to ``num_partitions`` clients.
        """
        # Each partition gets a copy of rng with the same state as in a run with only this partition, without drift.
        same, another = copy.deepcopy(rng), copy.deepcopy(rng)
        key = rng.integers(2**32, size=4).tolist()
        if self.to_seed:
            another = np.random.default_rng([*key, self.to_seed])
        first = _parts(self.over, labels, groups, num_partitions, same)
        last = _parts(self.to, labels, groups, num_partitions, another)
        before, after = (owner_of(parts, len(labels)) for parts in (first, last))
        done = _done_by(before * (num_partitions + 1) + after, np.random.default_rng([*key, 0]))
        rounds = self.first_round + np.ceil(done * (self.last_round - self.first_round)).astype(np.int64)
        return MovingParts(first, last, rounds)


def _parts(scheme: Scheme, labels: Indices, groups: Indices | None, num_partitions: int, rng: Generator) -> Parts:
    if groups is not None and isinstance(scheme, ByGroup):
        parts = scheme.split_groups(labels, groups, num_partitions, rng)
    else:
        parts = scheme.split(labels, num_partitions, rng)
    return parts if isinstance(parts, Parts) else Parts.of([np.asarray(part) for part in parts])


def _done_by(pair: Indices, rng: Generator) -> NDArray[np.float64]:
    """Return the time at which each record moves, in (0, 1]: 0 is ``first_round``, and 1 is ``last_round``.

    ``pair``: a number for the pair (old client, new client) of each record. The m records of a pair have the times
    (r + u) / m for r = 0..m-1, in a random order, with one random u in (0, 1] for the pair. So the number of records of
    the pair that have moved at time s is s m, rounded up or down, with the mean s m.
    """
    order = rng.permutation(len(pair))
    order = order[np.argsort(pair[order], kind="stable")]  # sorted by pair, in a random order within each pair
    _, starts, place, sizes = np.unique(pair[order], return_index=True, return_inverse=True, return_counts=True)
    rank = np.arange(len(pair)) - starts[place]
    done = np.empty(len(pair))
    done[order] = (rank + 1 - rng.random(len(sizes))[place]) / sizes[place]
    return done
