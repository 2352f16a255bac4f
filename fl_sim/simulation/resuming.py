"""The start of a run in its run directory: a new run is begun, an old run is resumed, extended or repeated."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_sim.data import fingerprint, is_own
from fl_sim.data.naming import same_but_place
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_of_run
from fl_sim.experiment.identity import CURE, Identity, edited_code, identity_of
from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of
from fl_sim.settings import read_table
from fl_sim.simulation.run_log import RunLog
from fl_sim.simulation.stage import Procedure
from fl_sim.store import run_directory
from fl_sim.store.files import LOCK, is_partial, readable_os_errors, run_lock
from fl_sim.store.run_directory import CHECKPOINT, RoundRecord, read_checkpoint, write_state
from fl_sim.store.tensors import open_state_checksum
from strategies.layer import layer_kinds

_BELIEVED = (run_directory.RESULT, run_directory.ROUNDS, run_directory.START, CHECKPOINT)
"""The files from which a later run with the same settings would continue. Without these files, a run starts again."""


def finished_result(experiment: Experiment, out: Path, now: Identity) -> dict[str, Any] | None:
    """Return the stored result of a finished run of ``experiment`` in ``out``; None if there is no such run.

    A run with another number of rounds is ignored. ``now``: the identity (digests) of the present records and code.
    Raises UserError if ``out`` contains a run with other settings, records or code, or if the stored result does not
    fit the stored rounds.
    """
    earlier = earlier_run(experiment, out, now)
    if earlier is None or earlier.rounds != experiment.rounds or not (out / run_directory.RESULT).exists():
        return None
    result = run_directory.read_result(out)
    if result is None and not (out / CHECKPOINT).exists():
        raise UserError(
            f"{out / run_directory.RESULT} is damaged, so it is unknown whether the run is finished: restore "
            "an unchanged copy of the file, or delete the file to run again"
        )
    if result is None or result.get("status") != "finished":
        return None
    _check_whole(out, result)
    _check_same(out, now)
    if now.has_other_records(str(result.get("records", ""))):
        raise UserError(f"{out} holds a run of other records (the files of {experiment.data} have changed): {CURE}")
    return result


def _check_whole(out: Path, result: Mapping[str, Any]) -> None:
    """Raise UserError if a finished run's ``result`` contradicts ``rounds.jsonl`` or ``config.toml`` in ``out``."""
    there, stated = len(run_directory.read_rounds(out)), result.get("rounds")
    if stated not in {None, there}:
        raise UserError(
            f"{out / run_directory.ROUNDS} holds {there} rounds, but {run_directory.RESULT} states {stated} rounds: "
            f"restore the whole file; {CURE}"
        )
    if result.get("chain") != run_directory.log_chain(out):
        raise UserError(
            f"{out / run_directory.RESULT} says that the run is finished, but it does not belong to "
            f"{run_directory.CONFIG} and {run_directory.ROUNDS} in the same directory, or comes from an older version: "
            "restore the old files, or choose another --out"
        )


def _check_same(out: Path, now: Identity) -> None:
    """Raise UserError if the records or code of the run in ``out`` differ from the present records and code.

    ``now``: the identity (digests) of the present records and code.
    """
    if changed := now.changed(run_directory.read_identity(out)):
        raise UserError(f"{out} holds a run of {changed}: restore the old files; {CURE}")


def objection(experiment: Experiment, out: Path, now: Identity) -> str:
    """Return an error message if ``out`` contains a run with other settings, records or code; otherwise an empty text.

    A different number of rounds is allowed. Damaged files are reported later, when the run is resumed.
    """
    if not any((out / name).exists() for name in _BELIEVED):
        return ""
    with suppress(UserError):
        found = experiment_of_run(read_table(out / run_directory.CONFIG))
        if changed := _other_settings(experiment, found, out, now):
            return f"{out} holds a run with {changed}: choose another --out, or delete it"
        if changed := now.changed(run_directory.read_identity(out)):
            return f"{out} holds a run of {changed}: restore the old files; {CURE}"
    return ""


def on_trust(out: Path, now: Identity) -> str:
    """Return a warning if it is unknown whether records or code have changed since the run; else an empty text."""
    if not (out / run_directory.CONFIG).exists() or not (unknown := now.unverified(run_directory.read_identity(out))):
        return ""
    return (
        f"{out} has no digest of its {unknown} that can be compared here (it was written by an older version, or "
        f"on another machine): it is assumed that its {unknown} are the same as now"
    )


