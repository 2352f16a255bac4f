"""A way of your own to compress what clients send: numbers of 16 bits, with what that rounds off sent later.

    fl-sim run compress=half_precision:HalfPrecision partition=iid

``bytes_up`` of every round is half of what it was: what is counted are the bytes that are packed here.
"""

from typing import ClassVar

import numpy as np
import torch

from fl_sim.packed import Coins, Packed, Size
from fl_sim.params import FlatParams, Layout, num_in
from strategies.compression.error_feedback import ErrorFeedback


class HalfPrecision(ErrorFeedback):
    """Two bytes a number; the rounding error joins the client's next update."""

    title: ClassVar[str] = "half precision"

    def size(self, layout: Layout) -> Size:
        """Return no float32 numbers, and two bytes for each number of a model of this layout."""
        return Size(numbers=0, bits=2 * num_in(layout))

    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return what is sent; numbers beyond the largest one of 16 bits are cut, and the rest of them sent later."""
        del coins  # the random numbers that client and server share
        largest = torch.finfo(torch.float16).max
        rounded = update.flat.clamp(-largest, largest).half()
        return Packed.of(torch.zeros(0), rounded.numpy().view(np.uint8))

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return what the server makes of it; raise fl_sim.errors.Malformed for what ``encode`` never packs."""
        del coins
        return FlatParams(torch.from_numpy(packed.bits.view(np.float16).astype(np.float32)), layout)
