"""What a scheme is: a frozen dataclass that deals records out to clients, and may change what they see of them."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


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
