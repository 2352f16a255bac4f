"""FedNova: normalised averaging, so that clients with many local steps do not pull harder (Wang et al. 2020, eq. 6-8)."""

from typing import Literal

import torch

from fl_sim.params import add, scale, subtract
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, ServerState, Trained
from strategies.algorithm import Averaging, accumulated_momentum


class FedNova(Averaging):
    """x <- x - tau_eff sum_i p_i (x - y_i) / a_i, with p_i = n_i / n and tau_eff = sum_i p_i a_i."""

    kind: Literal["fednova"] = "fednova"

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Send the normalised update (y_i - x) / a_i, and a_i itself for tau_eff."""
        a_i = accumulated_momentum(trained.num_steps, task.settings.momentum)
        direction = scale(subtract(trained.params, task.params), 1 / a_i if a_i else 0.0)
        payloads = {"direction": direction, "normaliser": {"a": torch.tensor([a_i])}}
        return ClientUpdate(payloads, task.num_examples, trained.loss)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Take tau_eff steps in the mean direction."""
        tau_eff = float(aggregate.payloads["normaliser"]["a"])
        return ServerState(add(server.params, aggregate.payloads["direction"], tau_eff))
