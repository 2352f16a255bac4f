"""The layer of FD: each client receives the mean logits of the other clients (Jeong et al. 2018, algorithm 1)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fl_sim.types import ServerState
from strategies.single_payloads import Learning, SinglePayloads

if TYPE_CHECKING:
    from torch import nn


class OtherLogits(SinglePayloads):
    """Stores each client's last logits in the server state. Sends a client the mean of all other clients' logits."""

    def __init__(self, algorithm: Learning) -> None:
        super().__init__(algorithm)
        self._seen: tuple[ServerState | None, torch.Tensor, torch.Tensor] = (None, torch.zeros(0), torch.zeros(0))
        self._shared: ServerState | None = None

    @classmethod
    def begun(cls, experiment: Any, model: nn.Module, server: ServerState) -> ServerState:
        """Return ``server`` with tensors of zeros in ``memory``, as placeholders for the logits of all clients."""
        del model
        number, (classes, _) = experiment.num_clients, server.broadcast["others"]["logits"].shape
        rows = {"means": torch.zeros(number, classes, classes), "held": torch.zeros(number, classes)}
        return replace(server, memory={**server.memory, "logits": rows})

    def sent_to(self, client: int, server: ServerState) -> ServerState:
        """Return the server state that ``client`` receives: with the mean logits of all other clients.

        All clients whose logits are not stored yet receive the same state object.
        """
        means, held = server.memory["logits"]["means"], server.memory["logits"]["held"]
        if self._seen[0] is not server:
            self._seen = (server, (held[:, :, None] * means).double().sum(0), held.sum(0))
            self._shared = None
        is_alone = not held[client].any()
        if is_alone and self._shared is not None:
            return self._shared
        _, sums, counts = self._seen
        others = counts - held[client]
        total = sums - (held[client][:, None] * means[client]).double()
        known = (others > 0).float()
        logits = known[:, None] * (total / others.clamp(min=1)[:, None]).float()
        groups = {**server.broadcast, "others": {"logits": logits, "known": known}}
        sent = self.inner.sent_to(client, replace(server, broadcast=groups))
        if is_alone:
            self._shared = sent
        return sent
