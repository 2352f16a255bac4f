"""FedNova: normalised averaging, so that a client's influence does not grow with its number of local steps.

Wang et al. 2020, eq. 6-8.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, hides_clients, kind_of
from fl_sim.params import add, scale, subtract
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, ServerState, Trained
from strategies.algorithm import Averaging, accumulated_momentum, check_sgd


class FedNova(Averaging):
    """x <- x - tau_eff sum_i p_i (x - y_i) / a_i, with p_i = n_i / n.

    y_i is the trained model of client i, n_i its number of records, and n the sum of n_i. x is the global model. a_i is
    the distance that client i's local steps would move with a constant gradient of 1, divided by the learning rate.
    ``tau_eff``: the factor of the server step; None means sum_i p_i a_i of the round, the paper's default. If it is a
    number, the number is public and fixed, and clients do not send a_i. (In Wang et al. 2020, section 4.2, the server
    may choose tau_eff.)
    """

    kind: Literal["fednova"] = "fednova"
    tau_eff: float | None = Field(None, gt=0)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the local optimizer is not SGD, or if Global DP has no public ``tau_eff``."""
        check_sgd(self, experiment, "it divides updates by the distance of SGD steps")
        if hides_clients(experiment.aggregator) and self.tau_eff is None:
            raise ValueError(
                f"algorithm fednova under aggregator {kind_of(experiment.aggregator)} needs a public "
                "algorithm.tau_eff, such as the usual number of local steps: otherwise clients also send their a_i, "
                "and joint clipping would leave almost nothing of the update"
            )

    def mean_only(self) -> str:
        """Return the reason why robust aggregators cannot be used: clients also send a_i, far larger than their update.

        If ``tau_eff`` is a public number, the result is an empty string, because clients then do not send a_i.
        """
        if self.tau_eff is not None:
            return ""
        return (
            "clients also send their a_i, which is far larger than the update and would decide distances between "
            "clients; set a public algorithm.tau_eff, such as the usual number of local steps"
        )

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the normalised update (y_i - x) / a_i and, without a public ``tau_eff``, also a_i."""
        a_i = accumulated_momentum(trained.num_steps, task.settings.momentum)
        direction = scale(subtract(trained.params, task.params), 1 / a_i if a_i else 0.0)
        payloads = {"direction": direction}
        if self.tau_eff is None:
            payloads["normaliser"] = {"a": torch.tensor([a_i])}
        return ClientUpdate(payloads, task.num_examples, trained.loss)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: the model plus ``tau_eff`` times the mean normalised update."""
        tau_eff = self.tau_eff
        if tau_eff is None:
            tau_eff = float(aggregate.payloads["normaliser"]["a"])
        return ServerState(add(server.params, aggregate.payloads["direction"], tau_eff))
