"""SCAFFOLD: control variates against client drift (Karimireddy et al. 2020, algorithm 1, option II)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, hides_clients, kind_of
from fl_sim.local_plan import LocalPlan
from fl_sim.params import add, scale, subtract, zeros_like
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, Payloads, ServerState, Trained
from strategies.algorithm import Averaging, Weighting, accumulated_momentum, check_sgd
from strategies.samplers import Everyone


class Scaffold(Averaging):
    """Local steps y <- y - eta (g(y) - c_i + c); every client has the same weight. The paper has no local momentum.

    x is the received model, y the client's model, y_i its trained model, g the gradient, and eta the local learning
    rate. c and c_i are the control variates of the server and of client i; c_i+ is the new c_i.
    ``server_learning_rate``: the paper's eta_g. ``variant`` "paper": c_i+ = c_i - c + (x - y_i) / (K eta) after K
    steps. "momentum" is our extension to local momentum. With momentum, K steps with a constant gradient g change the
    model by a_i eta g, not by K eta g; a_i follows from K and the momentum (Wang et al. 2020, section 4.1). So a_i eta
    replaces K eta in c_i+. "niid-bench" follows the program of a published benchmark (Li et al. 2022): the correction
    is added to the step after momentum, c_i+ divides by K eta, and models are weighted by records. The result equals
    the program's result if all clients take part in every round. Otherwise results differ: the program starts c and all
    c_i at one random model, not at 0, and a part of this model stays in c until every client has taken part.
    """

    kind: Literal["scaffold"] = "scaffold"
    server_learning_rate: float = Field(1.0, gt=0)
    variant: Literal["paper", "momentum", "niid-bench"] = "paper"
    title: ClassVar[str] = "SCAFFOLD"
    starts_with: ClassVar[Mapping[str, Any]] = {"local": {"momentum": 0.0}}
    weighting: ClassVar[Weighting] = "uniform"
    knobs: ClassVar[str] = (
        "SCAFFOLD diverges if local.learning_rate * steps / (1 - local.momentum) is too large: leave local.momentum at "
        "0, or set a smaller algorithm.server_learning_rate"
    )

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the local optimizer is not SGD, and for the variant "niid-bench" under Global DP."""
        check_sgd(self, experiment, "its control variates are the change of K steps of SGD, divided by K eta")
        if self.variant == "niid-bench" and hides_clients(experiment.aggregator):
            raise ValueError(
                "algorithm.variant=niid-bench weights models by their clients' records, and under aggregator "
                f"{kind_of(experiment.aggregator)} all clients have the same weight: take variant=paper"
            )

    def advice(self, momentum: float) -> str:
        """Return one sentence of advice on local momentum, which the paper does not use."""
        if not momentum:
            return "SCAFFOLD trains without local momentum, as in its paper"
        if self.variant == "paper":
            return (
                f"SCAFFOLD's paper has no local momentum: at local.momentum={momentum:g} its control variates "
                f"overshoot up to {1 / (1 - momentum):.3g} times and training may diverge; leave local.momentum out, "
                "or take algorithm.variant=momentum"
            )
        whose = "fl-sim's extension to" if self.variant == "momentum" else "NIID-Bench's program with"
        return f"SCAFFOLD here is {whose} local momentum {momentum:g}, which its paper does not have"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        said = []
        if experiment.rounds == 1:
            said.append("SCAFFOLD's corrections have no effect: rounds=1, and they are 0 in the first round")
        if self.variant == "niid-bench" and not isinstance(experiment.sampler, Everyone):
            said.append(
                "algorithm.variant=niid-bench equals NIID-Bench's program only if all clients are in every round: "
                "that program's control variates start at random weights, and here they start at 0"
            )
        return said

    def mean_only(self) -> str:
        """Return the reason why the server needs the mean of the updates: c is the mean of all c_i."""
        return "corrections c - c_i cancel only while c is the mean of all c_i, and with other aggregates it is not"

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the model ``params`` and c = 0."""
        return ServerState(params, broadcast={"control": zeros_like(params)})

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local objective (``LocalPlan``): c - c_i is added to gradients; with "niid-bench", to steps."""
        correction = subtract(task.broadcast["control"], _own_control(task))
        if self.variant == "niid-bench":
            return LocalPlan(step_offset=correction)
        return LocalPlan(gradient_offset=correction)

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update: y_i - x and c_i+ - c_i. The new control variate c_i+ is stored as client state.

        c_i+ = c_i - c + (x - y_i) / (K eta); in the variant "momentum", a_i eta replaces K eta.
        """
        delta = subtract(trained.params, task.params)
        if trained.num_steps == 0:
            return ClientUpdate(self._sent(delta, zeros_like(delta), task), task.num_examples)
        momentum = task.settings.momentum if self.variant == "momentum" else 0.0
        reach = accumulated_momentum(trained.num_steps, momentum) * task.settings.learning_rate
        control_delta = subtract(scale(delta, -1 / reach), task.broadcast["control"])
        kept = {"control": add(_own_control(task), control_delta)}
        return ClientUpdate(self._sent(delta, control_delta, task), task.num_examples, trained.loss, kept)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: x <- x + eta_g mean(y_i - x), and c <- c + |S|/N mean(c_i+ - c_i).

        |S| is the number of clients in the cohort, and N the number of all clients.
        """
        step = self.server_learning_rate
        if self.variant == "niid-bench":
            step /= float(aggregate.payloads["records"]["mean"])
        control = add(server.broadcast["control"], aggregate.payloads["control_delta"], aggregate.participation)
        return ServerState(add(server.params, aggregate.payloads["delta"], step), {"control": control})

    def _sent(self, delta: Params, control_delta: Params, task: LocalTask) -> Payloads:
        """Return a client's payloads. For "niid-bench" they contain n_i (y_i - x) and n_i, the number of records.

        The server divides the uniform mean of n_i (y_i - x) by the uniform mean of n_i: a mean weighted by records.
        """
        if self.variant != "niid-bench":
            return {"delta": delta, "control_delta": control_delta}
        records = {"mean": torch.tensor([float(task.num_examples)])}
        return {"delta": scale(delta, task.num_examples), "control_delta": control_delta, "records": records}


def _own_control(task: LocalTask) -> Params:
    return task.state.get("control") or zeros_like(task.params)
