"""The layer of DP-SGD on clients: it checks the algorithm, and counts the rounds in which each client trained."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from clients.client_layer import ClientLayer
from clients.client_task import CustomStart, OnClient
from clients.private_steps import CLASS_COUNTS, RECORDS, ClientPrivateSteps, refused
from fl_sim.errors import Malformed, UserError
from fl_sim.kinds import is_none, kind_of
from fl_sim.local_plan import FurtherModels
from fl_sim.params import trainable
from fl_sim.training.private_steps import unsupported
from fl_sim.types import LocalTask, Params, Payloads, Reply, ServerState, Trained
from strategies.algorithm import ONE_STEP, Algorithm
from strategies.answers import refusal
from strategies.layer import Beginning, Layer


class PrivateTraining(Layer):
    """Counts the rounds in which each client trained, {client: number of rounds}, for the privacy statements.

    The layer changes nothing in a round.
    """

    def __init__(self, counts: Mapping[int, int]) -> None:
        self.counts = Counter(counts)

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the clients' local steps are private."""
        return not is_none(experiment.local.privacy)

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> Layer:
        """Return the layer of a new or resumed run."""
        del experiment, out
        return cls({int(client): count for client, count in progress.get("rounds_trained", {}).items()})

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: object, model: Callable[[], nn.Module]) -> ClientLayer | None:
        """Return the layer's code on clients. It makes DP-SGD's steps, and charges them to the client's ledger."""
        del algorithm
        privacy = experiment.local.privacy
        clipping = privacy.rule(list(trainable(model())) if privacy.layer_norms else ())
        return ClientPrivateSteps(privacy.protection, digest_of(experiment), experiment.rounds, clipping)

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError if the algorithm reads records without noise, or has terms that private steps do not support.

        To find out, the algorithm's client methods are called for two rounds with placeholders instead of records. A
        placeholder raises an error when it is read.
        """
        if unknown := unsupported(beginning.plan, ONE_STEP):
            raise UserError(f"algorithm {kind_of(experiment.algorithm)}: {refused(unknown)}")
        _rehearse(experiment.algorithm, beginning.server)

    def received(self, replies: tuple[Reply, ...]) -> tuple[Reply, ...]:
        """Return the updates, and count one more round for each client that trained."""
        found = self.inner.received(replies)
        self.counts.update(reply.client for reply in found if reply.num_examples)
        return found

    def lost(self, server_round: int, failed: Mapping[int, Malformed], *, answered: bool) -> None:
        """Raise RunError for a failed client. Its own error message may quote records, and goes to a private file."""
        del answered
        for client, error in failed.items():
            raise refusal(f"client {client} in round {server_round}", error, quoted=False)

    def state(self) -> Mapping[str, Any]:
        """Return the number of rounds that each client trained, for the checkpoint."""
        return {"rounds_trained": {str(client): count for client, count in sorted(self.counts.items())}}


def digest_of(experiment: Any) -> str:
    """Return a digest of all settings that determine the results of a run; it identifies runs with seeded noise."""
    newer = {name for name in ("forgotten", "left_out") if not getattr(experiment, name)}  # keeps older digests valid
    text = experiment.model_dump_json(exclude={"engine", "device", "round_timeout", "keep_every", *newer})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def models_of(algorithm: object, params: Params) -> int:
    """Return the number of models that a client trains in a round: 1, or more for methods such as Ditto."""
    if not isinstance(algorithm, FurtherModels):
        return 1
    return 1 + len(algorithm.further(_task(ServerState(params))))


def _task(server: ServerState, server_round: int = 1, state: Payloads | None = None) -> LocalTask:
    return LocalTask(
        server_round, 0, 1, 1, ONE_STEP, server.params, server.broadcast, state or {}, class_counts=CLASS_COUNTS,
        initial=server.params,
    )  # fmt: skip


def _rehearse(algorithm: Algorithm, server: ServerState) -> None:
    """Call the client methods of ``algorithm``, for two rounds, to find out whether they read records.

    The methods get placeholders instead of records. A placeholder raises UserError when it is read.
    """
    trainer: Any = RECORDS
    state: Payloads = {}
    for server_round in (1, 2):  # two rounds, because a client has no state in its first round
        task = _task(server, server_round, state)
        if isinstance(algorithm, CustomStart):
            task = algorithm.start(task, OnClient(RECORDS, trainer))
        algorithm.plan(task)
        trained = Trained(task.params, {}, 1, None)
        if isinstance(algorithm, FurtherModels):
            trained = replace(trained, further=dict.fromkeys(algorithm.further(task), trained))
        state = {**algorithm.finish(task, trained).state}
