"""BatchNorm layers of the model: the server averages their running statistics, or each client keeps its own layers.

Server and clients exchange tensors of the BatchNorm layers in addition to the algorithm's own payloads. This module
calls these tensors a model's *layers*. They are the running statistics and, if the layers are personal (FedBN, Li et
al. 2021), also the parameters of the BatchNorm layers. Clients also send personal layers: the evaluated model uses the
mean of these layers over the last cohort, and a client starts its first round with this mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from torch import nn

from clients.client_layer import ClientLayer
from fl_sim.errors import UserError
from fl_sim.kinds import kind_of
from fl_sim.local_plan import LocalPlan
from fl_sim.params import all_norms_in, detached, layers_after, placed, statistics_of, trainable
from fl_sim.types import (
    Aggregate,
    BatchNorm,
    ClientUpdate,
    LocalTask,
    Params,
    Payloads,
    ServerState,
    Trained,
)
from strategies.algorithm import Algorithm
from strategies.layer import Beginning, Layer

LAYERS: Final = "batch-norm"
"""Name of the BatchNorm tensors in messages in both directions, and in client state."""

PERSONAL: Final = (
    "BatchNorm layers are personal: the evaluated model has the mean BatchNorm layers of the last cohort, and no "
    "trained client uses this model"
)


class BatchNormLayers(Layer):
    """Stores the mean BatchNorm tensors in the next server state. The algorithm merges all other payloads."""

    reserved: ClassVar[str] = LAYERS

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the settings allow BatchNorm layers in the model."""
        return bool(experiment.local.batch_norm != "none")

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: object, model: Callable[[], nn.Module]) -> ClientLayer:
        """Return a ``ClientBatchNorm``, which sends BatchNorm tensors, and stores personal ones in the client state."""
        del algorithm, model
        return ClientBatchNorm(experiment.local.batch_norm)

    @classmethod
    def begun(cls, experiment: Any, model: nn.Module, server: ServerState) -> ServerState:
        """Return ``server`` with the BatchNorm tensors of the initial ``model``."""
        return replace(server, layers=layers_in(model, experiment.local.batch_norm))

    @classmethod
    def warnings(cls, experiment: Any, rounds_done: int, idle: Sequence[int]) -> Sequence[str]:
        """Return a warning if BatchNorm layers are personal: then no client uses the evaluated model."""
        del rounds_done, idle
        return [PERSONAL] if experiment.local.batch_norm == "personal" else []

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError for personal BatchNorm layers with an algorithm such as FedCM.

        FedCM adds a share of the last mean update to every local step. For personal BatchNorm layers, there is no mean
        update.
        """
        if experiment.local.batch_norm == "personal" and (scale := beginning.plan.gradient_scale) != 1:
            raise UserError(
                f"algorithm {kind_of(experiment.algorithm)} adds the last round's mean update to {scale:g} of every "
                "gradient, and personal BatchNorm layers have no mean update: take local.batch_norm=average, or "
                "another algorithm"
            )

    def merge(self, algorithm: Algorithm, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: the algorithm's merge of other payloads, plus the mean BatchNorm tensors."""
        payloads = dict(aggregate.payloads)
        layers = payloads.pop(LAYERS, {})
        return replace(self.inner.merge(algorithm, server, replace(aggregate, payloads=payloads)), layers=layers)


@dataclass(frozen=True)
class ClientBatchNorm(ClientLayer):
    """Makes a client train with the received BatchNorm tensors, or with its own tensors if the layers are personal."""

    chosen: BatchNorm

    def received(self, task: LocalTask) -> LocalTask:
        """Return the task with BatchNorm tensors in its model.

        The BatchNorm tensors come from the client state if it contains them, otherwise from the server.
        """
        broadcast, state = {**task.broadcast}, {**task.state}
        layers = broadcast.pop(LAYERS, {})
        params, statistics = placed(task.params, state.pop(LAYERS, layers))
        return replace(task, params=params, statistics=statistics, broadcast=broadcast, state=state)

    def planned(self, came: LocalTask, plan: LocalPlan) -> LocalPlan:
        """Return ``plan``. For MOON, also put the client's BatchNorm layers into the client's previous model."""
        if plan.contrast is None or not (names := self._personal(came)):
            return plan
        params = self.received(came).params
        previous = {**plan.contrast.previous, **{name: params[name] for name in names}}
        return replace(plan, contrast=replace(plan.contrast, previous=previous))

    def finishing(self, came: LocalTask, task: LocalTask, trained: Trained) -> tuple[LocalTask, Trained]:
        """Return the training result with personal layers reset to their values before training: their update is 0."""
        if not (names := self._personal(came)):
            return task, trained
        resting = {name: task.params[name] for name in names}
        return task, replace(trained, params={**trained.params, **resting})

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return the update with BatchNorm tensors added.

        Personal BatchNorm layers are also added to the client state.
        """
        del task
        names = self._personal(came)
        if not (layers := layers_after(trained, names)):
            return update
        keeps = bool(names) and bool(update.state or trained.num_steps)
        state = {**update.state, LAYERS: layers} if keeps else update.state
        return replace(update, payloads={**update.payloads, LAYERS: layers}, state=state)

    def broadcast(self, server: ServerState) -> Payloads:
        """Return the BatchNorm tensors in the server state, which all clients receive."""
        return {LAYERS: server.layers} if server.layers else {}

    def adds(self, server: ServerState) -> Payloads:
        """Return the server's BatchNorm tensors, as a template for the tensors that clients add to their updates."""
        return self.broadcast(server)

    def kept(self, state: Payloads, template: Payloads, server: ServerState) -> Payloads:
        """Return a template (names and shapes) of client state.

        It includes BatchNorm tensors if BatchNorm layers are personal.
        """
        del template
        return {**state, LAYERS: server.layers} if self.chosen == "personal" else state

    def _personal(self, came: LocalTask) -> tuple[str, ...]:
        """Return the names of the personal BatchNorm parameters, which each client keeps."""
        return tuple(name for name in came.broadcast.get(LAYERS, {}) if name in came.params)


def layers_in(model: nn.Module, chosen: BatchNorm) -> Params:
    """Return the BatchNorm statistics of ``model``, on the CPU.

    If ``chosen`` is "personal", the BatchNorm parameters are included.
    """
    if chosen != "personal":
        return statistics_of(model)
    weights = {
        f"{name}.{key}".removeprefix("."): weight
        for name, layer in all_norms_in(model).items()
        for key, weight in trainable(layer).items()
    }
    return {**detached(weights.items()), **statistics_of(model)}
