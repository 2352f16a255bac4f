"""Label skew: clients have few classes, or unequal shares of all classes (NIID-Bench, Li et al. 2022, section 4.1)."""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from numpy.random import Generator

from partitions import assign
from partitions.scheme import ImpossibleSplit, Indices, Parts


@dataclass(frozen=True)
class LabelK:
    """Each client has records of ``k`` of the L classes: client i has class i mod L and ``k`` - 1 random other classes.

    The records of a class are split equally between the clients that have this class (numbers differ by at most 1).
    With at least L clients, every record belongs to exactly one client. With fewer clients, a class may have no client.
    The records of such a class are not used.
    """

    kind: Literal["label-k"] = field(default="label-k", kw_only=True)
    k: int = 1

    uses_labels: ClassVar[bool] = True
    __pydantic_config__ = assign.STRICT

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ImpossibleSplit(f"k={self.k} must be at least 1 class a client")

    @property
    def title(self) -> str:
        """The short name of this partition in tables and plots, such as ``2-Label``."""
        return f"{self.k}-Label"

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Parts:
        """Return the sorted record indices of every client; no client is empty.

        Raises ImpossibleSplit if ``k`` is above the number of classes, or if there are more clients than records. Also
        raises ImpossibleSplit if a class has fewer records than clients that share it.
        """
        class_sizes = assign.count_classes(labels, num_partitions)
        num_classes = len(class_sizes)
        if self.k > num_classes:
            raise ImpossibleSplit(
                f"k={self.k} classes a client, but the data have only {num_classes} classes; use a smaller k"
            )
        clients = np.arange(num_partitions)
        scores = rng.random((num_partitions, num_classes))
        scores[clients, clients % num_classes] = -1.0  # client i always gets class i mod L
        chosen = np.argpartition(scores, self.k - 1, axis=1)[:, : self.k]
        holds = np.zeros((num_partitions, num_classes), dtype=np.bool_)
        np.put_along_axis(holds, chosen, values=True, axis=1)
        num_holders = holds.sum(axis=0)
        short = np.flatnonzero(class_sizes < num_holders)
        if len(short):
            c = short[0]
            raise ImpossibleSplit(
                f"label-{self.k} over {num_partitions} clients: class {c} has {class_sizes[c]} records for "
                f"{num_holders[c]} clients that share it; use fewer clients or a smaller k"
            )
        base, extra = np.divmod(class_sizes, np.maximum(num_holders, 1))
        nth_holder = np.cumsum(holds, axis=0)
        return assign.deal(labels, holds * (base + (nth_holder <= extra)), rng)


@dataclass(frozen=True)
class Dirichlet:
    """Each class is divided among K clients in random shares from Dir_K(``beta``). A small ``beta`` means strong skew.

    The shares are drawn again until every client has enough records, at most 1000 times. The limit is lower if the
    number of clients times the number of classes exceeds 5000. ``min_size``: the minimum number of records of each
    client. If it is set and no draw reaches it, the partition is refused. By default (None), the minimum is 10 as in
    NIID-Bench. If no draw reaches 10, the last draw is used, with small and empty shards. (Dir(0.05) over 100 clients
    nearly always leaves some clients empty.) ``balanced``: True for NIID-Bench's variant: a client that has N/K of all
    N records receives no further classes.
    """

    kind: Literal["dirichlet"] = field(default="dirichlet", kw_only=True)
    beta: float = 0.5
    min_size: int | None = None
    balanced: bool = False

    uses_labels: ClassVar[bool] = True
    __pydantic_config__ = assign.STRICT

    def __post_init__(self) -> None:
        assign.check_drawn(self.beta, self.min_size)

    @property
    def title(self) -> str:
        """The short name of this partition in tables and plots, such as ``Dir(0.5)``."""
        return f"Dir({self.beta})"

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Parts:
        """Return the sorted record indices of every client. Every record belongs to a client; a client may be empty.

        Raises ImpossibleSplit for more clients than records, and if no draw reaches ``min_size`` (unless it is None).
        """
        class_sizes = assign.count_classes(labels, num_partitions)
        wanted = assign.USUAL_MIN_SIZE if self.min_size is None else self.min_size
        num_draws = min(max(5_000_000 // (len(class_sizes) * num_partitions), 10), 1000)
        counts = assign.drawn_until(
            partial(self._draw_balanced if self.balanced else self._draw, class_sizes, num_partitions, rng),
            self.min_size,
            num_draws if wanted * num_partitions <= len(labels) else 1,
            partial(self._message, len(labels), num_partitions),
        )
        return assign.deal(labels, counts, rng)

    def _draw(self, class_sizes: Indices, num_partitions: int, rng: Generator) -> Indices:
        shares = rng.dirichlet(np.full(num_partitions, self.beta), size=len(class_sizes))
        return np.stack([assign.cut(share, int(size)) for share, size in zip(shares, class_sizes, strict=True)], axis=1)

    def _draw_balanced(self, class_sizes: Indices, num_partitions: int, rng: Generator) -> Indices:
        counts = np.zeros((num_partitions, len(class_sizes)), dtype=np.int64)
        sizes = np.zeros(num_partitions, dtype=np.int64)
        fair = class_sizes.sum() / num_partitions
        for c in np.flatnonzero(class_sizes):
            has_room = sizes < fair
            share = rng.dirichlet(np.full(num_partitions, self.beta)) * has_room
            # With a tiny beta, one client may get the whole class. If this client is full, all remaining shares are 0.
            if share.sum() == 0:
                share[rng.choice(np.flatnonzero(has_room))] = 1.0
            counts[:, c] = assign.cut(share / share.sum(), int(class_sizes[c]))
            sizes += counts[:, c]
        return counts

    def _message(self, num_records: int, num_partitions: int, num_draws: int, most: int) -> str:
        name = f"dirichlet:{self.beta:g} over {num_partitions} clients with min_size={self.min_size}"
        if (needed := num_partitions * (self.min_size or 0)) > num_records:
            return f"{name} needs {needed} records, but there are {num_records}; use a smaller min_size"
        advice = "min_size=0, fewer clients" + ("" if self.balanced else ", balanced=true") + " or a larger beta"
        return f"{name}: in {num_draws} draws the smallest client held {most} records at best; use {advice}"


@dataclass(frozen=True)
class Shards:
    """The records are sorted by label and cut into pieces. Each client receives ``shards_per_client`` random pieces.

    For K clients the sorted records are cut into K * ``shards_per_client`` pieces, whose sizes differ by at most 1. A
    piece may contain records of two or more classes, so a client can have more classes than pieces.
    """

    kind: Literal["shards"] = field(default="shards", kw_only=True)
    shards_per_client: int = 2

    uses_labels: ClassVar[bool] = True
    __pydantic_config__ = assign.STRICT

    def __post_init__(self) -> None:
        if self.shards_per_client < 1:
            raise ImpossibleSplit(f"shards_per_client={self.shards_per_client} must be at least 1")

    @property
    def title(self) -> str:
        """The short name of this partition in tables and plots, such as ``shards:2``."""
        return f"shards:{self.shards_per_client}"

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Parts:
        """Return the sorted record indices of every client. Every record belongs to a client, and no client is empty.

        Raises ImpossibleSplit if the records are fewer than ``num_partitions`` * ``shards_per_client``.
        """
        assign.check_sizes(len(labels), num_partitions)
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
        return assign.group(owner, num_partitions)
