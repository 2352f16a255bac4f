"""Functions for a table's earlier runs on disk: they read results, extend runs, or find runs that must be repeated."""

import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_sim.data import load
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_of_run
from fl_sim.experiment.identity import identity_of
from fl_sim.experiment.job import resolved
from fl_sim.kinds import is_none
from fl_sim.settings import read_table
from fl_sim.simulation.resuming import check_extension, objection, on_trust, set_aside
from fl_sim.simulation.resuming import finished_result as matching_result
from fl_sim.store import run_directory
from fl_sim.store.files import readable_os_errors, run_lock
from fl_sim.store.run_directory import CHECKPOINT, RoundRecord, read_rounds
from fl_sim.tables.labels import run_name

_NEEDED = (run_directory.CONFIG, run_directory.ROUNDS, CHECKPOINT)


def begin_with_shorter(experiment: Experiment, out: Path, data_root: Path | None) -> Path | None:
    """Copy an earlier, shorter run to the new directory ``out``, to extend it there; return the earlier directory.

    The earlier run must be a finished run in the parent folder of ``out``, with the settings of ``experiment`` but
    fewer rounds. Its extension must be bit-identical to a run of ``experiment``. If there are several such runs, the
    run with the most rounds is copied. The result is None if there is no such run. The files of the earlier run do not
    change. All defaults in ``experiment`` must be filled in (``resolved``). Raises RunError if the copy cannot be
    written.
    """
    if out.exists() or not out.parent.is_dir():
        return None
    for earlier, folder in sorted(_shorter(experiment, out, data_root), key=lambda found: -found[0].rounds):
        with suppress(UserError, RunError):  # runs that are damaged, in use or not extendable are skipped
            check_extension(experiment, folder, earlier, read_rounds(folder))
            with run_lock(folder):
                _copy(folder, out)
            return folder
    return None


