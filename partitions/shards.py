"""Shards: records sorted by label, cut into pieces, a few pieces a client (McMahan et al. 2017, section 3)."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from partitions.assign import STRICT, check_sizes, group
from partitions.errors import ImpossibleSplit
from partitions.parts import Parts


@dataclass(frozen=True)
class Shards:
    """K * ``shards_per_client`` shards of the label-sorted records, ``shards_per_client`` random ones a client.

    Where the records do not divide, shard sizes differ by 1. A shard may straddle a class boundary, so a client can
    hold more classes than shards.
    """

    kind: Literal["shards"] = field(default="shards", kw_only=True)
    shards_per_client: int = 2

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if self.shards_per_client < 1:
            raise ImpossibleSplit(f"shards_per_client={self.shards_per_client} must be at least 1")

    @property
    def title(self) -> str:
        """Return the short form."""
        return f"shards:{self.shards_per_client}"

    def split(self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator) -> Parts:
        """Return ``num_partitions`` disjoint sorted index arrays that cover every record.

        Raises ImpossibleSplit for more shards than records.
        """
        check_sizes(len(labels), num_partitions)
        num_shards = num_partitions * self.shards_per_client
        if num_shards > len(labels):
            raise ImpossibleSplit(
                f"{num_partitions} clients x {self.shards_per_client} shards = {num_shards} shards, but only "
                f"{len(labels)} records; use fewer clients or shards"
            )
        shard_owner = rng.permutation(num_shards) % num_partitions
        shard = np.arange(len(labels)) * num_shards // len(labels)
        owner = np.empty(len(labels), dtype=np.int64)
        owner[np.argsort(labels, kind="stable")] = shard_owner[shard]
        return group(owner, num_partitions)
