"""Server optimisers: they use the mean update as a pseudo-gradient (Hsu et al. 2019; Reddi et al. 2021, algorithm 2).

In the formulas, Delta is the mean update of a round and x is the global model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.params import add, zeros_like
from fl_sim.types import Aggregate, Params, ServerState
from strategies.algorithm import FEDAVG, Averaging

SecondMoment: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"
"""A function from the second moment v and the mean update Delta to the new second moment, for one tensor each."""


class FedAvgM(Averaging):
    """v <- server_momentum v + Delta; x <- x + server_learning_rate v.

    x is the global model, Delta the mean update of the round, and v the server's momentum. ``server_learning_rate``:
    learning rate of the server step; with 1 and ``server_momentum`` 0 the method is FedAvg. ``server_momentum``: the
    factor of the last round's v.
    """

    kind: Literal["fedavgm"] = "fedavgm"
    server_learning_rate: float = Field(1.0, gt=0)
    server_momentum: float = Field(0.9, ge=0, lt=1)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        if self.server_momentum and experiment.rounds > 1:
            return []
        why = FEDAVG if self.server_learning_rate == 1 else "only algorithm.server_learning_rate has an effect"
        first = "" if not self.server_momentum else "rounds=1, and "
        return [off(f"algorithm.server_momentum={self.server_momentum:g}", f"{first}{why}")]

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the model ``params`` and v = 0."""
        return ServerState(params, memory={"momentum": zeros_like(params)})

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: one server step with momentum along the mean update."""
        momentum = add(aggregate.payloads["delta"], server.memory["momentum"], self.server_momentum)
        return ServerState(add(server.params, momentum, self.server_learning_rate), memory={"momentum": momentum})


class FedAdagrad(Averaging):
    """v <- v + Delta^2; x <- x + server_learning_rate m / (sqrt(v) + tau).

    x is the global model, Delta the mean update of the round, and v a sum of squares. m is a running mean of updates:
    m <- beta_1 m + (1 - beta_1) Delta. ``server_learning_rate``: learning rate of the server step. ``beta_1``: decay
    rate of m. ``tau``: with a larger value the step is less adaptive; v starts at tau^2.
    """

    kind: Literal["fedadagrad"] = "fedadagrad"
    server_learning_rate: float = Field(0.1, gt=0)
    beta_1: float = Field(0.0, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0, le=1e6)

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the model ``params``, m = 0 and v = tau^2."""
        return _adaptive_start(params, self.tau)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state. The step divides each coordinate by the root of v, its sum of squares."""
        return _adaptive_step(
            server, aggregate, lambda v, delta: v + delta**2, self.beta_1, self.tau, self.server_learning_rate
        )


class FedAdam(Averaging):
    """v <- beta_2 v + (1 - beta_2) Delta^2; x <- x + server_learning_rate m / (sqrt(v) + tau).

    x is the global model, Delta the mean update of the round, and v a running mean of squares. m is a running mean of
    updates: m <- beta_1 m + (1 - beta_1) Delta. ``server_learning_rate``: learning rate of the server step. ``beta_1``:
    decay rate of m. ``beta_2``: decay rate of v. ``tau``: with a larger value the step is less adaptive; v starts at
    tau^2.
    """

    kind: Literal["fedadam"] = "fedadam"
    server_learning_rate: float = Field(0.01, gt=0)
    beta_1: float = Field(0.9, ge=0, lt=1)
    beta_2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0, le=1e6)

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the model ``params``, m = 0 and v = tau^2."""
        return _adaptive_start(params, self.tau)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state. The step divides each coordinate by the root of v, its mean square."""
        beta = self.beta_2
        return _adaptive_step(
            server,
            aggregate,
            lambda v, delta: beta * v + (1 - beta) * delta**2,
            self.beta_1,
            self.tau,
            self.server_learning_rate,
        )


class FedYogi(Averaging):
    """v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2); x <- x + server_learning_rate m / (sqrt(v) + tau).

    x is the global model, Delta the mean update of the round, and v an estimate of Delta^2. m is a running mean of
    updates: m <- beta_1 m + (1 - beta_1) Delta. ``server_learning_rate``: learning rate of the server step. ``beta_1``:
    decay rate of m. ``beta_2``: in every round v changes by (1 - beta_2) Delta^2. ``tau``: with a larger value the step
    is less adaptive; v starts at tau^2.
    """

    kind: Literal["fedyogi"] = "fedyogi"
    server_learning_rate: float = Field(0.01, gt=0)
    beta_1: float = Field(0.9, ge=0, lt=1)
    beta_2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0, le=1e6)

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the model ``params``, m = 0 and v = tau^2."""
        return _adaptive_start(params, self.tau)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state, after a step whose coordinates are divided by the root of v.

        v moves towards Delta^2, by at most (1 - beta_2) Delta^2 in a round.
        """
        share = 1 - self.beta_2
        return _adaptive_step(
            server,
            aggregate,
            lambda v, delta: v - share * delta**2 * torch.sign(v - delta**2),
            self.beta_1,
            self.tau,
            self.server_learning_rate,
        )


def _adaptive_start(params: Params, tau: float) -> ServerState:
    second = {name: torch.full_like(value, tau**2) for name, value in params.items()}
    return ServerState(params, memory={"first_moment": zeros_like(params), "second_moment": second})


def _adaptive_step(
    server: ServerState, aggregate: Aggregate, second_moment: SecondMoment, beta_1: float, tau: float, rate: float
) -> ServerState:
    delta, old = aggregate.payloads["delta"], server.memory
    first = {name: beta_1 * old["first_moment"][name] + (1 - beta_1) * value for name, value in delta.items()}
    second = {name: second_moment(old["second_moment"][name], value) for name, value in delta.items()}
    params = {name: x + rate * first[name] / (second[name].sqrt() + tau) for name, x in server.params.items()}
    return ServerState(params, memory={"first_moment": first, "second_moment": second})
