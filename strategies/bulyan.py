"""Bulyan: a trimmed mean around the median of updates that Krum selects (El Mhamdi et al. 2018, section 4)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.types import Cohort
from strategies.aggregators import Robust, ordered, squared_distances
from strategies.algorithm import Weighting
from strategies.coordinate_median import middle
from strategies.krum import scores_of


class Bulyan(Robust):
    """Krum selects n - 2 h updates; the aggregate is a mean of the selected values near each median.

    n is the number of clients with records in the round, and h the number of hostile clients (see below). In each
    coordinate, the aggregate is the mean of n - 4 h values: those of the selected values that are nearest to their
    median. Krum selects the updates one by one. If several updates have the lowest score, Krum selects the update that
    is nearest to all other updates. In the last selections scores are often equal, because each score is a sum over few
    or no neighbours. No privacy guarantee.

    ``hostile``: the number h of hostile clients for which the rule is designed. Every round needs n >= 4 h + 3 clients
    with records.
    """

    kind: Literal["bulyan"] = "bulyan"
    hostile: int = Field(1, ge=0)
    title: ClassVar[str] = "Bulyan"

    def fewest(self) -> int:
        """Return the smallest number of updates that the rule needs: 4 ``hostile`` + 3."""
        return 4 * self.hostile + 3

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return for each coordinate the mean of the selected values that are nearest to their median."""
        del cohort, weighting
        distances, left, selected = squared_distances(rows), list(range(len(rows))), []
        distances = (distances + distances.T) / 2  # exactly symmetric: ties must not depend on rounding
        for _ in range(len(rows) - 2 * self.hostile):
            among = distances[left][:, left]
            nearest_first = among.sum(dim=1).argsort(stable=True)
            scores = scores_of(among, self.hostile)[nearest_first]
            selected.append(left.pop(int(nearest_first[scores.argsort(stable=True)[0]])))
        return mean_near_median(rows[selected], len(rows) - 4 * self.hostile)


def mean_near_median(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return for every column the mean of the ``count`` values nearest to the median, float64 (d,).

    If two values are equally near, the smaller value is used.
    """
    ascending = ordered(rows).double()
    centre = middle(ascending)
    # In ascending order, the ``count`` values nearest to the centre are consecutive. Value i comes before them if it is
    # further from the centre than value i + ``count``. ``first``: the number of such values in each column.
    first = (centre - ascending[: len(rows) - count] > ascending[count:] - centre).sum(dim=0)
    mean: torch.Tensor = ascending.gather(0, first + torch.arange(count)[:, None]).mean(dim=0)
    return mean
