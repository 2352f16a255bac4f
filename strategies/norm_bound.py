"""The mean of updates that are scaled down to a bounded norm (Sun et al. 2019, section 4: norm thresholding)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import off
from fl_sim.seeding import rng
from fl_sim.types import Cohort
from strategies.aggregators import Robust, weights_of
from strategies.algorithm import Weighting


class NormBound(Robust):
    """The mean of clients' payloads, each treated as one vector and scaled down to a norm of at most ``norm_bound``.

    ``weights`` "uniform": every client has the same weight, so that one of n clients in a round changes the mean by at
    most ``norm_bound`` / n. With "examples" a client's weight is its number of records, as in the paper, if the
    algorithm weights clients by records. But the server cannot verify this number: a client that claims to hold most of
    the records can change the mean by nearly ``norm_bound``.

    ``noise``: the standard deviation of normal noise on every coordinate of the mean. Sun et al. 2019 (section 4) call
    such noise weak differential privacy. The noise comes from the run's seed, so there is no privacy guarantee.
    """

    kind: Literal["norm-bound"] = "norm-bound"
    norm_bound: float = Field(1.0, gt=0)
    weights: Weighting = "uniform"
    noise: float = Field(0.0, ge=0, le=1e6)
    before: ClassVar[Mapping[str, Any]] = {"weights": "examples"}
    title: ClassVar[str] = "norm bound"

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return the mean of the updates ``rows`` after scaling them down, with noise if ``noise`` is set."""
        by = weighting if self.weights == "examples" else "uniform"
        updates, weights = rows.double(), torch.tensor(weights_of(cohort.replies, by), dtype=torch.float64)
        factors = self.norm_bound / updates.norm(dim=1).clamp(min=self.norm_bound)
        mean: torch.Tensor = (factors * weights / weights.sum()) @ updates
        if not self.noise:
            return mean
        coins = rng(cohort.seed, "noise beside a norm bound", cohort.server_round)
        return mean + self.noise * torch.from_numpy(coins.standard_normal(len(mean)))

    def no_effect(self, rows: torch.Tensor, cohort: Cohort) -> str:
        """Return a sentence for the user if no update was scaled down in the round, else an empty string."""
        del cohort
        if self.noise or float(rows.double().norm(dim=1).max()) > self.norm_bound:
            return ""
        return off(f"aggregator.norm_bound={self.norm_bound:g}", "no update had a larger norm")
