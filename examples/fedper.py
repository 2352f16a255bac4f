"""FedPer: the last layer stays with its client (Arivazhagan et al. 2019), measured on each client's own test records.

    fl-sim run algorithm=fedper:FedPer partition=dirichlet:0.3 model=mlp

``result.json`` has ``own_tests``: the accuracy of each client's own model on the test records of the classes that it
holds, all clients together. What a client sends for it is two numbers, without noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import MetricRecord, RecordDict

from clients.client_task import Client
from fl_sim.experiment.job import Job
from fl_sim.simulation.stage import Run, Stage
from fl_sim.training.loop import to_tensors
from fl_sim.types import Params
from strategies.algorithm import Averaging


class FedPer(Averaging):
    """FedAvg on all parameters but those of the last layer, its weight and its bias."""

    title: ClassVar[str] = "FedPer"
    stage: ClassVar[str] = "fedper:OwnTests"

    def sends(self, params: Params) -> Sequence[str]:
        """Return all names but the last two."""
        return list(params)[:-2]


@dataclass(frozen=True)
class EvaluateOwn:
    """The client half: how many of the client's own test records its own model gets right."""

    job: Job
    reads_records: ClassVar[bool] = True
    reads_state: ClassVar[bool] = True
    runs_in_threads: ClassVar[bool] = False

    def model(self, client: Client) -> Params:
        """Return the client's own model: what the server sent, and the layer that stayed."""
        return client.model()

    def run(self, client: Client) -> RecordDict:
        """Return how many records there are, and how many are right."""
        dataset, shard = self.job.dataset, self.job.shards[client.number]
        held = np.isin(dataset.test.labels, np.unique(dataset.train.labels[shard]))
        own = dataset.test.take(np.flatnonzero(held))
        right = 0
        if len(own):
            scores = client.runtime.trainer.evaluate(self.model(client), *to_tensors(own, dataset))
            right = round(scores.accuracy * len(own))
        return RecordDict({"own": MetricRecord({"right": right, "all": len(own)})})


class OwnTests(Stage):
    """The server half: after the last round every client is asked."""

    own: Mapping[str, float] = {}

    def tasks(self) -> Mapping[str, EvaluateOwn]:
        """Return the one question."""
        return {"evaluate-own": EvaluateOwn(self.job)}

    def after(self, run: Run) -> None:
        """Ask about the models as they are after the last round."""
        order, server = replace(run.order, server_round=len(run.log.rounds) + 1), run.strategy.server
        counts = run.ask(
            "evaluate-own", _read, quoted=True, params=server.model, broadcast=server.broadcast, order=order
        )
        right, total = np.sum(counts, axis=0)
        self.own = {"accuracy": float(right / total), "records": float(total)}

    def facts(self) -> Mapping[str, Any]:
        """Return the accuracy of clients' own models."""
        return {"own_tests": self.own}


def _read(content: RecordDict) -> tuple[int, int]:
    counts = content.metric_records["own"]
    return int(str(counts["right"])), int(str(counts["all"]))
