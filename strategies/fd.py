"""FD (federated distillation): clients keep their models and send only mean logits (Jeong et al. 2018, algorithm 1)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Batch, LocalPlan, LossTerm
from fl_sim.params import head_shape, head_weight
from fl_sim.types import ClientUpdate, LocalTask, Params, ServerState, Trained
from strategies.class_means import KeepsModels, RoundPayloads


class FD(KeepsModels):
    """Adds ``gamma`` times a distance to the loss: between a record's logits and the mean logits of the record's class.

    After its local steps, a client sends its mean logits over its records of each class that it has. A client's target
    for a class is the mean, with equal weights, of the other clients' mean logits of this class, from the last round in
    which any client of the cohort had this class. If no other client had this class in that round, the class adds
    nothing to the loss. Each client trains its own model, which starts as the run's initial model, in the rounds in
    which it takes part. No parameter is sent.

    ``gamma``: the weight of the distance; 0 is local-only. ``distance``: "kl" is KL(softmax(target) ||
    softmax(logits)), with the same gradient as the cross-entropy of Jeong et al. 2018; "l2" is the mean over classes of
    squared differences of logits. In Jeong et al. 2018, a client averages the logits of all local steps; here it
    averages the logits after the last step.
    """

    kind: Literal["fd"] = "fd"
    title: ClassVar[str] = "FD"
    layer: ClassVar[str] = "strategies.other_logits:OtherLogits"
    payload: ClassVar[str] = "mean logits"
    knobs: ClassVar[str] = "algorithm.gamma is the weight of a distance without an upper bound: set a smaller value"
    gamma: float = Field(1.0, ge=0)
    distance: Literal["kl", "l2"] = "kl"

    def mean_only(self) -> str:
        """Return the reason why this method cannot use robust aggregators."""
        return "clients receive the mean logits of all others, also of those that a robust aggregator leaves out"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        if not self.gamma:
            return [off("algorithm.gamma=0", "each client's own model is that of algorithm local-only")]
        first = "rounds=1, and in the first round there are no logits of other clients"
        return [off(f"algorithm.gamma={self.gamma:g}", first)] if experiment.rounds == 1 else []

    def note(self) -> str:
        """Return the note for tables, with the tensors that clients send."""
        return "FD: clients send only their mean logits of each class that they hold."

    def init_for(self, params: Params, model: Params) -> ServerState:
        """Return the server state before round 1. It contains no mean logits yet.

        ``params``: the initial values of the parameters that clients send. ``model``: the whole initial model.
        """
        classes, _ = head_shape(model)
        return ServerState(params, {"others": {"logits": torch.zeros(classes, classes), "known": torch.zeros(classes)}})

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local plan: a loss term on the logits and, after the steps, sums of the features of each class."""
        term = LossTerm(self.distances, task.broadcast["others"]) if self.gamma else None
        return LocalPlan(loss_term=term, class_features=True)

    def distances(self, batch: Batch) -> torch.Tensor:
        """Return ``gamma`` times the distance of each record's logits to the target of its class, (n,)."""
        target, known = batch.data["logits"][batch.labels], batch.data["known"][batch.labels]
        if self.distance == "l2":
            return self.gamma * known * (batch.logits - target).square().mean(-1)
        logs = torch.log_softmax(target, -1)
        return self.gamma * known * (logs.exp() * (logs - torch.log_softmax(batch.logits, -1))).sum(-1)

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update: the mean logits of each class, and a mask, 1 for the classes that the client has."""
        update, like = super().finish(task, trained), task.broadcast["others"]
        means, held = like["logits"] * 0, like["known"] * 0
        model = {**trained.params, **trained.personal}
        if trained.feature_sums is not None and model:
            counts = torch.tensor(task.class_counts, dtype=torch.float32)
            held = (counts > 0).float()
            # logits are linear in the features, so the mean logits are the logits of the mean features
            weight = head_weight(model)
            features = trained.feature_sums / counts.clamp(min=1)[:, None]
            logits = features @ model[weight].T + model.get(f"{weight.removesuffix('weight')}bias", torch.zeros(()))
            means = held[:, None] * logits
        payloads = {**update.payloads, "logits": {"means": means, "held": held}}
        return ClientUpdate(payloads, update.num_examples, update.loss)

    def learned(self, server: ServerState, rows: RoundPayloads) -> ServerState:
        """Return the server state with the round's mean logits in its memory. Row i belongs to client i.

        If no client of the round has a class, the logits of earlier rounds remain for this class.
        """
        memory, new = server.memory["logits"], rows.payloads["logits"]
        means, held = memory["means"].clone(), memory["held"].clone()
        seen = new["held"].amax(0) > 0
        held[:, seen] = 0
        held[rows.clients] = torch.where(seen, new["held"], held[rows.clients])
        means[rows.clients] = torch.where(new["held"][:, :, None] > 0, new["means"], means[rows.clients])
        return ServerState(server.params, server.broadcast, {"logits": {"means": means, "held": held}}, server.layers)
