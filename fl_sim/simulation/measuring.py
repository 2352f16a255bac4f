"""The evaluation of models on the test records and on the validation records."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from fl_sim.errors import Diverged, RunError
from fl_sim.experiment.job import Job
from fl_sim.own_code import error_context
from fl_sim.simulation.client_runtime import evaluation_records, threads_of, validation_records
from fl_sim.store.run_directory import RoundRecord
from fl_sim.training.evaluation import (
    Confusion,
    Holdings,
    OverClients,
    OwnTests,
    Scores,
    area_under_roc,
    known,
    ready,
)
from fl_sim.training.loop import resident
from fl_sim.training.own_metrics import OwnMetrics, measured_by, metrics_at
from fl_sim.training.records import Source
from fl_sim.types import Params
from partitions import ByGroup


@dataclass(frozen=True, eq=False)
class Measured:
    """The measures of one model.

    ``test``: the scores on the test records. ``confusion``: the confusion matrix on the test records. Both fields are
    None if the model is not tested. ``confusion`` is also None if the model predicts no classes (fl_sim.own_loss).
    ``validation``: the scores on the validation records; None without validation records. ``clients``: statistics of
    the client accuracies; None if the accuracies are private or no client has records. ``clients_by``: the data from
    which client accuracies are computed, either the owner of each test record, or each client's number of records of
    each class. ``by_client``: the accuracy of each client, NaN if undefined. Undefined accuracies at the end of the
    array may be missing.
    """

    test: Scores | None
    validation: Scores | None
    confusion: Confusion | None
    clients: OverClients | None
    clients_by: Holdings | OwnTests | None
    by_client: NDArray[np.float64] | None = None

    @classmethod
    def of(
        cls,
        test: Scores | None,
        num_classes: int,
        *,
        validation: Scores | None = None,
        clients_by: Holdings | OwnTests | None = None,
    ) -> Self:
        """Return the measures of a model, computed from its scores on test and validation records."""
        if test is None:
            return cls(None, validation, None, None, clients_by)
        confusion, clients, found = Confusion.of(test, num_classes) if test.counts is None else None, None, None
        if isinstance(clients_by, OwnTests):
            found = clients_by.by_client(test)
        elif clients_by is not None and confusion is not None:
            found = clients_by.by_client(confusion.recalls)
        if found is not None:
            accuracies = known(found)
            clients = OverClients.of(accuracies) if len(accuracies) else None
        return cls(test, validation, confusion, clients, clients_by, found)

    def noted_in(self, record: RoundRecord) -> RoundRecord:
        """Return a copy of ``record``, the result of a round, with these measures added."""
        if (validation := self.validation) is not None:
            record = replace(record, validation_accuracy=validation.accuracy, validation_loss=validation.loss)
        if (test := self.test) is None:
            return record
        record = replace(
            record, test_accuracy=test.accuracy, test_loss=test.loss, test_perplexity=test.perplexity,
            auc=area_under_roc(test),
        )  # fmt: skip
        if (confusion := self.confusion) is not None:
            balanced, macro_f1 = confusion.balanced_accuracy, confusion.macro_f1
            record = replace(record, balanced_accuracy=balanced, macro_f1=macro_f1)
        if (clients := self.clients) is None:
            return record
        return replace(
            record,
            client_accuracy=clients.mean,
            client_deviation=clients.deviation,
            client_worst_tenth=clients.worst_tenth,
            client_entropy=clients.entropy,
        )


@dataclass(frozen=True, eq=False)
class Measuring:
    """The evaluator of a run: it measures models of ``job`` on test and validation records.

    ``clients_by``: the data from which client accuracies are computed, as in ``Measured``. If shards depend on the
    round, the data are those of round 1. ``own_metrics``: the user's own metric functions, {origin of the function, for
    error messages: function}.
    """

    job: Job
    test: Source
    validation: Source | None
    clients_by: Holdings | OwnTests | None
    own_metrics: Mapping[str, OwnMetrics] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, own_metrics: Mapping[str, OwnMetrics] = MappingProxyType({})) -> Self:
        """Return the evaluator of ``job``, with the test and validation records in memory.

        ``own_metrics``: {name of an observer: its metric function}. The function in the setting ``evaluate.metrics`` is
        used, too.
        """
        validation = validation_records(job) if job.num_validated else None
        # A private run has no client accuracies, because they would reveal the clients' class counts.
        clients_by = None if job.experiment.is_private else _clients_by(job)
        named = {f"metrics of observer {name}": function for name, function in own_metrics.items()}
        named |= metrics_at(job.experiment.evaluate.metrics)
        return cls(job, evaluation_records(job), validation, clients_by, named)

    def measured(self, params: Params, when: str, *, is_last: bool, server_round: int) -> Measured:
        """Return the measures of the model with the parameters ``params``.

        ``is_last``: True for the last model of the run. ``server_round``: the round whose shards define the class
        distributions of the clients. Raises Diverged if a loss is not finite. ``when``: the last words of this error's
        message, such as "after round 3: try a smaller learning rate".
        """
        validation = self._scored(params, self.validation, "validation", when) if self.validation else None
        is_tested = self.job.experiment.evaluate.tests(is_last=is_last)
        test = self._scored(params, self.test, "test", when) if is_tested else None
        num_classes = self.job.dataset.num_classes
        clients_by = self.clients_by
        if clients_by is not None and self.job.moving is not None:
            clients_by = Holdings.of((self.job.shards_in(server_round),), self.job.dataset.train.labels)
        return Measured.of(test, num_classes, validation=validation, clients_by=clients_by)

    def own(self, params: Params, server_round: int) -> dict[str, float]:
        """Return the user's own metrics, {name: number}, of the model with the parameters ``params``.

        Each metric function receives its own copy of the model, and only the public test records. Raises RunError if
        two functions return a metric with the same name, or if a function fails (see ``measured_by``).
        """
        found: dict[str, float] = {}
        for what, metrics in self.own_metrics.items():
            model = ready(self.job.whole_model(), params).to(self.job.device)
            seed = self.job.experiment.seed
            for name, value in measured_by(metrics, what, server_round, model, self._test_records(), seed=seed).items():
                if name in found:
                    raise RunError(
                        f"{what} returned {name!r}, as another metric function does: give the metric another name"
                    )
                found[name] = value
        return found

    def _test_records(self) -> TensorDataset:
        """Return a copy of the test records in normalised form, which is the form that models receive."""
        job, test = self.job, self.test
        if job.records is not job.dataset:
            test = resident(job.dataset.test, job.dataset, job.device)
        inputs = test.inputs.clone() if test.scale is None else test.normalised(test.inputs)
        return TensorDataset(inputs, test.labels.clone())

    def _scored(self, params: Params, records: Source, what: str, when: str) -> Scores:
        workers = threads_of(self.job.experiment.engine, self.job)
        with error_context(f"measuring the model {self.job.experiment.model}"):
            scores = self.job.trainer.evaluate(
                params, records.inputs, records.labels, scale=records.scale, workers=workers
            )
        if not math.isfinite(scores.loss):
            raise Diverged(f"the {what} loss is {scores.loss} {when}")
        return scores


def _clients_by(job: Job) -> Holdings | OwnTests | None:
    """Return the data for computing client accuracies: the owners of test records, or the clients' class counts.

    An owner is the source of a record, such as its writer. Owners are used if both the data set and the partition group
    records by owner. The result is None for centralized training, because its only client has the same accuracy as the
    model.
    """
    if job.experiment.is_central:
        return None
    train, test = job.dataset.train, job.dataset.test
    follows = isinstance(job.experiment.partition, ByGroup) and job.moving is None
    if follows and train.groups is not None and test.groups is not None:
        own = OwnTests.of(job.shards, train.groups, test.groups, test.labels)
        if own is not None and own.counts.any():
            return own
    return Holdings.of((job.shards, job.validation), train.labels)
