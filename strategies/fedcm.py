"""FedCM: local steps contain a share of the last round's mean update (Xu et al. 2021, algorithm 2)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import LocalPlan
from fl_sim.params import add, scale, zeros_like
from fl_sim.types import Aggregate, LocalTask, Params, ServerState
from strategies.algorithm import Averaging, Weighting, accumulated_momentum, check_sgd


class ClientMomentum(Averaging):
    """Local steps use alpha g + (1 - alpha) D, where D is the last round's mean update, scaled like a gradient.

    g is the client's own gradient. ``alpha``: the share of g in a step.
    """

    alpha: float = Field(0.1, gt=0, le=1)
    weighting: ClassVar[Weighting] = "uniform"
    knobs: ClassVar[str] = (
        "set a larger algorithm.alpha, which adds less of the last round's update, or local.momentum=0, as in the paper"
    )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        if self.alpha == 1:
            return [off("algorithm.alpha=1", "nothing of the last round's update is added")]
        if experiment.rounds == 1:
            return [off(f"algorithm.alpha={self.alpha:g}", "rounds=1, and the first round has no earlier update")]
        return []

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the local optimizer is not SGD."""
        check_sgd(self, experiment, "it divides the last mean update by eta K, the scale of K steps of SGD")

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the model ``params`` and a last mean update of 0."""
        return ServerState(params, broadcast={"last": zeros_like(params)})

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the client's local objective (``LocalPlan``). Gradients contain a share of the last mean update."""
        settings = task.settings
        reach = accumulated_momentum(settings.num_steps(task.num_examples), settings.momentum) * settings.learning_rate
        carried = scale(task.broadcast["last"], (self.alpha - 1) / reach if reach else 0.0)
        return LocalPlan(gradient_scale=self.alpha, gradient_offset=carried)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: model plus mean update. Clients receive this mean update in the next round."""
        delta = aggregate.payloads["delta"]
        return ServerState(add(server.params, delta), broadcast={"last": delta})


class FedCM(ClientMomentum):
    """Local steps use alpha g + (1 - alpha) D with D = -(last round's mean of y_i - x) / (eta K). Equal weights.

    g is the gradient of a local step, x the received model, and y_i the trained model of client i. eta is the learning
    rate, and K a client's number of local steps. Together, the K steps of a client move the model by (1 - alpha) times
    the last mean update. ``alpha`` 1 is FedAvg with equal weights. fl-sim computes eta K for each client and round, as
    the distance that the client's steps would cover with a constant gradient of 1. The released code uses the first
    client's K and the last round's learning rate.
    """

    kind: Literal["fedcm"] = "fedcm"
    title: ClassVar[str] = "FedCM"
