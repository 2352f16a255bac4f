"""A run gets more rounds: it goes on with what it ended with, and ends in the bits of a run that had them at once.

So nothing that was done may have depended on the number of rounds, and nothing may have been promised for it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.kinds import kind_of
from fl_sim.simulation.procedure import Procedure
from fl_sim.store import run_directory
from fl_sim.store.run_directory import CHECKPOINT, RoundRecord, read_checkpoint, write_checkpoint
from fl_sim.store.tensors import open_state_checksum

MOST_KEPT = 64 * 2**20
"""Bytes on the disk. What a finished run ended with stays where it takes no more: the server's state, and clients'."""

_ANEW = "choose another --out, where the run begins anew"


def num_bytes_kept(out: Path) -> int:
    """Return how many bytes what the run in ``out`` can go on with takes on the disk; holes in files take none."""
    states = out / run_directory.STATE
    kept = [out / CHECKPOINT, *(states.iterdir() if states.is_dir() else ())]
    return sum(512 * path.stat().st_blocks for path in kept if path.is_file())


def extend(procedure: Procedure, out: Path, earlier: Experiment) -> None:
    """Make the run of ``earlier`` in ``out`` one of the procedure's experiment, which has another number of rounds.

    What is left of this by a crash, the same command finishes. Raises UserError, with the reason, where the run that
    goes on would not be the one that has all rounds from the beginning.
    """
    experiment = procedure.job.experiment
    _check_promises(experiment, out, earlier)
    checkpoint = read_checkpoint(out, procedure.beginning())
    settings = experiment.as_written()
    if checkpoint is not None:
        progress, server = checkpoint
        last = progress.last_round
        log = run_directory.log_with_settings(out, settings, last, _unmeasured(experiment, last))
        if progress.chain != log.chain:  # which it is where a crash came between what is written below
            records = run_directory.truncate_log(out, last, progress.chain)
            _check_rounds(experiment, out, earlier, records)
            if state := procedure.kept_by_clients(server):
                open_state_checksum(out / run_directory.STATE, experiment.num_clients, last, state)
            write_checkpoint(out, replace(progress, chain=log.chain), server)
        run_directory.write_log(out, log)
    elif run_directory.read_rounds(out):
        raise UserError(
            f"{out} holds this run of {earlier.rounds} rounds, but not {CHECKPOINT}, without which it cannot go on: "
            f"what a finished run ended with is kept up to {MOST_KEPT // 2**20} MiB, and was not by older versions; "
            f"{_ANEW}"
        )
    for stale in (run_directory.RESULT, run_directory.MODEL):
        (out / stale).unlink(missing_ok=True)
    run_directory.write_config(out, settings, run_directory.read_identity(out))


def check_extension(experiment: Experiment, out: Path, earlier: Experiment, records: Sequence[RoundRecord]) -> None:
    """Raise UserError, with the reason, where the run in ``out`` cannot go on to be ``experiment``.

    ``records``: the rounds that it has, as a run of ``earlier``.
    """
    _check_promises(experiment, out, earlier)
    _check_rounds(experiment, out, earlier, records)


def _unmeasured(experiment: Experiment, server_round: int) -> tuple[str, ...]:
    """Return which measures of a round are none where it is not the last one."""
    if server_round % experiment.evaluate_every:
        return run_directory.MEASURED
    return () if experiment.evaluate.tests(is_last=False) else run_directory.TESTED


def _check_promises(experiment: Experiment, out: Path, earlier: Experiment) -> None:
    held = f"{out} holds this run with rounds={earlier.rounds}"
    if experiment.is_private:
        raise UserError(
            f"{held}, which promises privacy for what was fixed before it began: rounds added after its results were "
            f"seen are covered by no epsilon that was stated; {_ANEW}, and pays from the beginning"
        )
    result = run_directory.read_result(out) or {}
    if result.get("status") == "finished" and result.get("stopped"):
        raise UserError(f"{held}, and it stopped by itself ({result['stopped']}): more of them change nothing")


def _check_rounds(experiment: Experiment, out: Path, earlier: Experiment, records: Sequence[RoundRecord]) -> None:
    """Raise UserError where a run of the experiment would have done other rounds, or no more than there are."""
    if len(records) >= experiment.rounds:
        raise UserError(
            f"{out} holds {len(records)} rounds of this run already, so rounds={experiment.rounds} cannot be what it "
            f"goes on to: take more of them, or {_ANEW}"
        )
    local = experiment.local
    for record in records:
        rate = local.rate_in(record.round, experiment.rounds)
        if rate != record.learning_rate:
            raise UserError(
                f"local.schedule={kind_of(local.schedule)} depends on the number of rounds: round {record.round} has "
                f"the learning rate {record.learning_rate:g} with rounds={earlier.rounds}, as {out} holds it, and "
                f"{rate:g} with rounds={experiment.rounds}; {_ANEW}"
            )
