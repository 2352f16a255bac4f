"""IFCA: k models, and each client trains the one that suits its records best (Ghosh et al. 2020, algorithm 1).

    fl-sim run algorithm=ifca:Ifca algorithm.num_models=3 partition=dirichlet:0.1 model=mlp

``result.json`` has ``own_tests``, as for ``fedper:FedPer``: each client is measured with the model that it chooses.
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
    """The server's model is the first of ``num_models``; the others are broadcast, and start ``spread`` around it."""

    title: ClassVar[str] = "IFCA"
    stage: ClassVar[str] = "ifca:ChosenTests"
    weighting: ClassVar[Weighting] = "uniform"
    num_models: int = Field(2, ge=2, le=20)
    spread: float = Field(0.05, gt=0)

    def init(self, params: Params) -> ServerState:
        """Start from ``params`` and neighbours of it."""
        others = {f"model-{j}": _moved(params, self.spread, j) for j in range(1, self.num_models)}
        return ServerState(params, broadcast=others)

    def start(self, task: LocalTask, client: OnClient) -> LocalTask:
        """Begin with the model of the least loss on the client's records; with the first one where it has none."""
        models = models_of(task.params, task.broadcast)
        best = int(np.argmin([client.scores(one).loss for one in models])) if len(client.records) else 0
        chosen = {"chosen": {"model": torch.tensor([float(best)])}}
        return replace(task, params=models[best], state={**task.state, **chosen})

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Send the update in the place of the chosen model, zeros for the others, and the number of records."""
        chosen = int(task.state["chosen"]["model"]) if "chosen" in task.state else 0
        weight, delta = float(task.num_examples), subtract(trained.params, task.params)
        sent = {f"delta-{j}": scale(delta, weight * (j == chosen)) for j in range(self.num_models)}
        counts = {"records": torch.tensor([weight * (j == chosen) for j in range(self.num_models)])}
        return ClientUpdate({**sent, "counts": counts}, task.num_examples, trained.loss)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Move each model by the mean update of the clients that chose it."""
        counts = aggregate.payloads["counts"]["records"]
        first, *others = (
            add(model, aggregate.payloads[f"delta-{j}"], 1 / float(counts[j])) if counts[j] > 0 else model
            for j, model in enumerate(models_of(server.params, server.broadcast))
        )
        return ServerState(first, broadcast={f"model-{j}": model for j, model in enumerate(others, 1)})


def models_of(first: Params, others: Payloads) -> Sequence[Params]:
    """Return all models, the server's first."""
    return [first, *(others[f"model-{j}"] for j in range(1, 1 + len(others)))]


def _moved(params: Params, spread: float, number: int) -> Params:
    draw = rng(0, "ifca", number)
    return {
        name: value + spread * torch.from_numpy(draw.standard_normal(value.shape, np.float32))
        for name, value in params.items()
    }


@dataclass(frozen=True)
class EvaluateChosen(EvaluateOwn):
    """The client half: measured with the model of the least loss on the client's training records."""

    def model(self, client: Client) -> Params:
        """Return the model that the client would begin the next round with."""
        params, broadcast = wire.read_task(client.content)
        models = models_of(params, broadcast)
        if not len(client.records):
            return params
        scores = OnClient(client.records, client.runtime.trainer).scores
        return min(models, key=lambda one: scores(one).loss)


class ChosenTests(OwnTests):
    """The server half."""

    def tasks(self) -> Mapping[str, EvaluateOwn]:
        """Return the one question."""
        return {"evaluate-own": EvaluateChosen(self.job)}
