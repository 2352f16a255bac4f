"""The layer for a server step after the mean update. The step uses the models of all clients of the round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fl_sim.errors import UserError
from fl_sim.params import add
from fl_sim.types import Aggregate, Cohort, Params, Reply, ServerState
from strategies.layer import Layer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strategies.algorithm import Algorithm
    from strategies.layer import Beginning

Step: TypeAlias = Callable[[Params, list[Params], int], Params]
"""A function (mean model, models of the round's clients, round) -> the server's model after the round."""


@dataclass
class StepOnModels(Layer):
    """The layer that stores the clients' models of a round, from which ``step`` then computes the server's model.

    ``models``: the models of the last round's clients with records, in the order of clients; each with its client's
    running statistics, if clients send them. ``step``: a function from these models to the server's model; a stage sets
    it before the first round.
    """

    models: list[Params] = field(default_factory=list)
    step: Step | None = None
    _round: int = 0

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> StepOnModels:
        """Return the layer for a run. It has no state that a resumed run would need."""
        del experiment, out, progress
        return cls()

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError if clients send anything except the change of the whole model."""
        if beginning.sent.keys() != {"delta"} or beginning.sent["delta"].keys() != beginning.server.params.keys():
            raise UserError(
                f"algorithm {experiment.algorithm.kind} needs the whole model of each client: leave local.personal out"
            )

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the aggregate, and store the models of all clients with records."""
        self._round = cohort.server_round
        held = [reply for reply in cohort.replies if reply.num_examples]
        self.models = [{**add(server.params, reply.payloads["delta"]), **_layers(reply, server)} for reply in held]
        return self.inner.aggregate(cohort, algorithm, server)

    def merge(self, algorithm: Algorithm, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server state with the model that ``step`` computes from the clients' models."""
        merged = self.inner.merge(algorithm, server, aggregate)
        if self.step is None:
            return merged
        found = self.step(merged.model, self.models, self._round)
        params, layers = ({name: found[name] for name in old} for old in (merged.params, merged.layers))
        return replace(merged, params=params, layers=layers)


def _layers(reply: Reply, server: ServerState) -> Params:
    """Return the running statistics in a reply. These are not part of the algorithm's own payload, ``delta``."""
    sent = [values for group, values in reply.payloads.items() if group != "delta"]
    return {name: value for values in sent for name, value in values.items() if name in server.layers}
