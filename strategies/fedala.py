"""FedALA: a client starts at a mixture of its own model and the global model (Zhang et al. 2023, algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.local_plan import LocalPlan
from fl_sim.params import add, subtract
from fl_sim.seeding import rng
from fl_sim.types import ClientUpdate, LocalTask, Params, Trained
from strategies.algorithm import FEDAVG, Averaging
from strategies.mixed_start import gradient_step, mixture, step_of

if TYPE_CHECKING:
    from clients.client_task import OnClient

_OWN, _WEIGHTS, _ROUNDS, _RECEIVED = "own-model", "weights", "rounds", "received"

_MOST_PASSES = 100
"""The largest number of passes until the weights converge. The released code has no limit, so it might never end."""

_WINDOW = 10
"""Number of passes that decide on convergence, as in the released code: the weights have converged if the losses of
this many passes differ little."""


class FedALA(Averaging):
    """FedAvg, but a client starts at v + (x - v) W instead of x, with its own last model v and weights W in [0, 1].

    x is the received global model. Only the last layers start at the mixture; all other layers start at x. W has a
    number for each parameter of the last layers, and begins at 1. Before local training, the client trains W on a
    random part of its records. Each step is W <- W - eta (x - v) G, cut to [0, 1], where G is the gradient of the loss
    at the mixture. In the client's second round, W is trained for several passes over these records, until the mean
    loss of a pass converges. In later rounds, W is trained for one pass. Local training starts at the resulting
    mixture. The mixture is also evaluated as the client's own model.

    ``weight_learning_rate``: the learning rate eta of W, 1 in Zhang et al. 2023; 0 is FedAvg. ``layers``: the number of
    last layers that start at the mixture, 1 in the paper. ``record_share``: the share of the client's records on which
    W is trained, 0.8 in the paper. ``threshold``: the loss has converged if the standard deviation of its last 10
    values is below this value (0.1 in the released code).

    The released code differs: ``layers`` is a number of tensors, the loss of a pass is the loss of the last batch, and
    a client that joins late mixes x with the initial model in its first round. Here this client starts at x.
    """

    kind: Literal["fedala"] = "fedala"
    title: ClassVar[str] = "FedALA"
    weight_learning_rate: float = Field(1.0, ge=0)
    layers: int = Field(1, ge=1)
    record_share: float = Field(0.8, gt=0, le=1)
    threshold: float = Field(0.1, gt=0)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        if not self.weight_learning_rate:
            return [off("algorithm.weight_learning_rate=0", FEDAVG)]
        first = "rounds=1, and in its first round a client has no own model yet"
        return [off("algorithm fedala", first)] if experiment.rounds == 1 else []

    def start(self, task: LocalTask, client: OnClient) -> LocalTask:
        """Return the task with the mixture as the initial model, and the received model in the client state."""
        state = {**task.state, _RECEIVED: task.params}
        if _OWN not in task.state or not len(client.records):
            return replace(task, state=state)
        weights = self._learned(task, client) if self.weight_learning_rate else task.state[_WEIGHTS]
        return replace(
            task,
            params={**task.params, **mixture(task.state[_OWN], task.params, weights)},
            state={**state, _WEIGHTS: weights},
        )

    def start_steps(self, num_examples: int, batch_size: int, starts: float) -> float:
        """Return the number of steps of W in the first ``starts`` rounds of a client: none in the first round.

        For the second round, the result assumes the smallest number of passes until convergence; for later rounds, one.
        """
        later = max(0.0, starts - 1) * bool(self.weight_learning_rate)
        return (later + _WINDOW * min(1.0, later)) * math.ceil(math.ceil(self.record_share * num_examples) / batch_size)

    def start_plan(self, params: Params) -> LocalPlan:
        """Return the local plan of a step of the mixing weights: only the last layers have gradients."""
        return step_of(self._mixed(params))

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update y_i - x. The client state has y_i's last layers, W and the number of rounds."""
        delta = subtract(trained.params, task.state.get(_RECEIVED, task.params))
        own = {name: trained.params[name] for name in self._mixed(task.params)}
        weights = task.state.get(_WEIGHTS, {name: torch.ones_like(value) for name, value in own.items()})
        state = {_OWN: own, _WEIGHTS: weights, _ROUNDS: {_ROUNDS: torch.tensor([_rounds(task) + 1])}}
        return ClientUpdate({"delta": delta}, task.num_examples, trained.loss, state if trained.num_steps else {})

    def _mixed(self, params: Params) -> Sequence[str]:
        """Return the parameter names of the last ``layers`` layers, which start at the mixture."""
        layer_of = {name: name.rpartition(".")[0] for name in params}
        last = list(dict.fromkeys(layer_of.values()))[-self.layers :]
        return [name for name in params if layer_of[name] in last]

    def _learned(self, task: LocalTask, client: OnClient) -> Params:
        """Return the mixing weights W after their training in this round."""
        inputs, labels = client.records.tensors()
        generator = rng(client.seed, "fedala", task.client, task.server_round)
        chosen = generator.permutation(len(labels))[: math.ceil(self.record_share * len(labels))]
        weights, losses, own = task.state[_WEIGHTS], list[float](), task.state[_OWN]
        apart = {name: task.params[name] - value for name, value in own.items()}
        while not losses or (_rounds(task) == 1 and not self._have_converged(losses)):
            steps = list[float]()
            for batch in torch.split(torch.from_numpy(chosen), task.settings.batch_size):
                mixed = mixture(own, task.params, weights)
                stepped = client.trainer.train(gradient_step(task, mixed, (inputs[batch], labels[batch]), generator))
                moves = {name: stepped.momentum_buffers[name] * change for name, change in apart.items()}
                weights = {
                    name: one.clamp(0, 1) for name, one in add(weights, moves, -self.weight_learning_rate).items()
                }
                steps.append(stepped.loss or 0.0)
            losses.append(float(np.mean(steps)))
        return weights

    def _have_converged(self, losses: Sequence[float]) -> bool:
        is_steady = len(losses) > _WINDOW and float(np.std(losses[-_WINDOW:])) < self.threshold
        return is_steady or len(losses) >= _MOST_PASSES


def _rounds(task: LocalTask) -> float:
    """Return the number of earlier rounds in which the client has trained, from its client state."""
    return float(task.state[_ROUNDS][_ROUNDS]) if _ROUNDS in task.state else 0.0
