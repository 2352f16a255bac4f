"""A run is done again from its beginning: what it was is moved aside, never deleted, and what it paid stays paid."""

import itertools
import shutil
from pathlib import Path

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.simulation.resuming import earlier_run
from fl_sim.store import run_directory
from fl_sim.store.files import LOCK, readable_os_errors, run_lock
from fl_sim.store.run_directory import CHECKPOINT


def set_aside(experiment: Experiment, out: Path, *, of_any_length: bool = False) -> Path | None:
    """Move the run of ``experiment`` in ``out`` to a folder beside it and return that; None where there is no run.

    Its settings and the ledger of Global DP stay in ``out`` as well: a repetition with other noise releases something
    again about the same clients, and is charged on top of what was. Raises UserError where ``out`` holds something
    else, or has another number of rounds, unless ``of_any_length``; RunError where the folder is in use or cannot be
    written.
    """
    earlier = earlier_run(experiment, out)
    if earlier is None:
        return None
    if earlier.rounds != experiment.rounds and not of_any_length:
        raise UserError(
            f"--again repeats the run in {out} as it is, with rounds={earlier.rounds}, not {experiment.rounds}: choose "
            "another --out"
        )
    with readable_os_errors(), run_lock(out):
        aside = _free_name(out)
        aside.mkdir()
        stays = {run_directory.CONFIG, run_directory.LEDGER}
        for name in stays:
            if (out / name).exists():
                shutil.copy2(out / name, aside)
        # Killed between two of these, the run in out is whole, or is refused: never cleared as one that has not begun.
        moved = sorted({path.name for path in out.iterdir()} - stays - {LOCK, run_directory.RESULT, CHECKPOINT})
        for name in (run_directory.RESULT, *moved, CHECKPOINT):
            if (out / name).exists():
                (out / name).rename(aside / name)
    return aside


def _free_name(out: Path) -> Path:
    names = (out.with_name(f"{out.name}-before-{number}") for number in itertools.count(1))
    return next(path for path in names if not path.exists())
