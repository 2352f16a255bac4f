"""FedProto: local training pulls a record's features towards the prototype (mean features) of its class.

Tan et al. 2022, algorithm 1.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, hides_clients, kind_of, off
from fl_sim.local_plan import LocalPlan, Pull
from fl_sim.params import add
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, ServerState, Trained
from strategies.algorithm import FEDAVG, Averaging
from strategies.low_rank import head_shape


class FedProto(Averaging):
    """Adds to the loss ``strength`` times the squared distance of a record's features to the class prototype (eq. 6).

    The paper is Tan et al. 2022. z is the feature vector of a record: the input of the last layer, with d numbers.
    ``distance`` "mean" is ||z - prototype||^2 / d, as in the released code; "sum" is ||z - prototype||^2, d times as
    strong. ``strength``: the weight of the distance, the paper's lambda. The released code uses 1 on MNIST and FEMNIST,
    and 0.1 on CIFAR-10. With 0 the method is FedAvg.

    A prototype is the mean of z over all records of a class. A class without records in a round keeps its old
    prototype. This implementation differs from the original in three points. In the released code, all clients that
    have a class have the same weight in its prototype; here, all records have the same weight. In the released code,
    clients compute z in the last epoch of training; here, after training. In the paper, clients send only prototypes,
    and each client's own model is evaluated (see ``fedproto-local``); here, clients also send their models, and the
    mean model is evaluated.
    """

    kind: Literal["fedproto"] = "fedproto"
    needs_head: ClassVar[bool] = True
    strength: float = Field(1.0, ge=0)
    distance: Literal["mean", "sum"] = "mean"
    before: ClassVar[Mapping[str, Any]] = {"distance": "sum"}
    knobs: ClassVar[str] = "algorithm.strength weighs squared distances without an upper bound: set a smaller one"

    def check(self, experiment: Choices) -> None:
        """Raise ValueError under Global DP: sums of features and the update would share one clipping norm."""
        if hides_clients(experiment.aggregator):
            raise ValueError(
                f"algorithm {kind_of(self)} cannot run under aggregator {kind_of(experiment.aggregator)}: the norm of "
                "sums of features is far larger than that of the update, so joint clipping would leave almost nothing "
                "of the update; take fedavg, fedprox or scaffold"
            )

    def mean_only(self) -> str:
        """Return the reason why the server needs the mean, for error messages: prototypes are ratios of sums."""
        return (
            "prototypes are sums of features divided by counts, which only means over the same clients preserve, and "
            "sums of features have a larger norm than the update, so they would decide distances between clients"
        )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return remarks for the user: one sentence for each setting that has no effect."""
        if not self.strength:
            return [off("algorithm.strength=0", FEDAVG)]
        first = "rounds=1, and there are no prototypes in the first round"
        return [off(f"algorithm.strength={self.strength:g}", first)] if experiment.rounds == 1 else []

    def note(self) -> str:
        """Return the note below result tables. It names the tensors that clients send in addition to their update."""
        return "FedProto: clients send the mean features of each class that they hold, and each class's share."

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the model ``params``, and no prototypes yet."""
        return self.init_for(params, params)

    def init_for(self, params: Params, model: Params) -> ServerState:
        """Return the server state before round 1, when no prototypes are known.

        ``params``: the parameters of ``model`` that clients send.
        """
        classes, features = head_shape(model)
        return ServerState(params, {"prototypes": {"z": torch.zeros(classes, features), "known": torch.zeros(classes)}})

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local objective (``LocalPlan``): pull features to prototypes; then sum features by class."""
        known = task.broadcast["prototypes"]
        weight = self.strength / (known["z"].shape[1] if self.distance == "mean" else 1)
        return LocalPlan(pull=Pull(known["z"], known["known"] > 0, weight), class_features=True)

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update y_i - x, and each class's feature sum and record count, both divided by n_i.

        n_i is the client's number of records. The server weights clients by n_i, so n_i cancels.
        """
        update, like = super().finish(task, trained), task.broadcast["prototypes"]
        sums = like["z"] * 0 if trained.feature_sums is None else trained.feature_sums
        counts = torch.tensor(task.class_counts or [0] * len(sums), dtype=torch.float32)
        size = max(task.num_examples, 1)
        payloads = {**update.payloads, "features": {"sums": sums / size, "counts": counts / size}}
        return ClientUpdate(payloads, update.num_examples, update.loss)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: the model plus the mean update, and new prototypes (feature sums / counts)."""
        old, (sums, counts) = server.broadcast["prototypes"], aggregate.payloads["features"].values()
        there = counts > 0
        z = torch.where(there[:, None], sums / counts.clamp(min=torch.finfo(counts.dtype).tiny)[:, None], old["z"])
        prototypes = {"z": z, "known": torch.maximum(old["known"], there.to(z.dtype))}
        return ServerState(add(server.params, aggregate.payloads["delta"]), {"prototypes": prototypes})
