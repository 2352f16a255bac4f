"""Who holds which records, as one array: a client costs eight bytes, and none of Python's objects."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray


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
