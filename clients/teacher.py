"""PATE's teachers: each client trains on its own shard and votes on every record of the public pool.

Papernot et al. 2017, "Semi-supervised knowledge transfer for deep learning from private training data", section 2.1.
A teacher never leaves its client; what leaves is one class per public record, for the aggregator alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clients.forest import RandomForest, as_table
from fl_sim.errors import RunError
from fl_sim.importing import torch
from fl_sim.local_plan import LocalPlan
from fl_sim.params import detached
from fl_sim.seeding import rng, seed_process
from fl_sim.settings import Settings
from fl_sim.types import LocalSettings, LocalTask

if TYPE_CHECKING:
    from fl_sim.training.records import Records
    from fl_sim.training.trainer import Trainer


class Network(Settings):
    """The experiment's ``model``, trained by its ``local`` settings from initial weights of the teacher's own."""

    kind: Literal["network"] = "network"


AnyTeacher: TypeAlias = Network | RandomForest


def network_votes(
    trainer: Trainer,
    build: Callable[[int], torch.nn.Module],
    settings: LocalSettings,
    records: Records,
    pool: torch.Tensor,
    *,
    client: int,
    seed: int,
    model_seed: int,
) -> NDArray[np.int64]:
    """Return the votes, shape (pool,), of a network that is trained on ``records`` and then forgotten.

    ``build(number)`` returns a network with the initial weights that ``number`` determines. May be called from several
    threads. Raises RunError where the network's outputs are not finite.
    """
    from fl_sim.training.trainer import LocalJob  # noqa: PLC0415 (needs torch as it is imported)

    model = build(int(rng(model_seed, "teacher", client).integers(2**31)))
    task = LocalTask(1, client, 1, len(records), settings, detached(model.named_parameters()))
    seeded = partial(seed_process, seed, "teacher", client)
    job = LocalJob(task, LocalPlan(), records, rng(seed, "teacher batches", client), seeded)
    trained = trainer.train(job)
    return votes_of(trainer.logits(model.to(pool.device), trained.params, pool))


def votes_of(logits: torch.Tensor) -> NDArray[np.int64]:
    """Return the class of the largest logit in each row. Raises RunError where one is not finite.

    The message holds none of them: a teacher's outputs are as private as its records.
    """
    if not bool(torch.isfinite(logits).all()):
        raise RunError(
            "the teacher's outputs are not finite, so its training diverged: choose a smaller local.learning_rate"
        )
    votes: NDArray[np.int64] = logits.argmax(dim=1).to(torch.int64).numpy(force=True)
    return votes


def forest_votes(
    settings: RandomForest, records: Records, pool: torch.Tensor, *, client: int, seed: int
) -> NDArray[np.int64]:
    """Return the votes, shape (pool,), of a random forest that is grown on ``records`` and then forgotten."""
    inputs, labels = records.tensors()
    forest = settings.fit(as_table(inputs.numpy(force=True)), labels.numpy(force=True), rng(seed, "teacher", client))
    votes: NDArray[np.int64] = forest.predict(as_table(pool.numpy(force=True))).astype(np.int64)
    return votes
