"""Noisy sums of vectors modulo 2^bits, for differential privacy without a trusted server.

A client clips its vector, rotates and scales it, and rounds it randomly to whole numbers. Then the client adds integer
noise and sends the result modulo 2^bits. Secure aggregation gives the server the sum modulo 2^bits, and nothing else.
The server shifts the sum into a range around 0, and undoes scale and rotation. These are algorithms 1 and 2 of Kairouz,
Liu, Steinke 2021.

* The rotation multiplies each number by a random sign, and the vector by a Hadamard matrix. The signs are public. The
  rotation spreads a vector evenly over all numbers, so few bits are enough. The vector is zero-padded to a power of 2.
* Random rounding may increase the norm of a vector. So rounding is repeated until the norm is within a bound. At least
  39 % of the tries succeed (in the paper: conditional rounding with beta = e^(-1/2)). The bound is the sensitivity of
  the sum, because a client without data sends zeros (plus noise).
* The scale is chosen so that ``headroom`` standard deviations of the sum fit into half of the modulus, even if all
  clients send the same vector.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final, Self

import numpy as np
from dp_accounting import dp_event
from numpy.typing import NDArray

from fl_sim.errors import Malformed, UserError
from fl_sim.privacy.accounting import epsilon_of_counts, least_noise
from fl_sim.privacy.events import DiscreteGaussiansDpEvent, SkellamDpEvent
from fl_sim.privacy.integer_noise import VARIANCE_STEPS, Mechanism, drawn
from fl_sim.privacy.mechanisms import Noise, clip_factor
from fl_sim.seeding import rng

MOST_TRIES: Final = 500
"""The largest number of tries of random rounding. If all fail (probability below 10^-100), zeros are sent."""

# numbers are packed in blocks of this size: a multiple of 8, so that each block fills whole bytes
_BLOCK: Final = 2**15

EDGE: Final = 0.75
"""A number of the sum is near the edge if its absolute value exceeds this fraction of half of the modulus."""


@dataclass(frozen=True)
class NoisyGrid(ABC):
    """The rounding grid and the noise of a noisy sum of vectors. All fields are public.

    ``dimension``: the length of a vector. ``shares``: the number of clients whose noise adds up to the planned noise.
    ``clipping_norm``: the largest L2 norm of what one privacy unit adds to the sum. ``noise_multiplier``: the planned
    standard deviation of the noise on each number of the sum, divided by ``clipping_norm``.
    """

    dimension: int
    shares: int
    clipping_norm: float
    noise_multiplier: float

    @property
    @abstractmethod
    def mechanism(self) -> Mechanism:
        """Return the name of the noise distribution."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Return the number of bits of a sent number."""

    @property
    @abstractmethod
    def padded(self) -> int:
        """Return the number of numbers in a message."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """Return the scale: a number x of a vector becomes x * scale, in grid steps."""

    @property
    @abstractmethod
    def cure(self) -> str:
        """Return advice, as a noun phrase, for sums whose rounding is too coarse."""

    @abstractmethod
    def event(self, present: int) -> dp_event.DpEvent:
        """Return the privacy event of a sum that contains the noise of ``present`` clients."""

    def with_noise(self, noise_multiplier: float) -> Self:
        """Return the grid for another noise multiplier."""
        return replace(self, noise_multiplier=noise_multiplier)

    @property
    def modulus(self) -> int:
        """Return the modulus, 2^bits: clients send numbers, and the server gets sums, modulo this number."""
        return 1 << self.bits

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes of the message that a client sends for one sum."""
        return -(-self.padded * self.bits // 8)

    @cached_property
    def share_variance(self) -> float:
        """Return the variance of one client's noise, in squared grid steps, rounded up to a multiple of 2^-10."""
        wanted = (self.noise_multiplier * self.clipping_norm * self.scale) ** 2 / self.shares
        return math.ceil(wanted * VARIANCE_STEPS) / VARIANCE_STEPS

    @property
    def std_of_mean(self) -> float:
        """Return an upper bound on the standard deviation of the error by noise and rounding in each mean value."""
        variance = self.shares * (self.share_variance + 0.25)
        return math.sqrt(variance) / self.scale / self.shares


@dataclass(frozen=True)
class SumGrid(NoisyGrid):
    """The grid of a sum of clients' clipped vectors; the privacy unit is a client.

    ``mechanism``: the distribution of the noise. ``bits``: the number of bits of a sent number. ``headroom``: the
    number of standard deviations of the sum that fit into half of the modulus.
    """

    mechanism: Mechanism = "skellam"
    bits: int = 16
    headroom: float = 4.0

    @property
    def cure(self) -> str:
        """Return advice, as a noun phrase, for sums whose rounding is too coarse."""
        return "more bits"

    @property
    def padded(self) -> int:
        """Return the length of a zero-padded vector: the smallest power of two that is at least ``dimension``."""
        return 1 << (self.dimension - 1).bit_length()

    @cached_property
    def scale(self) -> float:
        """Return the scale: a number x of a clipped vector becomes x * scale, in steps of the rounding grid.

        Let m be the number of clients, c the clipping norm, and d the padded dimension. The standard deviation of a
        number of the sum has three parts. The first part is m c / sqrt(d). This part comes from m vectors of the
        largest norm in one direction, after the rotation. The second part is the noise. The third part is the rounding
        of m numbers, at most sqrt(m) / 2 grid steps. Raises UserError if the bits are too few for the rounding errors
        of all clients.
        """
        room = (self.modulus / 2 / self.headroom) ** 2 - self.shares / 4
        if room <= 0:
            raise UserError(
                f"{self.bits} bits are too few for sums of {self.shares:,} clients: set more bits or a smaller headroom"
            )
        aligned = self.shares**2 / self.padded
        return math.sqrt(room / (aligned + self.noise_multiplier**2)) / self.clipping_norm

    @cached_property
    def most_squared(self) -> int:
        """Return the largest squared L2 norm of a client's rounded vector, in grid steps."""
        length, d = self.scale * self.clipping_norm, self.padded
        certain = (length + math.sqrt(d)) ** 2
        # In the paper, the last two terms have the factor sqrt(2 log(1 / beta)). This factor is 1 here, because beta =
        # e^(-1/2).
        probable = length**2 + d / 4 + length + math.sqrt(d) / 2
        return math.floor(min(certain, probable))

    @property
    def l2(self) -> float:
        """Return the largest L2 norm of a client's rounded vector, in grid steps."""
        return math.sqrt(self.most_squared)

    @property
    def l1(self) -> float:
        """Return the largest L1 norm of a client's rounded vector: for whole numbers, at most the squared L2 norm."""
        return min(math.sqrt(self.padded) * self.l2, float(self.most_squared))

    def event(self, present: int) -> dp_event.DpEvent:
        """Return the privacy event of a sum that contains the noise of ``present`` clients.

        If more than ``shares`` clients are present, only the noise of ``shares`` clients is counted. The privacy unit
        is a client. Adjacency: all data of one client are removed, but the client still takes part.
        """
        assert present > 0
        counted = min(present, self.shares)
        variance = counted * self.share_variance
        if variance == 0:
            return dp_event.NonPrivateDpEvent()
        if self.mechanism == "skellam":
            return SkellamDpEvent(variance, self.l1, self.l2)
        return DiscreteGaussiansDpEvent(variance, self.l1, self.l2, shares=counted, dimension=self.padded)


def noise_for(grid: NoisyGrid, rounds: int, epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier with which ``rounds`` sums cost at most ``epsilon`` at ``delta``.

    The assumption is that no client drops out, so every sum contains the noise of all clients. The noise multiplier in
    ``grid`` is ignored. Raises UserError if no noise is enough for ``epsilon``.
    """

    def spent(noise_multiplier: float, accountant: object) -> float:
        del accountant  # always RDP, because the PLD accountant does not support integer noise
        tried = grid.with_noise(noise_multiplier)
        return epsilon_of_counts({tried.event(tried.shares): rounds}, delta)

    assert grid.scale > 0  # ``scale`` raises UserError if the numbers have too few bits for all clients
    try:
        found = least_noise(spent, epsilon, "rdp")
    except UserError as error:
        raise UserError(
            f"epsilon {epsilon:g} at delta {delta:g} is out of reach with {grid.bits} bits for {grid.dimension:,} "
            f"numbers of {grid.shares:,} clients: because of the rounding, no noise is enough. Set {grid.cure}, a "
            "larger epsilon, or fewer rounds"
        ) from error
    return math.ceil(found * 1e6) / 1e6


def share_of(
    values: NDArray[np.float64], grid: SumGrid, noise: Noise, *, seed: int, server_round: int
) -> NDArray[np.int64]:
    """Return the numbers that a client sends in a round: its rounded ``values`` plus its noise, modulo 2^bits.

    ``values``: shape (dimension,). ``noise``: a source of random numbers for this client and round only. ``seed``: the
    public seed of the rotation. A vector that is not finite counts as zeros.
    """
    rounded = rounded_to_grid(rotated(values, grid, seed=seed, server_round=server_round), grid, noise, server_round)
    added = drawn(
        grid.mechanism, grid.share_variance, noise, grid.padded, purpose="noise of a share", server_round=server_round
    )
    return (rounded + added) % grid.modulus


def rotated(values: NDArray[np.float64], grid: SumGrid, *, seed: int, server_round: int) -> NDArray[np.float64]:
    """Return a client's vector ``values`` after clipping, padding with zeros, rotation and scaling; shape (padded,)."""
    factor = clip_factor(float(np.linalg.norm(values)), grid.clipping_norm)
    padded = np.zeros(grid.padded)
    if factor:
        padded[: grid.dimension] = values * factor
    return hadamard(padded * signs(seed, server_round, grid.padded)) * grid.scale


def rounded_to_grid(scaled: NDArray[np.float64], grid: SumGrid, noise: Noise, server_round: int) -> NDArray[np.int64]:
    """Round a client's rotated vector ``scaled`` randomly to whole numbers, within the norm bound of ``grid``.

    Random rounding is repeated while the squared norm exceeds ``grid.most_squared``. After too many tries, the result
    is a vector of zeros.
    """
    below = np.floor(scaled)
    upwards = scaled - below
    for number in range(MOST_TRIES):
        coins = noise.uniform(len(scaled), purpose=f"rounding of a share, try {number}", server_round=server_round)
        tried = (below + (coins < upwards)).astype(np.int64)
        if int(tried @ tried) <= grid.most_squared:
            return tried
    return np.zeros(len(scaled), np.int64)


def mean_of_sum(
    total: NDArray[np.int64], present: int, grid: SumGrid, *, seed: int, server_round: int
) -> NDArray[np.float64]:
    """Return the noisy mean of the vectors of ``present`` clients, shape (dimension,): the server's result of a round.

    ``total``: the sum modulo 2^bits of the numbers that these clients sent (``share_of``), shape (padded,).
    """
    unscaled = centred(total, grid).astype(np.float64) / (grid.scale * present)
    found: NDArray[np.float64] = hadamard(unscaled) * signs(seed, server_round, grid.padded)
    return found[: grid.dimension]


def centred(total: NDArray[np.int64], grid: SumGrid) -> NDArray[np.int64]:
    """Return the sum ``total``, which is known only modulo 2^bits, with numbers from -2^(bits-1) to 2^(bits-1) - 1."""
    return signed(total, grid.bits)


def signed(numbers: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """Return the numbers from -2^(bits-1) to 2^(bits-1) - 1 that are equal to ``numbers`` modulo 2^``bits``."""
    half = 1 << (bits - 1)
    return np.asarray((numbers + half) % (1 << bits) - half)


def wraps_around(total: NDArray[np.int64], grid: SumGrid) -> bool:
    """Return True if many numbers of the sum are near the limits +-2^(bits-1). Then some have probably wrapped around.

    If ``headroom`` standard deviations fit into half of the modulus, only few numbers are near these limits. The result
    depends only on the released sum, so it has no privacy cost.
    """
    near = int((np.abs(centred(total, grid)) > EDGE * grid.modulus / 2).sum())
    expected = grid.padded * math.erfc(EDGE * max(grid.headroom, 3.0) / math.sqrt(2))
    return near > 3 * expected + 10 * math.sqrt(expected + 1)


def packed(numbers: NDArray[np.int64], bits: int) -> NDArray[np.uint8]:
    """Return ``numbers`` as bytes, with ``bits`` bits per number. The lowest bit of each number comes first.

    The numbers are whole, from 0 to 2^``bits`` - 1.
    """
    if bits % 8 == 0:  # for whole bytes, the slow operations on single bits (below) are not needed
        return np.ascontiguousarray(numbers.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : bits // 8]).reshape(-1)
    blocks = (numbers[start : start + _BLOCK, None] >> np.arange(bits) & 1 for start in range(0, len(numbers), _BLOCK))
    each = [np.packbits(block.astype(np.uint8), bitorder="little") for block in blocks]
    return np.concatenate([np.zeros(0, np.uint8), *each])


def unpacked(content: NDArray[np.uint8], count: int, bits: int) -> NDArray[np.int64]:
    """Return the ``count`` numbers that ``packed`` wrote as bytes.

    Raises Malformed if a bit after the numbers is not 0.
    """
    if bits % 8 == 0:
        wide = np.zeros((count, 8), np.uint8)
        wide[:, : bits // 8] = content.reshape(count, bits // 8)
        return wide.view("<u8").reshape(-1).astype(np.int64)
    each = np.unpackbits(content, bitorder="little")
    if each[count * bits :].any():
        raise Malformed("sent packed numbers whose unused bits are not 0")
    numbers = np.zeros(count, np.int64)
    for place, column in enumerate(each[: count * bits].reshape(count, bits).T):
        numbers |= column.astype(np.int64) << place
    return numbers


def hadamard(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the product of ``vector``, whose length is a power of two, and the orthogonal Hadamard matrix.

    The matrix is symmetric, so it is its own inverse.
    """
    half, found, other = len(vector) // 2, vector.astype(np.float64), np.empty(len(vector))
    # in each step, the first half gets the sums of neighbouring numbers, and the second half their differences
    for _ in range(len(vector).bit_length() - 1):
        np.add(found[0::2], found[1::2], out=other[:half])
        np.subtract(found[0::2], found[1::2], out=other[half:])
        found, other = other, found
    return found / math.sqrt(len(vector))


@lru_cache(maxsize=2)
def signs(seed: int, server_round: int, count: int) -> NDArray[np.float64]:
    """Return the public signs of a round's rotation, 1.0 or -1.0, shape (count,)."""
    found = rng(seed, "rotation", server_round).choice(np.array([1.0, -1.0]), count)
    found.setflags(write=False)
    return found
