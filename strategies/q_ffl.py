"""q-FFL: a client's weight grows with a power of its loss (Li et al. 2020, algorithm 2: q-FedAvg)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Final, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.params import add, flattened
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Reply, ServerState, Trained
from strategies.algorithm import Weighting, check_sgd
from strategies.received_loss import SendingLoss, losses_of

_LEAST: Final = 1e-10
"""The number that is added to each loss, as in the released code: 0^(q-1) is not defined for q < 1."""


class QFFL(SendingLoss):
    """x <- x + sum_i F_i^q D_i / sum_i (F_i^q + q F_i^(q-1) ||D_i||^2 / eta), to lower the mean of F_i^(q+1).

    x is the global model, y_i the trained model of client i, D_i = y_i - x its update, and F_i the loss of x on all its
    training records. eta is the local learning rate; 1 / eta is the paper's L. All clients of a round have the same
    weight in both sums, whatever their number of records. ``q``: the power of the loss in a client's weight; with 0 the
    method is FedAvg with equal weights. The paper uses 0.1 to 15. As in the released code, 1e-10 is added to each F_i,
    because 0^(q-1) is not defined for q < 1. The server sees every F_i.
    """

    kind: Literal["q-ffl"] = "q-ffl"
    title: ClassVar[str] = "q-FFL"
    weighting: ClassVar[Weighting] = "uniform"
    q: float = Field(1.0, ge=0)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the local optimizer is not SGD."""
        check_sgd(self, experiment, "it uses 1 / local.learning_rate as the curvature of the loss")

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        return [] if self.q else [off("algorithm.q=0", "this is fedavg with equal weights of all clients")]

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the client's update D_i, its loss F_i, and ||D_i||^2 / (eta F_i) for the step's denominator."""
        update = super().finish(task, trained)
        [loss] = losses_of([Reply(task.client, update.payloads, task.num_examples, None)])
        square = flattened(update.payloads["delta"]).flat.double().pow(2).sum()
        curvature = (square / (task.settings.learning_rate * (loss + _LEAST))).float().reshape(1)
        return replace(update, payloads={**update.payloads, "curvature": {"norm": curvature}})

    def weigh(self, replies: Sequence[Reply]) -> list[float]:
        """Return the weight F_i^q of each reply, divided by the largest weight, so that no power overflows."""
        losses = [loss + _LEAST for loss in losses_of(replies)]
        return [(loss / max(losses)) ** self.q for loss in losses]

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: x plus the step.

        The step's numerator and denominator are divided by sum_i F_i^q, because the aggregate is a weighted mean.
        """
        curvature = max(0.0, float(aggregate.payloads["curvature"]["norm"]))
        return ServerState(add(server.params, aggregate.payloads["delta"], 1 / (1 + self.q * curvature)))
