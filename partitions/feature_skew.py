"""Feature skew: clients have different noise (NIID-Bench, Li et al. 2022, section 4.2) or different sources."""

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
    """IID shards of equal size. Each client's inputs have Gaussian noise of a different strength.

    ``sigma``: the strength of the noise, in units of raw inputs (a pixel value is between 0 and 1). ``variant``:
    "paper" gives client i of K noise of *variance* sigma * i / K, i = 1..K; test records have no noise. "niid-bench"
    follows NIID-Bench's code: client i has noise of *standard deviation* sigma * i / (K - 1), i = 0..K-1, and test
    records are noisy, too. In one point it differs: NIID-Bench's code makes one noisy copy of the test set for each
    client; here, the only copy of test record j has the noise of client j mod K.
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
        """The short name of this partition in tables and plots, such as ``feature-noise:0.1``."""
        return f"feature-noise:{self.sigma}"

    def remarks(self, experiment: object) -> list[str]:
        """Return a warning for the user if ``sigma`` is 0: then no input is noisy."""
        del experiment
        return [] if self.sigma else ["partition.sigma=0 has no effect: no input is noisy, and shards are those of iid"]

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Parts:
        """Return the record indices of every client, as in ``Iid.split``. The sizes of shards differ by at most 1.

        Raises ImpossibleSplit for more clients than records.
        """
        return Iid().split(labels, num_partitions, rng)

    def seen_by(self, client: int, num_partitions: int, inputs: Inputs, std: Inputs, rng: Generator) -> Inputs:
        """Return the normalised training ``inputs`` plus the noise of ``client``. See ``FeatureSkew.seen_by``."""
        noise = rng.standard_normal(inputs.shape, dtype=np.float32)
        seen: Inputs = inputs + noise * math.sqrt(self.noise_variance(client, num_partitions)) / std
        return seen

    def evaluated_on(self, num_partitions: int, inputs: Inputs, std: Inputs, rng: Generator) -> Inputs:
        """Return the test ``inputs``, with noise only in the variant "niid-bench" (see ``EvaluationSkew``)."""
        if self.variant == "paper":
            return inputs
        seen = inputs.copy()
        for client in range(num_partitions):
            seen[client::num_partitions] = self.seen_by(client, num_partitions, seen[client::num_partitions], std, rng)
        return seen

    def noise_variance(self, client: int, num_partitions: int) -> float:
        """Return the variance of the noise of ``client`` (numbered from 0), in squared units of raw inputs.

        In the variant "paper", every client has noise (client 0 is the client i = 1 of the paper), and the last
        client's variance is ``sigma``. In the variant "niid-bench", client 0 has no noise, and the last client's
        variance is ``sigma`` squared.
        """
        if self.variant == "niid-bench":
            return (self.sigma * client / max(1, num_partitions - 1)) ** 2
        return self.sigma * (client + 1) / num_partitions


@dataclass(frozen=True)
class Natural:
    """Each client receives all records of one or more sources, such as hospitals (LEAF, Caldas et al. 2018).

    If there are as many sources as clients, client i receives the i-th source, in ascending order of source IDs. If
    there are more sources than clients, the sources are divided at random, and the numbers of sources per client differ
    by at most one.
    """

    kind: Literal["natural"] = field(default="natural", kw_only=True)

    title: ClassVar[str] = "natural"
    __pydantic_config__ = STRICT

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Parts:
        """Raise ImpossibleSplit, because this partition needs the source of each record.

        fl-sim calls this method only for data without sources.
        """
        del labels, num_partitions, rng
        raise without_sources()

    def split_groups(self, labels: Indices, groups: Indices, num_partitions: int, rng: Generator) -> Parts:
        """Return the sorted record indices of every client. Every record belongs to a client, and no client is empty.

        ``groups``: the source ID of each record. Raises ImpossibleSplit for more clients than sources.
        """
        check_sizes(len(labels), num_partitions)
        numbers, group_of = np.unique(groups, return_inverse=True)
        if len(numbers) < num_partitions:
            raise ImpossibleSplit(f"its records come from {len(numbers)} sources; use at most {len(numbers)} clients")
        order = np.arange(len(numbers)) if len(numbers) == num_partitions else rng.permutation(len(numbers))
        owner = np.empty(len(numbers), dtype=np.int64)
        owner[order] = np.arange(len(numbers)) % num_partitions
        return group(owner[group_of], num_partitions)


def without_sources() -> ImpossibleSplit:
    """Return the error for a data set whose records have no source IDs."""
    return ImpossibleSplit(
        "this data set does not say where its records come from; set data.client=COLUMN for a table or "
        "data.domains=true for a folder PATH/DOMAIN/CLASS, add an array client_train to an npz file (in Python: "
        "Examples.groups), or choose another partition"
    )
