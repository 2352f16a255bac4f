"""Top-k with error feedback: only the largest numbers of an update travel (Aji and Heafield 2017, algorithm 1).

Stich et al. 2018, algorithm 1, have the same with a proof of convergence: e <- e + D; send the k largest of e, by size;
e <- e - what was sent.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_sim.errors import Malformed
from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.packed import Coins, Packed, Size
from fl_sim.params import FlatParams, Layout, num_in
from strategies.compression.bits import bits_for, num_bytes, pack, unpack
from strategies.compression.error_feedback import ErrorFeedback


class TopK(ErrorFeedback):
    """Sends the ``share`` of the update's numbers that are largest; what is left out joins the next round's update.

    ``share``: of all d numbers of the model together; how many these are, k, is rounded up. Each costs 32 bits and
    ceil(log2 d) for its place.
    """

    kind: Literal["top-k"] = "top-k"
    share: float = Field(0.01, gt=0, le=1)
    title: ClassVar[str] = "top-k"

    def remarks(self, experiment: Choices) -> list[str]:
        """Say where nothing is left out."""
        del experiment
        return [] if self.share < 1 else [off("compress.share=1", "all numbers of an update are sent")]

    def size(self, layout: Layout) -> Size:
        """Return k numbers and k places."""
        d = num_in(layout)
        k = count_of(self.share, d)
        return Size(k, num_bytes(k, bits_for(d)))

    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return the k largest numbers, in the order of their places."""
        del coins
        flat = update.flat
        k = count_of(self.share, len(flat))
        places = torch.topk(flat.abs(), k, sorted=False).indices.sort().values
        return Packed.of(flat[places], pack(places.numpy(), bits_for(len(flat))))

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return these numbers, and zeros elsewhere. Raises Malformed unless places rise and exist."""
        del coins
        d = num_in(layout)
        places = unpack(packed.bits, len(packed.numbers), bits_for(d))
        if (np.diff(places) <= 0).any() or places[-1] >= d:
            raise Malformed(f"sent places that do not rise from 0 to at most {d - 1}")
        return spread(packed.numbers, torch.from_numpy(places), layout)


def count_of(share: float, d: int) -> int:
    """Return how many of ``d`` numbers a share is, rounded up: at least 1.

    The share is taken as the decimal that it is written as: 0.07 of 100 are 7, and in binary a little more.
    """
    return math.ceil(Fraction(str(share)) * d)


def spread(numbers: torch.Tensor, places: torch.Tensor, layout: Layout) -> FlatParams:
    """Return ``numbers`` in their ``places`` of an update, and zeros elsewhere."""
    flat = torch.zeros(num_in(layout))
    flat[places] = numbers
    return FlatParams(flat, layout)
