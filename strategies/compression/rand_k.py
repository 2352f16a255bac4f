"""Rand-k: random numbers of an update travel, in places that both sides know (Wangni et al. 2018; Stich et al. 2018).

The places come from a seed that client and server share, a round's and a client's own, so they are never sent, and no
record has a say in them.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.packed import Coins, Packed, Size
from fl_sim.params import FlatParams, Layout, num_in
from fl_sim.types import Payloads
from strategies.compression.error_feedback import ErrorFeedback
from strategies.compression.top_k import count_of, spread


class RandK(ErrorFeedback):
    """Sends a ``share`` of the update's numbers, 32 bits each, in places drawn at random for each client and round.

    ``share``: of all d numbers of the model together; how many these are, k, is rounded up. ``correction``: what makes
    up for the others. By "scale" the server multiplies by d / k, so that the mean over draws is the update, with a
    variance of d / k - 1 times its squared norm; by "error-feedback" what is left out joins the next round's update.
    """

    kind: Literal["rand-k"] = "rand-k"
    share: float = Field(0.1, gt=0, le=1)
    correction: Literal["scale", "error-feedback"] = "scale"
    title: ClassVar[str] = "rand-k"

    @property
    def keeps_error(self) -> bool:
        """Say whether what is left out is sent later."""
        return self.correction == "error-feedback"

    def remarks(self, experiment: Choices) -> list[str]:
        """Say where nothing is left out."""
        del experiment
        return [] if self.share < 1 else [off("compress.share=1", "all numbers of an update are sent")]

    def size(self, layout: Layout) -> Size:
        """Return k numbers."""
        return Size(count_of(self.share, num_in(layout)))

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Send k numbers; hold back the rest only where it is not made up for by scaling."""
        return super().pack(update, held, coins) if self.keeps_error else (self.encode(update, coins), {})

    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return the numbers in the places that are drawn; of an update that is not finite all are NaN."""
        return Packed.of(update.flat[self._places(len(update.flat), coins)])

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return these numbers, scaled where that is the correction, and zeros elsewhere."""
        d = num_in(layout)
        factor = d / len(packed.numbers) if self.correction == "scale" else 1.0
        return spread(packed.numbers * factor, self._places(d, coins), layout)

    def _places(self, d: int, coins: Coins) -> torch.Tensor:
        drawn = coins().choice(d, count_of(self.share, d), replace=False, shuffle=False)
        drawn.sort()
        return torch.from_numpy(drawn)
