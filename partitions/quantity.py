"""Partitions that ignore labels: shards of equal or of random sizes (NIID-Bench, Li et al. 2022, section 4.3)."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.random import Generator

from partitions.assign import STRICT, USUAL_MIN_SIZE, check_drawn, check_sizes, cut, drawn_until, shuffled
from partitions.scheme import Indices, Parts


@dataclass(frozen=True)
class Iid:
    """IID shards: the records are shuffled and divided equally among the clients; sizes differ by at most 1."""

    kind: Literal["iid"] = field(default="iid", kw_only=True)

    title: ClassVar[str] = "iid"
    __pydantic_config__ = STRICT

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Parts:
        """Return the sorted record indices of every client. Every record belongs to a client, and no client is empty.

        Raises ImpossibleSplit for more clients than records.
        """
        check_sizes(len(labels), num_partitions)
        return shuffled(np.arange(len(labels)) % num_partitions, num_partitions, rng)


@dataclass(frozen=True)
class Quantity:
    """Shards of unequal sizes, independent of labels: the clients' shares of all records are drawn from Dir(``beta``).

    The shares are drawn again until every client has enough records, at most 1000 times. ``min_size``: the minimum
    number of records of each client; with 0, the first draw is used. If it is set and no draw reaches it, the partition
    is refused. By default (None), the minimum is 10 as in NIID-Bench. If no draw reaches 10, the last draw is used,
    with small and empty shards. This happens if beta is small or the number of clients is large.
    """

    kind: Literal["quantity"] = field(default="quantity", kw_only=True)
    beta: float = 0.5
    min_size: int | None = None

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        check_drawn(self.beta, self.min_size)

    @property
    def title(self) -> str:
        """The short name of this partition in tables and plots, such as ``quantity:0.5``."""
        return f"quantity:{self.beta}"

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Parts:
        """Return the sorted record indices of every client. Every record belongs to a client; a client may be empty.

        Raises ImpossibleSplit for more clients than records, and if no draw reaches ``min_size`` (unless it is None).
        """
        num_records = len(labels)
        check_sizes(num_records, num_partitions)
        wanted = USUAL_MIN_SIZE if self.min_size is None else self.min_size

        def message(num_draws: int, most: int) -> str:
            return (
                f"quantity:{self.beta:g} of {num_records} records over {num_partitions} clients with "
                f"min_size={self.min_size}: in {num_draws} draws the smallest client held {most} records at best; use "
                "min_size=0, fewer clients or a larger beta"
            )

        def draw() -> Indices:
            return cut(rng.dirichlet(np.full(num_partitions, self.beta)), num_records)

        sizes = drawn_until(draw, self.min_size, 1000 if wanted * num_partitions <= num_records else 1, message)
        return shuffled(np.repeat(np.arange(num_partitions), sizes), num_partitions, rng)
