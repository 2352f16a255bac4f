"""Krum and Multi-Krum: aggregators that select the updates closest to other updates (Blanchard et al. 2017, sec. 4)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.types import Cohort
from strategies.aggregators import Robust, cohort_size, squared_distances
from strategies.algorithm import Weighting


class Krum(Robust):
    """Selects the update with the least sum of squared distances to its n - ``hostile`` - 2 nearest other updates.

    n is the number of clients with records in the round. ``hostile``: the paper's f, the number of hostile clients in a
    round that Krum tolerates. Every round needs n >= 2 ``hostile`` + 3 clients with records. Under label skew honest
    updates are far from each other, too, and the same client may be selected again and again. No privacy guarantee.
    """

    kind: Literal["krum"] = "krum"
    hostile: int = Field(2, ge=0)
    title: ClassVar[str] = "Krum"

    def fewest(self) -> int:
        """Return the smallest number of updates that Krum can aggregate: 2 ``hostile`` + 3."""
        return 2 * self.hostile + 3

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return the update with the lowest Krum score among the updates ``rows``, shape (n, d)."""
        del cohort, weighting
        return rows[closest(rows, self.hostile, 1)[0]]


class MultiKrum(Robust):
    """The mean of several updates: those with the lowest Krum scores.

    ``hostile``: the number of hostile clients in a round that the rule tolerates. ``selected``: the number of selected
    updates; 0 selects n - hostile of n updates, the choice of Blanchard et al. 2017, section 4.
    """

    kind: Literal["multi-krum"] = "multi-krum"
    hostile: int = Field(2, ge=0)
    selected: int = Field(0, ge=0)
    title: ClassVar[str] = "Multi-Krum"

    def fewest(self) -> int:
        """Return the smallest number of updates for the rule: 2 ``hostile`` + 3, or ``selected`` if this is more."""
        return max(2 * self.hostile + 3, self.selected)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        size = cohort_size(experiment)
        if (self.selected or size - self.hostile) < size:
            return []
        setting = f"aggregator.selected={self.selected}" if self.selected else f"aggregator.hostile={self.hostile}"
        return [off(setting, f"all {size:g} clients of a round are selected, and all have the same weight")]

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return the mean of the selected updates among ``rows``, shape (n, d)."""
        del cohort, weighting
        mean: torch.Tensor = rows[closest(rows, self.hostile, self.selected or len(rows) - self.hostile)].mean(dim=0)
        return mean


def closest(rows: torch.Tensor, hostile: int, count: int) -> torch.Tensor:
    """Return the indices of the ``count`` rows (updates) with the lowest Krum scores, ascending."""
    return krum_scores(rows, hostile).argsort(stable=True)[:count].sort().values


def krum_scores(rows: torch.Tensor, hostile: int) -> torch.Tensor:
    """Return the Krum score of each row (update), shape (n,).

    The score is the sum of the squared distances to the n - ``hostile`` - 2 nearest other rows.
    """
    return scores_of(squared_distances(rows), hostile)


def scores_of(distances: torch.Tensor, hostile: int) -> torch.Tensor:
    """Return the Krum score of each row, shape (n,), from the squared ``distances`` of all pairs of rows, (n, n)."""
    nearest: torch.Tensor = distances.sort(dim=1).values[:, 1 : max(1, len(distances) - hostile - 1)]
    return nearest.sum(dim=1)
