"""The layer of methods whose clients send their logits on public records: all clients receive the mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from clients.public_logits import logits_in
from fl_sim.engines import arrays, wire
from fl_sim.errors import UserError
from fl_sim.kinds import is_none, is_own, kind_of
from fl_sim.types import ServerState, Traffic
from strategies.algorithm import check_proxy
from strategies.layer import Ask, Beginning, layer_kinds
from strategies.own_part import OwnPart

PUBLIC_LOGITS: Final = "public-logits"
"""Name of the client task that sends a client's logits on the public records."""


class PublicLogits(OwnPart):
    """Before each round, asks all clients for their logits on the public records, and sends the mean to the cohort.

    Before the first round no client has trained, so the layer asks nobody and sends a tensor with 0 rows. ``shape``:
    (records, classes) of a client's logits; a stage sets it before the first round.
    """

    def __init__(self, experiment: Any) -> None:
        self._num_clients, self.shape = experiment.num_clients, (0, 0)
        self._consensus: torch.Tensor | None = None
        self._shared: tuple[ServerState, torch.Tensor, ServerState] | None = None

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> PublicLogits | None:
        """Return the layer, or None without public records. It needs no state: clients send new logits each round."""
        del out, progress
        return None if experiment.algorithm.proxy == "none" else cls(experiment)

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError for settings that ``OwnPart`` refuses, or that do not fit the exchange of logits."""
        super().check(experiment, beginning)
        what = f"algorithm {kind_of(experiment.algorithm)}"
        if experiment.num_members < experiment.num_clients:
            raise UserError(
                f"{what} cannot run with evaluate.held_out_clients={experiment.evaluate.held_out_clients:g}: it asks "
                "all clients for logits; leave evaluate.held_out_clients out"
            )
        if not is_none(experiment.devices):
            raise UserError(
                f"{what} cannot run with devices={kind_of(experiment.devices)}: the virtual clock does not count the "
                "logits that all clients send before a round; leave devices out"
            )
        check_proxy(experiment.algorithm, experiment.algorithm.proxy, experiment)
        if own := [kind for kind in layer_kinds(experiment) if is_own(kind)]:
            raise UserError(
                f"{what} sends tensors of other shapes after the first round, and {own[0].__name__}, a round layer of "
                "your own, expects equal shapes: leave out one of the two"
            )

    @classmethod
    def exchanged(cls, experiment: Any, server: ServerState) -> Traffic:
        """Return the forecast number of bytes that logits add to a round, as a mean over all rounds.

        The forecast includes the messages to all clients before the round, their logits, and the mean for the cohort.
        """
        rounds, settings = experiment.rounds, experiment.algorithm
        if settings.proxy == "none":
            return Traffic(0, 0)
        _, num_classes = server.broadcast["consensus"]["logits"].shape
        logits = {"logits": torch.zeros(settings.public_records, num_classes)}
        up = arrays.num_bytes(wire.pool_content(logits))
        question, told = (
            arrays.num_bytes(wire.task_content(wire.BLANK, server.params, {**server.broadcast, "consensus": one}))
            for one in (server.broadcast["consensus"], logits)
        )
        cohort = experiment.sampler.expected_size(experiment.num_members)
        down = experiment.num_clients * question + cohort * (told - question)
        return Traffic(round(down * (rounds - 1) / rounds), round(experiment.num_clients * up * (rounds - 1) / rounds))

    def consult(self, server_round: int, ask: Ask) -> Traffic:
        """Ask all clients for their logits on the public records, and return the number of bytes that were sent."""
        traffic = self.inner.consult(server_round, ask)
        self._consensus = None
        if server_round == 1:
            return traffic
        read = partial(logits_in, shape=self.shape)
        answers, sent = ask(PUBLIC_LOGITS, range(self._num_clients), read)
        self._consensus = torch.stack([logits.double() for logits, _ in answers]).mean(0).float()
        return traffic + sent + Traffic(0, sum(num_bytes for _, num_bytes in answers))

    def sent_to(self, client: int, server: ServerState) -> ServerState:
        """Return the server state that ``client`` receives: with the mean of the clients' logits, if there is one."""
        sent = self.inner.sent_to(client, server)
        if self._consensus is None:
            return sent
        if self._shared is None or self._shared[0] is not sent or self._shared[1] is not self._consensus:
            groups = {**sent.broadcast, "consensus": {"logits": self._consensus}}
            self._shared = (sent, self._consensus, replace(sent, broadcast=groups))
        return self._shared[2]
