"""Partitions whose shards depend on the round: the protocol ``ByRound``, and its result ``MovingParts``."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.random import Generator

from partitions.assign import group
from partitions.scheme import Indices, Parts


@dataclass(frozen=True, eq=False)
class MovingParts:
    """The shards of all rounds. A record moves at most once, so it belongs to at most one client in each round.

    ``first``: the shards at the start. ``last``: the shards after all moves, for the same clients. ``rounds``: shape
    (records,). Before round ``rounds[j]``, record j belongs to its client in ``first``. From this round on, it belongs
    to its client in ``last``. A record may belong to no client in ``first`` or in ``last``.
    """

    first: Parts
    last: Parts
    rounds: Indices

    def in_round(self, server_round: int) -> Parts:
        """Return the shards of a round: ``first`` before all moves, ``last`` after all moves, else a mixture of both.

        Record indices are ascending in a mixture. ``server_round``: the number of the round, from 1.
        """
        if not (moves := self.moves_in) or server_round < moves[0]:
            return self.first
        if server_round >= moves[-1]:
            return self.last
        before, after = self._owners
        return group(np.where(server_round >= self.rounds, after, before), len(self.first))

    @cached_property
    def moves_in(self) -> tuple[int, ...]:
        """The rounds, ascending, in which at least one record changes its client; empty if no record moves."""
        before, after = self._owners
        return tuple(np.unique(self.rounds[before != after]).tolist())

    @cached_property
    def _owners(self) -> tuple[Indices, Indices]:
        """The clients of all records in ``first`` and in ``last``."""
        return owner_of(self.first, len(self.rounds)), owner_of(self.last, len(self.rounds))


@runtime_checkable
class ByRound(Protocol):
    """A partition whose shards depend on the round. Its method ``split`` returns the shards at the start.

    fl-sim refuses such a partition together with every setting that needs the same shards in all rounds.
    """

    def moving(self, labels: Indices, groups: Indices | None, num_partitions: int, rng: Generator) -> MovingParts:
        """Return the shards of all rounds. ``first`` equals the result of ``split`` with an equal generator.

        ``labels``: the label of each record, shape (records,). ``groups``: the source ID of each record, shape
        (records,), or None for data without sources. Raises ImpossibleSplit, a ValueError, if no such split exists.
        """
        ...


def owner_of(parts: Parts, num_records: int) -> Indices:
    """Return the client of each record, shape (``num_records``,); the number of clients means no client."""
    owner = np.full(num_records, len(parts))
    owner[parts.records] = parts.owners
    return owner
