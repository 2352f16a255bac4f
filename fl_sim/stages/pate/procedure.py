"""The procedure of PATE: teachers, one for each client, are trained on workers, and the server asks for their votes.

The steps of a run are in ``fl_sim.stages.pate.run``.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import nn

from clients.client_task import Client, ClientRuntime
from clients.teacher import RandomForest, forest_votes, network_votes
from fl_sim.engines import arrays, wire
from fl_sim.errors import Malformed, RunError
from fl_sim.experiment.job import Job
from fl_sim.simulation.client_runtime import answers_at_once, local_settings, runtime_for
from fl_sim.simulation.forecast import evaluation_work, training_work
from fl_sim.simulation.run_log import Observer, RunLog
from fl_sim.simulation.stage import Procedure
from fl_sim.simulation.timing import Work, public_records
from fl_sim.store.run_directory import RoundRecord
from fl_sim.training.loop import resident, to_tensors
from fl_sim.types import Traffic
from strategies.answers import UNQUOTED, Asking, answers_to, find_population, in_words, refusal
from strategies.fedavg import FedAvg
from strategies.pate.settings import Pate, PublicSplit

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment


@dataclass(frozen=True)
class Vote:
    """The client task of a teacher: train, and vote for a class of each record of the public pool.

    ``pool``: the inputs of the public pool, shape (records, *shape of a record).
    """

    job: Job
    settings: Pate
    pool: torch.Tensor
    reads_records: ClassVar[bool] = False  # the method ``run`` asks the client's policy for permission
    reads_state: ClassVar[bool] = False
    runs_in_threads: ClassVar[bool] = True

    def run(self, client: Client) -> RecordDict:
        """Return the message with the client's votes, one class for each record of the pool."""
        if client.policy:
            client.policy.check_vote()
        experiment, own = self.job.experiment, client.records
        number, seed = client.number, experiment.seed
        if isinstance(self.settings.teachers, RandomForest):
            votes = forest_votes(self.settings.teachers, own, self.pool, client=number, seed=seed)
            return wire.votes_content(votes)
        local = local_settings(self.job, experiment.local.learning_rate)
        votes = network_votes(
            client.runtime.trainer, self.job.built, local, own, self.pool,
            client=number, seed=seed, model_seed=experiment.seed_of_model,
        )  # fmt: skip
        return wire.votes_content(votes)


