"""The coordinate-wise trimmed mean of a round's updates (Yin et al. 2018, definition 2)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.types import Cohort
from strategies.aggregators import Robust, cohort_size, ordered
from strategies.algorithm import Weighting


class TrimmedMean(Robust):
    """The mean of every coordinate without the smallest and the largest values.

    ``trim``: the paper's beta, the share of clients whose values are left out at each end, rounded up to whole clients.
    Choose at least the share of clients that may be hostile. If no value would be left, the one or two middle values
    are used, as in the median. Every client has the same weight. No privacy guarantee.
    """

    kind: Literal["trimmed-mean"] = "trimmed-mean"
    trim: float = Field(0.2, ge=0, lt=0.5)
    title: ClassVar[str] = "trimmed mean"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        if self.trim and cohort_size(experiment) > 2:
            return []
        return [off(f"aggregator.trim={self.trim:g}", "nothing is cut off, and all clients have the same weight")]

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return the trimmed mean of every coordinate of the updates ``rows``, shape (n, d)."""
        del cohort, weighting
        cut = min(math.ceil(self.trim * len(rows) - 1e-9), (len(rows) - 1) // 2)
        return ordered(rows)[cut : len(rows) - cut].mean(dim=0)
