"""Krum and Multi-Krum: aggregators that select the updates closest to other updates (Blanchard et al. 2017, sec. 4)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.errors import RunError
from fl_sim.importing import torch
from fl_sim.kinds import Choices, kind_of, off
from fl_sim.types import Aggregate, Cohort
from strategies.aggregators import Robust, cohort_size, combined
from strategies.algorithm import Weighting


class Krum(Robust):
    """The one update with the least sum of squared distances to its n - ``hostile`` - 2 nearest other updates.

    ``hostile``: the paper's f, the number of hostile clients in a round that Krum tolerates. Every round needs
    n >= 2 ``hostile`` + 3 clients with records. Clients with different data are also far from each other: under label
    skew the result may follow a single client. No privacy guarantee.
    """

    kind: Literal["krum"] = "krum"
    hostile: int = Field(2, ge=0)
    title: ClassVar[str] = "Krum"

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if rounds have too few clients."""
        super().check(experiment)
        _check_cohorts(experiment, _needed(self.hostile, 1))

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the update with the lowest score, or None if no client has records; see ``Aggregator``."""
        del weighting
        return _closest(cohort, self.hostile, selected=1)


class MultiKrum(Robust):
    """The mean of the ``selected`` updates with the lowest Krum scores (0: n - ``hostile`` of the n updates).

    The default 0 is the choice in section 4 of the paper.
    """

    kind: Literal["multi-krum"] = "multi-krum"
    hostile: int = Field(2, ge=0)
    selected: int = Field(0, ge=0)
    title: ClassVar[str] = "Multi-Krum"

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if rounds have too few clients."""
        super().check(experiment)
        _check_cohorts(experiment, _needed(self.hostile, self.selected))

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        size = cohort_size(experiment)
        if (self.selected or size - self.hostile) < size:
            return []
        setting = f"aggregator.selected={self.selected}" if self.selected else f"aggregator.hostile={self.hostile}"
        return [off(setting, f"all {size:g} clients of a round are selected, and every client counts the same")]

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the mean of the selected updates, or None if no client has records; see ``Aggregator``."""
        del weighting
        return _closest(cohort, self.hostile, self.selected)


def _needed(hostile: int, selected: int) -> int:
    return max(2 * hostile + 3, selected)


def _check_cohorts(experiment: Choices, needed: int) -> None:
    if (size := cohort_size(experiment)) < needed:
        raise ValueError(
            f"aggregator {kind_of(experiment.aggregator)} needs {needed} clients in a round, and rounds have {size:g}: "
            "set a smaller aggregator.hostile, or more clients"
        )


def _closest(cohort: Cohort, hostile: int, selected: int) -> Aggregate | None:
    def closest(rows: torch.Tensor, _: object) -> torch.Tensor:
        count, wanted = len(rows), selected or len(rows) - hostile
        if count < _needed(hostile, wanted):
            raise RunError(
                f"round {cohort.server_round} has {count} clients with records: krum with hostile={hostile} needs at "
                f"least {_needed(hostile, wanted)}; set a smaller aggregator.hostile, or have more clients in a "
                "round"
            )
        chosen = krum_scores(rows, hostile).argsort(stable=True)[:wanted].sort().values
        return rows[chosen].mean(dim=0)

    return combined(cohort, closest)


def krum_scores(rows: torch.Tensor, hostile: int) -> torch.Tensor:
    """Return the score of each row, shape (n,): the sum of squared distances to its nearest other rows.

    The sum is over the n - ``hostile`` - 2 nearest rows.
    """
    centred = (rows - rows.mean(dim=0)).double()  # the same distances, with less rounding in the products
    products = centred @ centred.T
    squares = products.diagonal()
    distances = (squares[:, None] + squares[None, :] - 2 * products).clamp(min=0).fill_diagonal_(0)
    nearest: torch.Tensor = distances.sort(dim=1).values[:, 1 : len(rows) - hostile - 1]
    return nearest.sum(dim=1)