@dataclass(frozen=True)
class PateProcedure(Procedure):
    """The procedure of PATE: teachers vote once, and a student is trained on the noisy labels."""

    settings: Pate

    def run(self, grid: Grid, out: Path, log: RunLog, observer: Observer) -> None:
        """Let the teachers vote, add noise to their votes, and train the student on the noisy labels."""
        from fl_sim.stages.pate.run import run_pate  # noqa: PLC0415 (the accountants load slowly)

        def finished(record: RoundRecord) -> None:
            if (ended := observer.finished_round(record)) and record.round < self.job.experiment.rounds:
                log.warnings.append(
                    f"{ended}: without effect, because PATE has no rounds; its student trains all epochs"
                )

        run_pate(self.job, self.settings, grid, out, log, say=observer.preparing, finished=finished)

    def model(self) -> nn.Module:
        """Return the student model with initial weights."""
        return self.settings.student.network(self.job.dataset.input_shape, self.job.dataset.num_classes)

    def work(self) -> tuple[Work, ...]:
        """Return the amounts of computation for the teachers, and for the student's training, which is not timed."""
        student = Work("the student's training", pieces=1.0)
        if isinstance(self.settings.teachers, RandomForest):
            return (self._forests(self.settings.teachers), student)
        votes = evaluation_work(self, self.job.experiment.clients * len(self._split().pool))
        return (training_work(self, FedAvg(), 1), votes, student)

    def _forests(self, teachers: RandomForest) -> Work:
        """Return the amount of computation for the teachers' random forests: the training at clients, and the votes."""
        job = self.job
        records, votes = max(1, round(float(job.shards.sizes.mean()))), len(self._split().pool)

        def ready(size: int, _: int) -> Callable[[], object]:
            own = resident(public_records(job, size), job.dataset, torch.device("cpu")).whole()
            pool = to_tensors(public_records(job, votes), job.dataset)[0]
            return lambda: forest_votes(teachers, own, pool, client=0, seed=job.experiment.seed)

        alike = job.experiment.chosen("data", "features", "normalise")
        kind = json.dumps([alike, teachers.model_dump(mode="json"), votes, records], sort_keys=True)
        what, clients = (
            f"a teacher's {teachers.kind} on {job.experiment.data} ({records} records)",
            job.experiment.clients,
        )
        return Work(what, kind, clients, clients, ready, records, at_once=answers_at_once(job))

    def traffic(self) -> dict[str, Traffic]:
        """Return the bytes of the teachers' votes, which clients send to the server."""
        return {"votes": traffic_of_votes(len(self._split().pool), self.job.experiment.clients)}

    def payments(self) -> "tuple[Payment, ...] | None":
        """Return the privacy cost of the noisy labels. Runs that differ only in the student share this cost.

        Returns None if the data-dependent epsilon is published.
        """
        from fl_sim.stages.pate.statements import cost_of_labels  # noqa: PLC0415 (the accountants load slowly)

        return None if self.settings.publish_cost else (cost_of_labels(self.job, self.settings),)

    def runtime(self) -> ClientRuntime:
        """Return the client runtime of a worker that trains teachers."""
        inputs, _ = to_tensors(self._split().pool, self.job.dataset)
        return runtime_for(self.job, FedAvg(), {VOTE: Vote(self.job, self.settings, inputs.to(self.job.device))})

    def _split(self) -> PublicSplit:
        return self.settings.public_split(self.job.dataset, self.job.experiment.seed_of_partition)

    def warnings(self, log: RunLog) -> list[str]:
        """Return the warnings that are shown to the user before the teachers vote."""
        del log
        return list(filter(None, [self.settings.warning_of_noise(self.job.experiment.clients)]))


VOTE: Final = "vote"
"""The name of the client task that trains a teacher and returns its votes on the public pool."""


def ask_teachers(
    grid: Grid, order: wire.TaskConfig, timeout: float, *, teachers: int, records: int, classes: int, private: bool
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Let every client train a teacher and vote; return the votes, (teachers, records), and the failed teachers.

    Raises RunError that names the first teacher whose votes are missing or malformed. If ``private`` is True, such a
    teacher instead counts as a vote for class 0 in every query. The reason: a run that stops because of one teacher
    reveals something about its records. If all teachers fail, RunError is raised, and its message quotes no client.
    """
    population = find_population(grid, teachers, timeout)
    asking = Asking(replace(order, task=VOTE), timeout, quoted=not private)
    answers = answers_to(grid, population, asking, lambda one: wire.read_votes(one, records, classes))
    failed = {teacher: answer for teacher, answer in enumerate(answers) if isinstance(answer, Malformed)}
    if failed and not private:
        raise refusal(f"teacher {min(failed)}", failed[min(failed)], quoted=True)
    if len(failed) == teachers:
        raise RunError(
            f"none of {teachers} teachers voted: local.learning_rate may be too large, or the model may not suit "
            f"the records; {UNQUOTED}",
            private=in_words("teacher", failed),
        )
    silent = np.zeros(records, dtype=np.int64)
    return np.stack([silent if isinstance(one, Malformed) else one for one in answers]), tuple(failed)


def traffic_of_votes(num_records: int, num_teachers: int) -> Traffic:
    """Return the bytes of all teachers' votes. The public records are not sent, because every client has them."""
    sent = wire.votes_content(np.zeros(num_records, dtype=np.int64))
    return Traffic(0, arrays.num_bytes(sent)) * num_teachers
