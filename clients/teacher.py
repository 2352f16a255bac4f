"""PATE's teachers: each client trains a model, the teacher, on its own shard, and votes on every public record.

Papernot et al. 2017, "Semi-supervised knowledge transfer for deep learning from private training data", section 2.1.
A teacher never leaves its client. A client sends its votes, one class per public record, only to the aggregator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.errors import RunError
from fl_sim.importing import torch
from fl_sim.local_plan import LocalPlan
from fl_sim.params import detached
from fl_sim.seeding import rng, seed_process
from fl_sim.settings import Settings
from fl_sim.types import LocalSettings, LocalTask

if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestClassifier

    from fl_sim.training.records import Records
    from fl_sim.training.trainer import Trainer


class NetworkTeacher(Settings):
    """A PATE teacher that is a network: the experiment's ``model``, trained with the settings ``local``.

    Each client's teacher has different initial weights.
    """

    kind: Literal["network"] = "network"


class RandomForest(Settings):
    """A random forest (Breiman 2001; scikit-learn's code) for tables of numbers, as PATE's teacher or student.

    ``trees``: the number of trees. Each tree is grown on a bootstrap sample, without a limit on depth. ``min_leaf``:
    the least number of records in a leaf. ``balanced``: True gives every class the same total weight, even if the class
    has few records. Otherwise a forest rarely predicts a rare class, and the noisy majority vote of many forests never
    predicts it. The weights have an effect only if leaves contain several records.
    """

    kind: Literal["random-forest"] = "random-forest"
    trees: int = Field(100, ge=1)
    min_leaf: int = Field(1, ge=1)
    balanced: bool = False

    def fit(
        self, inputs: NDArray[np.float32], labels: NDArray[np.int64], generator: np.random.Generator
    ) -> RandomForestClassifier:
        """Return a forest fitted to ``inputs`` (n, features) and ``labels`` (n,); n must be at least 1."""
        from sklearn.ensemble import RandomForestClassifier  # noqa: PLC0415 (the import takes a second)

        seed = int(generator.integers(2**31))
        weights = "balanced" if self.balanced else None
        forest = RandomForestClassifier(
            self.trees, min_samples_leaf=self.min_leaf, class_weight=weights, random_state=seed, n_jobs=1
        )
        forest.fit(inputs, labels)
        return forest


AnyTeacher: TypeAlias = NetworkTeacher | RandomForest


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
    """Train a network on ``records``, and return its votes, shape (number of public records,).

    A vote is the predicted class of one public record. ``pool``: the public records. ``build(number)``: a function that
    returns a network. The network's initial weights depend only on ``number``. Several threads may call
    ``network_votes``. Raises RunError if the network's outputs are not finite.
    """
    from fl_sim.training.trainer import LocalJob  # noqa: PLC0415 (its import needs torch)

    model = build(int(rng(model_seed, "teacher", client).integers(2**31)))
    task = LocalTask(1, client, 1, len(records), settings, detached(model.named_parameters()))
    seeded = partial(seed_process, seed, "teacher", client)
    job = LocalJob(task, LocalPlan(), records, rng(seed, "teacher batches", client), seeded)
    trained = trainer.train(job)
    return votes_of(trainer.logits(model.to(pool.device), trained.params, pool))


def votes_of(logits: torch.Tensor) -> NDArray[np.int64]:
    """Return the class of the largest logit in each row. Raises RunError if a logit is not finite.

    The error message does not quote logits, because a teacher's outputs may reveal its records.
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
    """Fit a random forest to ``records``, and return its votes, shape (number of public records,).

    A vote is the predicted class of one public record. ``pool``: the public records.
    """
    inputs, labels = records.tensors()
    forest = settings.fit(as_table(inputs.numpy(force=True)), labels.numpy(force=True), rng(seed, "teacher", client))
    votes: NDArray[np.int64] = forest.predict(as_table(pool.numpy(force=True))).astype(np.int64)
    return votes


def as_table(inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return records of any shape as a table for the forest: one row of numbers per record, shape (n, features)."""
    return inputs.reshape(len(inputs), -1)
