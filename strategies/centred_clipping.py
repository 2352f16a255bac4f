"""Centred clipping: updates are clipped around the last round's result (Karimireddy, He, Jaggi 2021, section 4)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import off
from fl_sim.types import Cohort, Params, Payloads
from strategies.aggregators import Robust, as_named, row_like
from strategies.algorithm import Weighting


class CentredClipping(Robust):
    """v <- v + mean of (d_i - v) min(1, tau / |d_i - v|) over the updates d_i, repeated ``iterations`` times.

    v is the centre of clipping. It begins as the aggregate of the last round, or as 0 in the first round. Checkpoints
    contain v. A single hostile client in a round of n clients changes the result by at most 2 tau / n in one iteration.
    In the theory of Karimireddy et al., clients keep their momentum over all rounds. Here momentum restarts from 0 in
    every round. Every client has the same weight. No privacy guarantee.

    ``tau``: updates that are further than this from v are clipped. ``tau`` should be about the distance between honest
    updates; a much larger ``tau`` gives the plain mean. The experiments of Karimireddy et al. use 10 / (1 - momentum).
    ``iterations``: the number of times that v is updated in a round.
    """

    kind: Literal["centred-clipping"] = "centred-clipping"
    tau: float = Field(1.0, gt=0, le=1e30)
    iterations: int = Field(1, ge=1, le=1000)
    title: ClassVar[str] = "centred clipping"

    @property
    def has_memory(self) -> bool:
        """Return True: the rule keeps the centre of clipping, v, from round to round."""
        return True

    def remembered(self, payloads: Payloads, num_clients: int) -> Params:
        """Return the memory before the first round: v, the centre of clipping, is 0."""
        del num_clients
        return {name: torch.zeros_like(value) for name, value in as_named(payloads).items()}

    def memory_after(self, cohort: Cohort, payloads: Payloads) -> Params:
        """Return the next centre of clipping: the aggregate, with the old values of tensors that no client sent."""
        return {**cohort.memory, **as_named(payloads)}

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return the aggregate: the centre of clipping, v, after all iterations."""
        del weighting
        rows, centre = rows.double(), row_like(cohort.memory, cohort.replies[0].payloads).double()
        for _ in range(self.iterations):
            moves = rows - centre
            centre = centre + (self.tau / moves.norm(dim=1).clamp(min=self.tau)) @ moves / len(rows)
        return centre

    def no_effect(self, rows: torch.Tensor, cohort: Cohort) -> str:
        """Return a warning if no update was clipped, so that the rule had no effect, else an empty string."""
        centre = row_like(cohort.memory, cohort.replies[0].payloads).double()
        if self.iterations > 1 or float((rows.double() - centre).norm(dim=1).max()) > self.tau:
            return ""
        return off(f"aggregator.tau={self.tau:g}", "no update was further from the last aggregate, so none was clipped")
