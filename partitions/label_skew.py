"""Label skew: clients hold few classes, or unequal shares of them (NIID-Bench, Li et al. 2022, 4.1)."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from numpy.random import Generator

from partitions import assign
from partitions.scheme import ImpossibleSplit, Indices, Parts


@dataclass(frozen=True)
class LabelK:
    """Client i of K holds class i mod L and ``k`` - 1 other distinct classes, drawn at random from all L classes.

    Each class is split equally among the clients that hold it (sizes differ by at most 1). With K >= L every record
    belongs to exactly one client. With fewer clients than classes some classes may be held by no client: their records
    are in no shard.
    """

    kind: Literal["label-k"] = field(default="label-k", kw_only=True)
    k: int = 1

    __pydantic_config__ = assign.STRICT

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ImpossibleSplit(f"k={self.k} must be at least 1 class a client")

    @property
    def title(self) -> str:
        """NIID-Bench's name of this partition."""
        return f"{self.k}-Label"

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Parts:
        """Return ``num_partitions`` disjoint, sorted index arrays; none is empty.

        Raises ImpossibleSplit for k > L, for more clients than records, and for a class with fewer records than clients
        that hold it.
        """
        class_sizes = assign.count_classes(labels, num_partitions)
        num_classes = len(class_sizes)
        if self.k > num_classes:
            raise ImpossibleSplit(f"k={self.k} classes a client, but the data have only {num_classes} classes")
        clients = np.arange(num_partitions)
        scores = rng.random((num_partitions, num_classes))
        scores[clients, clients % num_classes] = -1.0  # its own class comes first
        chosen = np.argpartition(scores, self.k - 1, axis=1)[:, : self.k]
        holds = np.zeros((num_partitions, num_classes), dtype=np.bool_)
        np.put_along_axis(holds, chosen, values=True, axis=1)
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
        return assign.deal(labels, holds * (base + (nth_holder <= extra)), rng)


@dataclass(frozen=True)
class Dirichlet:
    """For every class c, client shares p_c ~ Dir_K(``beta``), drawn again until every client holds enough records.

    ``min_size``: the minimum number of records of each client. A split that does not reach an explicit minimum is
    refused. The default (None) aims at NIID-Bench's 10; if that is out of reach (Dir(0.05) over 100 clients nearly
    always leaves some clients empty), the last draw is used, empty shards included. At most 1000 draws are made, fewer
    from 500 clients x 10 classes on. ``balanced``: NIID-Bench's variant, in which clients that already hold N/K records
    get no more.
    """

    kind: Literal["dirichlet"] = field(default="dirichlet", kw_only=True)
    beta: float = 0.5
    min_size: int | None = None
    balanced: bool = False

    __pydantic_config__ = assign.STRICT

    def __post_init__(self) -> None:
        assign.check_drawn(self.beta, self.min_size)

    @property
    def title(self) -> str:
        """NIID-Bench's name of this partition."""
        return f"Dir({self.beta})"

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Parts:
        """Return ``num_partitions`` disjoint, sorted index arrays that cover every record.

        Raises ImpossibleSplit for more clients than records, and if no draw reaches an explicit ``min_size``.
        """
        class_sizes = assign.count_classes(labels, num_partitions)
        wanted = assign.USUAL_MIN_SIZE if self.min_size is None else self.min_size
        num_draws = min(max(5_000_000 // (len(class_sizes) * num_partitions), 10), 1000)
        counts = assign.drawn_until(
            partial(self._draw_balanced if self.balanced else self._draw, class_sizes, num_partitions, rng),
            self.min_size,
            num_draws if wanted * num_partitions <= len(labels) else 1,
            partial(self._refusal, len(labels), num_partitions),
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
            if share.sum() == 0:  # a tiny beta gave all to full clients: its limit is one random client for the class
                share[rng.choice(np.flatnonzero(has_room))] = 1.0
            counts[:, c] = assign.cut(share / share.sum(), int(class_sizes[c]))
            sizes += counts[:, c]
        return counts

    def _refusal(self, num_records: int, num_partitions: int, num_draws: int, most: int) -> str:
        asked = f"dirichlet:{self.beta:g} over {num_partitions} clients with min_size={self.min_size}"
        if num_partitions * (self.min_size or 0) > num_records:
            return f"{asked} needs {num_partitions * (self.min_size or 0)} records, but there are {num_records}"
        advice = "min_size=0, fewer clients" + ("" if self.balanced else ", balanced=true") + " or a larger beta"
        return f"{asked}: in {num_draws} draws the smallest client held {most} records at best; use {advice}"


@dataclass(frozen=True)
class Shards:
    """The records, sorted by label, are cut into K * ``shards_per_client`` shards; each client receives random ones.

    Each client receives ``shards_per_client`` shards. If the records do not divide evenly, shard sizes differ by 1. A
    shard may contain the end of one class and the start of the next, so a client can hold more classes than shards.
    """

    kind: Literal["shards"] = field(default="shards", kw_only=True)
    shards_per_client: int = 2

    __pydantic_config__ = assign.STRICT

    def __post_init__(self) -> None:
        if self.shards_per_client < 1:
            raise ImpossibleSplit(f"shards_per_client={self.shards_per_client} must be at least 1")

    @property
    def title(self) -> str:
        """The short form of this partition."""
        return f"shards:{self.shards_per_client}"

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Parts:
        """Return ``num_partitions`` disjoint sorted index arrays that cover every record.

        Raises ImpossibleSplit for more shards than records.
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
