"""Feature skew: different noise for each client (NIID-Bench, Li et al. 2022, 4.2), and real sources of records."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.random import Generator

from partitions.assign import STRICT, check_sizes, group
from partitions.quantity import Iid
from partitions.scheme import ImpossibleSplit, Indices, Inputs, Parts


@dataclass(frozen=True)
class FeatureNoise:
    """Equal IID parts with Gaussian noise on the inputs, of another strength for each client, in units of raw inputs.

    ``variant`` "paper": client i of K has noise of *variance* ``sigma`` * i / K, i = 1..K, and test records have none.
    "niid-bench", the published program: client i has noise of *standard deviation* ``sigma`` * i / (K - 1), i = 0..K-1,
    and test records are noisy, too: the program tests on a copy of the test set for each client, here test record j
    has the noise of client j mod K.
    """

    kind: Literal["feature-noise"] = field(default="feature-noise", kw_only=True)
    sigma: float = 0.1
    variant: Literal["paper", "niid-bench"] = "paper"

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise ImpossibleSplit(f"sigma={self.sigma} must be a finite number, at least 0")

    @property
    def title(self) -> str:
        """The short form."""
        return f"feature-noise:{self.sigma}"

    def remarks(self, experiment: object) -> list[str]:
        """Return a sentence where there is no noise."""
        del experiment
        return [] if self.sigma else ["partition.sigma=0 has no effect: no input is noisy, and parts are iid"]

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Parts:
        """Return ``num_partitions`` disjoint sorted index arrays that cover every record, sizes within 1.

        Raises ImpossibleSplit for more clients than records.
        """
        return Iid().split(labels, num_partitions, rng)

    def seen_by(self, client: int, num_partitions: int, inputs: Inputs, std: Inputs, rng: Generator) -> Inputs:
        """Return ``inputs`` with the noise of ``client`` added; see ``partitions.scheme.FeatureSkew``."""
        noise = rng.standard_normal(inputs.shape, dtype=np.float32)
        seen: Inputs = inputs + noise * math.sqrt(self.noise_variance(client, num_partitions)) / std
        return seen

    def evaluated_on(self, num_partitions: int, inputs: Inputs, std: Inputs, rng: Generator) -> Inputs:
        """Return the test ``inputs``, noisy in the program's variant; see ``partitions.scheme.EvaluationSkew``."""
        if self.variant == "paper":
            return inputs
        seen = inputs.copy()
        for client in range(num_partitions):
            seen[client::num_partitions] = self.seen_by(client, num_partitions, seen[client::num_partitions], std, rng)
        return seen

    def noise_variance(self, client: int, num_partitions: int) -> float:
        """Return the variance of the noise on the inputs of ``client``, from 0, in units of raw inputs.

        Client 0 is the paper's i = 1, so every client has noise and the last client has ``sigma``. In the program
        client 0 has none, and the last one has ``sigma`` squared.
        """
        if self.variant == "niid-bench":
            return (self.sigma * client / max(1, num_partitions - 1)) ** 2
        return self.sigma * (client + 1) / num_partitions


@dataclass(frozen=True)
class Natural:
    """All records of one writer, hospital or device belong to one client (LEAF, Caldas et al. 2018).

    With as many groups as clients, client i holds the group of the i-th smallest number. With more groups, each client
    gets equally many (within 1), drawn at random.
    """

    kind: Literal["natural"] = field(default="natural", kw_only=True)

    title: ClassVar[str] = "natural"
    __pydantic_config__ = STRICT

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Parts:
        """Raise ImpossibleSplit: labels do not name the source of a record."""
        del labels, num_partitions, rng
        raise ImpossibleSplit(
            "this data set does not say where its records come from; name the column of a table, data.client=COLUMN, "
            "add an array client_train to an npz file (in Python: Examples.groups), or take another split"
        )

    def split_groups(self, labels: Indices, groups: Indices, num_partitions: int, rng: Generator) -> Parts:
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
