"""SCAFFOLD: control variates against client drift (Karimireddy et al. 2020, algorithm 1, option II)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.local_plan import LocalPlan
from fl_sim.params import add, scale, subtract, zeros_like
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, ServerState, Trained
from strategies.algorithm import Averaging, Weighting, accumulated_momentum


class Scaffold(Averaging):
    """Local steps y <- y - eta (g(y) - c_i + c); every client counts the same.

    ``server_learning_rate`` is the paper's eta_g.
    """

    kind: Literal["scaffold"] = "scaffold"
    server_learning_rate: float = Field(1.0, gt=0)
    title: ClassVar[str] = "SCAFFOLD"
    weighting: ClassVar[Weighting] = "uniform"

    def init(self, params: Params) -> ServerState:
        """Start from ``params`` with c = 0."""
        return ServerState(params, broadcast={"control": zeros_like(params)})

    def plan(self, task: LocalTask) -> LocalPlan:
        """Correct every gradient by c - c_i."""
        return LocalPlan(gradient_offset=subtract(task.broadcast["control"], _own_control(task)))

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Send y_i - x and c_i+ - c_i; keep c_i+ = c_i - c + (x - y_i) / (a_i eta).

        With momentum a constant gradient g moves the model by a_i eta g, not by steps * eta * g; dividing by the number
        of steps would overshoot tenfold at momentum 0.9 and diverge.
        """
        delta = subtract(trained.params, task.params)
        if trained.num_steps == 0:
            return ClientUpdate({"delta": delta, "control_delta": zeros_like(delta)}, task.num_examples)
        reach = accumulated_momentum(trained.num_steps, task.settings.momentum) * task.settings.learning_rate
        mean_gradient = scale(delta, -1 / reach)
        control_delta = subtract(mean_gradient, task.broadcast["control"])
        c_i_plus = add(_own_control(task), control_delta)
        payloads = {"delta": delta, "control_delta": control_delta}
        return ClientUpdate(payloads, task.num_examples, trained.loss, state={"control": c_i_plus})

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Move x by eta_g mean(y_i - x) and c by |S|/K mean(c_i+ - c_i)."""
        params = add(server.params, aggregate.payloads["delta"], self.server_learning_rate)
        control = add(server.broadcast["control"], aggregate.payloads["control_delta"], aggregate.participation)
        return ServerState(params, broadcast={"control": control})


def _own_control(task: LocalTask) -> Params:
    return task.state.get("control") or zeros_like(task.params)
