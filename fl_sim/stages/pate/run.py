"""A run of PATE: teachers vote, the aggregator releases noisy labels, a student learns from them, epoch by epoch."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import nn

from fl_sim.errors import RunError
from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of
from fl_sim.privacy.terms import rounded_up
from fl_sim.seeding import seed_torch, torch_kept
from fl_sim.simulation.measuring import Measured, Tested
from fl_sim.simulation.preparation import order_of
from fl_sim.simulation.run_log import RunLog
from fl_sim.stages.pate.asking import traffic_of_votes
from fl_sim.stages.pate.ensemble import Votes, as_npy, prepare_votes, write_private_votes
from fl_sim.stages.pate.noisy_labels import LEDGER, Released, release_labels
from fl_sim.stages.pate.standing import Standing, put_back, read_standing, write_standing
from fl_sim.stages.pate.statements import data_dependent, statements_of
from fl_sim.store import run_directory
from fl_sim.store.files import write_whole
from fl_sim.store.run_directory import RoundRecord, coarse
from fl_sim.store.tensors import write_private
from fl_sim.training.evaluation import Scores, score
from fl_sim.training.loop import to_tensors
from fl_sim.types import Dataset, Examples, ServerState
from strategies.pate.labelling import UNANSWERED, Labelled
from strategies.pate.neighbours import representatives
from strategies.pate.settings import Pate
from strategies.pate.student import Part, StudentData

LABELS, QUERIES, PRIVATE = "labels.npy", "queries.npy", "private.json"


def run_pate(
    job: Job,
    settings: Pate,
    grid: Grid,
    out: Path,
    log: RunLog,
    *,
    say: Callable[[str], None],
    finished: Callable[[RoundRecord], None],
) -> None:
    """Run all of it; ``say`` hears what happens before the student trains, ``finished`` of its epochs.

    Raises RunError where no teacher votes, no query is answered or the student diverges; where the votes get no noise,
    also where one teacher fails.
    """
    experiment, start = job.experiment, time.perf_counter()
    split = settings.public_split(job.dataset, experiment.seed_of_partition)
    say(f"{experiment.clients} teachers train, and vote on {len(split.pool)} public records")
    votes = prepare_votes(job, settings, grid, order_of(job, grid, out))
    voted = time.perf_counter()
    log.before["votes"] = traffic_of_votes(len(split.pool), experiment.clients)
    rows = _asked(settings, split.pool, job.dataset)
    votes, pool = votes.about(rows), split.pool.take(rows)
    released = release_labels(settings, votes, experiment.seed, out)
    _write_labels(out, settings, votes, released, pool)
    log.statements = statements_of(experiment, settings, votes, released)
    epsilon = log.statements[0]["epsilon"]
    say(_spent(settings, votes, released, epsilon))
    log.preprocess_seconds = time.perf_counter() - start
    seconds = {"teachers": coarse(voted - start), "teachers_when_trained": coarse(votes.seconds),
               "labels": coarse(log.preprocess_seconds - (voted - start))}  # fmt: skip
    facts = _facts(settings, votes, released, pool)
    log.facts["pate"] = facts | {"evaluation_records": len(split.evaluation), "seconds": seconds}
    if not released.labelled.num_answered:
        raise RunError(
            f"none of {released.labelled.num_asked} queries was answered: give a larger algorithm.labelling.epsilon, "
            "or a lower threshold"
        )
    student = _Training(job, settings, split.evaluation, epsilon, log, out, finished, say)
    model = student.train(pool, released)
    log.server = ServerState({name: value.detach().cpu() for name, value in model.state_dict().items()})


def _asked(settings: Pate, pool: Examples, dataset: Dataset) -> NDArray[np.int64]:
    """Return the rows of the pool in the order in which teachers are asked about them, then all others."""
    if settings.asking == "in-order":
        return np.arange(len(pool), dtype=np.int64)
    return representatives(to_tensors(pool, dataset)[0], len(pool))


class _Training:
    """The student's training: its steps make ``rounds`` epochs of equal length, each one line of the log."""

    def __init__(
        self,
        job: Job,
        settings: Pate,
        evaluation: Examples,
        epsilon: float | None,
        log: RunLog,
        out: Path,
        finished: Callable[[RoundRecord], None],
        say: Callable[[str], None],
    ) -> None:
        experiment = job.experiment
        self.experiment, self.dataset, self.device, self.epsilon = experiment, job.dataset, job.device, epsilon
        self.log, self.out, self.finished, self.say = log, out, finished, say
        self.parts: Mapping[str, Part] = {}
        self.tests = experiment.evaluate.tests(is_last=True)
        self.start = ""
        self.settings, own = settings.student, settings.student_seed
        self.seed = experiment.seed if own is None else own
        self.inputs, self.labels = (tensor.to(self.device) for tensor in to_tensors(evaluation, job.dataset))

    def train(self, pool: Examples, released: Released) -> nn.Module:
        data = student_data(to_tensors(pool, self.dataset)[0], released.labelled, self.dataset.num_classes)
        with torch_kept():
            seed_torch(self.seed, "student")
            model = self.settings.network(self.dataset.input_shape, self.dataset.num_classes).to(self.device)
        self.start = _digest(self.log.chain, data)
        model = self.settings.train(data.to(self.device), model, self.seed, self)
        if self.log.measured is None and self.log.rounds and self.tests:  # all steps were taken before this process
            self.log.measured = self._measured(model, len(self.log.rounds))
        return model

    def begin(self, parts: Mapping[str, Part]) -> int:
        """Return how many steps an earlier process has taken, and make ``parts`` what they were after these."""
        self.parts, path = parts, self.out / run_directory.STUDENT
        if not path.exists():
            return 0
        standing, tensors = read_standing(path)
        if standing.start != self.start:
            self.say("the student begins anew: labels or settings are not those of the one that an earlier run left")
            return 0
        put_back(path, tensors, parts)
        for record in standing.rounds:
            self._write(record)
            self.finished(record)
        self.say(f"the student goes on after epoch {len(standing.rounds)} of {self.experiment.rounds}")
        return standing.steps

    def __call__(self, step: int, learning_rate: float, model: nn.Module) -> None:
        """Measure the student after an epoch, and keep where it stands."""
        rounds, epoch = self.experiment.rounds, len(self.log.rounds) + 1
        if step * rounds < epoch * self.settings.steps:
            return
        record = RoundRecord(epoch, None, None, None, self.epsilon, None, learning_rate, None, bytes_down=0, bytes_up=0)
        chosen = self.experiment.evaluate.tests(is_last=False) and epoch % self.experiment.evaluate_every == 0
        if chosen or (epoch == rounds and self.tests):
            self.log.measured = self._measured(model, epoch)
            record = self.log.measured.noted_in(record)
        self._write(record)
        if self.parts:
            write_standing(
                self.out / run_directory.STUDENT, Standing(self.start, step, tuple(self.log.rounds)), self.parts
            )
        self.finished(record)

    def _measured(self, model: nn.Module, epoch: int) -> Measured:
        scores = evaluate(model, self.inputs, self.labels)
        if not math.isfinite(loss := scores.loss):
            raise RunError(f"the student's loss is {loss} after epoch {epoch}: choose a smaller learning rate")
        return Measured(Tested(scores, self.dataset.num_classes))

    def _write(self, record: RoundRecord) -> None:
        self.log.rounds.append(record)
        self.log.chain = run_directory.append_round(self.out, record, self.log.chain)


