"""Runs that are in a folder already: shorter ones that a new run goes on from, and strangers to a table."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from fl_sim.data import load
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_of_run
from fl_sim.experiment.identity import identity_of
from fl_sim.experiment.job import resolved
from fl_sim.settings import read_table
from fl_sim.simulation.resuming import check_extension, objection, on_trust, set_aside
from fl_sim.store import run_directory
from fl_sim.store.files import readable_os_errors, run_lock
from fl_sim.store.run_directory import CHECKPOINT
from fl_sim.tables.labels import run_name

_NEEDED = (run_directory.CONFIG, run_directory.ROUNDS, CHECKPOINT)


def begin_with_shorter(experiment: Experiment, out: Path, data_root: Path | None) -> Path | None:
    """Copy to ``out``, where nothing is yet, what the longest shorter run ended with, and return where that is.

    None where no finished run beside ``out``, under the name that it has by itself, could go on to be ``experiment``
    (resolved), bit by bit. It stays as it is. Raises RunError where nothing can be written.
    """
    if out.exists() or not out.parent.is_dir():
        return None
    for earlier, folder in sorted(_shorter(experiment, out, data_root), key=lambda found: -found[0].rounds):
        with suppress(UserError, RunError):  # damaged, in use, or its rounds are no part of the longer run
            check_extension(experiment, folder, earlier, run_directory.read_rounds(folder))
            with run_lock(folder):
                _copy(folder, out)
            return folder
    return None


def put_aside(runs: Mapping[str, Experiment], folder: Path, data_root: Path | None, *, again: bool) -> list[str]:
    """Hold what is in ``folder`` against ``runs`` {name: experiment}, and return what is to be said of it.

    ``again``: runs of other records or code are moved aside, so that they are run again. Raises UserError without that,
    and for a run of other settings.
    """
    strangers: dict[str, str] = {}
    trusted = []
    for name, given in runs.items():
        if not (folder / name).exists():
            continue
        experiment = resolved(given, data_root)
        now = identity_of(experiment, data_root)
        if why := objection(experiment, folder / name, now):
            strangers[name] = why
        elif doubt := on_trust(folder / name, now):
            trusted.append(doubt)
    told = [f"{trusted[0]}{_more(trusted)}"] if trusted else []
    if strangers and not again:
        raise UserError(f"{next(iter(strangers.values()))}{_more(strangers)}")
    for name in strangers:
        experiment = resolved(runs[name], data_root)
        aside = set_aside(experiment, folder / name, of_any_length=True)
        told.append(f"what {folder / name} held is in {aside} now, and is run again")
    return told


def _shorter(experiment: Experiment, out: Path, data_root: Path | None) -> Iterator[tuple[Experiment, Path]]:
    """Give the finished runs beside ``out`` that are the same but for fewer rounds, and their folders."""
    dataset = load(experiment.data, data_root, experiment.features)
    readable = run_name(experiment, dataset).rpartition("-")[0]
    for folder in out.parent.glob(f"{readable}-*"):
        if not all((folder / name).exists() for name in _NEEDED):
            continue
        with suppress(UserError):
            earlier = experiment_of_run(read_table(folder / run_directory.CONFIG))
            result = run_directory.read_result(folder) or {}
            longer = Experiment.model_validate({**dict(earlier), "rounds": experiment.rounds})
            # By its name, which depends on the records, too: the same settings may be of other data.
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


def _more(found: Mapping[str, str] | list[str]) -> str:
    return f" (and {len(found) - 1} more of {len(found)} such runs)" if len(found) > 1 else ""
