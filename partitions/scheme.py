"""A scheme deals records out to clients as ``Parts``, and may change the inputs that they see."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class ImpossibleSplit(ValueError):  # noqa: N818 (names what happened)
    """The request cannot be met by any split; the message names the numbers and what to change."""


class Scheme(Protocol):
    """A way to split a data set over clients: one of those in this package, or the user's own."""

    def split(
        self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        """Return ``num_partitions`` disjoint sorted index arrays into ``labels``, shape (records,).

        As a list, or as ``partitions.Parts``, which costs less where clients are many. Raises ImpossibleSplit, a
        ValueError, where that cannot be done.
        """
        ...


@runtime_checkable
class ByGroup(Protocol):
    """A scheme that looks at where records come from: ``split`` is for data sets that do not say so."""

    def split_groups(
        self, labels: NDArray[np.int64], groups: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        """Return ``num_partitions`` disjoint sorted index arrays into ``labels``, shape (records,).

        ``groups``: a number for each record, shape (records,): its writer, hospital or device. Raises ImpossibleSplit,
        a ValueError, where that cannot be done.
        """
        ...


@runtime_checkable
class FeatureSkew(Protocol):
    """A scheme of whose records each client sees something of its own: noise, another angle, other colours."""

    def seen_by(
        self,
        client: int,
        num_partitions: int,
        inputs: NDArray[np.float32],
        std: NDArray[np.float32],
        rng: np.random.Generator,
    ) -> NDArray[np.float32]:
        """Return what ``client``, from 0, sees of its ``inputs``, shape (records, ...); they are left as they are.

        They are normalised, so 1 of a raw input is 1 / ``std`` here; ``std`` has a value a channel and fits them.
        """
        ...


@runtime_checkable
class EvaluationSkew(Protocol):
    """A scheme that changes the records which the global model is tested on, too."""

    def evaluated_on(
        self, num_partitions: int, inputs: NDArray[np.float32], std: NDArray[np.float32], rng: np.random.Generator
    ) -> NDArray[np.float32]:
        """Return test ``inputs``, shape (records, ...), as ``FeatureSkew.seen_by`` does for a client's."""
        ...


@dataclass(frozen=True, eq=False)
class Parts(Sequence[NDArray[np.int64]]):
    """The record indices of every client: ``parts[i]`` are those of client i, a view.

    ``records``: those of client 0, then of client 1, and so on. ``bounds``, (clients + 1,): where each client's begin,
    and at last where all end.
    """

    records: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @classmethod
    def of(cls, parts: Iterable[NDArray[np.int64]]) -> Self:
        """Return ``parts`` in this form."""
        each = list(parts)
        records = np.concatenate([part for part in each if len(part)] or [np.zeros(0, dtype=np.int64)])
        return cls(records, np.cumsum([0, *map(len, each)], dtype=np.int64))

    def where(self, kept: NDArray[np.bool_]) -> "Parts":
        """Return each client's share of the ``records`` that are ``kept``, in the same order."""
        return Parts(self.records[kept], np.concatenate([[0], np.cumsum(kept)])[self.bounds])

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, client: int) -> NDArray[np.int64]: ...
    @overload
    def __getitem__(self, client: slice) -> list[NDArray[np.int64]]: ...
    def __getitem__(self, client: int | slice) -> NDArray[np.int64] | list[NDArray[np.int64]]:
        """Return the records of one client, or of several."""
        if isinstance(client, slice):
            return [self[one] for one in range(len(self))[client]]
        one = range(len(self))[client]  # from the end, too, and an IndexError beyond
        return self.records[self.bounds[one] : self.bounds[one + 1]]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Return how many records each client holds."""
        return np.diff(self.bounds)

    @property
    def owners(self) -> NDArray[np.int64]:
        """Return the client that each of ``records`` belongs to."""
        return np.repeat(np.arange(len(self)), self.sizes)
