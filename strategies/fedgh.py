"""FedGH: the server trains one head for all clients, on the clients' mean features (Yi et al. 2023, algorithm 1)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.local_plan import LocalPlan
from fl_sim.params import head_names, head_shape
from fl_sim.types import ClientUpdate, LocalTask, Params, ServerState, Trained
from strategies.class_means import KeepsModels, RoundPayloads

if TYPE_CHECKING:
    from clients.client_task import OnClient


class FedGH(KeepsModels):
    """Each client begins a round with its own body and the server's head (the last linear layer), and trains both.

    A client then sends the mean features of each class that it has; features are the inputs of the head. The server
    trains its head on all these means, with their classes as labels. It takes ``head_steps`` steps of gradient descent
    on the mean cross-entropy, with the learning rate ``head_rate``. Clients send no parameters. Before the first round,
    all clients have the run's initial model.

    In the paper, the server takes one step for each of these means in turn. In the released code, it makes one pass
    over batches of means.
    """

    kind: Literal["fedgh"] = "fedgh"
    title: ClassVar[str] = "FedGH"
    layer: ClassVar[str] = "strategies.single_payloads:SinglePayloads"
    payload: ClassVar[str] = "mean features"
    knobs: ClassVar[str] = "algorithm.head_rate is the learning rate of the server's head: set a smaller one"
    head_steps: int = Field(100, ge=1, le=10**6)
    head_rate: float = Field(0.1, gt=0)

    def mean_only(self) -> str:
        """Return the reason why this method cannot use robust aggregators, for error messages."""
        return "its server trains on the mean features of all clients, also those that a robust aggregator leaves out"

    def note(self) -> str:
        """Return the note below result tables. It names the tensors that clients send."""
        return "FedGH: clients send only their mean features of each class that they hold, and receive a head."

    def init_for(self, params: Params, model: Params) -> ServerState:
        """Return the server state before round 1. Clients receive the head of ``model`` as broadcast tensors.

        ``params``: the parameters of ``model`` that clients send.
        """
        return ServerState(params, {"head": {_short(name): model[name] for name in sorted(head_names(model))}})

    def start(self, task: LocalTask, client: OnClient) -> LocalTask:
        """Return the client's task for the round. The head of the client's model is replaced by the server's head."""
        del client
        head = {name: task.broadcast["head"][_short(name)] for name in head_names(task.params)}
        return replace(task, params={name: head.get(name, value) for name, value in task.params.items()})

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local objective (``LocalPlan``): plain local steps, then sums of the features of each class."""
        del task
        return LocalPlan(class_features=True)

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update: the mean features of each class, and a 0/1 mask of the classes that the client has."""
        update, weight = super().finish(task, trained), task.broadcast["head"]["weight"]
        sums = weight * 0 if trained.feature_sums is None else trained.feature_sums
        counts = torch.tensor(task.class_counts or [0] * len(weight), dtype=torch.float32)
        features = {"means": sums / counts.clamp(min=1)[:, None], "held": (counts > 0).float()}
        return ClientUpdate({**update.payloads, "features": features}, update.num_examples, update.loss)

    def learned(self, server: ServerState, rows: RoundPayloads) -> ServerState:
        """Train the server's head on the clients' mean features. Return the server state with the new head."""
        means, held = rows.payloads["features"]["means"], rows.payloads["features"]["held"] > 0
        inputs, labels = means[held], held.nonzero()[:, 1]
        head = {name: value.clone() for name, value in server.broadcast["head"].items()}
        classes, _ = head_shape(head)
        right = torch.nn.functional.one_hot(labels, classes).to(inputs.dtype)
        for _ in range(self.head_steps if len(labels) else 0):
            logits = inputs @ head["weight"].T + head.get("bias", 0.0)
            slope = (logits.softmax(1) - right) / len(labels)
            head["weight"] -= self.head_rate * slope.T @ inputs
            if "bias" in head:
                head["bias"] -= self.head_rate * slope.sum(0)
        return replace(server, broadcast={**server.broadcast, "head": head})


def _short(name: str) -> str:
    """Return the last part of a parameter's name, such as "weight". It is equal for the heads of all architectures."""
    return name.rpartition(".")[2]
