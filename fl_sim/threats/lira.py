"""Membership inference by a likelihood ratio for each record: LiRA (Carlini et al. 2022, section IV, algorithm 1).

**Shadow runs** have the settings of the audited run with other seeds, but the same partition and initial model. (The
server of a federation knows the partition and the initial model.) A shadow run leaves each record out with a fixed
probability: the setting ``left_out`` of the audited run, or 1/2 if this setting is 0. So each record is in some shadow
runs and not in others. The confidence of a model in the
label of a record, log(p / (1 - p)), is approximately normally distributed over runs. LiRA fits one normal distribution
to the runs with the record and one to the runs without it. The score is the logarithm of the ratio of both densities at
the audited model's confidence.

**Members and non-members** must come from the same distribution, or the test would measure another difference. If the
audited run leaves records out, these records are the non-members, because they were chosen at random. Otherwise, the
non-members are test records. No shadow run trains on test records, so no shadow run contains a non-member. Therefore
the score has the offline form (also section IV): minus the logarithm of the probability that a model without the record
has a higher confidence. For a training record, only the shadow runs without this record are used. For a test record,
the same fraction of shadow runs is used, chosen at random. So the fits of all records have similar errors.

**Over rounds**, the scores of all stored models (the setting ``keep_every``) are added. The sum is the joint likelihood
ratio of these models if their confidences are independent, given the membership of the record. In the offline form, the
sum is Fisher's combination of p-values. The models of one run are not independent, and the fits of early rounds add
errors. The sum is still a valid score, because members and non-members are treated equally. But it may be a weaker
score than that of the final model, so the audit reports both scores.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, changed
from fl_sim.experiment.job import Job, job_of
from fl_sim.kinds import kind_of
from fl_sim.seeding import rng
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent
from fl_sim.store.run_directory import RoundRecord, kept_rounds, read_kept, read_model
from fl_sim.threats.finished import FinishedRun, Judged, logits_of
from fl_sim.training.loop import to_tensors
from fl_sim.types import Examples, Params
from partitions import EvaluationSkew, FeatureSkew, Parts, RecordSkew
from strategies.layer import layer_kinds

LEAST_SHADOWS = 8
"""The smallest number of shadow runs. With fewer runs, many records would be in none of them or in all of them."""

OWN_VARIANCE_FROM = 64
"""The smallest number of shadow runs for separate variances of each record (Carlini et al. 2022, section VI).

With fewer runs, all records have common variances."""

_AT_ONCE = 2_000
"""The number of records in a batch for predictions, to bound the memory."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Audited:
    """The records of an audit: first all members, then all non-members.

    ``members``: the indices of the members, (m,). Members are training records that the run used. ``others``: the
    indices of the non-members, (n,). If ``is_online`` is True, the non-members are training records that the run left
    out, else they are test records.
    """

    members: NDArray[np.int64]
    others: NDArray[np.int64]
    is_online: bool

    @property
    def is_member(self) -> NDArray[np.bool_]:
        """A mask of the audit's records, (m + n,): True for members."""
        return np.arange(len(self.members) + len(self.others)) < len(self.members)

    @classmethod
    def of(cls, finished: FinishedRun) -> "Audited":
        """Return the audited records of the run ``finished``. Raises UserError if its clients change records."""
        job = finished.job
        _check_records(job)
        members, held_out = (_of_members(job, parts) for parts in (job.shards, job.validation))
        if not job.experiment.left_out:
            return cls(members, np.arange(len(job.dataset.test)), is_online=False)
        everything = job_of(changed(job.experiment, left_out=0.0), job.root)
        pool = [_of_members(everything, parts) for parts in (everything.shards, everything.validation)]
        others = np.setdiff1d(np.concatenate(pool), np.concatenate([members, held_out]))
        return cls(members, others, is_online=True)


@dataclass(frozen=True, eq=False)
class Scored:
    """The result of LiRA for all records of ``audited``, first members, then non-members.

    ``by_loss``: the final model's predictions, with their losses. ``by_score``: these predictions with the negative
    score of the final model in place of the loss. ``over_rounds``: these predictions with the negative sum of several
    scores in place of the loss: the scores of the models after ``rounds``. A score is NaN if the record is in all
    shadow runs or in none of them.
    """

    audited: Audited
    by_score: Judged
    over_rounds: Judged
    by_loss: Judged
    rounds: tuple[int, ...]

    @property
    def is_scored(self) -> NDArray[np.bool_]:
        """A mask of the audit's records, (records,): True for each record that has a score."""
        return ~np.isnan(self.by_score.losses)

    def split(self, judged: Judged) -> tuple[Judged, Judged]:
        """Split ``judged``, a field of this object, into members and non-members, without records that lack a score."""
        is_member, is_scored = self.audited.is_member, self.is_scored
        return judged.where(is_member & is_scored), judged.where(~is_member & is_scored)


