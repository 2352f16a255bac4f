"""IID: the records are shuffled and dealt out in equal parts."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from partitions.assign import STRICT, check_sizes, group
from partitions.parts import Parts


@dataclass(frozen=True)
class Iid:
    """Shuffled equal parts; sizes differ by at most 1."""

    kind: Literal["iid"] = field(default="iid", kw_only=True)

    title: ClassVar[str] = "iid"
    __pydantic_config__ = STRICT

    def split(self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator) -> Parts:
        """Return ``num_partitions`` disjoint sorted index arrays that cover every record.

        Raises ImpossibleSplit for more clients than records.
        """
        check_sizes(len(labels), num_partitions)
        owner = np.empty(len(labels), dtype=np.int64)
        owner[rng.permutation(len(labels))] = np.arange(len(labels)) % num_partitions
        return group(owner, num_partitions)
