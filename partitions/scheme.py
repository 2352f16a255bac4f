"""Schemes: protocols of a split, and its result, the record indices of every client as ``Parts``."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias, overload, runtime_checkable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]
"""Labels, counts or record indices."""

Inputs: TypeAlias = NDArray[np.float32]
"""Normalised inputs, or one standard deviation per channel."""


class ImpossibleSplit(ValueError):  # noqa: N818 (names what happened)
    """No split meets the request; the message names the numbers and the cure."""


class Scheme(Protocol):
    """A split of a data set over clients: one of this package, or the user's own."""

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Sequence[Indices]:
        """Return ``num_partitions`` disjoint sorted index arrays into ``labels``, shape (records,).

        As a list, or as ``partitions.Parts``, which costs less where clients are many. Raises ImpossibleSplit, a
        ValueError, where that cannot be done.
        """
        ...


@runtime_checkable
class ByGroup(Protocol):
    """A scheme that uses the source of each record: ``split`` is for data sets that do not name sources."""

    def split_groups(self, labels: Indices, groups: Indices, num_partitions: int, rng: Generator) -> Sequence[Indices]:
        """Return ``num_partitions`` disjoint sorted index arrays into ``labels``, shape (records,).

        ``groups``: a number for each record, shape (records,): its writer, hospital or device. Raises ImpossibleSplit,
        a ValueError, where that cannot be done.
        """
        ...


@runtime_checkable
class FeatureSkew(Protocol):
    """A scheme that changes the inputs of each client: noise, another angle, other colours."""

    def seen_by(self, client: int, num_partitions: int, inputs: Inputs, std: Inputs, rng: Generator) -> Inputs:
        """Return new inputs of ``client``, from 0, made of its ``inputs``, shape (records, ...).

        Inputs are normalised, so 1 of a raw input is 1 / ``std`` here; ``std`` has one value per channel.
        """
        ...


@runtime_checkable
class EvaluationSkew(Protocol):
    """A scheme that changes the test inputs of the global model, too."""

    def evaluated_on(self, num_partitions: int, inputs: Inputs, std: Inputs, rng: Generator) -> Inputs:
        """Return new test inputs made of ``inputs``, shape (records, ...), as ``FeatureSkew.seen_by`` for a client."""
        ...


@dataclass(frozen=True, eq=False)
class Parts(Sequence[Indices]):
    """The record indices of every client in one array: ``parts[i]`` is a view of those of client i.

    A client costs eight bytes, and no Python objects. ``records``: the indices of client 0, then of client 1, and so
    on. ``bounds``, (clients + 1,): the start of each client's indices, and the end of all.
    """

    records: Indices
    bounds: Indices

    @classmethod
    def of(cls, parts: Iterable[Indices]) -> Self:
        """Return ``parts`` joined into one array."""
        each = list(parts)
        records = np.concatenate([part for part in each if len(part)] or [np.zeros(0, dtype=np.int64)])
        return cls(records, np.cumsum([0, *map(len, each)], dtype=np.int64))

    def where(self, kept: NDArray[np.bool_]) -> "Parts":
        """Return the parts with only those ``records`` that are ``kept``, in the same order."""
        return Parts(self.records[kept], np.concatenate([[0], np.cumsum(kept)])[self.bounds])

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, client: int) -> Indices: ...
    @overload
    def __getitem__(self, client: slice) -> list[Indices]: ...
    def __getitem__(self, client: int | slice) -> Indices | list[Indices]:
        """Return the records of one client, or of several."""
        if isinstance(client, slice):
            return [self[one] for one in range(len(self))[client]]
        one = range(len(self))[client]  # allows negative numbers, raises IndexError beyond the end
        return self.records[self.bounds[one] : self.bounds[one + 1]]

    @property
    def sizes(self) -> Indices:
        """The number of records of each client."""
        return np.diff(self.bounds)

    @property
    def owners(self) -> Indices:
        """The client of each of ``records``."""
        return np.repeat(np.arange(len(self)), self.sizes)
