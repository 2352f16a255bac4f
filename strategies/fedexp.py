"""FedExP: the server takes larger steps if clients' updates disagree (Jhunjhunwala et al. 2023, algorithm 1)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, hides_clients, kind_of
from fl_sim.params import add, flattened, scale
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, ServerState, Trained
from strategies.algorithm import Averaging, Weighting


class FedExP(Averaging):
    """x <- x + eta_g mean(D_i) with eta_g = max(1, mean ||D_i||^2 / (2 (||mean D_i||^2 + epsilon))); equal weights.

    x is the global model, y_i the trained model of client i, and D_i = y_i - x its update. ``epsilon``: the constant
    that bounds eta_g; the released code has 0.001 on CIFAR-10 and CIFAR-100, and 0.1 on EMNIST. The released code also
    weights clients by records and multiplies epsilon by the number of clients. In the released code, epsilon also
    decays with the square of the learning rate. ``average_two``: evaluate and save the mean of the last two models, as
    in the released code. (The paper probably does the same; this was not checked.) After the first round, the model of
    that round is evaluated. Clients always continue from the last model, not from the mean. If a run is interrupted,
    the last model is saved, not the mean.
    """

    kind: Literal["fedexp"] = "fedexp"
    epsilon: float = Field(1e-3, ge=0)
    average_two: bool = True
    weighting: ClassVar[Weighting] = "uniform"
    knobs: ClassVar[str] = "only algorithm.epsilon bounds the server step: set a larger algorithm.epsilon"

    def check(self, experiment: Choices) -> None:
        """Raise ValueError under noise or compression, because the step size is a ratio of squared norms."""
        if hides_clients(experiment.aggregator):
            raise ValueError(
                f"algorithm fedexp cannot run under aggregator {kind_of(experiment.aggregator)}: clients also send the "
                "squared norm of their update, which joint clipping and noise make useless; take fedavg, fedavgm or "
                "fedadam"
            )
        if (compress := kind_of(experiment.compress)) != "none":
            raise ValueError(
                f"algorithm fedexp cannot run with compress {compress}: its step divides the mean of squared norms by "
                "the squared norm of the mean update, and compression changes only the latter; take fedavg, fedavgm or "
                "fedadam"
            )

    def mean_only(self) -> str:
        """Return the reason why the server needs the mean of the updates: the step size is a ratio of means."""
        return (
            "its step divides the mean of squared norms by the squared norm of the mean update, and with other "
            "aggregates this ratio has no bound"
        )

    def note(self) -> str:
        """Return the note below result tables: one sentence on the model that is evaluated."""
        return f"FedExP: {self.reports()} is evaluated."

    def reports(self) -> str:
        """Return a phrase that describes the evaluated model: the mean of the last two models, or the last model."""
        return "the mean of the last two models" if self.average_two else "the last model"

    def reported(self, server: ServerState) -> Params:
        """Return the evaluated model: the mean of the last two models if ``average_two``, else the last model."""
        return server.memory["mean of two"] if self.average_two else server.params

    def init(self, params: Params) -> ServerState:
        """Return the server state before round 1. The mean of the last two models is initially ``params``, too."""
        return ServerState(params, memory={"mean of two": scale(params, 1.0), "rounds": {"done": torch.zeros(1)}})

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update D_i = y_i - x and its squared norm ||D_i||^2."""
        update = super().finish(task, trained)
        square = flattened(update.payloads["delta"]).flat.double().pow(2).sum().float()
        payloads = {**update.payloads, "square": {"norm": square.reshape(1)}}
        return ClientUpdate(payloads, update.num_examples, update.loss)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: x <- x + eta_g mean(D_i), where eta_g > 1 if clients' updates disagree."""
        delta = aggregate.payloads["delta"]
        of_mean = float(flattened(delta).flat.double().pow(2).sum()) + self.epsilon
        mean = float(torch.as_tensor(aggregate.payloads["square"]["norm"]))
        params = add(server.params, delta, max(1.0, mean / (2 * of_mean) if of_mean else 1.0))
        done = server.memory["rounds"]["done"] + 1
        of_two = scale(add(server.params if done > 1 else params, params), 0.5)
        return ServerState(params, memory={"mean of two": of_two, "rounds": {"done": done}})
