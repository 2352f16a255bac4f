"""The evaluation of models: on the test records, and on the validation records of clients."""

import math
from dataclasses import dataclass, replace
from typing import Self

from fl_sim.errors import Diverged
from fl_sim.experiment.job import Job
from fl_sim.own_code import error_context
from fl_sim.simulation.client_runtime import evaluation_records, threads_of, validation_records
from fl_sim.store.run_directory import RoundRecord
from fl_sim.training.evaluation import Confusion, Holdings, OverClients, OwnTests, Scores, area_under_roc
from fl_sim.training.records import Source
from fl_sim.types import Params
from partitions import ByGroup


@dataclass(frozen=True, eq=False)
class Measured:
    """The measures of one model.

    ``test``: on the test records, with ``confusion``; both None where the model is not tested. ``clients``: over
    clients' accuracies; None where these are private or no client has records. ``clients_by``: the owners of the test
    records, or the class counts of clients, by which these accuracies are weighted. ``validation``: on the validation
    records; None without any.
    """

    test: Scores | None
    validation: Scores | None
    confusion: Confusion | None
    clients: OverClients | None
    clients_by: Holdings | OwnTests | None

    @classmethod
    def of(
        cls,
        test: Scores | None,
        num_classes: int,
        *,
        validation: Scores | None = None,
        clients_by: Holdings | OwnTests | None = None,
    ) -> Self:
        """Return the measures of a model with these scores."""
        if test is None:
            return cls(None, validation, None, None, clients_by)
        confusion, clients = Confusion.of(test, num_classes), None
        if clients_by is not None:
            if isinstance(clients_by, OwnTests):
                found = clients_by.accuracies(test)
            else:
                found = clients_by.accuracies(confusion.recalls)
            clients = OverClients.of(found) if len(found) else None
        return cls(test, validation, confusion, clients, clients_by)

    def noted_in(self, record: RoundRecord) -> RoundRecord:
        """Return a round's record with these measures."""
        if (validation := self.validation) is not None:
            record = replace(record, validation_accuracy=validation.accuracy, validation_loss=validation.loss)
        if (test := self.test) is None or self.confusion is None:
            return record
        record = replace(
            record,
            test_accuracy=test.accuracy,
            test_loss=test.loss,
            balanced_accuracy=self.confusion.balanced_accuracy,
            macro_f1=self.confusion.macro_f1,
            auc=area_under_roc(test),
        )
        if (clients := self.clients) is None:
            return record
        return replace(
            record,
            client_accuracy=clients.mean,
            client_deviation=clients.deviation,
            client_worst_tenth=clients.worst_tenth,
        )


@dataclass(frozen=True, eq=False)
class Measuring:
    """The records that models of ``job`` are measured on, and ``clients_by`` as in ``Measured``."""

    job: Job
    test: Source
    validation: Source | None
    clients_by: Holdings | OwnTests | None

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return the records of an experiment, loaded."""
        validation = validation_records(job) if job.num_validated else None
        # The class counts of a client are private where anybody is promised privacy.
        clients_by = None if job.experiment.is_private else _clients_by(job)
        return cls(job, evaluation_records(job), validation, clients_by)

    def measured(self, params: Params, when: str, *, is_last: bool) -> Measured:
        """Return the measures of the model ``params``, the last of its run or not.

        Raises Diverged where a loss is not finite, with ``when`` and a cure in its message.
        """
        validation = self._scored(params, self.validation, "validation", when) if self.validation else None
        is_tested = self.job.experiment.evaluate.tests(is_last=is_last)
        test = self._scored(params, self.test, "test", when) if is_tested else None
        num_classes = self.job.dataset.num_classes
        return Measured.of(test, num_classes, validation=validation, clients_by=self.clients_by)

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
    """Return the owners of the test records where data and partition tell them, else the class counts of clients.

    None where one holder has all records: its accuracy is the accuracy, and nobody's worst tenth.
    """
    if job.experiment.is_central:
        return None
    train, test = job.dataset.train, job.dataset.test
    follows = isinstance(job.experiment.partition, ByGroup)
    if follows and train.groups is not None and test.groups is not None:
        own = OwnTests.of(job.shards, train.groups, test.groups)
        if own is not None and own.counts.any():
            return own
    return Holdings.of((job.shards, job.validation), train.labels)
