"""The server's model is measured: on the test records, and on what clients' records are held out for validation."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
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
class Tested:
    """What a model does on the test records.

    ``clients_by``: which test records are whose, or what clients hold, by which their accuracies are weighted; None
    where those may not be told.
    """

    scores: Scores
    num_classes: int
    clients_by: Holdings | OwnTests | None = None

    @cached_property
    def confusion(self) -> Confusion:
        """Return which classes are taken for which."""
        return Confusion.of(self.scores, self.num_classes)

    @cached_property
    def auc(self) -> float | None:
        """Return the area under the ROC curve; None unless there are two classes."""
        return area_under_roc(self.scores)

    @cached_property
    def clients(self) -> OverClients | None:
        """Return how the accuracy differs over clients; None where that may not be told, or nobody holds records."""
        if self.clients_by is None:
            return None
        if isinstance(self.clients_by, OwnTests):
            found = self.clients_by.accuracies(self.scores)
        else:
            found = self.clients_by.accuracies(self.confusion.recalls)
        return OverClients.of(found) if len(found) else None

    def noted_in(self, record: RoundRecord) -> RoundRecord:
        """Return a round's record with all this in it."""
        record = replace(
            record,
            test_accuracy=self.scores.accuracy,
            test_loss=self.scores.loss,
            balanced_accuracy=self.confusion.balanced_accuracy,
            macro_f1=self.confusion.macro_f1,
            auc=self.auc,
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
class Measured:
    """What a model is measured to be, None where it is not: on the test records, and on those held out."""

    test: Tested | None = None
    validation: Scores | None = None

    @property
    def accuracy(self) -> float | None:
        """Return the test accuracy."""
        return self.test.scores.accuracy if self.test is not None else None

    @property
    def validation_accuracy(self) -> float | None:
        """Return the accuracy on the records held out."""
        return self.validation.accuracy if self.validation is not None else None

    def noted_in(self, record: RoundRecord) -> RoundRecord:
        """Return a round's record with all this in it."""
        if self.validation is not None:
            accuracy, loss = self.validation.accuracy, self.validation.loss
            record = replace(record, validation_accuracy=accuracy, validation_loss=loss)
        return record if self.test is None else self.test.noted_in(record)


@dataclass(frozen=True, eq=False)
class Measuring:
    """What models of ``job`` are measured on; ``validation`` None: nothing is held out. ``clients_by``: see Tested."""

    job: Job
    test: Source
    validation: Source | None
    clients_by: Holdings | OwnTests | None

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return what the experiment's models are measured on, loaded."""
        validation = validation_records(job) if job.num_validated else None
        # How many records of which class a client holds is its own affair where anybody is promised privacy.
        clients_by = None if job.experiment.is_private else _clients_by(job)
        return cls(job, evaluation_records(job), validation, clients_by)

    def measured(self, params: Params, when: str, *, is_last: bool) -> Measured:
        """Measure the model ``params``, the last of its run or not.

        Raises Diverged, with ``when`` and what to do about it in its message, where a loss is not finite.
        """
        validation = self._scored(params, self.validation, "validation", when) if self.validation else None
        tests = self.job.experiment.evaluate.tests(is_last=is_last)
        return Measured(self.tested(params, when) if tests else None, validation)

    def tested(self, params: Params, when: str) -> Tested:
        """Measure the model on the test records alone. Raises Diverged as ``measured`` does."""
        scores = self._scored(params, self.test, "test", when)
        return Tested(scores, self.job.dataset.num_classes, self.clients_by)

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
    """Return which test records are whose where the data say so and the split follows, else what clients hold.

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
