"""FedDyn: dynamic regularisation, so that local optima agree with the global optimum (Acar et al. 2021, alg. 1)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices
from fl_sim.local_plan import LocalPlan
from fl_sim.params import add, scale, subtract, zeros_like
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, ServerState, Trained
from strategies.algorithm import Averaging, Weighting, check_sgd


class Dynamic(Averaging):
    """Clients minimise F_i(w) - <g_i, w> + alpha/2 ||w - x||^2. Means over clients have equal weights.

    F_i is the loss of client i, w its model, and x the global model. g_i, the client state, approaches the gradient of
    F_i at the client's model. h, in the server state, is the mean of all clients' g_i.
    """

    alpha: float = Field(0.01, gt=0)
    weighting: ClassVar[Weighting] = "uniform"
    knobs: ClassVar[str] = (
        "the server step contains h / alpha: set a larger algorithm.alpha, or local.momentum=0, as in the paper"
    )

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the local optimizer is not SGD."""
        check_sgd(
            self,
            experiment,
            "its correction is a gradient, and steps that are not in proportion to gradients never balance it",
        )

    def mean_only(self) -> str:
        """Return the reason why the server needs the mean of the updates: h is the mean of all g_i."""
        return (
            "its corrections cancel at the optimum only while h is the mean of the client states, and with other "
            "aggregates the error adds up over rounds"
        )

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the model ``params`` and h = 0, the mean of all g_i."""
        return ServerState(params, memory={"h": zeros_like(params)})

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the client's local objective (``LocalPlan``): -g_i + alpha (w - x) is added to every gradient."""
        return LocalPlan(gradient_offset=scale(_g_i(task), -1.0), proximal_mu=self.alpha)

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update y_i - x. The client state becomes g_i - alpha (y_i - x), the new g_i."""
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


class FedDyn(Dynamic):
    """Clients minimise F_i(w) - <g_i, w> + alpha/2 ||w - x||^2, so that all w agree at the minimum of sum_i F_i.

    F_i is the loss of client i, w its model, and x the global model. g_i is part of the client state, and approaches
    the gradient of F_i at the client's model. ``alpha``: the strength of the regularisation; the paper tries 0.001,
    0.01 and 0.1. The released code divides alpha by the product of a client's share of the records and the number of
    clients. The released code also clips gradients to norm 10 (``local.clip_norm``), and evaluates x and the mean of
    the clients' models.
    """

    kind: Literal["feddyn"] = "feddyn"


def _g_i(task: LocalTask) -> Params:
    return task.state.get("g_i") or zeros_like(task.params)
