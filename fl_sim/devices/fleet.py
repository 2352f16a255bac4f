"""What the devices of all clients are like, as numbers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BYTES_PER_MEGABIT = 125_000


@dataclass(frozen=True, eq=False)
class Fleet:
    """One device for each client; all arrays have the shape (clients,).

    ``step_seconds``: seconds for a step, 0 where a device goes by records. ``record_seconds``: seconds for a record,
    0 where it goes by steps. ``download`` and ``upload``: bytes in a second to and from the client. ``availability``:
    how often, in (0, 1], the client is there when the server looks for it. ``jitter``: the deviation of the logarithm
    of the factor by which each turn of a client takes longer or shorter; 0: none does.
    """

    step_seconds: NDArray[np.float64]
    record_seconds: NDArray[np.float64]
    download: NDArray[np.float64]
    upload: NDArray[np.float64]
    availability: NDArray[np.float64]
    jitter: float = 0.0
