"""QSGD quantization, and the packing of whole numbers into bytes with as few bits as possible.

QSGD rounds numbers randomly to a few levels, without bias (Alistarh et al. 2017, section 3.1): Q(v)_j = sign(v_j) ||v||
xi_j. Here s is the number of levels above 0, and xi_j is one of the two multiples of 1/s around |v_j| / ||v||. It is
chosen at random so that E[xi_j] = |v_j| / ||v||. Lemma 3.1 of the paper: E[Q(v)] = v, and E||Q(v) - v||^2 <= min(d /
s^2, sqrt(d) / s) ||v||^2 for d numbers. As in section 4 of the paper, v is a bucket of neighbouring numbers of the
update, not the whole update.

Every list of numbers has exactly one packed form, in which unused bits are 0. Any other form is refused.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.errors import Malformed
from fl_sim.importing import torch
from fl_sim.packed import Coins, Packed, Size
from fl_sim.params import FlatParams, Layout, num_in
from fl_sim.settings import Settings
from fl_sim.types import Payloads

_WORD: Final = 64  # bits


class QSGD(Settings):
    """Sends every number as one of a few levels, and the L2 norm of every bucket of ``bucket_size`` numbers.

    ``levels``: the number s of levels above 0; the number of levels below 0 is equal. ``levels=7`` needs 4 bits per
    number, ``levels=1`` needs 1.6 bits. ``bucket_size``: larger buckets mean fewer norms of 32 bits, but more variance.
    """

    kind: Literal["qsgd"] = "qsgd"
    levels: int = Field(7, ge=1, le=32767)
    bucket_size: int = Field(512, ge=1, le=10**9)
    keeps_error: ClassVar[bool] = False

    def size(self, layout: Layout) -> Size:
        """Return the size of a message: one norm for each bucket, and the packed levels of all numbers."""
        d = num_in(layout)
        return Size(-(-d // self.bucket_size), num_digit_bytes(d, self._values))

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Return the packed ``update`` (norms of the buckets and levels), and an empty client state."""
        del held
        buckets = self._in_buckets(update.flat.numpy())
        with np.errstate(over="ignore"):  # a norm that is not finite is sent, so that the server reports the error
            norms = np.sqrt(np.square(buckets, dtype=np.float64).sum(axis=1)).astype(np.float32)
        drawn = coins().random(buckets.size, dtype=np.float32).reshape(buckets.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            heights = np.abs(buckets) / np.where(norms > 0, norms, 1)[:, None] * np.float32(self.levels)
            below = np.floor(heights)
            levels = np.nan_to_num(np.minimum(below + (drawn < heights - below), self.levels) * np.sign(buckets))
        digits = levels.astype(np.int64).ravel()[: len(update.flat)] + self.levels
        return Packed.of(norms, pack_digits(digits, self._values)), {}

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return the update, rounded to levels. Raises Malformed for norms below 0 and for unknown levels."""
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
        """Return ``flat`` in the shape (buckets, bucket size), with zeros after the last number."""
        size = min(self.bucket_size, len(flat))
        padded = np.zeros(-(-len(flat) // size) * size, np.float32)
        padded[: len(flat)] = flat
        return padded.reshape(-1, size)


def bits_for(values: int) -> int:
    """Return the number of bits that can represent ``values`` different numbers.

    >>> [bits_for(values) for values in (1, 2, 3, 1024, 1025)]
    [0, 1, 2, 10, 11]
    """
    return (values - 1).bit_length()


def num_bytes(count: int, bits: int) -> int:
    """Return the number of bytes that ``count`` packed numbers of ``bits`` bits each need."""
    return -(-count * bits // 8)


def pack(numbers: NDArray[np.int64], bits: int) -> NDArray[np.uint8]:
    """Return the bytes of ``numbers`` from 0 to 2^``bits`` - 1, ``bits`` bits each, the highest bit first."""
    places = np.arange(bits - 1, -1, -1)
    return np.packbits((numbers[:, None] >> places & 1).astype(np.uint8))


def unpack(packed: NDArray[np.uint8], count: int, bits: int) -> NDArray[np.int64]:
    """Return the ``count`` numbers that ``pack`` packed. Raises Malformed if an unused bit at the end is not 0."""
    each = np.unpackbits(packed)
    if each[count * bits :].any():
        raise Malformed("sent packed numbers whose unused bits are not 0")
    numbers = np.zeros(count, np.int64)
    for column in each[: count * bits].reshape(count, bits).T:
        numbers = numbers << 1 | column
    return numbers


def digits_in_word(base: int) -> int:
    """Return the number of digits in the number system of ``base`` that fit into 64 bits.

    >>> [digits_in_word(base) for base in (2, 3, 15, 255)]
    [64, 40, 16, 8]
    """
    digits, values = 0, base
    while values <= 2**_WORD:
        digits, values = digits + 1, values * base
    return digits


def num_digit_bytes(count: int, base: int) -> int:
    """Return the number of bytes that ``pack_digits`` returns for ``count`` digits."""
    return _WORD // 8 * -(-count // digits_in_word(base))


def pack_digits(digits: NDArray[np.int64], base: int) -> NDArray[np.uint8]:
    """Return the bytes of digits from 0 to ``base`` - 1, packed into words of 64 bits.

    A digit with three possible values needs 1.6 bits instead of 2.
    """
    width = digits_in_word(base)
    columns = np.zeros((-(-len(digits) // width), width), np.uint64)
    columns.ravel()[: len(digits)] = digits
    words = np.zeros(len(columns), np.uint64)
    for column in columns.T[::-1]:
        words = words * np.uint64(base) + column
    return words.astype("<u8").view(np.uint8)


def unpack_digits(packed: NDArray[np.uint8], count: int, base: int) -> NDArray[np.int64]:
    """Return the ``count`` digits that ``pack_digits`` packed. Raises Malformed for invalid bytes."""
    words, digits = packed.view("<u8").astype(np.uint64), np.zeros((digits_in_word(base), len(packed) // 8), np.int64)
    for row in digits:
        words, left = np.divmod(words, np.uint64(base))
        row[:] = left
    every = digits.T.ravel()
    if words.any() or every[count:].any():
        raise Malformed(f"sent a level that is not one of the {base} valid levels")
    return every[:count]