def check_shadows(shadows: int) -> None:
    """Raise UserError for fewer shadow runs than ``LEAST_SHADOWS``."""
    if shadows < LEAST_SHADOWS:
        raise UserError(
            f"--shadows {shadows} is too few: many records would be in all shadow runs or in none, and LiRA compares "
            f"runs with a record and runs without it; take {LEAST_SHADOWS} or more, 16 are usual"
        )


def shadow_of(experiment: Experiment, number: int) -> Experiment:
    """Return the settings of shadow run ``number`` (from 1). ``experiment``: the settings of the audited run."""
    return changed(
        experiment, seed=int(rng(experiment.seed, "shadow run", number).integers(2**31)),
        partition_seed=experiment.seed_of_partition, model_seed=experiment.seed_of_model,
        left_out=experiment.left_out or 0.5,
    )  # fmt: skip


def attack(finished: FinishedRun, shadows: int, folder: Path, progress: Callable[[str], object]) -> Scored:
    """Make the shadow runs of ``finished`` in ``folder``, and return the scores of all records.

    Finished shadow runs in ``folder`` are not repeated, and an unfinished one is resumed. ``progress``: a function that
    receives progress messages. Raises UserError as ``check_shadows`` and ``Audited.of`` do. Also raises UserError if no
    member or no non-member has a score, or if the confidences of a model are not finite.
    """
    check_shadows(shadows)
    audited, job = Audited.of(finished), finished.job
    labels = np.concatenate([one.labels for one in _examples(audited, job)])
    confidences, taught = list[dict[int, Floats]](), list[NDArray[np.bool_]]()

    def confidences_of(out: Path) -> dict[int, Floats]:
        found = {}
        for server_round, params in _models(finished, out):
            found[server_round] = log_odds(_logits(job, params, audited), torch.from_numpy(labels))
            if not np.isfinite(found[server_round]).all():
                raise UserError(f"the model of {out} after round {server_round} gives numbers that are not finite")
        return found

    for number in range(1, shadows + 1):
        shadow = shadow_of(job.experiment, number)
        said = f"shadow run {number} of {shadows}"
        run(shadow, folder / str(number), job.root, _Shown(progress, said))
        progress(f"{said}: confidences")
        confidences.append(confidences_of(folder / str(number)))
        taught.append(_taught(job_of(shadow, job.root), audited))
    target = confidences_of(finished.out)
    rounds = sorted(set(target).intersection(*confidences))
    is_in, scores = np.stack(taught), list[Floats]()
    for server_round in rounds:
        of_shadows = np.stack([one[server_round] for one in confidences])
        scores.append(score(target[server_round], of_shadows, is_in, is_online=audited.is_online))
    by_loss = judged_by_loss(finished, audited)
    by_score, over_rounds = (replace(by_loss, losses=-values) for values in (scores[-1], np.sum(scores, axis=0)))
    scored = Scored(audited, by_score, over_rounds, by_loss, tuple(rounds))
    if not all(len(some.losses) for some in scored.split(scored.by_score)):
        raise UserError(
            f"every member, or every non-member, is in all {shadows} shadow runs or in none of them, so there is "
            "nothing to compare: set a larger number for --shadows, or give a run with left_out nearer to 0.5"
        )
    return scored


def judged_by_loss(finished: FinishedRun, audited: Audited) -> Judged:
    """Return the predictions of the final model for all records of ``audited``, first members, then non-members."""
    labels = np.concatenate([one.labels for one in _examples(audited, finished.job)])
    return Judged.of(_logits(finished.job, read_model(finished.out), audited), torch.from_numpy(labels))


def score(target: Floats, shadows: Floats, is_in: NDArray[np.bool_], *, is_online: bool) -> Floats:
    """Return the score of each record, (records,). Members tend to have larger scores. NaN: no score is possible.

    ``target``: the confidences of the audited model, (records,). ``shadows``: the confidences of the shadow models,
    (shadows, records). ``is_in``: True where the shadow run contains the record, (shadows, records). ``is_online``:
    True for the log likelihood ratio. False for the offline form: minus the logarithm of the probability that a model
    without the record has a higher confidence.
    """
    from scipy.stats import norm  # noqa: PLC0415 (the import takes half a second)

    without = _fitted(shadows, ~is_in)
    if not is_online:
        return -np.asarray(norm.logsf(target, *without))
    return np.asarray(norm.logpdf(target, *_fitted(shadows, is_in)) - norm.logpdf(target, *without))


