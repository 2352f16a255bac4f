"""SignGuard: filters updates by their norms and by the signs of their coordinates (Xu et al. 2022, algorithm 2)."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.importing import torch
from fl_sim.seeding import rng
from fl_sim.types import Cohort
from strategies.aggregators import Robust
from strategies.algorithm import Weighting


class SignGuard(Robust):
    """The mean of the updates with usual norms and usual signs, each scaled down to the median norm at most.

    For the signs, the rule draws some coordinates by the run's seed. For each update it computes the shares of
    positive, zero and negative values at these coordinates. Mean shift (scikit-learn, bandwidth of quantile 0.5, as in
    the authors' program) clusters these triples. The updates of the largest cluster have usual signs. If no update has
    a usual norm and usual signs, the mean is over all updates with usual norms. More than half of the clients must be
    honest. No privacy guarantee.

    A norm is usual from ``lowest`` to ``highest`` times the median norm. ``coordinate_share``: the share of the
    coordinates that are drawn.
    """

    kind: Literal["signguard"] = "signguard"
    coordinate_share: float = Field(0.1, gt=0, le=1)
    lowest: float = Field(0.1, ge=0, le=1)
    highest: float = Field(3.0, ge=1, le=1e6)
    title: ClassVar[str] = "SignGuard"

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return the mean of the updates with usual norms and signs, among ``rows``, shape (n, d)."""
        del weighting
        rows, size = rows.double(), rows.shape[1]
        norms = rows.norm(dim=1)
        middle = norms.quantile(0.5)
        usual = (norms >= self.lowest * middle) & (norms <= self.highest * middle)
        coins = rng(cohort.seed, "coordinates of SignGuard", cohort.server_round)
        chosen = np.sort(coins.choice(size, max(1, round(self.coordinate_share * size)), replace=False))
        signs = rows[:, torch.from_numpy(chosen)].sign()
        triples = torch.stack([(signs == sign).double().mean(dim=1) for sign in (1, 0, -1)], dim=1)
        both = usual & torch.from_numpy(_in_largest_cluster(triples.numpy()))
        kept = both if bool(both.any()) else usual
        factors = middle / torch.maximum(norms, middle.clamp(min=1e-300))
        mean: torch.Tensor = (factors[kept, None] * rows[kept]).mean(dim=0)
        return mean


def _in_largest_cluster(points: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask of the ``points``, shape (n, 3), in the largest cluster that mean shift finds."""
    from sklearn.cluster import MeanShift, estimate_bandwidth  # noqa: PLC0415 (a second to import)

    if not (bandwidth := estimate_bandwidth(points, quantile=0.5)):
        return np.ones(len(points), dtype=bool)  # bandwidth 0 (one point, or half of the points are equal): use all
    labels = MeanShift(bandwidth=bandwidth).fit(points).labels_
    largest: NDArray[np.bool_] = labels == np.bincount(labels).argmax()
    return largest
