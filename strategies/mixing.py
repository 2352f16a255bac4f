"""Bucketing and nearest-neighbour mixing: they apply another aggregator to means of several updates."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, Promising, kind_of, path_in
from fl_sim.one_of import OneOf
from fl_sim.seeding import rng
from fl_sim.settings import by_default
from fl_sim.types import Aggregate, Cohort, Params, Payloads, Reply
from strategies.aggregators import Robust, as_rows, from_row, squared_distances
from strategies.algorithm import Weighting


class _Mixed(Robust):
    """Base class of aggregators that apply the aggregator ``over`` to means of updates, not to single updates.

    Means differ less from each other than single updates do.
    """

    if TYPE_CHECKING:
        over: Any  # subclasses declare it second: a short form such as "bucketing:2" sets the first field

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the aggregator ``over`` cannot aggregate means, or if rounds have too few clients."""
        if (isinstance(self.over, Promising) and self.over.is_private) or (
            isinstance(self.over, Robust) and self.over.needs_names
        ):
            raise ValueError(
                f"aggregator {kind_of(self)} cannot run over {kind_of(self.over)}, which needs the updates of single "
                "clients: take another aggregator.over, such as median or krum"
            )
        if path_in(type(self.over), "stage"):
            raise ValueError(
                f"aggregator {kind_of(self)} cannot run over {kind_of(self.over)}, whose server takes part in every "
                "round: take another aggregator.over, such as median or krum"
            )
        super().check(experiment)

    @property
    def has_memory(self) -> bool:
        """Return True if the aggregator ``over`` carries tensors from round to round."""
        return isinstance(self.over, Robust) and self.over.has_memory

    def remembered(self, payloads: Payloads, num_clients: int) -> Params:
        """Return the initial tensors that the aggregator ``over`` carries from round to round."""
        return self.over.remembered(payloads, num_clients) if isinstance(self.over, Robust) else {}

    @property
    def _fewest_means(self) -> int:
        return self.over.fewest() if isinstance(self.over, Robust) else 1

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Apply the aggregator ``over`` to the means. Return None if no client has records; see ``Aggregator``."""
        if (taken := self.taken(cohort)) is None:
            return None
        like, means = taken.replies[0].payloads, self.means(as_rows(taken.replies), cohort)
        replies = tuple(Reply(number, from_row(row, like), 1, None) for number, row in enumerate(means))
        aggregate: Aggregate = self.over.mean(replace(cohort, replies=replies), weighting)
        return replace(aggregate, participation=cohort.participation(len(taken.replies)))

    @abstractmethod
    def means(self, rows: torch.Tensor, cohort: Cohort) -> torch.Tensor:
        """Return the means of updates that are then aggregated, one per row. ``rows``: the updates, shape (n, d)."""


class Bucketing(_Mixed):
    """Applies another aggregator to means of a few random updates each (Karimireddy, He, Jaggi 2022, algorithm 1).

    The random updates of one mean form a bucket. The last bucket may be smaller. The buckets come from the run's seed.
    A bucket with a hostile update counts as hostile, so the aggregator must withstand as many hostile buckets as there
    are hostile clients. With buckets of one update the result is that of the aggregator without bucketing. No privacy
    guarantee.

    ``size``: the number of updates in a bucket. ``over``: the aggregator of the means.
    """

    kind: Literal["bucketing"] = "bucketing"
    size: int = Field(2, ge=1)
    over: Annotated[Any, OneOf("aggregator", group="fl_sim.aggregator")] = by_default("median")
    title: ClassVar[str] = "bucketing"
    lower: ClassVar[str] = "aggregator.size or aggregator.over.hostile"

    def fewest(self) -> int:
        """Return the smallest number of updates that fill as many buckets as the aggregator ``over`` needs."""
        return self.size * (self._fewest_means - 1) + 1

    def means(self, rows: torch.Tensor, cohort: Cohort) -> torch.Tensor:
        """Return the mean of each bucket of updates, one per row."""
        order = torch.from_numpy(rng(cohort.seed, "buckets", cohort.server_round).permutation(len(rows)))
        return torch.stack([rows[bucket].mean(dim=0) for bucket in torch.split(order, self.size)])


class NearestNeighbourMixing(_Mixed):
    """Replaces each update by the mean of its nearest updates, then applies another aggregator (Allouah et al. 2023).

    This is algorithm 2 of the paper. Each mean is over n - h of the n updates, including the update itself. With h = 0
    all means are the mean of all updates. A round needs 2 h + 1 clients with records, or more if the aggregator of the
    means needs more. No privacy guarantee.

    ``hostile``: the number h of hostile clients in a round that the rule tolerates. ``over``: the aggregator of the
    means.
    """

    kind: Literal["nnm"] = "nnm"
    hostile: int = Field(2, ge=0)
    over: Annotated[Any, OneOf("aggregator", group="fl_sim.aggregator")] = by_default("median")
    title: ClassVar[str] = "nearest-neighbour mixing"
    lower: ClassVar[str] = "aggregator.hostile or aggregator.over.hostile"

    def fewest(self) -> int:
        """Return the smallest number of updates: 2 ``hostile`` + 1, or more if the aggregator ``over`` needs more."""
        return max(2 * self.hostile + 1, self._fewest_means)

    def means(self, rows: torch.Tensor, cohort: Cohort) -> torch.Tensor:
        """Return for each update the mean of the n - ``hostile`` nearest updates."""
        del cohort
        nearest = squared_distances(rows).argsort(dim=1, stable=True)[:, : len(rows) - self.hostile]
        return torch.zeros(len(rows), len(rows)).scatter_(1, nearest, 1.0) @ rows / nearest.shape[1]
