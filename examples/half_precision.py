"""A compressor of your own: clients send numbers of 16 bits, and error feedback sends the rounding error later.

    fl-sim run compress=half_precision:HalfPrecision partition=iid

``bytes_up`` of every round counts compressed bytes, so it is half of ``bytes_up`` without compression.
"""

from typing import ClassVar

import numpy as np
import torch

from fl_sim.packed import Coins, Packed, Size
from fl_sim.params import FlatParams, Layout, num_in
from strategies.compression.error_feedback import ErrorFeedback


class HalfPrecision(ErrorFeedback):
    """Sends two bytes per number; the rounding error is added to the client's next update."""

    title: ClassVar[str] = "half precision"

    def size(self, layout: Layout) -> Size:
        """Return the size of a message: no float32 numbers, and two bytes for each number of the model."""
        return Size(numbers=0, bits=2 * num_in(layout))

    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return the rounded update. Numbers outside the range of float16 are clamped; the difference is sent later."""
        del coins  # the random generator that client and server share: rounding needs no random numbers
        largest = torch.finfo(torch.float16).max
        rounded = update.flat.clamp(-largest, largest).half()
        return Packed.of(torch.zeros(0), rounded.numpy().view(np.uint8))

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return the update as float32. Raise fl_sim.errors.Malformed for invalid bytes (here all bytes are valid)."""
        del coins
        return FlatParams(torch.from_numpy(packed.bits.view(np.float16).astype(np.float32)), layout)
