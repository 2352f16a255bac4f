"""The mean of updates whose length is bounded (Sun et al. 2019, section 4: norm thresholding)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.late_torch import torch
from fl_sim.types import Aggregate, Cohort, Reply
from strategies.aggregators import Robust, combined, weights_of
from strategies.algorithm import Weighting


class NormBound(Robust):
    """Each client's payloads, taken as one vector, are scaled down to at most ``norm_bound``; then their mean.

    One hostile client of n moves the model by ``norm_bound`` / n at most. Nothing is noised: no privacy.
    """

    kind: Literal["norm-bound"] = "norm-bound"
    norm_bound: float = Field(1.0, gt=0)
    title: ClassVar[str] = "norm bound"

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the mean of bounded updates, or None where no client has records; see ``Aggregator``."""

        def bounded(rows: torch.Tensor, replies: Sequence[Reply]) -> torch.Tensor:
            updates, weights = rows.double(), torch.tensor(weights_of(replies, weighting), dtype=torch.float64)
            factors = self.norm_bound / updates.norm(dim=1).clamp(min=self.norm_bound)
            mean: torch.Tensor = (factors * weights / weights.sum()) @ updates
            return mean

        return combined(cohort, bounded)
