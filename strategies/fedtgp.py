"""FedTGP: FedProto with prototypes that the server trains with an adaptive margin (Zhang et al. 2024, AAAI)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices
from fl_sim.seeding import rng
from fl_sim.types import Aggregate, Params, ServerState
from strategies.class_means import RoundPayloads, check_in_the_clear
from strategies.fedproto_local import FedProtoLocal

LARGEST_MARGIN: Final = 100.0
"""The paper's tau: the upper bound of the margin."""


class FedTGP(FedProtoLocal):
    """``fedproto-local`` with other prototypes: the server trains them on the clients' mean features of each class.

    The prototype of class c is g(e_c). g is a network with one hidden ReLU layer, whose layers are as wide as the
    feature vector. e_c is a trained vector. Let P be a client's mean features of a class y. The logit of class c for P
    is -||P - prototype c||. For c = y the margin is subtracted, too. The loss is the mean cross-entropy over all P. The
    server minimises it by ``server_steps`` steps of gradient descent with the learning rate ``server_rate``. The margin
    is the largest distance between two classes' means of P, and at most 100 (Zhang et al. 2024, section 3.3). Training
    of g and of all e_c continues in every round. If no client of the round has a class, the class keeps its prototype.
    In the released code, the server takes steps on batches of P.
    """

    kind: Literal["fedtgp"] = "fedtgp"  # type: ignore[assignment]  # another kind than its base class
    title: ClassVar[str] = "FedTGP"
    layer: ClassVar[str] = "strategies.single_payloads:SinglePayloads"
    before: ClassVar[Mapping[str, Any]] = {}
    server_steps: int = Field(200, ge=1, le=10**6)
    server_rate: float = Field(0.5, gt=0)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings that hide single clients from the server, and for local differential privacy.

        Local differential privacy does not cover the mean features that clients send.
        """
        check_in_the_clear(self, experiment, "mean features")

    def mean_only(self) -> str:
        """Return the reason why this method cannot use robust aggregators, for error messages."""
        return "its server trains on the mean features of all clients, also those that a robust aggregator leaves out"

    def note(self) -> str:
        """Return the note below result tables: it lists the tensors that clients send."""
        return "FedTGP: clients send the mean features of each class that they hold, and each class's share."

    def init_for(self, params: Params, model: Params) -> ServerState:
        """Return the server state before the first round.

        Its ``memory`` has the initial weights of the network g, and a random trainable vector e_c for each class c. The
        output g(e_c) is the prototype of class c.
        """
        server = super().init_for(params, model)
        classes, features = server.broadcast["prototypes"]["z"].shape
        draw, bound = rng(0, "trainable prototypes"), 1 / math.sqrt(features)
        drawn = {
            "vectors": draw.normal(size=(classes, features)),
            "hidden.weight": draw.uniform(-bound, bound, (features, features)),
            "hidden.bias": draw.uniform(-bound, bound, features),
            "output.weight": draw.uniform(-bound, bound, (features, features)),
            "output.bias": draw.uniform(-bound, bound, features),
        }
        return replace(server, memory={"g": {name: torch.from_numpy(one).float() for name, one in drawn.items()}})

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return FedProto's next server state. The method ``learned`` then trains the prototypes."""
        return replace(super().merge(server, aggregate), memory=server.memory)

    def learned(self, server: ServerState, rows: RoundPayloads) -> ServerState:
        """Train the prototypes' network. Return the server state with new prototypes for this round's classes."""
        sums, counts = rows.payloads["features"]["sums"], rows.payloads["features"]["counts"]
        held = counts > 0
        if not held.any():
            return server
        inputs, labels = sums[held] / counts[held][:, None], held.nonzero()[:, 1]
        weights = {name: value.clone().requires_grad_() for name, value in server.memory["g"].items()}
        margin = margin_of(inputs, labels)
        for _ in range(self.server_steps):
            loss = contrast(prototypes_of(weights), inputs, labels, margin)
            slopes = torch.autograd.grad(loss, list(weights.values()))
            with torch.no_grad():
                for value, slope in zip(weights.values(), slopes, strict=True):
                    value.sub_(slope, alpha=self.server_rate)
        trained = {name: value.detach() for name, value in weights.items()}
        old = server.broadcast["prototypes"]
        there = held.any(0)[:, None]
        prototypes = {**old, "z": torch.where(there, prototypes_of(trained), old["z"])}
        return replace(
            server, broadcast={**server.broadcast, "prototypes": prototypes}, memory={**server.memory, "g": trained}
        )


def margin_of(inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the largest distance between two classes' means of ``inputs`` (n, d), at most ``LARGEST_MARGIN``.

    ``labels``: (n,). With a single class the margin is 0.
    """
    centres = torch.stack([inputs[labels == one].mean(0) for one in sorted(set(labels.tolist()))])
    return min(float(torch.cdist(centres, centres).max()), LARGEST_MARGIN)


def prototypes_of(weights: Params) -> torch.Tensor:
    """Return the prototypes g(e_c) of all classes, (C, d). ``weights``: the vectors e_c and the weights of g."""
    hidden = torch.relu(weights["vectors"] @ weights["hidden.weight"].T + weights["hidden.bias"])
    return hidden @ weights["output.weight"].T + weights["output.bias"]


def contrast(prototypes: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor, margin: float) -> torch.Tensor:
    """Return the mean cross-entropy of classifying ``inputs`` (n, d) by their distances to the prototypes.

    The logit of a class is minus the distance to the class's prototype. The logit of the true class, given by
    ``labels`` (n,), is also reduced by ``margin``.
    """
    distances = torch.cdist(inputs, prototypes)
    own = torch.nn.functional.one_hot(labels, len(prototypes)).to(distances.dtype)
    return torch.nn.functional.cross_entropy(-(distances + margin * own), labels)
