"""A partition of your own: one client holds most of the records, and the others divide the other records equally.

    fl-sim run partition=one_big_client:OneBigClient partition.share=0.7

A partition is a frozen dataclass with a method ``split``, which needs only numpy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partitions import ImpossibleSplit


@dataclass(frozen=True)
class OneBigClient:
    """Client 0 holds a random ``share`` of all records; the other clients hold equal parts of the other records."""

    share: float = 0.5

    def split(
        self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        """Return each client's record indices, sorted. fl-sim shows the message of ImpossibleSplit to the user."""
        if not 0 < self.share < 1 or num_partitions < 2:
            raise ImpossibleSplit(f"share={self.share:g} of {num_partitions} clients: take 0 < share < 1 and 2 clients")
        shuffled = rng.permutation(len(labels))
        first = round(self.share * len(labels))
        return [np.sort(part) for part in (shuffled[:first], *np.array_split(shuffled[first:], num_partitions - 1))]
