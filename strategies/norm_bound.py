"""The mean of updates whose length is bounded (Sun et al. 2019, section 4: norm thresholding)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.settings import Settings
from fl_sim.types import Aggregate, Cohort
from strategies.aggregators import as_rows, from_row, trained_replies
from strategies.algorithm import Weighting


class NormBound(Settings):
    """Each client's payloads, taken as one vector, are scaled down to at most ``norm_bound``; then their mean.

    One hostile client of n moves the model by ``norm_bound`` / n at most. Nothing is noised: no privacy.
    """

    kind: Literal["norm-bound"] = "norm-bound"
    norm_bound: float = Field(1.0, gt=0)
    title: ClassVar[str] = "norm bound"

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the mean of bounded updates, or None where no client has records; see ``Aggregator``."""
        if not (replies := trained_replies(cohort)):
            return None
        rows = as_rows(replies).double()
        weights = rows.new_tensor([float(one.num_examples) if weighting == "examples" else 1.0 for one in replies])
        factors = (self.norm_bound / rows.norm(dim=1).clamp(min=self.norm_bound)) * weights / weights.sum()
        return Aggregate(
            from_row((factors @ rows).to(as_rows(replies[:1]).dtype), replies[0].payloads),
            len(replies) / cohort.num_clients,
        )
