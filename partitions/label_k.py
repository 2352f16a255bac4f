"""Label skew by count: each client holds exactly k classes (1-Label, 2-Label; NIID-Bench, Li et al. 2022, 4.1)."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from partitions.assign import STRICT, count_classes, deal
from partitions.errors import ImpossibleSplit
from partitions.parts import Parts


@dataclass(frozen=True)
class LabelK:
    """Client i of K holds class i mod L and ``k`` - 1 further distinct random classes of the L there are.

    Each class is split equally among its holders (sizes differ by at most 1). Every record belongs to exactly one
    client whenever K >= L. With fewer clients than classes some classes may have no holder: their records are in no
    client's shard, as "exactly k classes" demands.
    """

    kind: Literal["label-k"] = field(default="label-k", kw_only=True)
    k: int = 1

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ImpossibleSplit(f"k={self.k} must be at least 1 class a client")

    @property
    def title(self) -> str:
        """Return NIID-Bench's name."""
        return f"{self.k}-Label"

    def split(self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator) -> Parts:
        """Return ``num_partitions`` disjoint sorted index arrays, none empty.

        Raises ImpossibleSplit for k > L, more clients than records, or a class with fewer records than holders.
        """
        class_sizes = count_classes(labels, num_partitions)
        holds = self._choose(num_partitions, len(class_sizes), rng)
        num_holders = holds.sum(axis=0)
        short = np.flatnonzero(class_sizes < num_holders)
        if len(short):
            c = short[0]
            raise ImpossibleSplit(
                f"label-{self.k} over {num_partitions} clients: class {c} has {class_sizes[c]} records for "
                f"{num_holders[c]} holders; use fewer clients or a smaller k"
            )
        base, extra = np.divmod(class_sizes, np.maximum(num_holders, 1))
        nth_holder = np.cumsum(holds, axis=0)
        return deal(labels, holds * (base + (nth_holder <= extra)), rng)

    def _choose(self, num_partitions: int, num_classes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        if self.k > num_classes:
            raise ImpossibleSplit(f"k={self.k} classes a client, but the data have only {num_classes} classes")
        clients = np.arange(num_partitions)
        scores = rng.random((num_partitions, num_classes))
        scores[clients, clients % num_classes] = -1.0  # its own class comes first
        chosen = np.argpartition(scores, self.k - 1, axis=1)[:, : self.k]
        holds = np.zeros((num_partitions, num_classes), dtype=np.bool_)
        np.put_along_axis(holds, chosen, values=True, axis=1)
        return holds