def _fitted(confidences: Floats, chosen: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return each record's mean and standard deviation of the ``chosen`` confidences; NaN for too few runs."""
    counts = chosen.sum(0)
    means = np.where(counts > 0, (confidences * chosen).sum(0) / np.maximum(counts, 1), np.nan)
    squares = np.where(chosen, (confidences - means) ** 2, 0.0).sum(0)
    if len(confidences) >= OWN_VARIANCE_FROM:
        variances = np.where(counts > 1, squares / np.maximum(counts - 1, 1), np.nan)
    else:
        variances = np.full(len(counts), squares.sum() / max(1, np.maximum(counts - 1, 0).sum()))
    return means, np.sqrt(np.maximum(variances, 1e-24))


def _of_members(job: Job, parts: Parts) -> NDArray[np.int64]:
    """Return the indices of the records of all clients that may take part in rounds."""
    return parts.records[np.isin(parts.owners, job.members)]


def _check_records(job: Job) -> None:
    experiment = job.experiment
    changes = {
        f"partition={kind_of(experiment.partition)}": isinstance(
            experiment.partition, FeatureSkew | RecordSkew | EvaluationSkew
        ),
        f"attack={kind_of(experiment.attack)}": any(
            kind.tampers(experiment, job.dataset.num_classes) for kind in layer_kinds(experiment)
        ),
        "evaluate.clients, which trains on test records": bool(experiment.evaluate.pooled_share),
    }
    if what := next((what for what, holds in changes.items() if holds), ""):
        raise UserError(
            f"LiRA compares the records of the data set, but clients of this run hold changed records ({what}): take "
            "--method loss, or a run without this setting"
        )


def _examples(audited: Audited, job: Job) -> list[Examples]:
    source = job.dataset.train if audited.is_online else job.dataset.test
    return [job.dataset.train.take(audited.members), source.take(audited.others)]


def _taught(shadow: Job, audited: Audited) -> NDArray[np.bool_]:
    """Return a mask, (records,): True for each of the audit's records that a shadow run contains.

    In the offline form, the score of a record uses only the shadow runs without this record. No shadow run contains
    test records. So random test records are marked as contained, and this shadow run is not used for their scores.
    """
    members = np.isin(audited.members, shadow.shards.records)
    if audited.is_online:
        return np.concatenate([members, np.isin(audited.others, shadow.shards.records)])
    coins = rng(shadow.experiment.seed, "left out test records").random(len(audited.others))
    return np.concatenate([members, coins >= shadow.experiment.left_out])


def _models(finished: FinishedRun, out: Path) -> Iterator[tuple[int, Params]]:
    """Yield (round, parameters) of all models in ``out``, the directory of the run or of a shadow run.

    The final model comes last. Its round is the last round of ``finished``, even if a shadow run stopped earlier.
    """
    beginning, last = finished.procedure.beginning(), int(finished.facts["rounds"])
    for server_round in kept_rounds(out):
        if server_round < last:
            yield server_round, finished.procedure.model_after(read_kept(out, server_round, beginning)[1])
    yield last, read_model(out)


def _logits(job: Job, params: Params, audited: Audited) -> torch.Tensor:
    """Return the logits of the model ``params`` for all records, float64 of shape (records, classes)."""
    model, parts = job.whole_model().to(job.device), []
    for examples in _examples(audited, job):
        for start in range(0, len(examples), _AT_ONCE):
            some = examples.take(np.arange(start, min(start + _AT_ONCE, len(examples))))
            parts.append(logits_of(model, params, to_tensors(some, job.dataset)[0].to(job.device)))
    return torch.cat(parts)


def log_odds(logits: torch.Tensor, labels: torch.Tensor) -> Floats:
    """Return log(p / (1 - p)), (n,), for the probability p of the true class. ``logits``: (n, classes), float64.

    To avoid rounding errors near p = 1, the result is computed as the true logit minus the logsumexp of the other
    logits.
    """
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return (own[:, 0] - others.logsumexp(1)).numpy()


class _Shown(Silent):
    """An observer that reports the rounds of a shadow run. ``said``: the beginning of each progress message."""

    def __init__(self, progress: Callable[[str], object], said: str) -> None:
        self._progress, self._said = progress, said

    def finished_round(self, record: RoundRecord) -> None:
        """Report the number of the round."""
        self._progress(f"{self._said}: round {record.round}")
