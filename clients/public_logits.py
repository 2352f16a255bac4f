"""The client task that sends the logits of a client's own model on the run's public records, for distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from flwr.app import RecordDict

from clients.client_task import Client
from clients.train import TrainingJob
from fl_sim.engines import arrays, wire
from fl_sim.errors import Malformed


@dataclass(frozen=True)
class TellLogits:
    """The client task that computes logits with the client's initial model of the round.

    It changes no client state.
    """

    reads_records: ClassVar[bool] = True
    reads_state: ClassVar[bool] = True
    runs_in_threads: ClassVar[bool] = True

    def run(self, client: Client) -> RecordDict:
        """Return the message with the model's logits, (records, classes), on the task's public records."""
        training = TrainingJob.of(client, trains=False)
        task, trainer = training.job.task, client.runtime.sized(training.job.task).trainer
        inputs = task.pool["inputs"].to(training.job.records.tensors()[0].device)
        logits, _ = trainer.outputs({**task.params, **task.statistics}, inputs)
        training.check_bits()
        return wire.pool_content({"logits": logits.cpu().contiguous()})


def logits_in(content: RecordDict, shape: tuple[int, int]) -> tuple[torch.Tensor, int]:
    """Return the logits in a client's answer, of ``shape`` (records, classes), and the bytes of the answer.

    Raises Malformed if the answer has other tensors or another shape, or numbers that are not finite.
    """
    rows, num_classes = shape
    logits = wire.read_pool(content, {"logits": torch.zeros(0, num_classes)}, rows)["logits"]
    if len(logits) != rows:
        raise Malformed(f"sent logits of {len(logits)} records instead of {rows}", cure="check the code of this client")
    return logits, arrays.num_bytes(content)
