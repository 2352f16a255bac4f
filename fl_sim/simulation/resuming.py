"""A run directory is made, or taken up where an earlier run stopped, if all in it fits together."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from clients.frequency_sums import STEPS
from fl_sim.data import fingerprint, is_own
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import Job
from fl_sim.settings_file import read_table
from fl_sim.simulation.extending import MOST_KEPT, extend, num_bytes_kept
from fl_sim.simulation.procedure import Procedure
from fl_sim.simulation.run_log import RunLog
from fl_sim.store import run_directory
from fl_sim.store.checkpoint import CHECKPOINT, read_checkpoint
from fl_sim.store.files import is_partial, read_whole
from fl_sim.store.locks import LOCK
from fl_sim.store.seal import open_seal
from strategies.global_dp import GlobalDP
from strategies.private_start import PrivateStart


def finished_result(experiment: Experiment, out: Path) -> dict[str, Any] | None:
    """Return what a finished run of ``experiment`` in ``out`` says; None where there is none, or one of other rounds.

    Raises UserError where ``out`` holds a run with other settings, or a result that is not of the rounds beside it.
    """
    earlier = earlier_run(experiment, out)
    if earlier is None or earlier.rounds != experiment.rounds or not (out / run_directory.RESULT).exists():
        return None
    result = run_directory.read_result(out)
    if result is None and not (out / CHECKPOINT).exists():
        raise UserError(
            f"{out / run_directory.RESULT} is damaged, so nobody can tell whether the run is finished: put an "
            "unchanged copy of it back, or delete it to run again"
        )
    if result is None or result.get("status") != "finished":
        return None
    if result.get("chain") != run_directory.chained(out):
        raise UserError(
            f"{out / run_directory.RESULT} says that the run is finished, but it does not belong to "
            f"{run_directory.CONFIG} and {run_directory.ROUNDS} beside it, or comes from an older version: put the "
            "files back as they were, or choose another --out"
        )
    return result


def earlier_run(experiment: Experiment, out: Path) -> Experiment | None:
    """Return the run of ``experiment`` that ``out`` holds, which may have another number of rounds; None without one.

    Raises UserError where it holds one with other settings, or anything else.
    """
    path = out / run_directory.CONFIG
    if path.exists():
        found = experiment_from(read_table(path))
        settings, earlier = _settings(experiment), _settings(found)
        if earlier != settings:
            changed = ", ".join(key for key, value in settings.items() if earlier[key] != value)
            raise UserError(f"{out} holds a run with other settings ({changed}): choose another --out, or delete it")
        return found
    if out.exists() and any(not is_partial(found) and found.name != LOCK for found in out.iterdir()):
        raise UserError(f"{out} is not empty and holds no run: choose another --out")
    return None


def take_up(procedure: Procedure, out: Path) -> tuple[RunLog, int]:
    """Make the run directory, or take it up; return what the run has to show so far, and the round to go on with.

    Raises UserError where what is there does not fit together, or does not fit the experiment: never goes on from less.
    """
    experiment = procedure.job.experiment
    log = RunLog(procedure.beginning(), records=_records_key(procedure.job))
    there = earlier_run(experiment, out)
    if there is not None:
        _check_records(out, log)
    if there is not None and there.rounds != experiment.rounds:
        extend(procedure, out, there)
    if isinstance(experiment.aggregator, GlobalDP):
        beforehand = len(STEPS) if isinstance(experiment.preprocess, PrivateStart) else 0
        _check_paid(out, getattr(experiment.sampler, "rounds_apart", 1), beforehand)
    checkpoint = read_checkpoint(out, log.server)
    if there is not None and checkpoint is not None:
        progress, log.server = checkpoint
        log.rounds = run_directory.keep_rounds(out, progress.last_round, progress.chain)
        log.chain, log.clipping_norm, log.receipt = progress.chain, progress.clipping_norm, progress.receipt
        log.versions, log.counts_holders = progress.versions, progress.counts_holders
    else:
        _clear(out)
        run_directory.write_config(out, experiment.as_written())
        log.chain = run_directory.chain_start(out)
    if state := procedure.kept_by_clients(log.server):
        log.seal = open_seal(out / run_directory.STATE, experiment.num_clients, len(log.rounds), state)
    return log, len(log.rounds) + 1


def has_leftovers(experiment: Experiment, out: Path) -> bool:
    """Say whether ``out`` holds what only an unfinished run needs."""
    if (out / run_directory.STUDENT).exists():
        return True
    there = (out / run_directory.STATE).exists() or (out / CHECKPOINT).exists()
    return there and not _can_go_on(experiment, out)


def clean_up(experiment: Experiment, out: Path) -> None:
    """Remove what a finished run does not need: what its clients once failed of, and what it could not go on with.

    The checkpoint and what clients kept stay, unless they are large or the run promises privacy.
    """
    if not _can_go_on(experiment, out):
        if (out / run_directory.STATE).exists():
            shutil.rmtree(out / run_directory.STATE)
        (out / CHECKPOINT).unlink(missing_ok=True)
    for needless in (run_directory.PRIVATE_ERRORS, run_directory.PRIVATE_WARNINGS, run_directory.STUDENT):
        (out / needless).unlink(missing_ok=True)


def _can_go_on(experiment: Experiment, out: Path) -> bool:
    return not experiment.is_private and num_bytes_kept(out) <= MOST_KEPT


def _records_key(job: Job) -> str:
    """Return a digest of the user's own records, empty for public ones, whose files are known.

    Where a run promises privacy, a digest of all that is public about them alone: whoever knows all records but one
    could find that one by trying.
    """
    name, dataset = job.experiment.data, job.dataset
    if not is_own(name):
        return ""
    if not job.experiment.is_private:
        return fingerprint(name, job.root, with_test=True)
    facts = [len(dataset.train), len(dataset.test), dataset.input_shape, dataset.num_classes, dataset.mean, dataset.std]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _check_records(out: Path, log: RunLog) -> None:
    """Raise UserError where a run that is to go on has begun on other records."""
    checkpoint = read_checkpoint(out, log.server)
    if checkpoint is not None and checkpoint[0].records not in {"", log.records}:
        raise UserError(
            f"{out} holds a run on other records: what its data name has changed since; put that back as it was, "
            "choose another --out, or run from the beginning by --again"
        )


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Return what two runs must have in common for one to be the other, or to be where the other goes on."""
    return experiment.model_dump(exclude={"engine", "round_timeout", "rounds"})


def _check_paid(out: Path, rounds_of_a_charge: int, beforehand: int) -> None:
    """Raise RunError where rounds of a private run were released, but are not in its ledger any more.

    ``beforehand``: the number of charges before the first round. The receipt in the checkpoint says more, but not of a
    round that was seen in the log and has no checkpoint.
    """
    released = len(run_directory.read_rounds(out))
    path = out / run_directory.LEDGER
    charges = read_whole(path).count(b"\n") - 1 if path.exists() else 0
    if released and (charges - beforehand) * rounds_of_a_charge < released:
        raise RunError(
            f"{path} holds {charges} charges, but {released} rounds were released: put an unchanged copy of it back, "
            "or start a new run in a fresh directory, which pays again"
        )


def _clear(out: Path) -> None:
    """Remove what a run that never finished a round has left.

    Never the ledger: what was released before stays paid for, and a run again with other noise pays again.
    """
    if (out / run_directory.STATE).exists():
        shutil.rmtree(out / run_directory.STATE)
    for stale in (run_directory.ROUNDS, run_directory.RESULT, run_directory.MODEL):
        (out / stale).unlink(missing_ok=True)
