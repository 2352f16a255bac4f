"""The server's model is measured: on the test records, and on what clients' records are held out for validation."""

import math
from dataclasses import dataclass
from typing import Self

from fl_sim.errors import Diverged
from fl_sim.experiment.job import Job
from fl_sim.simulation.capacity import threads_of
from fl_sim.simulation.site import evaluation_records, validation_records
from fl_sim.training.records import Source
from fl_sim.types import Params


@dataclass(frozen=True)
class Measured:
    """What a model is measured to be: accuracies in [0, 1], mean cross-entropies; None where it is not measured."""

    accuracy: float | None = None
    loss: float | None = None
    validation_accuracy: float | None = None
    validation_loss: float | None = None


@dataclass(frozen=True, eq=False)
class Measuring:
    """What models of ``job`` are measured on; ``validation`` None: nothing is held out."""

    job: Job
    test: Source
    validation: Source | None

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return what the experiment's models are measured on, loaded."""
        return cls(job, evaluation_records(job), validation_records(job) if job.validation else None)

    def measured(self, params: Params, when: str, *, is_last: bool) -> Measured:
        """Measure the model ``params``, the last of its run or not.

        Raises Diverged, with ``when`` and what to do about it in its message, where a loss is not finite.
        """
        tested: tuple[float | None, float | None] = (None, None)
        if self.job.experiment.evaluate.tests(is_last=is_last):
            tested = self._scored(params, self.test, "test", when)
        if self.validation is None:
            return Measured(*tested)
        return Measured(*tested, *self._scored(params, self.validation, "validation", when))

    def _scored(self, params: Params, records: Source, what: str, when: str) -> tuple[float, float]:
        workers = threads_of(self.job.experiment.engine, self.job)
        accuracy, loss = self.job.trainer.evaluate(
            params, records.inputs, records.labels, scale=records.scale, workers=workers
        )
        if not math.isfinite(loss):
            raise Diverged(f"the {what} loss is {loss} {when}")
        return accuracy, loss
