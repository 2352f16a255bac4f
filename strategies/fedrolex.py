"""FedRolex: HeteroFL with a window of channels that shifts by one channel per round (Alam et al. 2022, sec. 3)."""

from typing import ClassVar, Literal

from strategies.heterofl import HeteroFL


class FedRolex(HeteroFL):
    """HeteroFL with a moving window: in round t (from 0), a small model starts at channel t mod K of each layer.

    K is the layer's number of channels; channel 0 follows channel K - 1. So over the rounds all parameters of the large
    model are trained. The settings are those of ``heterofl``.
    """

    kind: Literal["fedrolex"] = "fedrolex"  # type: ignore[assignment]  # another kind than its base class
    title: ClassVar[str] = "FedRolex"

    def first_channel(self, rounds: int) -> int:
        """Return the index of the first channel of small models. The index increases by one in every round."""
        return rounds
