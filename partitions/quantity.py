"""Quantity skew: sizes follow a Dirichlet distribution, labels are IID (NIID-Bench, Li et al. 2022, 4.3)."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from partitions.assign import STRICT, check_beta, check_sizes, cut, group


@dataclass(frozen=True)
class Quantity:
    """Client sizes ~ Dir(``beta``) of all records, whatever their label; small ``beta`` leaves some clients empty."""

    kind: Literal["quantity"] = field(default="quantity", kw_only=True)
    beta: float = 0.5

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        check_beta(self.beta)

    @property
    def title(self) -> str:
        """Return the short form."""
        return f"quantity:{self.beta}"

    def split(
        self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        """Return ``num_partitions`` disjoint sorted index arrays that cover every record.

        Raises ImpossibleSplit for more clients than records.
        """
        check_sizes(len(labels), num_partitions)
        sizes = cut(rng.dirichlet(np.full(num_partitions, self.beta)), len(labels))
        owner = np.empty(len(labels), dtype=np.int64)
        owner[rng.permutation(len(labels))] = np.repeat(np.arange(num_partitions), sizes)
        return group(owner, num_partitions)
