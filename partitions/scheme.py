"""The protocols (required methods) of a partition, and its result: ``Parts``, the record indices of every client."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias, overload, runtime_checkable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]
"""An integer array: labels, numbers of records, or record indices."""

Inputs: TypeAlias = NDArray[np.float32]
"""A float array: normalised inputs of records, or one standard deviation per channel."""

Stored: TypeAlias = NDArray[Any]
"""Inputs of records as a data set stores them: images of bytes, or float vectors."""


class ImpossibleSplit(ValueError):  # noqa: N818 (the name states the problem, so it does not end in Error)
    """Raised if a partition cannot assign the records as requested. The message contains the numbers and advice."""


class Scheme(Protocol):
    """The interface of every partition, also of user-defined ones. The method ``split`` assigns records to clients."""

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Sequence[Indices]:
        """Return the record indices of every client: ``num_partitions`` disjoint, sorted arrays.

        ``labels``: the label of each record, shape (records,). The result is a list, or ``partitions.Parts``, which
        takes less memory for many clients. Raises ImpossibleSplit, a ValueError, if no such split exists.
        """
        ...


@runtime_checkable
class ByGroup(Protocol):
    """A partition that uses the source of each record (its writer, hospital or device).

    For a data set without sources, ``split`` is called instead of ``split_groups``.
    """

    def split_groups(self, labels: Indices, groups: Indices, num_partitions: int, rng: Generator) -> Sequence[Indices]:
        """Return the record indices of every client: ``num_partitions`` disjoint, sorted arrays.

        ``labels``: the label of each record, shape (records,). ``groups``: the source ID of each record, shape
        (records,). Raises ImpossibleSplit, a ValueError, if no such split exists.
        """
        ...


@runtime_checkable
class WithinSources(Protocol):
    """A partition that can ensure that each client has records of one source only, such as ``domain``.

    ``keeps_sources``: True if each client has records of one source only. Several clients may share a source.
    """

    @property
    def keeps_sources(self) -> bool:
        """True if each client has records of one source only."""
        ...


@runtime_checkable
class ByLabels(Protocol):
    """A partition that may use the labels of records, such as a label skew. It needs records with labels."""

    @property
    def uses_labels(self) -> bool:
        """True if the partition uses labels."""
        ...


def uses_labels(scheme: Scheme) -> bool:
    """Return True if ``scheme`` uses the labels of records, according to its property ``ByLabels.uses_labels``."""
    return isinstance(scheme, ByLabels) and scheme.uses_labels


@runtime_checkable
class FeatureSkew(Protocol):
    """A partition that changes the inputs of each client, for example by noise, rotation or other colours."""

    def seen_by(self, client: int, num_partitions: int, inputs: Inputs, std: Inputs, rng: Generator) -> Inputs:
        """Return the changed training inputs of ``client``. Clients are numbered from 0.

        ``inputs``: normalised inputs, shape (records, ...). ``std``: the standard deviation by which each channel was
        divided. So a difference of 1 in raw inputs is a difference of 1 / ``std`` in ``inputs``.
        """
        ...


@runtime_checkable
class EvaluationSkew(Protocol):
    """A partition that also changes the inputs of the test set."""

    def evaluated_on(self, num_partitions: int, inputs: Inputs, std: Inputs, rng: Generator) -> Inputs:
        """Return the changed test inputs. ``inputs``: normalised inputs. ``std``: as in ``FeatureSkew.seen_by``."""
        ...


@runtime_checkable
class RecordSkew(Protocol):
    """A partition that changes the stored inputs or the labels of each client. The changes may depend on the seed.

    A client's training, validation and own test records are changed in the same way. The global test set is not
    changed. In a run with one client no record is changed.
    """

    def check_records(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Raise ImpossibleSplit for records that the partition cannot change. ``shape``: the shape of one input."""
        ...

    def held_by(
        self, client: int, inputs: Stored, labels: Indices, num_classes: int, rng: Generator
    ) -> tuple[Stored, Indices]:
        """Return the changed inputs and labels of ``client``, with unchanged shapes and types.

        Clients are numbered from 0. ``inputs``: the stored inputs, before normalisation; images of bytes have shape
        (records, channels, height, width). ``rng`` gives the same random numbers in each call, for all clients. The
        method must not write to ``inputs`` or ``labels``.
        """
        ...


@dataclass(frozen=True, eq=False)
class Parts(Sequence[Indices]):
    """The record indices of every client: ``parts[i]`` is the array of client i, a view without a copy.

    All indices are in one array, so each client needs only 8 bytes of memory in addition to its indices.
    ``records``: the indices of client 0, then of client 1, and so on. ``bounds``: shape (clients + 1,); the indices of
    client i are ``records[bounds[i]:bounds[i + 1]]``.
    """

    records: Indices
    bounds: Indices

    @classmethod
    def of(cls, parts: Iterable[Indices]) -> Self:
        """Join ``parts``, the index arrays of all clients in order, into one ``Parts``."""
        each = list(parts)
        records = np.concatenate([part for part in each if len(part)] or [np.zeros(0, dtype=np.int64)])
        return cls(records, np.cumsum([0, *map(len, each)], dtype=np.int64))

    def where(self, kept: NDArray[np.bool_]) -> "Parts":
        """Return the partition without some records: entry ``records[j]`` is kept only if ``kept[j]`` is True."""
        return Parts(self.records[kept], np.concatenate([[0], np.cumsum(kept)])[self.bounds])

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, client: int) -> Indices: ...
    @overload
    def __getitem__(self, client: slice) -> list[Indices]: ...
    def __getitem__(self, client: int | slice) -> Indices | list[Indices]:
        if isinstance(client, slice):
            return [self[one] for one in range(len(self))[client]]
        one = range(len(self))[client]  # allows negative IDs; raises IndexError for an ID out of range
        return self.records[self.bounds[one] : self.bounds[one + 1]]

    @property
    def sizes(self) -> Indices:
        """The number of records of each client, shape (clients,)."""
        return np.diff(self.bounds)

    @property
    def owners(self) -> Indices:
        """The client to which each entry of ``records`` belongs, shape (records,)."""
        return np.repeat(np.arange(len(self)), self.sizes)
