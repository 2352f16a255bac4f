"""What a scheme is: a frozen dataclass that deals records out to clients."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Scheme(Protocol):
    """A way to split a data set over clients: one of those in this package, or the user's own."""

    def __hash__(self) -> int:
        """Return a hash: frozen dataclasses have one."""
        ...

    def split(
        self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        """Return ``num_partitions`` disjoint sorted index arrays into ``labels``, shape (records,).

        Raises ImpossibleSplit, a ValueError, where that cannot be done.
        """
        ...
