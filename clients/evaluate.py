"""The client task that measures a client's models on the client's own test and validation records.

The answer contains counts for each class, and the values of user-defined metrics (setting ``evaluate.metrics``).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, Protocol, runtime_checkable

import numpy as np
import torch
from flwr.app import MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from clients.client_task import Client, OnClient
from clients.train import TrainingJob, further_job
from fl_sim.errors import Malformed, RunError
from fl_sim.local_plan import FurtherModel, LocalPlan
from fl_sim.params import check_layout, layout_of
from fl_sim.seeding import rng
from fl_sim.training.evaluation import Scores, ready, score
from fl_sim.training.losses import LogitsOf
from fl_sim.training.own_metrics import LONGEST_NAME, measured_by, metrics_at
from fl_sim.training.records import Records
from fl_sim.types import LocalTask, Params, Trained

RECEIVED: Final = "received"
"""The name of the model with which the client would start its next round."""

OWN: Final = "own"
"""The name of the client's own model: its personal model, or the received model if it has no personal model.

Algorithms of the class ``OwnModel`` have personal models. Algorithms of the class ``OwnPredictions`` combine a model
with other predictions.
"""

TRAINED: Final = "trained"
"""The name of the model after further training: the received model after one more round of local training.

With an algorithm of the class ``OwnModel``, ``TRAINED`` is the name of the personal model, without further training.
With an algorithm that adapts the received model (``Adapting``), ``TRAINED`` is the name of the adapted model.
"""

FINE_TUNED: Final = "fine_tuned"
"""The name of the client's own model after some epochs of plain SGD on the client's training records."""

MODELS: Final = (RECEIVED, OWN, TRAINED, FINE_TUNED)

TESTED, VALIDATED = "test", "validation"

MEASURES: Final = frozenset({
    "accuracy", "accuracy_pooled", "balanced_accuracy", "macro_f1", "mean_balanced_accuracy", "mean_macro_f1",
    "recalls", "worst_tenth", "deviation", "entropy", "validation_accuracy", "worse_than_alone",
})  # fmt: skip
"""The names of the measures that every model has. A user-defined metric must have another name."""

ROWS: Final = 3
"""The number of counts for each class: records of the class, predictions of the class, and correct predictions."""


@runtime_checkable
class OwnModel(Protocol):
    """An algorithm whose clients have a personal model in addition to the model that they send, such as Ditto."""

    def own_model(self, task: LocalTask) -> Params:
        """Return the personal model after the client's last round. ``task``: the task of the client's next round."""
        ...


@runtime_checkable
class Adapting(Protocol):
    """An algorithm that defines how a client adapts the received model. The default is one more round of training."""

    def adapted(self, task: LocalTask) -> FurtherModel:
        """Return the training that adapts the received model to a client.

        The result (``FurtherModel``) contains initial parameters, a local plan, and settings.
        """
        ...


@runtime_checkable
class OwnPredictions(Protocol):
    """An algorithm whose clients combine a model with other predictions, such as the labels of the nearest records."""

    def own_scores(self, task: LocalTask, client: OnClient) -> LogitsOf:
        """Return a function from inputs (n, *input shape) to scores (n, classes). The highest score is the prediction.

        ``task``: the task of the client's next round. Scores are logits, or logarithms of probabilities.
        """
        ...


@dataclass(frozen=True)
class EvaluateOwn:
    """The client task that counts, by class, the correct predictions of a client's models on the client's own records.

    ``own_records``: the test and validation records of each client, which may be empty. ``is_tested``: True if models
    are measured on test records. ``trains``: True if models are also measured after further training by the client (one
    more round, or fine-tuning). ``fine_tune_epochs``: the number of epochs of fine-tuning (setting
    ``evaluate.fine_tune_epochs``). ``metrics``: the user-defined metrics on test records (setting
    ``evaluate.metrics``).
    """

    own_records: OwnRecords
    num_classes: int
    is_tested: bool = True
    trains: bool = False
    fine_tune_epochs: int = 0
    metrics: str = "none"
    reads_records: ClassVar[bool] = True
    reads_state: ClassVar[bool] = True
    runs_in_threads: ClassVar[bool] = True

    def run(self, client: Client) -> RecordDict:
        """Return the message with every measured model's counts of correct predictions and user-defined metrics."""
        records = {VALIDATED: self.own_records.validation(client.number)}
        if self.is_tested:
            records[TESTED] = self.own_records.tests(client.number)
        counts, numbers = dict[str, list[int]](), dict[str, float]()
        if any(map(len, records.values())):
            for name, one in self.measured(client, records[VALIDATED]).items():
                for what, some in records.items():
                    if len(some):
                        scores = one.scores(*some.tensors())
                        counts[f"{name}/{what}"] = counts_of(scores, self.num_classes).ravel().tolist()
                if len(records.get(TESTED, ())):
                    found = self._own_metrics(client, one, records[TESTED])
                    numbers |= {f"{name}/{metric}": value for metric, value in found.items()}
        answer = RecordDict({"counts": MetricRecord({**counts})})
        if numbers:
            answer["metrics"] = MetricRecord({**numbers})
        return answer

    def _own_metrics(self, client: Client, measured: MeasuredModel, tests: Records) -> dict[str, float]:
        """Return the user-defined metrics of a model on test records, {name: number}.

        Raises RunError if a metric has the name of a measure of fl-sim (``MEASURES``).
        """
        server_round, numbers = client.config.server_round - 1, dict[str, float]()
        for what, function in metrics_at(self.metrics).items():
            inputs, labels = tests.tensors()
            copies, network = TensorDataset(inputs.clone(), labels.clone()), measured.network()
            numbers |= measured_by(
                function, what, server_round, network, copies, client.number, seed=client.runtime.seed
            )
            if taken := sorted(numbers.keys() & MEASURES):
                raise RunError(
                    f"{what} returned {taken[0]!r}, the name of a measure of fl-sim: give the metric another name"
                )
        return numbers

    def measured(self, client: Client, validation: Records) -> Mapping[str, MeasuredModel]:
        """Return the models of the client that are measured, by name.

        ``validation``: the client's own validation records.
        """
        training, algorithm = TrainingJob.of(client, trains=self.trains), client.runtime.algorithm
        runtime = client.runtime.sized(training.job.task)
        measured = {
            name: MeasuredModel(partial(runtime.trainer.evaluate, params), partial(_network, runtime.model, params))
            for name, params in self._models(training).items()
        }
        if isinstance(algorithm, OwnPredictions):
            task = training.job.task
            on_client = OnClient(training.job.records, runtime.trainer, runtime.seed, validation)
            with runtime.drawing("own scores", client.number, task.server_round):
                logits_of = algorithm.own_scores(task, on_client)
            measured[OWN] = MeasuredModel(partial(score, logits_of), partial(_Predicting, logits_of))
            training.check(algorithm.own_scores)
        training.check_bits()
        return measured

    def _models(self, training: TrainingJob) -> Mapping[str, Params]:
        """Return the tensors of the client's models by name, with the running statistics of BatchNorm layers."""
        client, task, own = training.client, training.job.task, training.job.task.params
        runtime, algorithm = client.runtime.sized(task), client.runtime.algorithm
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
        job = training.job
        runtime = training.client.runtime.sized(job.task)
        if not isinstance(algorithm, Adapting):
            return training.client.runtime.prepare([job])()[0]
        with runtime.drawing("adapted", job.task.client, job.task.server_round):
            model = algorithm.adapted(job.task)
        training.check(algorithm.adapted)
        batches = rng(runtime.seed, "adaptation", job.task.client)
        return runtime.trainer.train(further_job(job, "adapted", model, batches))


