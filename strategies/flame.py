"""FLAME: clusters updates by their directions, clips them and adds noise (Nguyen et al. 2022, algorithm 1)."""

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


class Flame(Robust):
    """The mean of the updates in the largest cluster, with noise. Updates are scaled down to at most the median norm.

    HDBSCAN clusters the n updates by their cosine distances. A cluster must have more than n / 2 updates, so there is
    at most one. If there is no cluster, the mean is over all updates. The median norm is that of all n updates.
    ``noise``: the paper's lambda. Every coordinate of the mean gets normal noise. Its standard deviation is ``noise``
    times the median norm. The paper uses 0.001 for images. There is no privacy guarantee: the noise comes from the
    run's seed, and its standard deviation depends on the updates. More than half of the clients must be honest.
    """

    kind: Literal["flame"] = "flame"
    noise: float = Field(0.001, ge=0, le=1e6)
    title: ClassVar[str] = "FLAME"

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return the noisy mean of the clipped updates in the largest cluster."""
        del weighting
        rows = rows.double()
        norms = rows.norm(dim=1)
        middle = norms.quantile(0.5)
        units = rows / norms[:, None].clamp(min=1e-300)
        distances = (1 - units @ units.T).clamp(min=0).fill_diagonal_(0)
        kept = torch.from_numpy(_in_cluster(((distances + distances.T) / 2).numpy()))
        factors = middle / torch.maximum(norms, middle.clamp(min=1e-300))
        mean: torch.Tensor = (factors[:, None] * rows)[kept].mean(dim=0)
        if not self.noise:
            return mean
        coins = rng(cohort.seed, "noise of FLAME", cohort.server_round)
        noisy: torch.Tensor = mean + self.noise * middle * torch.from_numpy(coins.standard_normal(len(mean)))
        return noisy


def _in_cluster(distances: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask of the updates in the largest cluster, shape (n,). If there is no cluster, all values are True.

    ``distances``: the distances of all pairs of updates, shape (n, n).
    """
    if (count := len(distances)) < 3:
        return np.ones(count, dtype=bool)
    from sklearn.cluster import HDBSCAN  # noqa: PLC0415 (a second to import)

    # min_samples 1 in the paper is 2 here, because scikit-learn also counts the point itself
    clusters = HDBSCAN(
        min_cluster_size=count // 2 + 1, min_samples=2, metric="precomputed", allow_single_cluster=True, copy=True
    )
    found: NDArray[np.bool_] = clusters.fit(distances).labels_ >= 0
    return found if found.any() else np.ones(count, dtype=bool)
