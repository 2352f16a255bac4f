"""Natural: the records of one writer, hospital or device stay together (LEAF, Caldas et al. 2018)."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from partitions.assign import STRICT, check_sizes, group
from partitions.errors import ImpossibleSplit
from partitions.parts import Parts


@dataclass(frozen=True)
class Natural:
    """Every group of records, as the data set numbers them, belongs to one client whole.

    With as many groups as clients, client i holds the group of the i-th smallest number. With more groups, each client
    gets equally many (within 1), drawn at random.
    """

    kind: Literal["natural"] = field(default="natural", kw_only=True)

    title: ClassVar[str] = "natural"
    __pydantic_config__ = STRICT

    def split(self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator) -> Parts:
        """Raise ImpossibleSplit: labels do not say where a record comes from."""
        del labels, num_partitions, rng
        raise ImpossibleSplit(
            "this data set does not say where its records come from; name the column of a table, data.client=COLUMN, "
            "add an array client_train to an npz file (in Python: Examples.groups), or take another split"
        )

    def split_groups(
        self, labels: NDArray[np.int64], groups: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> Parts:
        """Return ``num_partitions`` disjoint sorted index arrays that cover every record, none empty.

        Raises ImpossibleSplit for more clients than groups.
        """
        check_sizes(len(labels), num_partitions)
        numbers, group_of = np.unique(groups, return_inverse=True)
        if len(numbers) < num_partitions:
            raise ImpossibleSplit(f"its records come from {len(numbers)} groups; use at most {len(numbers)} clients")
        order = np.arange(len(numbers)) if len(numbers) == num_partitions else rng.permutation(len(numbers))
        owner = np.empty(len(numbers), dtype=np.int64)
        owner[order] = np.arange(len(numbers)) % num_partitions
        return group(owner[group_of], num_partitions)
