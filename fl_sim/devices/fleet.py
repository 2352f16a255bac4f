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

    def wrong(self, num_clients: int) -> str:
        """Say what is wrong with these numbers for so many clients, a clause; empty where nothing is."""
        computing = self.step_seconds + self.record_seconds
        for name, numbers, is_good in (
            ("step_seconds and record_seconds", computing, (computing > 0) & np.isfinite(computing)),
            ("step_seconds", self.step_seconds, self.step_seconds >= 0),
            ("record_seconds", self.record_seconds, self.record_seconds >= 0),
            ("download", self.download, self.download > 0),
            ("upload", self.upload, self.upload > 0),
            ("availability", self.availability, (self.availability >= 1e-3) & (self.availability <= 1)),
        ):
            if numbers.shape != (num_clients,):
                return f"{name} have the shape {numbers.shape}, and there are {num_clients} clients"
            if not is_good.all():
                return f"{name} of client {int(np.argmin(is_good))} is {numbers[np.argmin(is_good)]:g}"
        return "" if 0 <= self.jitter <= 3 else f"jitter is {self.jitter:g}: it must be from 0 to 3"
