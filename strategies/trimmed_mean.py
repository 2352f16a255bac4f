"""The coordinate-wise trimmed mean of a round's updates (Yin et al. 2018, definition 2)."""

import math
from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.settings import Settings
from fl_sim.types import Aggregate, Cohort
from strategies.aggregators import as_rows, from_row, trained_replies
from strategies.algorithm import Weighting


class TrimmedMean(Settings):
    """Of every number the mean without the ``trim`` share of clients at each end, rounded up to whole clients.

    ``trim``: the paper's beta, at least the share of clients that may be hostile. Where it leaves nobody, the median's
    one or two in the middle stay. Every client counts the same. No privacy.
    """

    kind: Literal["trimmed-mean"] = "trimmed-mean"
    trim: float = Field(0.2, ge=0, lt=0.5)
    title: ClassVar[str] = "trimmed mean"

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the trimmed means of all payloads, or None where no client has records; see ``Aggregator``."""
        del weighting
        if not (replies := trained_replies(cohort)):
            return None
        cut = min(math.ceil(self.trim * len(replies) - 1e-9), (len(replies) - 1) // 2)
        kept = as_rows(replies).sort(dim=0).values[cut : len(replies) - cut]
        return Aggregate(from_row(kept.mean(dim=0), replies[0].payloads), len(replies) / cohort.num_clients)