def earlier_run(experiment: Experiment, out: Path, now: Identity | None = None) -> Experiment | None:
    """Return the stored experiment of the run in ``out``; None if there is no run.

    The stored experiment may differ from ``experiment`` in the number of rounds. It may also differ in the path of the
    user's own data files, if the stored digest of the records equals the digest in ``now``. Raises UserError if ``out``
    contains a run with other settings, or files that belong to no run.
    """
    path = out / run_directory.CONFIG
    if path.exists():
        found = experiment_of_run(read_table(path))
        if changed := _other_settings(experiment, found, out, now):
            raise UserError(f"{out} holds a run with {changed}: choose another --out, or delete it")
        return found
    if out.exists() and any(not is_partial(found) and found.name != LOCK for found in out.iterdir()):
        raise UserError(f"{out} is not empty and holds no run: choose another --out")
    return None


def start_or_resume(procedure: Procedure, out: Path) -> tuple[RunLog, int]:
    """Create the run directory, or resume the run in it; return the log and the number of the next round.

    Raises UserError if the files do not belong together, or if they belong to another experiment. A run never resumes
    from incomplete files.
    """
    experiment = procedure.job.experiment
    now = identity_of(experiment, procedure.job.root)
    log = RunLog(procedure.beginning(), records=_records_key(procedure.job))
    there = earlier_run(experiment, out, now)
    if there is not None:
        _check_records(out, log, now)
    if there is not None and there.rounds != experiment.rounds:
        extend(procedure, out, there)
    for kind in layer_kinds(experiment):
        kind.check_directory(experiment, out)
    checkpoint = read_checkpoint(out, log.server)
    if there is not None and checkpoint is not None:
        progress, log.server = checkpoint
        log.rounds = run_directory.truncate_log(out, progress.last_round, progress.chain)
        log.chain, log.layer_states = progress.chain, progress.layers
        log.versions, log.counts_holders = progress.versions, progress.counts_holders
        if doubt := on_trust(out, now):
            log.doubts.append(doubt)
    else:
        _clear(out)
        run_directory.write_config(out, experiment.as_written(), _identity(out, now))
        log.chain = run_directory.chain_start(out)
    log.identity = run_directory.read_identity(out)
    if edited := edited_code(experiment):
        log.doubts.append(edited)
    if state := procedure.kept_by_clients(log.server):
        log.seal = open_state_checksum(out / run_directory.STATE, experiment.num_clients, len(log.rounds), state)
    return log, len(log.rounds) + 1


def _identity(out: Path, now: Identity) -> Mapping[str, Any]:
    """Return the identity (digests of the user's records and code) to write into the run directory.

    The result is the stored identity if it agrees with the present identity ``now``; else it is ``now``.
    """
    recorded = run_directory.read_identity(out) if (out / run_directory.CONFIG).exists() else {}
    return now.written() if now.unverified(recorded) or now.changed(recorded) else recorded


def has_leftovers(experiment: Experiment, out: Path) -> bool:
    """Return True if ``out`` contains files that only an unfinished run needs."""
    if (out / run_directory.STUDENT).exists():
        return True
    there = (out / run_directory.STATE).exists() or (out / CHECKPOINT).exists()
    return there and not _stays_extendable(experiment, out)


def clean_up(experiment: Experiment, out: Path) -> None:
    """Remove the files that a finished run does not need.

    Such files contain private errors and warnings, and the checkpoint of PATE's student. The run's checkpoint and
    client states stay, so that the run can be extended. If the checkpoint and client states are large, or the run
    promises privacy, these files are removed, too.
    """
    if not _stays_extendable(experiment, out):
        if (out / run_directory.STATE).exists():
            shutil.rmtree(out / run_directory.STATE)
        (out / CHECKPOINT).unlink(missing_ok=True)
    for needless in (run_directory.PRIVATE_ERRORS, run_directory.PRIVATE_WARNINGS, run_directory.STUDENT):
        (out / needless).unlink(missing_ok=True)


def _stays_extendable(experiment: Experiment, out: Path) -> bool:
    return not experiment.is_private and num_bytes_kept(out) <= MOST_KEPT


def _records_key(job: Job) -> str:
    """Return a digest of the user's own records; empty for public data sets, whose files are known.

    If a run promises privacy, the digest covers only public facts about the records, such as their number and shape. A
    digest of the records themselves would reveal a record: a person who knows all other records could find this record
    by trying all possible values.
    """
    name, dataset = job.experiment.data, job.dataset
    if not is_own(name):
        return ""
    if not job.experiment.is_private:
        return fingerprint(name, job.root, with_test=True)
    facts = [len(dataset.train), len(dataset.test), dataset.input_shape, dataset.num_classes, dataset.mean, dataset.std]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _check_records(out: Path, log: RunLog, now: Identity) -> None:
    """Raise UserError if the records or code of the run to be resumed have changed since the start of the run."""
    checkpoint = read_checkpoint(out, log.server)
    if checkpoint is not None or (out / run_directory.START).exists():
        _check_same(out, now)
    if checkpoint is not None and checkpoint[0].records not in {"", log.records}:
        raise UserError(f"{out} holds a run of other records (the data have changed since): {CURE}")


