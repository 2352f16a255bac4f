"""RFA: the geometric median of a round's updates (Pillutla, Kakade, Harchaoui 2022, algorithm 2)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import off
from fl_sim.types import Cohort
from strategies.aggregators import Robust
from strategies.algorithm import Weighting
from strategies.coordinate_median import median


class GeometricMedian(Robust):
    """The point with the least sum of distances to the updates, by the smoothed Weiszfeld algorithm.

    The iterations start from the coordinate-wise median. The paper starts from the mean. Ten iterations from the mean
    are not enough if hostile updates are large. For example, with two hostile clients of nine and hostile updates of
    1e8, the result still moves by 14 after ten iterations. Every client has the same weight, because the server cannot
    verify a client's number of records (the paper weights clients by records). No privacy guarantee.

    ``iterations``: the number of iterations. ``smoothing``: the paper's nu, the least number that the algorithm divides
    by, so no division by 0 occurs.
    """

    kind: Literal["geometric-median"] = "geometric-median"
    iterations: int = Field(10, ge=1, le=10_000)
    smoothing: float = Field(1e-6, gt=0)
    title: ClassVar[str] = "geometric median"

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return the approximate geometric median of the updates ``rows``, shape (n, d)."""
        del cohort, weighting
        start = median(rows).double()
        points = rows - start
        products = points @ points.T  # distances come from products, so an iteration reads n x n numbers, not n x d
        shares = torch.zeros(len(rows), dtype=torch.float64)  # the iterate is start + shares @ points
        for _ in range(self.iterations):
            squares = products.diagonal() - 2 * products @ shares + shares @ products @ shares
            weights = 1 / squares.clamp(min=self.smoothing**2).sqrt()
            shares = weights / weights.sum()
        return start + shares @ points

    def no_effect(self, rows: torch.Tensor, cohort: Cohort) -> str:
        """Return a remark for the user if the result is only the mean of the updates ``rows``, else an empty string.

        The result is the mean if there are at most two updates, or if no update is further than half of ``smoothing``
        from the mean.
        """
        del cohort
        far = (rows.double() - rows.double().mean(dim=0)).norm(dim=1).max()
        # Updates and starting point are at most ``far`` from the mean, so any two of these points are at most 2 ``far``
        # apart. If 2 ``far`` is at most ``smoothing``, all weights are 1 / ``smoothing``, and the result is the mean.
        if len(rows) > 2 and 2 * float(far) > self.smoothing:
            return ""
        if len(rows) <= 2:
            return off("aggregator geometric-median", "at most two clients had records, and their median is their mean")
        return off(
            "aggregator geometric-median",
            f"the distances of updates are below aggregator.smoothing={self.smoothing:g}, so the result is their mean",
        )
