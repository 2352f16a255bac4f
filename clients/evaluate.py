"""The client task that measures a client's models on the client's own test and validation records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Final, Protocol, runtime_checkable

import numpy as np
from flwr.app import MetricRecord, RecordDict
from numpy.typing import NDArray

from clients.client_task import Client, OnClient
from clients.train import TrainingJob, further_job
from fl_sim.errors import Malformed
from fl_sim.local_plan import FurtherModel, LocalPlan
from fl_sim.params import check_layout, layout_of
from fl_sim.seeding import rng
from fl_sim.training.evaluation import Scores, score
from fl_sim.training.losses import LogitsOf
from fl_sim.training.records import Records
from fl_sim.types import LocalTask, Params, Trained

RECEIVED: Final = "received"
"""The name of the model with which the client would begin its next round."""

OWN: Final = "own"
"""The name of the client's own model: its personal model, or the received model if it has no personal model.

Algorithms of the class ``OwnModel`` have personal models. An algorithm with ``OwnPredictions`` predicts in its own way.
"""

TRAINED: Final = "trained"
"""The name of the model after further training: the received model after one more round of local training.

With an algorithm of the class ``OwnModel``, it is the name of the personal model, without further training. With an
algorithm that adapts the received model (``Adapting``), it is the name of the adapted model.
"""

FINE_TUNED: Final = "fine_tuned"
"""The name of the client's own model after some epochs of plain SGD on the client's training records."""

TESTED, VALIDATED = "test", "validation"

ROWS: Final = 3
"""The number of counts for each class: records of the class, records predicted as it, and correct predictions."""


@runtime_checkable
class OwnModel(Protocol):
    """An algorithm whose clients have a personal model beside the model that they send, such as Ditto."""

    def own_model(self, task: LocalTask) -> Params:
        """Return the client's personal model after its last round. ``task``: the task of its next round."""
        ...


@runtime_checkable
class Adapting(Protocol):
    """An algorithm in which each client adapts the received model, in another way than by a round of training."""

    def adapted(self, task: LocalTask) -> FurtherModel:
        """Return the training that adapts the received model to a client."""
        ...


@runtime_checkable
class OwnPredictions(Protocol):
    """An algorithm whose clients do not predict by a model alone, but for example by their nearest records."""

    def own_scores(self, task: LocalTask, client: OnClient) -> LogitsOf:
        """Return a function from inputs (n, *input shape) to scores (n, classes). The highest score is the prediction.

        ``task``: the task of the client's next round. Scores are logits, or logarithms of probabilities.
        """
        ...


