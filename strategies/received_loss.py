"""The base class of algorithms whose clients send the loss of the received model on all their training records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

from fl_sim.importing import torch
from fl_sim.types import ClientUpdate, LocalTask, Reply, Trained
from strategies.algorithm import Averaging

if TYPE_CHECKING:
    from clients.client_task import OnClient

_RECEIVED: Final = "received-loss"


class SendingLoss(Averaging):
    """Clients send their update and F_i, the mean cross-entropy of the received model on client i's records.

    F_i is measured on all training records before the first local step. The mean loss of the local steps would be
    lower, because the model improves from step to step.
    """

    start_passes: ClassVar[int] = 1

    def start(self, task: LocalTask, client: OnClient) -> LocalTask:
        """Measure F_i, and return the client's task with F_i in its client state, for ``finish``.

        A client without records has no F_i.
        """
        if not len(client.records):
            return task
        loss = client.scores({**task.params, **task.statistics}).loss
        return replace(task, state={**task.state, _RECEIVED: {"loss": torch.tensor([loss])}})

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update y_i - x of client i, and its loss F_i. y_i: the trained model. x: the received model."""
        update = super().finish(task, trained)
        sent = task.state.get(_RECEIVED, {"loss": torch.zeros(1)})
        return replace(update, payloads={**update.payloads, _RECEIVED: sent})


def losses_of(replies: Sequence[Reply]) -> list[float]:
    """Return the loss F_i of each reply. A negative F_i, which only a hostile client sends, counts as 0."""
    return [max(0.0, float(reply.payloads[_RECEIVED]["loss"])) for reply in replies]
