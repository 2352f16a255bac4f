"""The layer for aggregators that compare the updates of clients with an update of the server itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fl_sim.errors import UserError
from fl_sim.kinds import kind_of
from fl_sim.types import Aggregate, Cohort, Payloads, ServerState
from strategies.layer import Layer

if TYPE_CHECKING:
    from strategies.algorithm import Algorithm
    from strategies.layer import Beginning

Train: TypeAlias = Callable[[ServerState, int], Payloads]
"""A function (server state before the round, round) -> the payloads of the server's own update."""


@dataclass
class ServerUpdate(Layer):
    """The layer that gives the aggregator the server's own update of the round (``Cohort.own``).

    ``train``: a function that trains at the server; a stage sets it before the first round.
    """

    train: Train | None = None
    _made: tuple[ServerState | None, Payloads] = (None, {})

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> ServerUpdate:
        """Return the layer for a run. It has no state that a resumed run would need."""
        del experiment, out, progress
        return cls()

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError if the algorithm has client states, because the server has none."""
        if beginning.kept:
            raise UserError(
                f"algorithm {kind_of(experiment.algorithm)} cannot run with aggregator {kind_of(experiment.aggregator)}"
                ": each client keeps tensors from round to round, and the server, which trains like a client, keeps "
                "none; take another aggregator, or an algorithm such as fedavg"
            )

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the aggregate of the round. The aggregator reads the server's own update from ``Cohort.own``."""
        return self.inner.aggregate(self._with_own(cohort, server), algorithm, server)

    def foreseen(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the aggregate that ``cohort`` would have with the server's own update of the round."""
        return self.inner.foreseen(self._with_own(cohort, server), algorithm, server)

    def _with_own(self, cohort: Cohort, server: ServerState) -> Cohort:
        """Return the cohort with the server's own update (``Cohort.own``). The server trains only once in a round."""
        if self._made[0] is not server:
            assert self.train is not None
            self._made = (server, self.train(server, cohort.server_round))
        return replace(cohort, own=self._made[1])
