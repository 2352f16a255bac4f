"""The mean of updates with a bounded norm (Sun et al. 2019, section 4: norm thresholding)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import off
from fl_sim.types import Aggregate, Cohort, Reply
from strategies.aggregators import Robust, combined, weights_of
from strategies.algorithm import Weighting


class NormBound(Robust):
    """The mean of the clients' payloads, each taken as one vector and scaled down to a norm of at most ``norm_bound``.

    ``weights`` "uniform": every client has the same weight, so that one of n clients in a round moves the mean by
    ``norm_bound`` / n at most. With "examples" a client's weight is its number of records, if the algorithm weights
    clients so, as Sun et al. do. But the server cannot verify the number of records: a client that claims most of the
    records moves the mean by nearly ``norm_bound``. No noise is added: no privacy guarantee.
    """

    kind: Literal["norm-bound"] = "norm-bound"
    norm_bound: float = Field(1.0, gt=0)
    weights: Weighting = "uniform"
    before: ClassVar[Mapping[str, Any]] = {"weights": "examples"}
    title: ClassVar[str] = "norm bound"

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the mean of the bounded updates, or None if no client has records; see ``Aggregator``."""

        def bounded(rows: torch.Tensor, replies: Sequence[Reply]) -> torch.Tensor:
            by = weighting if self.weights == "examples" else "uniform"
            updates, weights = rows.double(), torch.tensor(weights_of(replies, by), dtype=torch.float64)
            factors = self.norm_bound / updates.norm(dim=1).clamp(min=self.norm_bound)
            mean: torch.Tensor = (factors * weights / weights.sum()) @ updates
            return mean

        return combined(cohort, bounded, self._no_effect)

    def _no_effect(self, rows: torch.Tensor) -> str:
        if float(rows.double().norm(dim=1).max()) > self.norm_bound:
            return ""
        return off(f"aggregator.norm_bound={self.norm_bound:g}", "no update had a larger norm")