def _other_settings(experiment: Experiment, found: Experiment, out: Path, now: Identity | None) -> str:
    """Return a phrase with the settings that differ from the stored experiment ``found``; empty if none differs.

    The settings in ``_FREE``, such as the number of rounds, are not compared: a run may continue with other values of
    these settings. The path of the user's own data files may differ, too, if the digest of the records equals the
    digest that is stored in ``out``.
    """
    compared = (one.model_dump(exclude=_FREE) for one in (experiment, found))
    settings, earlier = compared
    changed = [key for key, value in settings.items() if earlier[key] != value]
    if files := [key for key in changed if _has_other_file(settings[key], earlier[key])]:
        return f"other content in a file of {' and '.join(files)}, which has changed since"
    if "data" in changed and same_but_place(experiment.data, found.data) and now is not None:
        is_moved = now.has_records_of(run_directory.read_identity(out))
        changed = [key for key in changed if key != "data" or not is_moved]
    return f"other settings ({', '.join(changed)})" if changed else ""


def _has_other_file(now: object, then: object) -> bool:
    """Return True if two groups of settings name the same file and differ only in its digest: the file has changed."""
    if not isinstance(now, Mapping) or not isinstance(then, Mapping) or now.get("digest") == then.get("digest"):
        return False
    return {**now, "digest": ""} == {**then, "digest": ""}


def _clear(out: Path) -> None:
    """Remove the files of a run that stopped before the end of its first round, so that the run can start again.

    The privacy ledger is not removed. It contains the costs of all published outputs. If the new start draws other
    noise, its privacy cost is added to the ledger.
    """
    for folder in (run_directory.STATE, run_directory.KEPT):
        if (out / folder).exists():
            shutil.rmtree(out / folder)
    for stale in (run_directory.ROUNDS, run_directory.RESULT, run_directory.MODEL, run_directory.CLIENTS):
        (out / stale).unlink(missing_ok=True)


MOST_KEPT = 64 * 2**20
"""The largest size, in bytes, of a finished run's server state and client states. Larger states are removed."""

_FREE = {"engine", "round_timeout", "rounds", "keep_every"}
"""The settings that may differ when a run is resumed or extended."""

_ANEW = "choose another --out, where the run starts again from round 1"


def num_bytes_kept(out: Path) -> int:
    """Return the bytes that the checkpoint and the client states in ``out`` take on the disk.

    Empty ranges of sparse files take no space on the disk and are not counted.
    """
    states = out / run_directory.STATE
    kept = [out / CHECKPOINT, *(states.iterdir() if states.is_dir() else ())]
    return sum(512 * path.stat().st_blocks for path in kept if path.is_file())


def extend(procedure: Procedure, out: Path, earlier: Experiment) -> None:
    """Change the number of rounds of the run in ``out``: from the number in ``earlier`` to the number in ``procedure``.

    The extended run ends bit-identical to a run that had all rounds from its beginning. Raises UserError, with the
    reason, if the run cannot be extended. For example, a setting depends on the number of rounds, or a privacy promise
    was made for this number. After a crash in the middle, the same command completes the change.
    """
    experiment = procedure.job.experiment
    _check_promises(experiment, out, earlier)
    checkpoint = read_checkpoint(out, procedure.beginning())
    settings = experiment.as_written()
    if checkpoint is not None:
        progress, server = checkpoint
        last = progress.last_round
        content, chain = run_directory.log_with_settings(out, settings, last, _unmeasured(experiment, last))
        # If the hash chains are equal, the checkpoint is changed already: an earlier call was interrupted after this
        # step.
        if progress.chain != chain:
            records = run_directory.truncate_log(out, last, progress.chain)
            _check_rounds(experiment, out, earlier, records)
            if state := procedure.kept_by_clients(server):
                open_state_checksum(out / run_directory.STATE, experiment.num_clients, last, state)
            write_state(out / CHECKPOINT, replace(progress, chain=chain), server)
        run_directory.write_log(out, content)
        run_directory.relink_kept(out, settings, server)
    elif run_directory.read_rounds(out):
        raise UserError(
            f"{out} holds this run of {earlier.rounds} rounds, but not {CHECKPOINT}, so more rounds cannot follow: "
            f"a finished run deletes its checkpoint and client states if they exceed {MOST_KEPT // 2**20} MiB, and "
            f"older versions always deleted them; {_ANEW}"
        )
    for stale in (run_directory.RESULT, run_directory.MODEL, run_directory.CLIENTS):
        (out / stale).unlink(missing_ok=True)
    run_directory.write_config(out, settings, run_directory.read_identity(out))


