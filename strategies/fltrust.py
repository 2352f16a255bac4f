"""FLTrust: the weight of an update is its cosine to the server's own update (Cao et al. 2021, section IV)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator

from fl_sim.importing import torch
from fl_sim.kinds import Choices
from fl_sim.types import Cohort
from strategies.aggregators import Robust, as_named, row_like
from strategies.algorithm import Weighting


def _count_or_name(value: Any) -> int | str:
    text = str(value).strip()
    if text.isdigit() and 0 < int(text) <= 10**9:
        return int(text)
    if text in {"", "none"} or not any(map(str.isalpha, text)):
        raise ValueError(
            "the server needs its own records: give the number of training records that no client holds, such as "
            "100, or the name of another data set"
        )
    return text


class FLTrust(Robust):
    """The weighted mean of updates scaled to the norm of the server's own update g0; the weights are cosines to g0.

    In every round the server trains the received model on its own records, with the local settings of clients. The
    number of epochs then means passes over the server's records. The weight of an update is its cosine to g0, or 0 if
    this cosine is negative. Each update is scaled to the norm of g0, so an update with a large norm has no more
    influence. If g0 is 0, or if all weights are 0, the aggregate is 0, and the model does not change. No privacy
    guarantee.

    ``records``: the number of training records of the server (the paper has 100). These records are drawn with the
    run's seed, and removed from the clients' shards after the partition. If ``records`` is the name of another data
    set, the server uses the training records of that data set. The server never uses test records.
    """

    kind: Literal["fltrust"] = "fltrust"
    records: Annotated[int | str, PlainValidator(_count_or_name, json_schema_input_type=int | str)] = 100
    title: ClassVar[str] = "FLTrust"
    layer: ClassVar[str] = "strategies.server_update:ServerUpdate"
    stage: ClassVar[str] = "fl_sim.stages.server_update:ServerTraining"

    @property
    def num_set_aside(self) -> int:
        """Return the number of training records that are set aside for the server, so that no client holds them."""
        return self.records if isinstance(self.records, int) else 0

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for private runs, and if the server's and a client's update would have different tensors."""
        super().check(experiment)
        reason = ""
        if experiment.is_private:
            reason = "this run promises privacy, and no epsilon covers the server's records: take another aggregator"
        elif experiment.local.personal != "none":
            reason = "the server has no personal part of the model: leave local.personal out"
        elif experiment.local.batch_norm != "none":
            reason = "the server has no running statistics: leave local.batch_norm out"
        elif self.records == getattr(experiment, "data", ""):
            reason = f"{self.records} is what clients hold: set aggregator.records to a number, or to another data set"
        if reason:
            raise ValueError(f"the server of aggregator {self.kind} trains like a client, and {reason}")

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return the mean of the scaled updates, weighted by max(0, cosine to the server's own update)."""
        del weighting
        updates, own = rows.double(), row_like(as_named(cohort.own), cohort.replies[0].payloads).double()
        length = own.norm()
        units = updates / updates.norm(dim=1, keepdim=True).clamp(min=1e-300)
        trust = (units @ (own / length.clamp(min=1e-300))).clamp(min=0)
        mean: torch.Tensor = length * (trust / trust.sum().clamp(min=1e-300)) @ units
        return mean
