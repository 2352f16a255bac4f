"""Error feedback: what compression leaves out is added to the next round's update (Seide et al. 2014).

e <- e + D; send C(e); e <- e - C(e). So all that was sent and what is left add up to all updates, but for rounding.
"""

from __future__ import annotations

from abc import abstractmethod

from fl_sim.packed import Coins, Packed, Size
from fl_sim.params import FlatParams, Layout, add, flattened, subtract
from fl_sim.settings import Settings
from fl_sim.types import Params, Payloads


class ErrorFeedback(Settings):
    """A compressor C of which clients keep the error."""

    @property
    def keeps_error(self) -> bool:
        """Say whether what is left out is sent later."""
        return True

    @abstractmethod
    def size(self, layout: Layout) -> Size:
        """Return how much is sent."""

    @abstractmethod
    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return C of a vector, packed."""

    @abstractmethod
    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return C of a vector."""

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Send C(e + D) and hold back the rest."""
        corrected = corrected_by(held, update)
        packed = self.encode(corrected, coins)
        return packed, {"error": subtract(corrected, self.unpack(packed, update.layout, coins))}


def corrected_by(held: Payloads, update: FlatParams) -> FlatParams:
    """Return e + D: an update with what earlier rounds held back of theirs."""
    error: Params | None = held.get("error")
    return update if error is None else flattened(add(update, error))
