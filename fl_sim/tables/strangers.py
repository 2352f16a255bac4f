"""Runs in a table's folder that are not of the table: of other settings, records or code than its cells are now."""

from collections.abc import Mapping
from pathlib import Path

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.identity import identity_of
from fl_sim.experiment.job import resolved
from fl_sim.simulation.repeating import set_aside
from fl_sim.simulation.resuming import objection, on_trust


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


def _more(found: Mapping[str, str] | list[str]) -> str:
    return f" (and {len(found) - 1} more of {len(found)} such runs)" if len(found) > 1 else ""
