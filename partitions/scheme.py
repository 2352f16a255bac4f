"""Protocols of partitions, and the result of a partition: ``Parts``, the record indices of every client."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias, overload, runtime_checkable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]
"""An array of labels, of counts or of record indices."""

Inputs: TypeAlias = NDArray[np.float32]
"""An array of normalised inputs, or of one standard deviation per channel."""


class ImpossibleSplit(ValueError):  # noqa: N818 (names what happened)
    """An error: no partition meets the request. The message names the numbers and the cure."""


class Scheme(Protocol):
    """A partition: a rule that assigns records to clients, from this package or the user's own."""

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Sequence[Indices]:
        """Return ``num_partitions`` disjoint, sorted arrays of record indices. ``labels``: shape (records,).

        The result is a list or ``partitions.Parts``, which takes less memory if there are many clients. Raises
        ImpossibleSplit, a ValueError, if no such split exists.
        """
        ...


@runtime_checkable
class ByGroup(Protocol):
    """A partition that uses the source of each record. ``split`` is called if the data set does not name sources."""

    def split_groups(self, labels: Indices, groups: Indices, num_partitions: int, rng: Generator) -> Sequence[Indices]:
        """Return ``num_partitions`` disjoint, sorted arrays of record indices. ``labels``: shape (records,).

        ``groups``: shape (records,), the number of each record's source: its writer, hospital or device. Raises
        ImpossibleSplit, a ValueError, if no such split exists.
        """
        ...


@runtime_checkable
class FeatureSkew(Protocol):
    """A partition that changes the inputs of each client, for example by noise, rotation or other colours."""

    def seen_by(self, client: int, num_partitions: int, inputs: Inputs, std: Inputs, rng: Generator) -> Inputs:
        """Return the changed inputs of ``client`` (numbered from 0), made from its ``inputs`` of shape (records, ...).

        Inputs are normalised: a difference of 1 in raw inputs is 1 / ``std`` here. ``std`` has one value per channel.
        """
        ...


@runtime_checkable
class EvaluationSkew(Protocol):
    """A partition that also changes the test inputs on which the global model is measured."""

    def evaluated_on(self, num_partitions: int, inputs: Inputs, std: Inputs, rng: Generator) -> Inputs:
        """Return the changed test inputs, made from ``inputs`` of shape (records, ...); see ``FeatureSkew.seen_by``."""
        ...


@dataclass(frozen=True, eq=False)
class Parts(Sequence[Indices]):
    """The record indices of every client, stored in one array: ``parts[i]`` is a view of the indices of client i.

    Each client takes eight bytes and no Python object. ``records``: the indices of client 0, then of client 1, and so
    on. ``bounds``: (clients + 1,), the position in ``records`` where each client's indices start, and the length of
    ``records``.
    """

    records: Indices
    bounds: Indices

    @classmethod
    def of(cls, parts: Iterable[Indices]) -> Self:
        """Return the index arrays ``parts``, one per client, joined into one ``Parts``."""
        each = list(parts)
        records = np.concatenate([part for part in each if len(part)] or [np.zeros(0, dtype=np.int64)])
        return cls(records, np.cumsum([0, *map(len, each)], dtype=np.int64))

    def where(self, kept: NDArray[np.bool_]) -> "Parts":
        """Return the parts with only those records whose entry in ``kept`` is True, in the same order.

        ``kept``: one bool for each entry of ``records``.
        """
        return Parts(self.records[kept], np.concatenate([[0], np.cumsum(kept)])[self.bounds])

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, client: int) -> Indices: ...
    @overload
    def __getitem__(self, client: slice) -> list[Indices]: ...
    def __getitem__(self, client: int | slice) -> Indices | list[Indices]:
        """Return the record indices of one client, or a list of them for a slice of clients."""
        if isinstance(client, slice):
            return [self[one] for one in range(len(self))[client]]
        one = range(len(self))[client]  # allows negative numbers, raises IndexError beyond the end
        return self.records[self.bounds[one] : self.bounds[one + 1]]

    @property
    def sizes(self) -> Indices:
        """The number of records of each client, shape (clients,)."""
        return np.diff(self.bounds)

    @property
    def owners(self) -> Indices:
        """The client of each entry of ``records``, shape (records,)."""
        return np.repeat(np.arange(len(self)), self.sizes)