@dataclass(frozen=True)
class EvaluateOwn:
    """The client task that counts correct predictions of a client's models on its own records, by class.

    ``own_records``: the test and validation records of each client, which may be empty. ``is_tested``: True if the test
    records are used. ``trains``: True if models are also measured after further training. ``fine_tune_epochs``: the
    number of epochs of fine-tuning (setting ``evaluate.fine_tune_epochs``).
    """

    own_records: OwnRecords
    num_classes: int
    is_tested: bool = True
    trains: bool = False
    fine_tune_epochs: int = 0
    reads_records: ClassVar[bool] = True
    reads_state: ClassVar[bool] = True
    runs_in_threads: ClassVar[bool] = True

    def run(self, client: Client) -> RecordDict:
        """Return the message with the counts of every measured model (see ``counts_of``)."""
        records = {VALIDATED: self.own_records.validation(client.number)}
        if self.is_tested:
            records[TESTED] = self.own_records.tests(client.number)
        found: dict[str, list[int]] = {}
        if any(map(len, records.values())):
            for name, scored in self._scored(client, records[VALIDATED]).items():
                for what, one in records.items():
                    if len(one):
                        scores = scored(*one.tensors())
                        found[f"{name}/{what}"] = counts_of(scores, self.num_classes).ravel().tolist()
        return RecordDict({"counts": MetricRecord({**found})})

    def _scored(self, client: Client, validation: Records) -> Mapping[str, Callable[..., Scores]]:
        """Return a function for each of the client's models, by name.

        The function computes scores from inputs and labels.
        """
        runtime, algorithm = client.runtime, client.runtime.algorithm
        training = TrainingJob.of(client)
        scored: dict[str, Callable[..., Scores]] = {
            name: partial(runtime.trainer.evaluate, params) for name, params in self._models(training).items()
        }
        if isinstance(algorithm, OwnPredictions):
            task = training.job.task
            on_client = OnClient(training.job.records, runtime.trainer, runtime.seed, validation)
            with runtime.drawing("own scores", client.number, task.server_round):
                scored[OWN] = partial(score, algorithm.own_scores(task, on_client))
            training.check(algorithm.own_scores)
        training.check_bits()
        return scored

    def _models(self, training: TrainingJob) -> Mapping[str, Params]:
        """Return the tensors of the client's models by name, with the running statistics of BatchNorm layers."""
        client = training.client
        runtime, algorithm = client.runtime, client.runtime.algorithm
        task, own = training.job.task, training.job.task.params
        if isinstance(algorithm, OwnModel):
            with runtime.drawing("own model", client.number, task.server_round):
                own = algorithm.own_model(task)
            training.check(algorithm.own_model)
            check_layout("the parameters that own_model returns", own, layout_of(task.params))
        models = {RECEIVED: {**task.params, **task.statistics}, OWN: {**own, **task.statistics}}
        if self.trains and isinstance(algorithm, OwnModel):
            models[TRAINED] = models[OWN]
        elif self.trains:
            trained = self._adapted(training, algorithm)
            models[TRAINED] = {**trained.params, **trained.statistics}
        if self.trains and self.fine_tune_epochs:
            settings = replace(task.settings, epochs=self.fine_tune_epochs, steps=0)
            start = replace(task, params=own, settings=settings)
            batches = rng(runtime.seed, "fine-tuning", client.number)
            tuned = runtime.trainer.train(replace(training.job, task=start, plan=LocalPlan(), generator=batches))
            models[FINE_TUNED] = {**tuned.params, **tuned.statistics}
        return models

    @staticmethod
    def _adapted(training: TrainingJob, algorithm: object) -> Trained:
        """Return the received model after the adaptation of the algorithm, or after one more round of training."""
        runtime, job = training.client.runtime, training.job
        if not isinstance(algorithm, Adapting):
            return runtime.prepare([job])()[0]
        with runtime.drawing("adapted", job.task.client, job.task.server_round):
            model = algorithm.adapted(job.task)
        training.check(algorithm.adapted)
        batches = rng(runtime.seed, "adaptation", job.task.client)
        return runtime.trainer.train(further_job(job, "adapted", model, batches))


class OwnRecords(Protocol):
    """The clients' test and validation records. On these records the clients' own models are measured."""

    def tests(self, client: int) -> Records:
        """Return the client's own test records."""
        ...

    def validation(self, client: int) -> Records:
        """Return the client's own validation records."""
        ...


def counts_of(scores: Scores, num_classes: int) -> NDArray[np.int64]:
    """Return counts of shape (3, classes): records of each class, records predicted as it, and correct predictions."""
    right = scores.labels[scores.labels == scores.predicted]
    return np.stack([np.bincount(one, minlength=num_classes) for one in (scores.labels, scores.predicted, right)])


def counts_in(content: RecordDict, num_classes: int) -> Mapping[str, NDArray[np.int64]]:
    """Return the counts in a client's answer, by the names of model and records: {"own/test": (3, classes), ...}.

    Raises Malformed for counts that no client can have.
    """
    found = {}
    for name, values in content.metric_records.get("counts", {}).items():
        counts = np.asarray(values)
        if counts.shape != (ROWS * num_classes,) or counts.dtype != np.int64 or (counts < 0).any():
            raise Malformed("sent counts of another form")
        found[name] = counts.reshape(ROWS, num_classes)
        held, predicted, right = found[name]
        if held.sum() != predicted.sum() or (right > np.minimum(held, predicted)).any():
            raise Malformed("counted more correct predictions than records", cure="check the code of this client")
    return found
