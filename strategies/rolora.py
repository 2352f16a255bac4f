"""RoLoRA: odd rounds train and send the factors B of adapters, even rounds the factors A (Chen et al. 2024, alg. 1)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from fl_sim.kinds import Choices, hides_clients, is_none, kind_of
from fl_sim.local_plan import LocalPlan
from fl_sim.params import subtract
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, ServerState, Trained
from strategies.algorithm import Averaging
from strategies.low_rank import STARTS_WITH, check_adapters, is_factor


class RoLoRA(Averaging):
    """FedAvg on one factor of adapters at a time, so that each round's mean is exact.

    All clients have the same frozen factor, so the mean of the trained factors gives the mean of the products B A. In
    each round clients send the trained factor of each adapter, and all trained non-adapter parameters. Clients receive
    both factors, because a client may have missed the last round.
    """

    kind: Literal["rolora"] = "rolora"
    title: ClassVar[str] = "RoLoRA"
    starts_with: ClassVar[Mapping[str, Any]] = STARTS_WITH
    turns: ClassVar[int] = 2

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings that need equal payloads in all rounds, or if no adapters are trained."""
        check_adapters(self, experiment)
        refused = {
            "aggregator": hides_clients(experiment.aggregator),
            "local.privacy": kind_of(experiment.local.privacy) == "local-dp",
            "compress": not is_none(experiment.compress),
            "server": kind_of(experiment.server) != "synchronous",
        }
        for name in (name for name, is_refused in refused.items() if is_refused):
            raise ValueError(
                "algorithm rolora sends factors B in odd rounds and factors A in even rounds, and this "
                f"{name} needs the same parameters in each round: leave {name} out, or take ffa-lora"
            )

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local objective (``LocalPlan``): train this round's factor, A or B, and non-adapter parameters."""
        return LocalPlan(trained=frozenset(_moving(task.params, task.server_round)))

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update y_i - x of factor B in odd rounds or A in even rounds, and of non-adapter parameters.

        x is the received model, y_i the trained model.
        """
        before, after = (_moving(params, task.server_round) for params in (task.params, trained.params))
        return ClientUpdate({"delta": subtract(after, before)}, task.num_examples, trained.loss)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: the model plus the mean update. The frozen factor does not change."""
        delta = aggregate.payloads["delta"]
        params = {name: value + delta[name] if name in delta else value for name, value in server.params.items()}
        return ServerState(params, server.broadcast, server.memory)


def _moving(params: Params, server_round: int) -> Params:
    frozen = "A" if server_round % 2 else "B"
    return {name: value for name, value in params.items() if not is_factor(name, frozen)}