def finished_result(directory: Path, experiment: Experiment, data_root: Path | None) -> dict[str, Any] | None:
    """Return the content of ``result.json`` if ``directory`` has a finished run of ``experiment``, else None.

    The result is also None for a damaged run, and for a run with different settings, records or code. In these cases,
    the worker that later executes the run reports the reason. All defaults in ``experiment`` must be filled in
    (``resolved``).
    """
    result = run_directory.read_result(directory)
    if result is None or result.get("status") != "finished":
        return None
    with suppress(UserError, OSError):
        return matching_result(experiment, directory, identity_of(experiment, data_root))
    return None


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of a trial of the hyperparameter search on one rung. A rung is a stage of successive halving.

    ``accuracy``: in [0, 1]; None if the trial diverged. ``error``: the error message of a trial that diverged.
    ``trained``: number of rounds trained on this rung. Rounds of earlier rungs are not counted.
    ``seconds``: time of these rounds; the time of a private run is rounded up.
    """

    accuracy: float | None
    trained: int
    seconds: float
    error: str = ""


def trial_directory(experiment: Experiment, folder: Path, data_root: Path | None) -> Path:
    """Return the directory in ``folder`` where a trial of the hyperparameter search has its run.

    ``experiment``: the trial on one rung (stage) of successive halving. Trials with equal settings share one run, even
    if the trials belong to different rows of the table. The next rung usually extends this run in the same directory.
    If the run cannot be extended (see ``can_extend``), or its checkpoint was too large to write, the next rung has
    another directory.
    """
    of_any_length = Experiment.model_validate({**dict(experiment), "rounds": 1})
    shared = folder / run_name(of_any_length, load(experiment.data, data_root, experiment.features))
    is_new = not (shared / run_directory.CONFIG).exists()
    has_checkpoint = is_new or (shared / CHECKPOINT).exists()
    if can_extend(experiment) and (has_checkpoint or len(read_rounds(shared)) not in range(1, experiment.rounds)):
        return shared
    return folder / f"{shared.name}-{experiment.rounds}-rounds"


def can_extend(experiment: Experiment) -> bool:
    """Return True if the run of a trial can later be extended by more rounds.

    A run can be extended if the learning rate of each round does not depend on the planned number of rounds. Private
    runs, and runs with calibration after the last round, cannot be extended.
    """
    schedule, rounds = experiment.local.schedule, experiment.rounds
    return (
        not experiment.is_private
        and is_none(experiment.calibrate)
        and all(schedule.factor(each, rounds) == schedule.factor(each, rounds + 1) for each in range(1, rounds + 1))
    )


def trial_outcome(directory: Path, experiment: Experiment, after: int, data_root: Path | None) -> TrialOutcome | None:
    """Return the outcome of the trial ``experiment`` in ``directory``; None if there is no finished run of the trial.

    The result is also None for a run that was made from other records or with other code. ``after``: the number of
    rounds that an earlier rung (stage of successive halving) already trained. Raises UserError for a damaged
    ``rounds.jsonl``.
    """
    result = run_directory.read_result(directory) or {}
    if not (directory / run_directory.CONFIG).exists():
        return None
    chosen = resolved(experiment, data_root)
    if objection(chosen, directory, identity_of(chosen, data_root)):
        return None  # the worker that executes the trial will report the difference
    records = read_rounds(directory)
    ended_here = read_table(directory / run_directory.CONFIG).get("rounds") == experiment.rounds
    new = records[after : experiment.rounds]
    cost = len(new), _seconds(new, result, anew=not after)
    if ended_here and result.get("status") == "finished" and result.get("rounds") == len(records):
        return TrialOutcome(result.get("validation", result)["final_accuracy"], *cost)
    if result.get("diverged") and (ended_here or len(records) < experiment.rounds):
        return TrialOutcome(None, *cost, str(result["error"]))
    if len(records) >= experiment.rounds:  # a later rung (stage) of the search may have extended the run
        record = records[experiment.rounds - 1]
        accuracy = record.test_accuracy if record.validation_accuracy is None else record.validation_accuracy
        assert accuracy is not None, "every round of a trial is evaluated"
        return TrialOutcome(accuracy, *cost)
    return None


def check_earlier(runs: Mapping[str, Experiment], folder: Path, data_root: Path | None, *, again: bool) -> list[str]:
    """Check that earlier runs in ``folder`` fit the planned ``runs``, {name: experiment}; return messages for the user.

    An earlier run does not fit if its records or its code differ from those of the planned run. ``again``: True moves
    such a run to another directory, so that it is repeated; False raises UserError. A run with other settings always
    raises UserError.
    """
    differing: dict[str, str] = {}
    trusted = []
    for name, given in runs.items():
        if not (folder / name).exists():
            continue
        experiment = resolved(given, data_root)
        now = identity_of(experiment, data_root)
        if why := objection(experiment, folder / name, now):
            differing[name] = why
        elif doubt := on_trust(folder / name, now):
            trusted.append(doubt)
    messages = [f"{trusted[0]}{_more(trusted)}"] if trusted else []
    if differing and not again:
        raise UserError(f"{next(iter(differing.values()))}{_more(differing)}")
    for name in differing:
        experiment = resolved(runs[name], data_root)
        aside = set_aside(experiment, folder / name, of_any_length=True)
        messages.append(f"the earlier run in {folder / name} was moved to {aside}, and is repeated")
    return messages


def _shorter(experiment: Experiment, out: Path, data_root: Path | None) -> Iterator[tuple[Experiment, Path]]:
    """Yield (experiment, directory) of each finished run in the parent folder of ``out`` with fewer rounds.

    Except for the number of rounds, these runs have the settings, records and code of ``experiment``.
    """
    dataset = load(experiment.data, data_root, experiment.features)
    readable = run_name(experiment, dataset).rpartition("-")[0]
    for folder in out.parent.glob(f"{readable}-*"):
        if not all((folder / name).exists() for name in _NEEDED):
            continue
        with suppress(UserError):
            earlier = experiment_of_run(read_table(folder / run_directory.CONFIG))
            result = run_directory.read_result(folder) or {}
            longer = Experiment.model_validate({**dict(earlier), "rounds": experiment.rounds})
            # Two runs with equal settings may have different numbers of records. Their names then differ, because the
            # name of a run contains a hash of these numbers.
            same = run_name(longer, dataset) == run_name(experiment, dataset)
            if objection(earlier, folder, identity_of(experiment, data_root)):
                continue
            if same and folder.name == run_name(earlier, dataset) and result.get("status") == "finished":
                yield earlier, folder


def _copy(folder: Path, out: Path) -> None:
    with readable_os_errors(), tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=out.parent) as temporary:
        copied = Path(temporary) / "run"
        copied.mkdir()
        for name in _NEEDED:
            shutil.copy2(folder / name, copied)
        if (folder / run_directory.STATE).exists():
            shutil.copytree(folder / run_directory.STATE, copied / run_directory.STATE)
        copied.rename(out)


def _more(found: Collection[str]) -> str:
    return f" (and {len(found) - 1} more of {len(found)} such runs)" if len(found) > 1 else ""


def _seconds(records: list[RoundRecord], result: Mapping[str, Any], *, anew: bool) -> float:
    spent = result.get("seconds", {})
    before = float(spent.get("preprocess", 0.0)) if anew else 0.0
    timed = [record.seconds for record in records if record.seconds is not None]
    return before + (sum(timed) if len(timed) == len(records) else float(spent.get("train", 0.0)))
