"""The steps of a PATE run: teachers vote, the aggregator makes noisy labels, and a student is trained on the labels."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of
from fl_sim.privacy.terms import rounded_up
from fl_sim.seeding import seed_torch, torch_kept
from fl_sim.simulation.measuring import Measured
from fl_sim.simulation.run_log import RunLog
from fl_sim.simulation.stage import order_of
from fl_sim.stages.pate.noisy_labels import (
    LEDGER,
    Released,
    Votes,
    as_npy,
    prepare_votes,
    release_labels,
    write_private_votes,
)
from fl_sim.stages.pate.procedure import traffic_of_votes
from fl_sim.stages.pate.statements import data_dependent, statements_of
from fl_sim.store import run_directory
from fl_sim.store.files import read_whole, write_whole
from fl_sim.store.run_directory import RoundRecord, coarse, digest_of, metadata_in
from fl_sim.store.tensors import write_private
from fl_sim.training.evaluation import Scores, score
from fl_sim.training.loop import to_tensors
from fl_sim.types import Dataset, Examples, Params, ServerState
from strategies.pate.labelling import UNANSWERED, Labelled
from strategies.pate.semi_supervised import representatives
from strategies.pate.settings import Pate
from strategies.pate.student import StudentData, TrainingPart

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
    """Run PATE. ``say`` receives progress messages, and ``finished`` a ``RoundRecord`` for each student epoch.

    Raises RunError if no teacher votes, if no query is answered, or if the student diverges. Without noise on the
    votes, one failed teacher also raises RunError.
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
    """Return the row numbers of all records of the public pool, in the order of the queries."""
    if settings.asking == "in-order":
        return np.arange(len(pool), dtype=np.int64)
    return representatives(to_tensors(pool, dataset)[0], len(pool))


class _Training:
    """The student's training: as many epochs as the setting ``rounds``. The log gets one line for each epoch."""

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
        self.parts: Mapping[str, TrainingPart] = {}
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
        # If an earlier process already took all steps of the training, the final model is not measured yet.
        if self.log.measured is None and self.log.rounds and self.tests:
            self.log.measured = self._measured(model, len(self.log.rounds))
        return model

    def begin(self, parts: Mapping[str, TrainingPart]) -> int:
        """Restore ``parts`` from the checkpoint of an earlier process; return the number of steps taken so far.

        ``parts``: {name: object} of all objects that training changes, such as the model and the optimizer. Without a
        usable checkpoint, nothing is restored and 0 is returned.
        """
        self.parts, path = parts, self.out / run_directory.STUDENT
        if not path.exists():
            return 0
        standing, tensors = read_student(path)
        if standing.start != self.start:
            self.say("the student's training restarts: labels or settings differ from those of the checkpoint")
            return 0
        restore(path, tensors, parts)
        for record in standing.rounds:
            self._write(record)
            self.finished(record)
        self.say(f"the student's training resumes after epoch {len(standing.rounds)} of {self.experiment.rounds}")
        return standing.steps

    def __call__(self, step: int, learning_rate: float, model: nn.Module) -> None:
        """Log the epoch that ends with step ``step``, and write a checkpoint.

        If no epoch ends with this step, do nothing. If the student is due to be tested, the log entry contains its
        measures.
        """
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
            checkpoint = StudentCheckpoint(self.start, step, tuple(self.log.rounds))
            write_student(self.out / run_directory.STUDENT, checkpoint, self.parts)
        self.finished(record)

    def _measured(self, model: nn.Module, epoch: int) -> Measured:
        scores = evaluate(model, self.inputs, self.labels)
        if not math.isfinite(loss := scores.loss):
            raise RunError(f"the student's loss is {loss} after epoch {epoch}: choose a smaller learning rate")
        return Measured.of(scores, self.dataset.num_classes)

    def _write(self, record: RoundRecord) -> None:
        self.log.rounds.append(record)
        self.log.chain = run_directory.append_round(self.out, record, self.log.chain)


def _digest(chain: str, data: StudentData) -> str:
    """Return a digest of the student's training data and of ``chain``, which is a digest of the run's settings."""
    digest = hashlib.sha256(chain.encode())
    for part in (data.labelled, data.labels, data.unlabelled):
        digest.update(part.numpy(force=True).tobytes())
    return digest.hexdigest()


def student_data(pool: torch.Tensor, labelled: Labelled, num_classes: int) -> StudentData:
    """Return the student's training data: the labelled records (answered queries), and all records of ``pool``."""
    answered = np.flatnonzero(labelled.labels != UNANSWERED)
    labels = torch.from_numpy(labelled.labels[answered])
    return StudentData(pool[torch.from_numpy(answered)], labels, pool, num_classes)


