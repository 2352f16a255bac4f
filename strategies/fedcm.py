"""FedCM: client-level momentum. Local steps contain a share of the last mean update (Xu et al. 2021, algorithm 2)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import LocalPlan
from fl_sim.params import add, scale, zeros_like
from fl_sim.types import Aggregate, LocalTask, Params, ServerState
from strategies.algorithm import Averaging, Weighting, accumulated_momentum, check_sgd


class ClientMomentum(Averaging):
    """Clients step with alpha g + (1 - alpha) D, where D has the direction of the last round's mean update.

    ``alpha``: the share of the client's own gradient g in a step.
    """

    alpha: float = Field(0.1, gt=0, le=1)
    weighting: ClassVar[Weighting] = "uniform"
    knobs: ClassVar[str] = (
        "a larger algorithm.alpha carries less of the last round on, and the paper has local.momentum=0"
    )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return remarks on settings that have no effect."""
        if self.alpha == 1:
            return [off("algorithm.alpha=1", "nothing of the last round is carried on")]
        if experiment.rounds == 1:
            return [off(f"algorithm.alpha={self.alpha:g}", "rounds=1, and it carries the round before on")]
        return []

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the local optimizer is not SGD."""
        check_sgd(self, experiment, "its momentum is a last step in units of SGD's, eta K, mixed into gradients")

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the model ``params`` and a last mean update of 0."""
        return ServerState(params, broadcast={"last": zeros_like(params)})

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local plan that mixes the last mean update into every gradient."""
        settings = task.settings
        reach = accumulated_momentum(settings.num_steps(task.num_examples), settings.momentum) * settings.learning_rate
        carried = scale(task.broadcast["last"], (self.alpha - 1) / reach if reach else 0.0)
        return LocalPlan(gradient_scale=self.alpha, gradient_offset=carried)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: model plus mean update. Clients receive the mean update in the next round."""
        delta = aggregate.payloads["delta"]
        return ServerState(add(server.params, delta), broadcast={"last": delta})


class FedCM(ClientMomentum):
    """Clients step with alpha g + (1 - alpha) D, D = -(last round's mean of y_i - x) / (eta K); equal weights.

    The K steps of a client together contain (1 - alpha) of the last mean update. ``alpha`` 1 is FedAvg with equal
    weights. If clients differ in size, the learning rate changes between rounds, or steps have momentum, eta K is the
    sum over this client's steps in this round; the released code takes the first client's K and the last round's rate.
    """

    kind: Literal["fedcm"] = "fedcm"
    title: ClassVar[str] = "FedCM"