def check_extension(experiment: Experiment, out: Path, earlier: Experiment, records: Sequence[RoundRecord]) -> None:
    """Raise UserError, with the reason, if the run in ``out`` cannot be extended to ``experiment``.

    ``earlier``: the stored experiment of the run. ``records``: the records of its rounds so far.
    """
    _check_promises(experiment, out, earlier)
    _check_rounds(experiment, out, earlier, records)


def _unmeasured(experiment: Experiment, server_round: int) -> tuple[str, ...]:
    """Return name prefixes, such as ``test_``, of the measures to remove from ``server_round`` in an extended run.

    ``server_round`` was the last round of the shorter run, so it was measured. In a longer run it may be unmeasured.
    """
    if server_round % experiment.evaluate_every:
        return run_directory.MEASURED
    return () if experiment.evaluate.tests(is_last=False) else run_directory.TESTED


def _check_promises(experiment: Experiment, out: Path, earlier: Experiment) -> None:
    held = f"{out} holds this run with rounds={earlier.rounds}"
    if experiment.is_private:
        raise UserError(
            f"{held}, and the run promises privacy for settings that were fixed before its first round: no stated "
            f"epsilon covers rounds that are added after the results were seen; {_ANEW}, with its full privacy cost"
        )
    result = run_directory.read_result(out) or {}
    # a run that an observer stopped may get more rounds
    stopped = result.get("stopped") and not result.get("stopped_by_observer")
    if result.get("status") == "finished" and stopped:
        raise UserError(f"{held}, and it stopped by itself ({result['stopped']}): more rounds change nothing")


def _check_rounds(experiment: Experiment, out: Path, earlier: Experiment, records: Sequence[RoundRecord]) -> None:
    """Raise UserError unless ``experiment`` has more rounds than ``records``, and the same learning rates.

    ``records``: the records of the finished rounds. The learning rate in each record must equal the learning rate of
    this round in ``experiment``.
    """
    if len(records) >= experiment.rounds:
        raise UserError(
            f"{out} holds {len(records)} rounds of this run already, so it cannot be extended to "
            f"rounds={experiment.rounds}: set a larger number of rounds, or {_ANEW}"
        )
    local = experiment.local
    for record in records:
        rate = local.rate_in(record.round, experiment.rounds)
        if rate != record.learning_rate:
            raise UserError(
                f"local.schedule={kind_of(local.schedule)} depends on the number of rounds: the learning rate of round "
                f"{record.round} was {record.learning_rate:g} with rounds={earlier.rounds} in {out}, and would be "
                f"{rate:g} with rounds={experiment.rounds}; {_ANEW}"
            )


def set_aside(experiment: Experiment, out: Path, *, of_any_length: bool = False) -> Path | None:
    """Move the run of ``experiment`` in ``out`` to a new folder next to ``out``; return that folder.

    If ``out`` contains no run, return None. The run's settings and the privacy ledger of Global DP stay in ``out``, and
    the new folder has copies. The ledger in ``out`` is still needed: a repetition with other noise publishes another
    model about the same clients, so its privacy cost is added to the cost in this ledger. Raises UserError if ``out``
    holds another run or other files. Also raises UserError for a run with another number of rounds, unless
    ``of_any_length`` is True. Raises RunError if ``out`` is in use or cannot be written.
    """
    earlier = earlier_run(experiment, out)
    if earlier is None:
        return None
    if earlier.rounds != experiment.rounds and not of_any_length:
        raise UserError(
            f"--again repeats the run in {out} with its rounds={earlier.rounds}, not {experiment.rounds}: choose "
            "another --out"
        )
    with readable_os_errors(), run_lock(out):
        names = (out.with_name(f"{out.name}-before-{number}") for number in itertools.count(1))
        aside = next(path for path in names if not path.exists())
        aside.mkdir()
        stays = {run_directory.CONFIG, run_directory.LEDGER}
        for name in stays:
            if (out / name).exists():
                shutil.copy2(out / name, aside)
        # The result is moved first and the checkpoint last. If the process is killed between two moves, the next start
        # either finds a complete run or refuses the files. In another order, the next start could believe that the run
        # has no finished round, and delete its files.
        moved = sorted({path.name for path in out.iterdir()} - stays - {LOCK, run_directory.RESULT, CHECKPOINT})
        for name in (run_directory.RESULT, *moved, CHECKPOINT):
            if (out / name).exists():
                (out / name).rename(aside / name)
    return aside
