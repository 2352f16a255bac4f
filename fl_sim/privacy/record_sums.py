"""Noisy sums of all clients' per-record gradients modulo 2^40: DP-SGD without a trusted server.

A client adds up the clipped gradients of its records, scales the sum, and rounds it randomly to whole numbers. Then it
adds integer noise and sends the result modulo 2^40. Secure aggregation gives the server the sum over all clients, and
nothing else. The sum has the noise of a trusted server that sees all records, whatever the number of clients, because
the clients' noises add up to it.

* The privacy unit is one record, so a client's sum is not clipped: only each record's gradient is.
* The coins of random rounding do not depend on records. So for given coins, rounding changes the difference of two
  adjacent sums by less than one grid step in each of d numbers, and the sensitivity by at most sqrt(d) grid steps.
* The grid is fine: a client's noise has a standard deviation of 2^16 grid steps, so the sensitivity grows little.
* 40 bits hold the sum of all records' gradients, even if all are equal. So no number wraps around.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from dp_accounting import dp_event
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.privacy.events import SkellamDpEvent
from fl_sim.privacy.integer_noise import Mechanism, drawn
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.modular_sums import NoisyGrid, signed

BITS: Final = 40
"""The number of bits of a sent number."""

MOST_RECORDS: Final = 2**20
"""The largest number of records of all clients together, for which the rounding errors of float64 are covered."""

STEPS_OF_NOISE: Final = 2**16
"""The standard deviation of a client's noise in grid steps. More steps need a larger table of the distribution."""

_TAIL: Final = 16  # no noise number is further from 0 than this number of standard deviations


@dataclass(frozen=True)
class RecordGrid(NoisyGrid):
    """The grid of a sum of records' clipped gradients; the privacy unit is a record."""

    @property
    def mechanism(self) -> Mechanism:
        """Return the name of the noise distribution: a sum of Skellam noises is exactly Skellam."""
        return "skellam"

    @property
    def cure(self) -> str:
        """Return advice, as a noun phrase, for sums whose rounding is too coarse."""
        return "a smaller model"

    @property
    def padded(self) -> int:
        """Return the length of a message: ``dimension``, because there is no rotation that needs zeros."""
        return self.dimension

    @property
    def bits(self) -> int:
        """Return the number of bits of a sent number."""
        return BITS

    @property
    def scale(self) -> float:
        """Return the scale: a number x of a sum becomes x * scale, in grid steps."""
        return STEPS_OF_NOISE * math.sqrt(self.shares) / (self.noise_multiplier * self.clipping_norm)

    @cached_property
    def l2(self) -> float:
        """Return the largest L2 norm of the change of a rounded sum when one record is removed, in grid steps.

        It is the scaled clipping norm, sqrt(d) for the rounding of d numbers, and the rounding errors of float64. Let u
        be 2^-53 and n = ``MOST_RECORDS``. The sum of n clipped gradients is wrong by at most (n^2 / 2 + n) u clipping
        norms, a norm by (d / 2 + 4) u of itself, and scaling by n u clipping norms. This holds for both sums, and twice
        the errors are counted, to cover the terms quadratic in u.
        """
        n, length = MOST_RECORDS, self.scale * self.clipping_norm
        errors = (n * (n + 4) + self.dimension + 8) * 2.0**-52
        return length * (1 + errors) + math.sqrt(self.dimension)

    @property
    def l1(self) -> float:
        """Return the largest L1 norm of the same change: for whole numbers, at most the squared L2 norm."""
        return min(math.sqrt(self.dimension) * self.l2, self.l2**2)

    def event(self, present: int) -> dp_event.DpEvent:
        """Return the privacy event of a sum that contains the noise of ``present`` clients.

        If more than ``shares`` clients are present, only the noise of ``shares`` clients is counted. The privacy unit
        is a record. Adjacency: one record is removed, and the public number of its client's records does not change.
        """
        assert present > 0
        return SkellamDpEvent(min(present, self.shares) * self.share_variance, self.l1, self.l2)

    def check_records(self, num_records: int) -> None:
        """Raise UserError if a sum of ``num_records`` gradients could exceed the range of 40 bits."""
        most = (self.modulus / 2 - _TAIL * self.shares * STEPS_OF_NOISE) / (self.scale * self.clipping_norm) - 1
        if num_records > (fits := max(0, math.floor(min(most, MOST_RECORDS)))):
            raise UserError(
                f"the sum of {num_records:,} records' gradients may exceed the range of {BITS} bits: with noise of "
                f"{self.noise_multiplier:g} clipping norms and {self.shares:,} clients, {fits:,} records fit; set a "
                "larger aggregator.noise_multiplier, or use fewer records"
            )


def record_share(total: NDArray[np.float64], grid: RecordGrid, noise: Noise, server_round: int) -> NDArray[np.int64]:
    """Return the numbers that a client sends in a round: its rounded sum plus its noise, modulo 2^40.

    ``total``: the sum of the clipped gradients of the client's records, shape (dimension,), finite. ``noise``: a source
    of random numbers for this client and round only.
    """
    scaled = total * grid.scale
    below = np.floor(scaled)
    coins = noise.uniform(len(scaled), purpose="rounding of a share", server_round=server_round)
    rounded = (below + (coins < scaled - below)).astype(np.int64)
    added = drawn(
        grid.mechanism, grid.share_variance, noise, len(rounded), purpose="noise of a share", server_round=server_round
    )
    return (rounded + added) % grid.modulus


def opened(total: NDArray[np.int64], grid: RecordGrid) -> NDArray[np.float64]:
    """Return the noisy sum of all gradients, shape (dimension,).

    ``total``: the sum modulo 2^40 of the clients' numbers (``record_share``), shape (dimension,).
    """
    return signed(total, grid.bits) / grid.scale
