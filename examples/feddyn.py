"""FedDyn: an algorithm of your own in one file (Acar et al. 2021, "Dynamic Regularization", algorithm 1).

    fl-sim run algorithm=feddyn:FedDyn algorithm.alpha=0.1

Run this command in the folder of this file. Tables and TOML files name the algorithm in the same way; in Python it is
``Experiment(algorithm=FedDyn())``. fl-sim's own ``algorithm=feddyn`` gives the same result.
"""

from typing import ClassVar

from pydantic import Field

from fl_sim.local_plan import LocalPlan
from fl_sim.params import add, scale, subtract, zeros_like
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, ServerState, Trained
from strategies.algorithm import Averaging, Weighting


class FedDyn(Averaging):
    """Clients minimise F_i(w) - <g_i, w> + alpha/2 |w - x|^2 (algorithm 1).

    At the optimum, all clients have the same model. F_i is the loss of client i, w its model during training, y_i its
    trained model, x the global model. g_i is the client state and approaches the gradient of F_i at y_i. h, in the
    server state, is the mean of all g_i.
    """

    title: ClassVar[str] = "FedDyn"
    weighting: ClassVar[Weighting] = "uniform"
    alpha: float = Field(0.01, gt=0)

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the model ``params`` and h = 0."""
        return ServerState(params, memory={"h": zeros_like(params)})

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local plan that adds -g_i + alpha (w - x) to every gradient."""
        return LocalPlan(gradient_offset=scale(_g_i(task), -1.0), proximal_mu=self.alpha)

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update y_i - x, with the new g_i = g_i - alpha (y_i - x) as client state."""
        delta = subtract(trained.params, task.params)
        g_i = add(_g_i(task), delta, -self.alpha)
        return ClientUpdate({"delta": delta}, task.num_examples, trained.loss, state={"g_i": g_i})

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: h <- h - alpha |S|/K mean(y_i - x), then x <- mean(y_i) - h / alpha.

        |S| is the number of clients in the cohort, and K the number of all clients.
        """
        delta = aggregate.payloads["delta"]
        h = add(server.memory["h"], delta, -self.alpha * aggregate.participation)
        return ServerState(add(add(server.params, delta), h, -1 / self.alpha), memory={"h": h})


def _g_i(task: LocalTask) -> Params:
    return task.state.get("g_i") or zeros_like(task.params)
