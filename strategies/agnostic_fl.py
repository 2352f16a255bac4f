"""Agnostic federated learning: minimise the loss of the worst mixture of clients (Mohri et al. 2019, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, kind_of, off
from fl_sim.params import add, scale, subtract
from fl_sim.types import Aggregate, Params, Reply, ServerState
from strategies.algorithm import Weighting
from strategies.mixture import MIXTURE
from strategies.received_loss import SendingLoss


class AgnosticFL(SendingLoss):
    """x <- x + sum_i lambda_i (y_i - x); lambda <- Proj(lambda + r F), to lower the loss of the worst client mixture.

    x is the global model, y_i the trained model of client i, and F_i the loss of x on all training records of client i.
    F is the vector of all F_i. A mixture lambda is one weight per client: at least 0, with sum 1. The first lambda has
    equal weights. Proj maps a vector to the nearest mixture. ``mixture_learning_rate``: the learning rate r of lambda;
    0 is FedAvg with equal weights. ``average``: if true, the mean of the models after all rounds is evaluated and
    saved, as in Mohri et al. 2019. If false, the last model is evaluated. In both cases clients continue from the last
    model. The mean also contains the poor models of the first rounds, so during many rounds the mean is worse than the
    last model. In Mohri et al. 2019 a client makes one step in a round; here clients make their usual local steps.

    All clients must take part in every round, because each weight depends on all losses. If a client is late, its
    weight does not change, and the updates of all other clients are averaged in proportion to their weights. The server
    sees every F_i. The algorithm ``afl`` is a different method, analytic federated learning.
    """

    kind: Literal["agnostic-fl"] = "agnostic-fl"
    title: ClassVar[str] = "Agnostic FL"
    layer: ClassVar[str] = "strategies.mixture:Mixture"
    weighting: ClassVar[Weighting] = "uniform"
    mixture_learning_rate: float = Field(0.1, ge=0)
    average: bool = True

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if not all clients take part in every round, or if the model has personal layers."""
        what = f"algorithm {kind_of(self)} cannot run with"
        if (sampler := kind_of(experiment.sampler)) != "full":
            raise ValueError(
                f"{what} sampler {sampler}: each client's weight depends on all clients' losses; leave sampler out, "
                "or take q-ffl or term"
            )
        if (personal := experiment.local.personal) != "none":
            raise ValueError(
                f"{what} local.personal={personal}: the losses would be of different models; leave local.personal out"
            )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        if self.mixture_learning_rate:
            return []
        return [off("algorithm.mixture_learning_rate=0", "all clients keep equal weights")]

    def note(self) -> str:
        """Return the note for tables: one sentence on the model that is evaluated."""
        return f"Agnostic FL: {self.reports()} is evaluated."

    def reports(self) -> str:
        """Describe the evaluated model: the mean of all rounds' models, or the last model."""
        return "the mean of the models after all rounds" if self.average else "the last model"

    def reported(self, server: ServerState) -> Params:
        """Return the evaluated model: the mean of the models after all rounds if ``average``, else the last model."""
        return server.memory["mean"] if self.average else server.params

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the model ``params``, also as the initial mean of models."""
        return ServerState(params, memory={"mean": scale(params, 1.0), "rounds": {"done": torch.zeros(1)}})

    def weigh(self, replies: Sequence[Reply]) -> list[float]:
        """Return the weight lambda_i of each reply's client, or equal weights if all these weights are 0."""
        weights = [float(reply.payloads.get(MIXTURE, {"weight": 0.0})["weight"]) for reply in replies]
        return weights if sum(weights) > 0 else [1.0] * len(weights)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: the model plus the weighted mean update, and the mean of all models so far."""
        params = add(server.params, aggregate.payloads["delta"])
        done, mean = server.memory["rounds"]["done"] + 1, server.memory["mean"]
        mean = add(mean, subtract(params, mean), 1 / float(done))
        return ServerState(params, memory={"mean": mean, "rounds": {"done": done}})
