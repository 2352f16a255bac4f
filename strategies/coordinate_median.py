"""The coordinate-wise median of a round's updates (Yin et al. 2018, definition 1)."""

from __future__ import annotations

from typing import ClassVar, Literal

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.types import Aggregate, Cohort
from strategies.aggregators import Robust, cohort_size, combined
from strategies.algorithm import Weighting


class CoordinateMedian(Robust):
    """Of every number the middle one; of an even number of clients the mean of the two in the middle.

    Fewer than half of the clients cannot move a number beyond what honest clients sent. Every client counts the same,
    as the number of records that a client says it has is its own word. No privacy.
    """

    kind: Literal["median"] = "median"
    title: ClassVar[str] = "coordinate median"

    def remarks(self, experiment: Choices) -> list[str]:
        """Name settings without effect."""
        if (size := cohort_size(experiment)) > 2:
            return []
        return [off("aggregator median", f"rounds have {size:g} clients, of which the median is the mean")]

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the medians of all payloads, or None where no client has records; see ``Aggregator``."""
        del weighting
        return combined(cohort, lambda rows, _: _median(rows))


def _median(rows: torch.Tensor) -> torch.Tensor:
    ordered = rows.sort(dim=0).values
    return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2
