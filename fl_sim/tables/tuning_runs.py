"""Where a trial runs, and what its directory says that it came to."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_sim.data import load
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.identity import identity_of
from fl_sim.experiment.job import resolved
from fl_sim.settings_file import read_table
from fl_sim.simulation.resuming import objection
from fl_sim.store import run_directory
from fl_sim.store.checkpoint import CHECKPOINT
from fl_sim.store.run_directory import RoundRecord, read_rounds
from fl_sim.tables.words import run_name


@dataclass(frozen=True)
class Outcome:
    """What a trial came to: its accuracy in [0, 1], None where it diverged, and then of what.

    ``trained``: how many rounds it finished beyond those that another rung has paid for. ``seconds`` of these, known
    only roughly where the run is private.
    """

    accuracy: float | None
    trained: int
    seconds: float
    error: str = ""


def directory_of(experiment: Experiment, folder: Path, data_root: Path | None) -> Path:
    """Return where a trial runs on its rung.

    Trials with the same settings, of whatever row, are one run. It goes on from rung to rung in one directory, unless
    what it does depends on how many rounds it has, or what it could go on with was too large to be kept.
    """
    of_any_length = Experiment.model_validate({**dict(experiment), "rounds": 1})
    shared = folder / run_name(of_any_length, load(experiment.data, data_root, experiment.features))
    if goes_on(experiment) and _can_go_on(shared, experiment.rounds):
        return shared
    return folder / f"{shared.name}-{experiment.rounds}-rounds"


def goes_on(experiment: Experiment) -> bool:
    """Say whether a trial can get more rounds: what it does depends on nothing that more of them would change."""
    schedule, rounds = experiment.local.schedule, experiment.rounds
    return (
        not experiment.is_private
        and experiment.calibrate.kind == "none"
        and all(schedule.factor(each, rounds) == schedule.factor(each, rounds + 1) for each in range(1, rounds + 1))
    )


def outcome_in(directory: Path, experiment: Experiment, after: int, data_root: Path | None) -> Outcome | None:
    """Return what the trial ``experiment`` came to, None where it is not known yet, or is of other records or code.

    ``after``: how many of its rounds another rung has paid for. Raises UserError for a damaged log.
    """
    result = run_directory.read_result(directory) or {}
    if not (directory / run_directory.CONFIG).exists():
        return None
    chosen = resolved(experiment, data_root)
    if objection(chosen, directory, identity_of(chosen, data_root)):
        return None  # whoever runs it will say so
    records = read_rounds(directory)
    ended_here = read_table(directory / run_directory.CONFIG).get("rounds") == experiment.rounds
    new = records[after : experiment.rounds]
    cost = len(new), _seconds(new, result, anew=not after)
    if ended_here and result.get("status") == "finished" and result.get("rounds") == len(records):
        return Outcome(_final_accuracy(result), *cost)
    if result.get("diverged") and (ended_here or len(records) < experiment.rounds):
        return Outcome(None, *cost, str(result["error"]))
    if len(records) >= experiment.rounds:  # it has gone on since
        return Outcome(_accuracy(records[experiment.rounds - 1]), *cost)
    return None


def _can_go_on(directory: Path, rounds: int) -> bool:
    if not (directory / run_directory.CONFIG).exists() or (directory / CHECKPOINT).exists():
        return True
    return len(read_rounds(directory)) not in range(1, rounds)


def _final_accuracy(result: Mapping[str, Any]) -> float:
    """Return what a trial is judged by: accuracy on validation, or on the test records of a public data set."""
    accuracy = result["validation"]["final_accuracy"] if "validation" in result else result["final_accuracy"]
    assert isinstance(accuracy, float), "the last round is evaluated"
    return accuracy


def _accuracy(record: RoundRecord) -> float:
    accuracy = record.test_accuracy if record.validation_accuracy is None else record.validation_accuracy
    assert accuracy is not None, "every round of a trial is evaluated"
    return accuracy


def _seconds(records: list[RoundRecord], result: Mapping[str, Any], *, anew: bool) -> float:
    told = result.get("seconds", {})
    before = float(told.get("preprocess", 0.0)) if anew else 0.0
    timed = [record.seconds for record in records if record.seconds is not None]
    return before + (sum(timed) if len(timed) == len(records) else float(told.get("train", 0.0)))
