"""The points of a table's grid: what each of them lays over the base, and the experiment and job that come of it."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fl_sim.data.places import look_for
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_values
from fl_sim.importing import importing
from fl_sim.kinds import short_form
from fl_sim.tables.words import text

if TYPE_CHECKING:
    from fl_sim.experiment.job import Job

Point: TypeAlias = Mapping[str, Any]
"""Settings by key, dots and all, that a cell of the table lays over the base."""

AXES = ("algorithm", "data", "partition", "seed")
"""Keys that span a table even where [grid] does not name them."""

CENTRALIZED: Point = {
    "algorithm": "centralized", "partition": "iid", "clients": 1, "sampler": "full", "aggregator": "mean",
    "preprocess": "none", "attack": "none", "calibrate": "none", "compress": "none",
    "partition_seed": None, "sampling_seed": None,
}  # fmt: skip
"""What makes an experiment the upper bound, whatever the split and the clients of its column are."""

_FEDAVG: Point = {"algorithm": "fedavg", "preprocess": "none", "calibrate": "none"}


def points(base: Mapping[str, Any], grid: Mapping[str, list[Any]], *, centralized: bool) -> Iterable[dict[str, Any]]:
    """Yield the grid's points, methods outermost, the upper bound last if there is one."""
    axes = dict(grid)
    for axis in AXES:
        default = Experiment.model_fields[axis].default
        axes.setdefault(axis, [base.get(axis, default if isinstance(default, str | int) else short_form(default))])
    methods = [_together(entry, grid) for entry in axes.pop("algorithm")]
    methods += [{"algorithm": "centralized"}] if centralized else []
    extra = [key for key in axes if key not in AXES]
    order = [*extra, "data", "partition", "seed"]
    for one in methods:
        for values in itertools.product(*(axes[key] for key in order)):
            yield {**one, **dict(zip(order, values, strict=True))}


def is_bound(point: Point) -> bool:
    """Say whether a point is an upper bound."""
    algorithm = point["algorithm"]
    return (algorithm.get("kind") if isinstance(algorithm, dict) else algorithm) == "centralized"


def as_run(point: Point) -> Point:
    """Return the settings of a point's run: an upper bound has no place for what federations have alone."""
    return _outside(point, CENTRALIZED) if is_bound(point) else point


def as_federation(point: Point) -> Point:
    """Return the settings by which a point's column is named: FedAvg's stand in for an upper bound's."""
    return _outside(point, _FEDAVG) if is_bound(point) else point


def experiment_at(base: Mapping[str, Any], point: Point) -> Experiment:
    """Return the experiment of a point. Raises UserError that names the point."""
    with _naming(point):
        table = _laid_over(base, {key: value for key, value in point.items() if "." not in key})
        return experiment_from(with_values(table, [(key, value) for key, value in point.items() if "." in key]))


def job_at(base: Mapping[str, Any], point: Point, data_root: Path | None) -> "Job":
    """Return a point's job, checked as far as that is possible without running it. Raises UserError that names it."""
    experiment = experiment_at(base, point)
    with _naming(point):
        look_for(experiment.data, data_root)
        with importing():  # now: a mistake in the settings is told without waiting for torch
            from fl_sim.experiment.job import job_of  # noqa: PLC0415
            from fl_sim.simulation.engine_choice import check_trainer  # noqa: PLC0415
        job = job_of(experiment, data_root)
        job.model()
        check_trainer(job)
    return job


def _together(entry: Any, grid: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an entry of ``grid.algorithm``: an algorithm, or a table that sets it and more."""
    if not isinstance(entry, dict) or "kind" in entry or not set(entry) & set(Experiment.model_fields):
        return {"algorithm": entry}
    spanned = {key.split(".")[0] for key in grid} - {"algorithm"} | {"data", "partition", "seed"}
    if twice := sorted(set(entry) & spanned):
        raise UserError(
            f"an entry of grid.algorithm sets {', '.join(twice)}, which spans the table as well: entries are for what "
            "belongs to a method, such as algorithm, preprocess or aggregator"
        )
    return {"algorithm": "fedavg", **entry}


def _outside(point: Point, instead: Point) -> Point:
    """Return ``point`` with ``instead`` in place of all that it says about the same groups."""
    return {key: value for key, value in point.items() if key.split(".")[0] not in instead} | dict(instead)


@contextmanager
def _naming(point: Point) -> Iterator[None]:
    """Say of which cell a mistake is told."""
    try:
        yield
    except UserError as error:
        where = ", ".join(f"{key}={text(value)}" for key, value in point.items())
        raise UserError(f"cell {where}: {error}") from error


def _laid_over(base: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """Return ``base`` with ``point`` over it; a table without a kind changes some keys of the one in ``base``."""
    merged = {**base, **point}
    for key, value in point.items():
        if isinstance(value, dict) and "kind" not in value and isinstance(base.get(key), dict):
            merged[key] = {**base[key], **value}
    return merged
