"""IFCA: of several models, each client trains the one with the least loss on its records (Ghosh et al. 2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.params import add, subtract, zeros_like
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, ServerState, Trained
from strategies.algorithm import FEDAVG, Averaging
from strategies.several_models import CHOSEN, check_choices, delta_name, further_models, model_name, models_of

if TYPE_CHECKING:
    from clients.client_task import OnClient


class IFCA(Averaging):
    """The server keeps k = ``num_models`` models. A client chooses j = argmin F_i(x_j) and trains only x_j (alg. 1).

    Ghosh et al. 2020: x_j <- x_j + sum p_i (y_i - x_j). The sum is over the clients that chose j. y_i is the trained
    model of client i. The weights p_i are in proportion to the clients' numbers of records. F_i(x) is the mean loss of
    model x over the training records of client i. A model that no client chooses stays unchanged. In the released code
    all clients have the same weight, and a test client chooses by its test records.

    The first model is the run's initial model. ``spread`` "shuffled": each other model has the values of the first one
    in random order within each tensor. If initial values are independent draws, as for most layers, a shuffled model is
    distributed like a newly drawn one. The paper and the released code draw new models. If ``spread`` is a number, each
    other model is the first one plus normal noise of this standard deviation. A number suits an initial model that is
    already trained. The random numbers come from a digest of the initial model, so they depend on ``model_seed``.

    Each client receives k models, and sends one update and k numbers; ``OneUpdate`` leaves out the zeros of the other k
    - 1 updates. ``num_models`` 1 is FedAvg.
    """

    kind: Literal["ifca"] = "ifca"
    title: ClassVar[str] = "IFCA"
    layer: ClassVar[str] = "strategies.several_models:OneUpdate"
    stage: ClassVar[str] = "fl_sim.stages.chosen_models:ChosenModels"
    follows_moves: ClassVar[bool] = True
    num_models: int = Field(2, ge=1, le=100)
    spread: Annotated[float, Field(gt=0)] | Literal["shuffled"] = "shuffled"

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if there are fewer clients than models, or if a setting does not fit several models."""
        if self.num_models > experiment.clients:
            raise ValueError(
                f"algorithm.num_models={self.num_models} is more than clients={experiment.clients}, and each client "
                "trains one model in a round: take a smaller algorithm.num_models, or more clients"
            )
        check_choices(self, self.num_models, experiment)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return remarks for the user: one sentence for each setting that has no effect."""
        del experiment
        return [off("algorithm.num_models=1", FEDAVG)] if self.num_models == 1 else []

    def mean_only(self) -> str:
        """Return the reason why this method cannot use robust aggregators, for error messages; empty for one model."""
        if self.num_models == 1:
            return ""
        return "a client's update is zero for all models but one, and only a mean leaves such zeros without effect"

    def note(self) -> str:
        """Return the note below result tables: the evaluated model, and the models and updates that are sent."""
        return (
            "IFCA: the first of several models is evaluated, and evaluate.clients measures the model that each client "
            "chooses; bytes are those of all models down and of one update up."
        )

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: ``params`` as the first model, and all other models."""
        return ServerState(params, broadcast=further_models(params, self.num_models, self.spread))

    def start(self, task: LocalTask, client: OnClient) -> LocalTask:
        """Return the client's task. Of all models it contains the one with the lowest loss on the client's records.

        A client without records gets the first model.
        """
        if self.num_models == 1 or not len(client.records):
            return task
        models = models_of(task.params, task.broadcast)
        best = int(np.argmin([client.scores(one).loss for one in models]))
        return replace(task, params=models[best], state={**task.state, CHOSEN: {"model": torch.tensor([best])}})

    @property
    def start_passes(self) -> int:
        """Return the number of models that a client evaluates on its training records to choose one."""
        return self.num_models if self.num_models > 1 else 0

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return one update per model, and a 0/1 mask of the chosen model. Updates of all other models are 0."""
        if self.num_models == 1:
            return super().finish(task, trained)
        chosen = int(task.state[CHOSEN]["model"]) if CHOSEN in task.state else 0
        delta = subtract(trained.params, task.params)
        sent = {delta_name(j): delta if j == chosen else zeros_like(delta) for j in range(self.num_models)}
        share = torch.tensor([float(j == chosen) for j in range(self.num_models)])
        return ClientUpdate({**sent, CHOSEN: {"share": share}}, task.num_examples, trained.loss)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: each model plus the mean update of the clients that chose the model."""
        if self.num_models == 1:
            return super().merge(server, aggregate)
        shares = aggregate.payloads[CHOSEN]["share"].tolist()
        first, *others = (
            add(model, aggregate.payloads[delta_name(j)], 1 / shares[j]) if shares[j] > 0 else model
            for j, model in enumerate(models_of(server.params, server.broadcast))
        )
        return ServerState(first, broadcast={model_name(j): model for j, model in enumerate(others, 1)})
