"""QSGD: numbers rounded at random to a few levels, right on average (Alistarh et al. 2017, section 3.1).

Q(v)_j = sign(v_j) ||v|| xi_j, where xi_j is one of the two multiples of 1/s around |v_j| / ||v||, the upper one with
the probability that makes E[xi_j] = |v_j| / ||v||. Lemma 3.1: E[Q(v)] = v, and E||Q(v) - v||^2 <=
min(d / s^2, sqrt(d) / s) ||v||^2. As in section 4 of the paper, v is a bucket of neighbouring numbers, not all of them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.errors import Malformed
from fl_sim.importing import torch
from fl_sim.packed import Coins, Packed, Size
from fl_sim.params import FlatParams, Layout, num_in
from fl_sim.settings import Settings
from fl_sim.types import Payloads
from strategies.compression.bits import num_digit_bytes, pack_digits, unpack_digits


class QSGD(Settings):
    """Sends every number as one of a few levels, and the L2 norm of every bucket of ``bucket_size`` numbers.

    ``levels``: the paper's s, how many there are above 0, and as many below; 7 take 4 bits a number, 1 takes 1.6.
    ``bucket_size``: larger ones cost fewer norms, 32 bits each, and more variance.
    """

    kind: Literal["qsgd"] = "qsgd"
    levels: int = Field(7, ge=1, le=32767)
    bucket_size: int = Field(512, ge=1, le=10**9)
    keeps_error: ClassVar[bool] = False

    def size(self, layout: Layout) -> Size:
        """Return a norm for each bucket, and as many bits as the levels take."""
        d = num_in(layout)
        return Size(-(-d // self.bucket_size), num_digit_bytes(d, self._values))

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Send norms and levels."""
        del held
        buckets = self._in_buckets(update.flat.numpy())
        with np.errstate(over="ignore"):  # the server tells a norm that is not finite
            norms = np.sqrt(np.square(buckets, dtype=np.float64).sum(axis=1)).astype(np.float32)
        drawn = coins().random(buckets.size, dtype=np.float32).reshape(buckets.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            heights = np.abs(buckets) / np.where(norms > 0, norms, 1)[:, None] * np.float32(self.levels)
            below = np.floor(heights)
            levels = np.nan_to_num(np.minimum(below + (drawn < heights - below), self.levels) * np.sign(buckets))
        digits = levels.astype(np.int64).ravel()[: len(update.flat)] + self.levels
        return Packed.of(norms, pack_digits(digits, self._values)), {}

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return the rounded update. Raises Malformed for norms below 0 and for levels that there are not."""
        del coins
        norms, d = packed.numbers.numpy(), num_in(layout)
        if (norms < 0).any():
            raise Malformed("sent norms that are below 0")
        levels = self._in_buckets((unpack_digits(packed.bits, d, self._values) - self.levels).astype(np.float32))
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = levels * (norms / np.float32(self.levels))[:, None]
        return FlatParams(torch.from_numpy(rounded.ravel()[:d].copy()), layout)

    @property
    def _values(self) -> int:
        return 2 * self.levels + 1

    def _in_buckets(self, flat: NDArray[np.float32]) -> NDArray[Any]:
        """Return numbers as (buckets, bucket size), with zeros behind the last of them."""
        size = min(self.bucket_size, len(flat))
        padded = np.zeros(-(-len(flat) // size) * size, np.float32)
        padded[: len(flat)] = flat
        return padded.reshape(-1, size)
