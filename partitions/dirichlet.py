"""Label skew by proportion: a Dirichlet draw spreads each class over the clients (NIID-Bench, Li et al. 2022, 4.1)."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from partitions.assign import STRICT, USUAL_MIN_SIZE, check_beta, check_min_size, count_classes, cut, deal, drawn_until
from partitions.parts import Parts

_PROPORTIONS = 5_000_000
_FEWEST_DRAWS, _MOST_DRAWS = 10, 1000


@dataclass(frozen=True)
class Dirichlet:
    """For every class c, client shares p_c ~ Dir_K(``beta``), redrawn until every client holds enough records.

    ``min_size``: an explicit number is a promise, kept or refused. The default (None) aims at NIID-Bench's 10; where
    that is out of reach (Dir(0.05) over 100 clients nearly always leaves some empty) the last draw stands as it is,
    empty shards and all. At most 1000 draws are made, fewer from 500 clients x 10 classes on.
    ``balanced``: NIID-Bench's variant, which gives a class nothing to clients that already hold N/K records.
    """

    kind: Literal["dirichlet"] = field(default="dirichlet", kw_only=True)
    beta: float = 0.5
    min_size: int | None = None
    balanced: bool = False

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_min_size(self.min_size)

    @property
    def title(self) -> str:
        """Return NIID-Bench's name."""
        return f"Dir({self.beta})"

    def split(self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator) -> Parts:
        """Return ``num_partitions`` disjoint sorted index arrays that cover every record.

        Raises ImpossibleSplit for more clients than records, or an explicit ``min_size`` that the draws do not reach.
        """
        class_sizes = count_classes(labels, num_partitions)
        wanted = USUAL_MIN_SIZE if self.min_size is None else self.min_size
        draw = _draw_balanced if self.balanced else _draw
        num_draws = _num_draws(len(class_sizes), num_partitions, reachable=wanted * num_partitions <= len(labels))
        counts = drawn_until(
            lambda: draw(class_sizes, num_partitions, self.beta, rng),
            self.min_size,
            num_draws,
            partial(self._refusal, len(labels), num_partitions),
        )
        return deal(labels, counts, rng)

    def _refusal(self, num_records: int, num_partitions: int, num_draws: int, most: int) -> str:
        asked = f"dirichlet:{self.beta:g} over {num_partitions} clients with min_size={self.min_size}"
        if num_partitions * (self.min_size or 0) > num_records:
            return f"{asked} needs {num_partitions * (self.min_size or 0)} records, but there are {num_records}"
        advice = "min_size=0, fewer clients" + ("" if self.balanced else ", balanced=true") + " or a larger beta"
        return f"{asked}: in {num_draws} draws the smallest client held {most} records at best; use {advice}"


def _num_draws(num_classes: int, num_partitions: int, *, reachable: bool) -> int:
    if not reachable:
        return 1
    return min(max(_PROPORTIONS // (num_classes * num_partitions), _FEWEST_DRAWS), _MOST_DRAWS)


def _draw(
    class_sizes: NDArray[np.int64], num_partitions: int, beta: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    shares = rng.dirichlet(np.full(num_partitions, beta), size=len(class_sizes))
    return np.stack([cut(share, int(size)) for share, size in zip(shares, class_sizes, strict=True)], axis=1)


def _draw_balanced(
    class_sizes: NDArray[np.int64], num_partitions: int, beta: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    counts = np.zeros((num_partitions, len(class_sizes)), dtype=np.int64)
    sizes = np.zeros(num_partitions, dtype=np.int64)
    fair = class_sizes.sum() / num_partitions
    for c in np.flatnonzero(class_sizes):
        has_room = sizes < fair
        share = rng.dirichlet(np.full(num_partitions, beta)) * has_room
        if share.sum() == 0:  # a tiny beta gave all to full clients: its limit is one random client for the class
            share[rng.choice(np.flatnonzero(has_room))] = 1.0
        counts[:, c] = cut(share / share.sum(), int(class_sizes[c]))
        sizes += counts[:, c]
    return counts
