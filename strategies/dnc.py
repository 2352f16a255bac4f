"""DnC, divide and conquer: a spectral filter of updates (Shejwalkar and Houmansadr 2021, section 6, algorithm 2)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.seeding import rng
from fl_sim.types import Cohort
from strategies.aggregators import Robust
from strategies.algorithm import Weighting


class DnC(Robust):
    """The mean of the updates, without outliers in the direction of largest variance.

    An iteration draws some coordinates of the updates, with the run's seed, and computes the first principal direction
    of the updates in these coordinates. It removes the updates with the largest squared projections on this direction:
    c h updates, rounded up, where c is ``filter_share``, and h is ``hostile``. The result is the mean of the updates
    that no iteration removes. A round needs at least 2 h + 1 clients with records, and more clients than all iterations
    together can remove. The rule assumes that all hostile updates have the same direction: a large outlier hides a
    smaller outlier in another direction. No privacy guarantee.

    ``hostile``: the number h of hostile clients for which the rule is designed. ``filter_share``: the factor c of the
    paper; an iteration removes c h updates. ``coordinates``: the number of coordinates that an iteration draws, or all
    if updates have fewer coordinates. ``iterations``: the number of iterations.
    """

    kind: Literal["dnc"] = "dnc"
    hostile: int = Field(2, ge=0)
    filter_share: float = Field(1.0, ge=0, le=100)
    coordinates: int = Field(10_000, ge=1)
    iterations: int = Field(1, ge=1, le=1000)
    title: ClassVar[str] = "DnC"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        left_out = "no update is left out, and all clients have equal weights"
        return [] if self._num_out else [off(f"aggregator.hostile={self.hostile}", left_out)]

    @property
    def _num_out(self) -> int:
        return math.ceil(self.filter_share * self.hostile - 1e-9)

    def fewest(self) -> int:
        """Return the smallest number of updates that the rule needs.

        This number is 2 ``hostile`` + 1, or more if the iterations together could otherwise remove all updates.
        """
        return max(2 * self.hostile, self._num_out * self.iterations) + 1

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return the mean of the updates that no iteration removes."""
        del weighting
        coins, (count, size) = rng(cohort.seed, "coordinates of DnC", cohort.server_round), rows.shape
        kept = torch.ones(count, dtype=torch.bool)
        for _ in range(self.iterations if self._num_out else 0):
            part = rows
            if self.coordinates < size:
                part = rows[:, torch.from_numpy(np.sort(coins.choice(size, self.coordinates, replace=False)))]
            centred = part.double() - part.double().mean(dim=0)
            # The first left singular vector, times a constant, has the projections on the first right singular vector.
            projections = torch.linalg.eigh(centred @ centred.T).eigenvectors[:, -1].square()
            kept[projections.argsort(stable=True)[count - self._num_out :]] = False
        mean: torch.Tensor = rows[kept].double().mean(dim=0)
        return mean
