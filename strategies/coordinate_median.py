"""The coordinate-wise median of a round's updates (Yin et al. 2018, definition 1)."""

from __future__ import annotations

from typing import ClassVar, Literal

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.types import Cohort
from strategies.aggregators import Robust, cohort_size, ordered
from strategies.algorithm import Weighting


class CoordinateMedian(Robust):
    """The median of every coordinate; for an even number of clients, the mean of the two middle values.

    If fewer than half of the clients are hostile, every coordinate stays within the range of the honest clients'
    values. Every client has the same weight, because the server cannot verify a client's number of records. No privacy
    guarantee.
    """

    kind: Literal["median"] = "median"
    title: ClassVar[str] = "coordinate median"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        if (size := cohort_size(experiment)) > 2:
            return []
        return [off("aggregator median", f"rounds have {size:g} clients, and the median of two values is their mean")]

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return the median of every coordinate."""
        del cohort, weighting
        return median(rows)


def median(rows: torch.Tensor) -> torch.Tensor:
    """Return the median of every column; for an even number of rows, the mean of the two middle values."""
    return middle(ordered(rows))


def middle(ascending: torch.Tensor) -> torch.Tensor:
    """Return the median of every column. The values of each column must be in ascending order."""
    return (ascending[(len(ascending) - 1) // 2] + ascending[len(ascending) // 2]) / 2