@dataclass(frozen=True)
class MeasuredModel:
    """One of a client's models, which is measured on the client's own records.

    ``scores``: a function that computes scores from inputs and labels. ``network``: a function that returns a copy of
    the model, in evaluation mode, for user-defined metrics.
    """

    scores: Callable[..., Scores]
    network: Callable[[], nn.Module]


def _network(model: nn.Module, params: Params) -> nn.Module:
    return ready(copy.deepcopy(model), params)


class _Predicting(nn.Module):
    """A PyTorch module whose outputs are the scores of an algorithm (``OwnPredictions.own_scores``)."""

    def __init__(self, logits_of: LogitsOf) -> None:
        super().__init__()
        self._logits_of = logits_of
        self.eval()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the scores of ``inputs`` (n, *input shape), of shape (n, classes)."""
        return self._logits_of(inputs)


class OwnRecords(Protocol):
    """The test and validation records of clients, on which the clients' own models are measured."""

    def tests(self, client: int) -> Records:
        """Return the client's own test records."""
        ...

    def validation(self, client: int) -> Records:
        """Return the client's own validation records."""
        ...


def counts_of(scores: Scores, num_classes: int) -> NDArray[np.int64]:
    """Return for each class the numbers of records, predictions and correct predictions, shape (3, classes)."""
    # some models make several predictions per record: every prediction is counted for the record's class
    if scores.counts is not None:
        right, held = (np.bincount(scores.labels, one, num_classes) for one in scores.predictions)
        return np.stack([held, held, right]).astype(np.int64)
    right = scores.labels[scores.labels == scores.predicted]
    return np.stack([np.bincount(one, minlength=num_classes) for one in (scores.labels, scores.predicted, right)])


@dataclass(frozen=True)
class OwnAnswer:
    """A client's answer: measures of its models on its own records.

    ``counts``: {"MODEL/RECORDS": counts of shape (3, classes)}, such as "own/test". ``metrics``: {"MODEL/METRIC":
    value}, such as "own/NAME".
    """

    counts: Mapping[str, NDArray[np.int64]]
    metrics: Mapping[str, float] = field(default_factory=dict)


def answer_in(content: RecordDict, num_classes: int, *, has_metrics: bool) -> OwnAnswer:
    """Return the counts and metrics in a client's answer.

    ``has_metrics``: True if the experiment has user-defined metrics. Raises Malformed for impossible counts, for
    metrics that are not finite, and for metrics that the experiment does not have.
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
    return OwnAnswer(found, _metrics_in(content, has_metrics=has_metrics))


def _metrics_in(content: RecordDict, *, has_metrics: bool) -> Mapping[str, float]:
    metrics = dict(content.metric_records.get("metrics", {}))
    for name, value in metrics.items():
        model, _, metric = name.partition("/")
        is_known = has_metrics and model in MODELS and metric not in MEASURES and 0 < len(metric) <= LONGEST_NAME
        if not (is_known and metric.isprintable() and isinstance(value, float) and math.isfinite(value)):
            raise Malformed("sent metrics of another form")
    return {name: float(value) for name, value in metrics.items() if isinstance(value, float)}