def _digest(chain: str, data: StudentData) -> str:
    """Return a digest of what the student learns from, and of the run's settings, which its ``chain`` begins with."""
    digest = hashlib.sha256(chain.encode())
    for part in (data.labelled, data.labels, data.unlabelled):
        digest.update(part.numpy(force=True).tobytes())
    return digest.hexdigest()


def student_data(pool: torch.Tensor, labelled: Labelled, num_classes: int) -> StudentData:
    """Return what the student learns from: the records of ``pool`` whose query was answered, and all of it."""
    answered = np.flatnonzero(labelled.labels != UNANSWERED)
    labels = torch.from_numpy(labelled.labels[answered])
    return StudentData(pool[torch.from_numpy(answered)], labels, pool, num_classes)


def evaluate(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Scores:
    """Return how well a model does as it is; its mode is left as it was."""
    training = model.training
    scores = score(model.eval(), inputs, labels)
    model.train(training)
    return scores


def _write_labels(out: Path, settings: Pate, votes: Votes, released: Released, pool: Examples) -> None:
    write_whole(out / LEDGER, released.charges)
    write_whole(out / LABELS, as_npy(released.labelled.labels))
    write_whole(out / QUERIES, as_npy(votes.rows[: settings.queries]))
    if settings.keep_private:
        write_private_votes(out, votes, settings.queries)
        private = json.dumps(_private(settings, votes, released, pool), indent=2)
        write_private(out / PRIVATE, f"{private}\n".encode())


def _private(settings: Pate, votes: Votes, released: Released, pool: Examples) -> dict[str, Any]:
    correct = votes.predictions == pool.labels
    asked = votes.counts[: settings.queries]
    return {
        "private": "computed from the votes, and as private as they are: do not publish",
        "epsilon_data_dependent": data_dependent(settings, votes, released),
        "teacher_accuracy": correct.mean(axis=1).tolist(),
        "ensemble_accuracy": float((asked.argmax(axis=1) == pool.labels[: len(asked)]).mean()),
    }


def _spent(settings: Pate, votes: Votes, released: Released, epsilon: float | None) -> str:
    """Say what the labels cost, on the screen alone: the data-dependent part of it goes into no file."""
    labelled, private = released.labelled, data_dependent(settings, votes, released)
    total = "none (no guarantee)" if epsilon is None else rounded_up(epsilon)
    again = ", paid for by an earlier run with the same settings" if released.reused else ""
    line = (
        f"{labelled.num_asked} queries asked, {labelled.num_answered} answered{again}; epsilon {total} in total at "
        f"delta {settings.labelling.delta:g}, whatever the votes"
    )
    if private is None:
        return line
    shown = rounded_up(private)
    return f"{line}; data-dependent epsilon {shown}: PRIVATE, as it is computed from the votes; do not publish it"


def _facts(settings: Pate, votes: Votes, released: Released, pool: Examples) -> dict[str, Any]:
    labelled = released.labelled
    answered = np.flatnonzero(labelled.labels != UNANSWERED)
    right = labelled.labels[answered] == pool.labels[answered]
    return {
        "teachers": len(votes.predictions),
        "teacher": settings.teachers.kind,
        "mechanism": settings.labelling.mechanism.model_dump(),
        "public_records": len(pool),
        "queries_asked": labelled.num_asked,
        "queries_answered": labelled.num_answered,
        "label_accuracy": float(right.mean()) if len(right) else None,
        "student": kind_of(settings.student),
        "labels": LABELS,
        "asking": settings.asking,
        "votes_reused": votes.reused,
        "labels_reused": released.reused,
        "private_kept": settings.keep_private,
    }
