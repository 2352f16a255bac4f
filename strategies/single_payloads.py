"""The layer of methods in which clients keep their models, and the server learns from each client's payload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fl_sim.types import Aggregate, Cohort, Payloads, ServerState
from strategies.class_means import RoundPayloads
from strategies.own_part import OwnPart

if TYPE_CHECKING:
    from strategies.algorithm import Algorithm


class Learning(Protocol):
    """An algorithm whose server learns from each client's payload, not from a mean."""

    def learned(self, server: ServerState, rows: RoundPayloads) -> ServerState:
        """Learn from a round's payloads, and return the new server state. ``server``: the state after ``merge``."""
        ...


class SinglePayloads(OwnPart):
    """After each round's merge, passes the payloads of every single client to the algorithm's method ``learned``."""

    def __init__(self, algorithm: Learning) -> None:
        self._algorithm = algorithm
        self._rows = RoundPayloads((), {})

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> SinglePayloads | None:
        """Return the layer for a run. It has no state that a resumed run would need."""
        del out, progress
        return cls(experiment.algorithm)

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the aggregate of the inner layer, and store the payloads of all clients with records."""
        held = [reply for reply in cohort.replies if reply.num_examples]
        groups = {group: list(params) for group, params in held[0].payloads.items()} if held else {}
        payloads: Payloads = {
            group: {name: torch.stack([one.payloads[group][name] for one in held]) for name in names}
            for group, names in groups.items()
        }
        self._rows = RoundPayloads([one.client for one in held], payloads)
        return self.inner.aggregate(cohort, algorithm, server)

    def merge(self, algorithm: Algorithm, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server state after the algorithm has learned from the payloads."""
        return self._algorithm.learned(self.inner.merge(algorithm, server, aggregate), self._rows)
