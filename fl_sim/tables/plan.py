"""A grid of experiments: methods in rows, data sets and splits in columns; every cell is checked before one runs."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field, ValidationError

from fl_sim.data.places import look_for
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.importing import importing
from fl_sim.kinds import short_form
from fl_sim.mistakes import explain, guess, shortened
from fl_sim.settings import Settings
from fl_sim.settings_file import read_table
from fl_sim.tables.names import run_name
from fl_sim.tables.words import caption, data_label, differences, label, method, text

if TYPE_CHECKING:
    from fl_sim.experiment.job import Job

PRESETS = Path(__file__).parent / "presets"
AXES = ("algorithm", "data", "partition", "seed")
"""Keys that span a table even where [grid] does not name them."""

CENTRALIZED: Mapping[str, Any] = {
    "algorithm": "centralized", "partition": "iid", "clients": 1, "sampler": "full", "aggregator": "mean",
    "preprocess": "none", "attack": "none", "calibrate": "none", "partition_seed": None, "sampling_seed": None,
}  # fmt: skip
"""What makes an experiment the upper bound, whatever the split and the clients of its column are."""

FEDAVG: Mapping[str, Any] = {"algorithm": "fedavg", "preprocess": "none", "calibrate": "none"}
"""What stands in for the upper bound where the head of its column is worked out."""

MOST_CELLS = 10_000
"""A table of more cells would be checked for minutes before the first one runs, and nobody could read it."""

_IN_THE_NAME = ("algorithm", "preprocess")


class TableSettings(Settings):
    """``base``: settings of every cell; ``grid``: lists of values by key; ``centralized`` adds the upper-bound row.

    An entry of ``grid.algorithm`` may set more than the algorithm: ``{algorithm = "fedavg", preprocess = "da-fl"}``.
    """

    base: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Any] = Field(default_factory=dict)
    centralized: bool = True


@dataclass(frozen=True)
class Cell:
    """One experiment's place in the table. Upper bounds stand in several columns with the same experiment."""

    row: str
    column: str
    seed: int
    experiment: Experiment
    name: str
    """Name of the run's directory: readable, and different for different settings or records."""


@dataclass(frozen=True)
class Plan:
    """A table before it is filled."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    upper_bounds: frozenset[str]
    caption: tuple[str, ...]

    @property
    def runs(self) -> dict[str, Experiment]:
        """Return {directory name: experiment}, each experiment once, in the order of the rows."""
        return {cell.name: cell.experiment for cell in self.cells}


def preset_names() -> list[str]:
    """Return the names of the tables that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def file_or_preset(name: str) -> tuple[Path, str]:
    """Return the file of the preset ``name``, else the one at that path; and which was taken where there are both.

    So a preset's name means the same in every folder. Raises UserError where there is neither.
    """
    presets, there = preset_names(), Path(name)
    if name in presets:
        which = f"{name} is taken for the preset; the file of that name in this folder is ./{name}"
        return PRESETS / f"{name}.toml", which if there.is_file() else ""
    with suppress(OSError):  # what no path can be is refused when it is read
        if not there.exists():
            raise UserError(
                f"no file or preset {shortened(name)!r}{guess(name, presets)}; presets: {', '.join(presets)} (settings "
                "are given as key=value, for example rounds=50)"
            )
    return there, ""


def read_settings(path: Path, overrides: list[str]) -> TableSettings:
    """Read a table's TOML file and lay ``key=value`` settings over it, as ``table_settings`` does."""
    return table_settings(read_table(path), overrides, str(path))


def table_settings(table: Mapping[str, Any], overrides: list[str], where: str) -> TableSettings:
    """Return the settings of a ``table`` from ``where`` with ``key=value`` settings over it.

    Keys that the grid spans take lists (``seed=0,1,2``), all others go to [base]. Raises UserError for invalid ones.
    """
    centralized = [text.partition("=")[2] for text in overrides if text.startswith("centralized=")]
    table = {**table, **({"centralized": centralized[-1]} if centralized else {})}
    try:
        settings = TableSettings.model_validate(table)
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, TableSettings, '')}") from error
    grid = dict(_flat(settings.grid))
    # Cells side by side already fill the cores.
    start = {"engine": "inprocess", **settings.base}
    base = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in grid or key in AXES:
            grid[key] = value.split(",")
        elif key != "centralized":
            base.append(override)
    return TableSettings(base=with_overrides(start, base), grid=grid, centralized=settings.centralized)


