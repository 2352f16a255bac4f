"""FedRolex: HeteroFL with a window of channels that shifts by one channel in every round (Alam et al.

2022, section 3).
"""

from typing import ClassVar, Literal

from strategies.heterofl import HeteroFL


class FedRolex(HeteroFL):
    """HeteroFL whose small models begin at channel t mod K in round t, counted from 0, so all entries are trained.

    K is the number of channels of a layer. After channel K - 1, the window continues at channel 0. The settings are
    those of ``heterofl``.
    """

    kind: Literal["fedrolex"] = "fedrolex"  # type: ignore[assignment]  # another kind than its base class
    title: ClassVar[str] = "FedRolex"

    def first_channel(self, rounds: int) -> int:
        """Return the first channel of small models. It increases by one in every round."""
        return rounds
