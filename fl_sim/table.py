"""A grid of experiments: methods in rows, data sets and splits in columns; every cell is checked before one runs."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from fl_sim.config import Settings, explain
from fl_sim.data import load
from fl_sim.experiment import (
    Experiment,
    build_model,
    client_shards,
    experiment_from,
    read_table,
    resolved,
    with_overrides,
)
from fl_sim.simulation import short_form
from fl_sim.table_words import caption, data_label, label, text
from fl_sim.types import UserError

PRESETS = Path(__file__).parent / "presets"
AXES = ("algorithm", "data", "partition", "seed")
"""Keys that span a table even where [grid] does not name them."""

CENTRALIZED: Mapping[str, Any] = {
    "algorithm": "centralized", "partition": "iid", "clients": 1, "sampler": "full", "aggregator": "mean",
}  # fmt: skip
"""What makes an experiment the upper bound, whatever the split and the clients of its column are."""

FEDAVG: Mapping[str, Any] = {"algorithm": "fedavg"}
"""What stands in for the upper bound where the head of its column is worked out."""


class TableSettings(Settings):
    """``base``: settings of every cell; ``grid``: lists of values by key; ``centralized`` adds the upper-bound row."""

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


def read_settings(path: Path, overrides: list[str]) -> TableSettings:
    """Read a table's TOML file and lay ``key=value`` settings over it.

    Keys that the grid spans take lists (``seed=0,1,2``), all others go to [base]. Raises UserError for invalid ones.
    """
    table = read_table(path)
    centralized = [text.partition("=")[2] for text in overrides if text.startswith("centralized=")]
    table |= {"centralized": centralized[-1]} if centralized else {}
    try:
        settings = TableSettings.model_validate(table)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, TableSettings, '')}") from error
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
    extra = [key for key in grid if key not in AXES]
    cells: dict[tuple[str, str, int], Cell] = {}
    bounds: dict[str, None] = {}
    for point in _points(settings, grid):
        is_bound = _is_centralized(point["algorithm"])
        experiment = _experiment(
            settings.base, _outside(point, ["algorithm"], FEDAVG) if is_bound else point, data_root
        )
        column = f"{data_label(experiment.data)} {label(experiment.partition)}"
        if is_bound:
            experiment = _experiment(settings.base, _outside(point, CENTRALIZED, CENTRALIZED), data_root)
        shown = [key for key in extra if not (is_bound and key.split(".")[0] in CENTRALIZED)]
        row = ", ".join([label(experiment.algorithm), *(f"{key}={text(point[key])}" for key in shown)])
        if is_bound:
            bounds[row] = None
        place = (row, column, experiment.seed)
        cell = Cell(*place, experiment, _directory(experiment, data_root))
        assert cells.setdefault(place, cell) == cell, "two experiments of one name"
    rows = [row for row in dict.fromkeys(cell.row for cell in cells.values()) if row not in bounds] + list(bounds)
    columns = tuple(dict.fromkeys(cell.column for cell in cells.values()))
    ordered = sorted(cells.values(), key=lambda cell: (rows.index(cell.row), columns.index(cell.column)))
    federated_runs = [cell.experiment for cell in ordered if cell.row not in bounds]
    words = caption(federated_runs or [cell.experiment for cell in ordered], data_root, has_bound=bool(bounds))
    return Plan(tuple(rows), columns, tuple(ordered), frozenset(bounds), words)


def _points(settings: TableSettings, grid: Mapping[str, list[Any]]) -> Iterable[dict[str, Any]]:
    """Yield the grid's points, methods outermost, the upper bound last."""
    axes = dict(grid)
    for axis in AXES:
        default = Experiment.model_fields[axis].default
        axes.setdefault(
            axis, [settings.base.get(axis, default if isinstance(default, str | int) else short_form(default))]
        )
    algorithms = [*axes.pop("algorithm"), *(["centralized"] if settings.centralized else [])]
    extra = [key for key in axes if key not in AXES]
    order = [*extra, "data", "partition", "seed"]
    for algorithm in algorithms:
        for values in itertools.product(*(axes[key] for key in order)):
            yield {"algorithm": algorithm, **dict(zip(order, values, strict=True))}


def _experiment(base: Mapping[str, Any], point: Mapping[str, Any], data_root: Path | None) -> Experiment:
    """Return one cell's experiment, checked as far as that is possible without running it."""
    try:
        table = {**base, **{key: value for key, value in point.items() if "." not in key}}
        table = with_overrides(table, [f"{key}={value}" for key, value in point.items() if "." in key])
        experiment = resolved(experiment_from(table), data_root)
        client_shards(experiment, data_root)
        build_model(experiment, load(experiment.data, data_root))
    except UserError as error:
        where = ", ".join(f"{key}={text(value)}" for key, value in point.items())
        raise UserError(f"cell {where}: {error}") from error
    return experiment


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


def _directory(experiment: Experiment, data_root: Path | None) -> str:
    dataset = load(experiment.data, data_root)
    content = experiment.model_dump(mode="json", exclude={"engine", "round_timeout"})
    records = [len(dataset.train), len(dataset.test), dataset.note]
    digest = hashlib.sha256(json.dumps([content, records], sort_keys=True).encode()).hexdigest()[:8]
    split = "" if experiment.algorithm.kind == "centralized" else short_form(experiment.partition)
    readable = f"{label(experiment.algorithm)} {experiment.data} {split} seed {experiment.seed}"
    return f"{re.sub(r'[^a-z0-9.]+', '-', readable.lower())[:80].strip('-.')}-{digest}"