def plan_table(settings: TableSettings, data_root: Path | None = None) -> Plan:
    """Expand the grid and check every cell: its settings, its data, its split and its model.

    Raises UserError that names the first cell that could not run.
    """
    grid = dict(_flat(settings.grid))
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"grid.{key} = {values!r}: give a list of one or more values, such as {key} = [{values!r}]")
    if (num_cells := math.prod(map(len, grid.values()))) > MOST_CELLS:
        raise UserError(f"the grid has {num_cells:,} cells, a table at most {MOST_CELLS:,}: make several tables of it")
    placed = [(point, _placed(settings, point, data_root)) for point in _points(settings, grid)]
    varied = differences([cell.experiment for _, cell in placed])
    cells: dict[tuple[str, str, int], Cell] = {}
    bounds: dict[str, None] = {}
    for point, (column, experiment, name, _) in placed:
        row = ", ".join([method(experiment, varied), *_further(point)])
        if _is_centralized(point["algorithm"]):
            bounds[row] = None
        place = (row, column, experiment.seed)
        cell = Cell(*place, experiment, name)
        assert cells.setdefault(place, cell) == cell, "two experiments of one name"
    rows = [row for row in dict.fromkeys(cell.row for cell in cells.values()) if row not in bounds] + list(bounds)
    columns = tuple(dict.fromkeys(cell.column for cell in cells.values()))
    ordered = sorted(cells.values(), key=lambda cell: (rows.index(cell.row), columns.index(cell.column)))
    federated_runs = [cell.experiment for cell in ordered if cell.row not in bounds]
    notes = {cell.experiment.data: cell.data_note for _, cell in placed}
    words = caption(federated_runs or [cell.experiment for cell in ordered], notes, has_bound=bool(bounds))
    return Plan(tuple(rows), columns, tuple(ordered), frozenset(bounds), words)


def experiments(settings: TableSettings) -> list[Experiment]:
    """Return the experiment of every cell as its settings say: neither data nor split are looked at.

    Raises UserError that names the first cell whose settings do not go together.
    """
    points = _points(settings, dict(_flat(settings.grid)))
    return [_experiment(settings.base, point) for point in points]


def _points(settings: TableSettings, grid: Mapping[str, list[Any]]) -> Iterable[dict[str, Any]]:
    """Yield the grid's points, methods outermost, the upper bound last."""
    axes = dict(grid)
    for axis in AXES:
        default = Experiment.model_fields[axis].default
        axes.setdefault(
            axis, [settings.base.get(axis, default if isinstance(default, str | int) else short_form(default))]
        )
    methods = [_together(entry, grid) for entry in axes.pop("algorithm")]
    methods += [{"algorithm": "centralized"}] if settings.centralized else []
    extra = [key for key in axes if key not in AXES]
    order = [*extra, "data", "partition", "seed"]
    for one in methods:
        for values in itertools.product(*(axes[key] for key in order)):
            yield {**one, **dict(zip(order, values, strict=True))}


class _Placed(NamedTuple):
    """What a point of the grid stands for. Its job is forgotten: thousands of splits would fill the memory."""

    column: str
    experiment: Experiment
    name: str
    data_note: str


def _placed(settings: TableSettings, point: Mapping[str, Any], data_root: Path | None) -> _Placed:
    is_bound = _is_centralized(point["algorithm"])
    job = _job(settings.base, _outside(point, FEDAVG, FEDAVG) if is_bound else point, data_root)
    column = f"{data_label(job.experiment.data)} {label(job.experiment.partition)}"
    if is_bound:
        job = _job(settings.base, _outside(point, CENTRALIZED, CENTRALIZED), data_root)
    return _Placed(column, job.experiment, run_name(job.experiment, job.dataset), job.dataset.note)


def _further(point: Mapping[str, Any]) -> list[str]:
    """Return what a row's name must say besides the method: all that spans the table and is in no column."""
    named = {*AXES, *(CENTRALIZED if _is_centralized(point["algorithm"]) else _IN_THE_NAME)}
    return [f"{key}={text(value)}" for key, value in _flat(point) if key.split(".")[0] not in named]


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


def _experiment(base: Mapping[str, Any], point: Mapping[str, Any]) -> Experiment:
    with _naming(point):
        table = _laid_over(base, {key: value for key, value in point.items() if "." not in key})
        return experiment_from(with_overrides(table, [f"{key}={value}" for key, value in point.items() if "." in key]))


def _job(base: Mapping[str, Any], point: Mapping[str, Any], data_root: Path | None) -> "Job":
    """Return one cell's job, checked as far as that is possible without running it."""
    experiment = _experiment(base, point)
    with _naming(point):
        look_for(experiment.data, data_root)
        with importing():  # now: a mistake in the settings is told without waiting for torch
            from fl_sim.experiment.job import job_of  # noqa: PLC0415
        job = job_of(experiment, data_root)
        job.model()
    return job


@contextmanager
def _naming(point: Mapping[str, Any]) -> Iterator[None]:
    """Say of which cell a mistake is told."""
    try:
        yield
    except UserError as error:
        where = ", ".join(f"{key}={text(value)}" for key, value in point.items())
        raise UserError(f"cell {where}: {error}") from error


def _laid_over(base: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``point`` over it; a table without a kind changes some keys of the one in ``base``."""
    merged = {**base, **point}
    for key, value in point.items():
        if isinstance(value, dict) and "kind" not in value and isinstance(base.get(key), dict):
            merged[key] = {**base[key], **value}
    return merged


def _is_centralized(algorithm: Any) -> bool:
    return (algorithm.get("kind") if isinstance(algorithm, dict) else algorithm) == "centralized"


def _outside(point: Mapping[str, Any], groups: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``point`` with ``values`` in place of all that it says about ``groups``."""
    return {key: value for key, value in point.items() if key.split(".")[0] not in groups} | dict(values)


def _flat(grid: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Turn TOML's nested ``local.epochs = [1, 5]`` into the key ``local.epochs``."""
    for key, value in grid.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
