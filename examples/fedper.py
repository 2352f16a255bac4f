"""FedPer: every client keeps its own last layer (Arivazhagan et al. 2019). The clients' own models are evaluated.

    fl-sim run algorithm=fedper:FedPer partition=dirichlet:0.3 model=mlp

``own_tests`` in ``result.json`` is the accuracy of the clients' own models over all clients. Each model is evaluated on
the test records of the classes that its client holds. For this, a client sends two counts, without noise.
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
    """FedAvg on all parameters except weight and bias of the last layer."""

    title: ClassVar[str] = "FedPer"
    stage: ClassVar[str] = "fedper:OwnTests"

    def sends(self, params: Params) -> Sequence[str]:
        """Return the names of the parameters that clients send: all except the last two."""
        return list(params)[:-2]


@dataclass(frozen=True)
class EvaluateOwn:
    """The client task: evaluates the client's own model on the test records of the classes that the client holds."""

    job: Job
    reads_records: ClassVar[bool] = True
    reads_state: ClassVar[bool] = True
    runs_in_threads: ClassVar[bool] = False

    def model(self, client: Client) -> Params:
        """Return the client's own model: the received parameters and the client's last layer."""
        return client.model()

    def run(self, client: Client) -> RecordDict:
        """Return the number of test records of the client's classes, and the number of correct predictions."""
        dataset, shard = self.job.dataset, self.job.shards[client.number]
        held = np.isin(dataset.test.labels, np.unique(dataset.train.labels[shard]))
        own = dataset.test.take(np.flatnonzero(held))
        right = 0
        if len(own):
            scores = client.runtime.trainer.evaluate(self.model(client), *to_tensors(own, dataset))
            right = round(scores.accuracy * len(own))
        return RecordDict({"own": MetricRecord({"right": right, "all": len(own)})})


class OwnTests(Stage):
    """The stage at the server: it sends ``EvaluateOwn`` to every client after the last round and sums up the counts."""

    own: Mapping[str, float] = {}

    def tasks(self) -> Mapping[str, EvaluateOwn]:
        """Return the client task of this stage, by name."""
        return {"evaluate-own": EvaluateOwn(self.job)}

    def after(self, run: Run) -> None:
        """Evaluate the clients' own models after the last round."""
        order, server = replace(run.order, server_round=len(run.log.rounds) + 1), run.strategy.server
        counts = run.ask(
            "evaluate-own", _read, quoted=True, params=server.model, broadcast=server.broadcast, order=order
        )
        right, total = np.sum(counts, axis=0)
        self.own = {"accuracy": float(right / total), "records": float(total)}

    def facts(self) -> Mapping[str, Any]:
        """Return the entries of ``result.json``: the accuracy of the clients' own models."""
        return {"own_tests": self.own}


def _read(content: RecordDict) -> tuple[int, int]:
    counts = content.metric_records["own"]
    return int(str(counts["right"])), int(str(counts["all"]))
