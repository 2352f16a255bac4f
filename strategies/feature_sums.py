"""The privacy settings of methods whose clients send sums of their features once, such as CCVR."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, Literal

from fl_sim.settings import Settings

if TYPE_CHECKING:
    from clients.private_moments import Protection

MOST_BYTES: Final = 2**28
"""The largest size of a client's sums, in bytes: half the size of the largest message on Flower's runtime."""


class SumsOfFeatures(Settings):
    """Base class of settings for sums of features, with or without noise.

    ``sensitivity``: the largest L2 norm of one record's contribution to the sums.
    """

    # Each subclass declares these fields in its own order, because the names of runs depend on the order.
    if TYPE_CHECKING:
        epsilon: float | None
        delta: float
        clipping_norm: float | None
        noise: Literal["secret", "seeded"]
    sensitivity: ClassVar[float]

    @property
    def is_private(self) -> bool:
        """Return True if clients send their sums with noise, under differential privacy."""
        return self.epsilon is not None

    @property
    def protection(self) -> Protection | None:
        """Return the privacy parameters for the clients' sums, or None if clients send the sums without noise."""
        if self.epsilon is None:
            return None
        from clients.private_moments import Protection  # noqa: PLC0415 (the accountants load slowly)

        return Protection(self.epsilon, self.delta, self.clipping_norm or 0.0, self.noise, self.sensitivity)
