"""IFCA: of k models, each client trains the one with the lowest loss on its records (Ghosh et al. 2020, algorithm 1).

    fl-sim run algorithm=ifca:Ifca algorithm.num_models=3 partition=dirichlet:0.1 model=mlp

IFCA means Iterative Federated Clustering Algorithm. ``own_tests`` in ``result.json`` is computed as for
``fedper:FedPer``. A client's own model is its chosen model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from fedper import EvaluateOwn, OwnTests
from pydantic import Field

from clients.client_task import Client, OnClient
from fl_sim.engines import wire
from fl_sim.params import add, scale, subtract
from fl_sim.seeding import rng
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, Payloads, ServerState, Trained
from strategies.algorithm import Averaging, Weighting


class Ifca(Averaging):
    """The first of ``num_models`` models is the global model; the others are broadcast tensors.

    The others start from the global model plus normal noise of standard deviation ``spread``.
    """

    title: ClassVar[str] = "IFCA"
    stage: ClassVar[str] = "ifca:ChosenTests"
    weighting: ClassVar[Weighting] = "uniform"
    num_models: int = Field(2, ge=2, le=20)
    spread: float = Field(0.05, gt=0)

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the model ``params``, and noisy copies of this model."""
        others = {f"model-{j}": _moved(params, self.spread, j) for j in range(1, self.num_models)}
        return ServerState(params, broadcast=others)

    def start(self, task: LocalTask, client: OnClient) -> LocalTask:
        """Return the task with the model of lowest loss on the client's records. With no records: the first."""
        models = models_of(task.params, task.broadcast)
        best = int(np.argmin([client.scores(one).loss for one in models])) if len(client.records) else 0
        chosen = {"chosen": {"model": torch.tensor([float(best)])}}
        return replace(task, params=models[best], state={**task.state, **chosen})

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return, for each model, an update times a number of records, and this number.

        For the chosen model, it is the number of the client's records. For all other models, it is 0.
        """
        chosen = int(task.state["chosen"]["model"]) if "chosen" in task.state else 0
        weight, delta = float(task.num_examples), subtract(trained.params, task.params)
        sent = {f"delta-{j}": scale(delta, weight * (j == chosen)) for j in range(self.num_models)}
        counts = {"records": torch.tensor([weight * (j == chosen) for j in range(self.num_models)])}
        return ClientUpdate({**sent, "counts": counts}, task.num_examples, trained.loss)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: each model plus the mean update of the clients that chose the model."""
        counts = aggregate.payloads["counts"]["records"]
        first, *others = (
            add(model, aggregate.payloads[f"delta-{j}"], 1 / float(counts[j])) if counts[j] > 0 else model
            for j, model in enumerate(models_of(server.params, server.broadcast))
        )
        return ServerState(first, broadcast={f"model-{j}": model for j, model in enumerate(others, 1)})


def models_of(first: Params, others: Payloads) -> Sequence[Params]:
    """Return all models: the global model ``first``, then the models among the broadcast tensors ``others``."""
    return [first, *(others[f"model-{j}"] for j in range(1, 1 + len(others)))]


def _moved(params: Params, spread: float, number: int) -> Params:
    draw = rng(0, "ifca", number)
    return {
        name: value + spread * torch.from_numpy(draw.standard_normal(value.shape, np.float32))
        for name, value in params.items()
    }


@dataclass(frozen=True)
class EvaluateChosen(EvaluateOwn):
    """The client task: evaluates the model that has the lowest loss on the client's training records."""

    def model(self, client: Client) -> Params:
        """Return the model with which the client would start the next round."""
        params, broadcast = wire.read_task(client.content)
        models = models_of(params, broadcast)
        if not len(client.records):
            return params
        scores = OnClient(client.records, client.runtime.trainer).scores
        return min(models, key=lambda one: scores(one).loss)


class ChosenTests(OwnTests):
    """The stage at the server: it evaluates the chosen model of every client after the last round."""

    def tasks(self) -> Mapping[str, EvaluateOwn]:
        """Return the client task of this stage, by name."""
        return {"evaluate-own": EvaluateChosen(self.job)}
