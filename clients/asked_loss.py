"""The client task that sends the model's loss on the client's training records, for samplers that select by loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flwr.app import MetricRecord, RecordDict

from clients.client_task import Client
from clients.train import TrainingJob
from fl_sim.errors import Malformed


@dataclass(frozen=True)
class TellLoss:
    """The client task that measures the loss of the model with which the client would start the round.

    It changes no client state.
    """

    reads_records: ClassVar[bool] = True
    reads_state: ClassVar[bool] = True
    runs_in_threads: ClassVar[bool] = True

    def run(self, client: Client) -> RecordDict:
        """Return the message with the mean cross-entropy over the client's training records; 0 without records."""
        training = TrainingJob.of(client, trains=False)
        task, records, loss = training.job.task, training.job.records, 0.0
        if len(records):
            trainer = client.runtime.sized(task).trainer
            loss = trainer.evaluate({**task.params, **task.statistics}, *records.tensors()).loss
        training.check_bits()
        return RecordDict({"asked": MetricRecord({"loss": loss})})


def loss_in(content: RecordDict) -> float:
    """Return the loss in a client's answer. Raises Malformed if the answer has no loss."""
    loss = dict(content.metric_records.get("asked", {})).get("loss")
    if not isinstance(loss, float):
        raise Malformed("sent no loss", cure="check the code of this client")
    return loss