def evaluate(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Scores:
    """Return the scores of a model in evaluation mode. Afterwards the model has its earlier mode again."""
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
        asked = votes.counts[: settings.queries]
        private = {
            "private": "these values are private, because they are computed from the votes: do not publish",
            "epsilon_data_dependent": data_dependent(settings, votes, released),
            "teacher_accuracy": (votes.predictions == pool.labels).mean(axis=1).tolist(),
            "ensemble_accuracy": float((asked.argmax(axis=1) == pool.labels[: len(asked)]).mean()),
        }
        write_private(out / PRIVATE, f"{json.dumps(private, indent=2)}\n".encode())


def _spent(settings: Pate, votes: Votes, released: Released, epsilon: float | None) -> str:
    """Return a line for the user about the privacy cost of the labels.

    The line is only for the screen. The data-dependent part of the cost is written to no file.
    """
    labelled, private = released.labelled, data_dependent(settings, votes, released)
    total = "none (no guarantee)" if epsilon is None else rounded_up(epsilon)
    again = ", charged by an earlier run with the same settings" if released.reused else ""
    line = (
        f"{labelled.num_asked} queries asked, {labelled.num_answered} answered{again}; epsilon {total} in total at "
        f"delta {settings.labelling.delta:g}, for any votes"
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


@dataclass(frozen=True)
class StudentCheckpoint:
    """The progress of the student's training.

    ``start``: a digest of everything that the training depends on. ``steps``: the number of steps taken so far.
    ``rounds``: the log entries of the epochs so far.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    start: str
    steps: int
    rounds: tuple[RoundRecord, ...]


_CHECKPOINT = TypeAdapter(StudentCheckpoint)


def write_student(path: Path, standing: StudentCheckpoint, parts: Mapping[str, TrainingPart]) -> None:
    """Write a checkpoint atomically. ``parts``: {name: object} of all objects that training changes."""
    tensors = dict(_named(parts))
    facts = _CHECKPOINT.dump_json(standing).decode()
    write_whole(path, save(tensors, {"standing": facts, "sha256": digest_of(facts, dict(sorted(tensors.items())))}))


def read_student(path: Path) -> tuple[StudentCheckpoint, Params]:
    """Return the progress and the tensors in a file of ``write_student``. Raises UserError for a damaged file."""
    content = read_whole(path)
    try:
        tensors, said = load(content), metadata_in(content)
        standing = _CHECKPOINT.validate_json(said["standing"])
        if said["sha256"] != digest_of(said["standing"], dict(sorted(tensors.items()))):
            raise ValueError("its checksum does not match")  # noqa: TRY301 (one message for all that is wrong with a file)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = "its metadata are not readable" if isinstance(error, ValidationError) else error
        raise UserError(
            f"{path} is damaged ({reason}): delete it; the student is then trained from the start"
        ) from error
    return standing, tensors


def restore(path: Path, tensors: Params, parts: Mapping[str, TrainingPart]) -> None:
    """Load ``tensors`` into ``parts``. Raises UserError if the tensors' names or shapes do not fit ``parts``."""
    fresh = {name for name, part in parts.items() if not isinstance(part, torch.optim.Optimizer)}
    wanted = {name: value.shape for name, value in _named({name: parts[name] for name in fresh})}
    found = {name: value.shape for name, value in tensors.items() if name.split("/")[0] in fresh}
    if sorted(wanted) != sorted(found) or {name.split("/")[0] for name in tensors} - set(parts):
        raise UserError(
            f"{path} does not fit this version of the code: delete it; the student is then trained from the start"
        )
    for name, part in parts.items():
        own = {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
        try:
            part.load_state_dict(_of_optimizer(part, own) if isinstance(part, torch.optim.Optimizer) else own)
        except (RuntimeError, ValueError) as error:  # raised if the stored tensors have other shapes
            raise UserError(
                f"{path} does not fit: {name}: {error}; delete it; the student is then trained from the start"
            ) from error


def _named(parts: Mapping[str, TrainingPart]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for every tensor of ``parts``; the name is "part/key", such as "model/0.weight"."""
    for name, part in parts.items():
        state = part.state_dict()
        if isinstance(part, torch.optim.Optimizer):  # its parameter groups follow from settings
            state = {f"{index}/{key}": value for index, of in state["state"].items() for key, value in of.items()}
        for key, value in state.items():
            assert isinstance(value, torch.Tensor), f"{name}: {key} is no tensor"
            yield f"{name}/{key}", value.detach().cpu().contiguous().clone()


def _of_optimizer(optimizer: torch.optim.Optimizer, tensors: Params) -> dict[str, Any]:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        index, kind = key.split("/")
        like = weights[int(index)]
        # Fused optimisers need state tensors with the same memory layout as the weights.
        laid_out = torch.empty_like(like).copy_(value) if value.shape == like.shape else value
        state.setdefault(int(index), {})[kind] = laid_out
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
