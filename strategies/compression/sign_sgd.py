"""SignSGD with error feedback: one bit a number (Karimireddy et al. 2019, algorithm 1, EF-SignSGD).

p = e + D; send (||p||_1 / d) sign(p); e <- p - what was sent. The scale is that of a tensor here: those of a model's
layers differ by orders of magnitude, and one for all would have small ones follow large ones.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from fl_sim.errors import Malformed
from fl_sim.importing import torch
from fl_sim.packed import Coins, Packed, Size
from fl_sim.params import FlatParams, Layout, num_in
from strategies.compression.bits import num_bytes, pack, unpack
from strategies.compression.error_feedback import ErrorFeedback


class SignSGD(ErrorFeedback):
    """Sends the sign of every number, and the mean size of each tensor's; what is left out joins the next round's."""

    kind: Literal["signsgd"] = "signsgd"
    title: ClassVar[str] = "SignSGD"

    def size(self, layout: Layout) -> Size:
        """Return a scale for each tensor, and a bit for each number."""
        return Size(len(layout), num_bytes(num_in(layout), 1))

    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return mean sizes and signs; 0 counts as positive."""
        del coins
        scales = torch.stack([value.abs().sum() / max(1, value.numel()) for value in update.values()])
        return Packed.of(scales, pack((update.flat.numpy() >= 0).astype(np.int64), 1))

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return scales with signs. Raises Malformed for scales below 0."""
        del coins
        if (packed.numbers < 0).any():
            raise Malformed("sent mean sizes that are below 0")
        signs = FlatParams(torch.from_numpy(2.0 * unpack(packed.bits, num_in(layout), 1) - 1).float(), layout)
        parts = [scale * sign.reshape(-1) for scale, sign in zip(packed.numbers, signs.values(), strict=True)]
        return FlatParams(torch.cat(parts), layout)
