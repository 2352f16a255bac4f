"""RFA: the geometric median of a round's updates (Pillutla, Kakade, Harchaoui 2022, algorithm 2)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import off
from fl_sim.types import Aggregate, Cohort
from strategies.aggregators import Robust, combined
from strategies.algorithm import Weighting


class GeometricMedian(Robust):
    """The point with the least sum of distances to the updates, by ``iterations`` of the smoothed Weiszfeld algorithm.

    ``smoothing``: the paper's nu, the least distance that the algorithm divides by; so no division by 0 occurs. Every
    client has the same weight, because the server cannot verify a client's number of records (the paper weights clients
    by records). No privacy guarantee.
    """

    kind: Literal["geometric-median"] = "geometric-median"
    iterations: int = Field(10, ge=1, le=10_000)
    smoothing: float = Field(1e-6, gt=0)
    title: ClassVar[str] = "geometric median"

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the geometric median of all payloads, or None if no client has records; see ``Aggregator``."""
        del weighting
        return combined(cohort, lambda rows, _: self._median(rows.double()), self._no_effect)

    def _no_effect(self, rows: torch.Tensor) -> str:
        far = (rows.double() - rows.double().mean(dim=0)).norm(dim=1).max()
        if len(rows) > 2 and float(far) > self.smoothing:
            return ""
        if len(rows) <= 2:
            return off("aggregator geometric-median", "at most two clients had records, and their median is their mean")
        return off(f"aggregator.smoothing={self.smoothing:g}", "no update was further from the mean, the result")

    def _median(self, rows: torch.Tensor) -> torch.Tensor:
        centre = rows.mean(dim=0)
        for _ in range(self.iterations):
            weights = 1 / (rows - centre).norm(dim=1).clamp(min=self.smoothing)
            centre = (weights / weights.sum()) @ rows
        return centre
