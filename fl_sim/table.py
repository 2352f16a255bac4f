"""A grid of experiments: methods in rows, data sets and splits in columns, seeds averaged; every cell checked before one runs."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fl_sim.config import Settings, explain, field_defaults
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
from fl_sim.types import UserError

PRESETS = Path(__file__).parent / "presets"
AXES = ("algorithm", "data", "partition", "seed")
"""Keys that span a table even where [grid] does not name them."""

CENTRALIZED: Mapping[str, Any] = {
    "algorithm": "centralized", "partition": "iid", "clients": 1, "sampler": "full", "aggregator": "mean",
}  # fmt: skip
"""What makes an experiment the upper bound, whatever the split and the clients of its column are."""


class TableSettings(Settings):
    """``base``: settings of every cell; ``grid``: lists of values by key; ``centralized`` adds the upper-bound row."""

    base: dict[str, Any] = {}
    grid: dict[str, Any] = {}
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

    Keys that the grid spans take lists (``seed=0,1,2``); all others go to [base]. Raises UserError for what is not valid.
    """
    table = read_table(path)
    centralized = [text.partition("=")[2] for text in overrides if text.startswith("centralized=")]
    table |= {"centralized": centralized[-1]} if centralized else {}
    try:
        settings = TableSettings.model_validate(table)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, TableSettings, '')}") from error
    grid = dict(_flat(settings.grid))
    base = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in grid or key in AXES:
            grid[key] = value.split(",")
        elif key != "centralized":
            base.append(override)
    return TableSettings(base=with_overrides(settings.base, base), grid=grid, centralized=settings.centralized)


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
        experiment = _experiment(settings.base, point, data_root)
        column = f"{data_label(experiment.data)} {_label(experiment.partition)}"
        if experiment.algorithm.kind == "centralized":
            experiment = _experiment(settings.base, {**point, **CENTRALIZED}, data_root)
        row = ", ".join([_label(experiment.algorithm), *_extra_labels(point, extra, experiment)])
        if experiment.algorithm.kind == "centralized":
            bounds[row] = None
        key = (row, column, experiment.seed)
        cells.setdefault(key, Cell(*key, experiment, _directory(experiment, data_root)))
    rows = [row for row in dict.fromkeys(cell.row for cell in cells.values()) if row not in bounds] + list(bounds)
    columns = tuple(dict.fromkeys(cell.column for cell in cells.values()))
    ordered = sorted(cells.values(), key=lambda cell: (rows.index(cell.row), columns.index(cell.column)))
    caption = _caption(ordered, frozenset(bounds), data_root)
    return Plan(tuple(rows), columns, tuple(ordered), frozenset(bounds), caption)


def data_label(name: str) -> str:
    """Return how a data set is written in a table's head."""
    known = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN"}
    return known.get(name, name)


def _points(settings: TableSettings, grid: Mapping[str, list[Any]]) -> Iterable[dict[str, Any]]:
    """Yield the grid's points, methods outermost, the upper bound last."""
    axes = dict(grid)
    for axis in AXES:
        axes.setdefault(axis, [settings.base.get(axis, Experiment.model_fields[axis].default)])
    algorithms = [*axes.pop("algorithm"), *(["centralized"] if settings.centralized else [])]
    extra = [key for key in axes if key not in AXES]
    order = [*extra, "data", "partition", "seed"]
    for algorithm in algorithms:
        for values in itertools.product(*(axes[key] for key in order)):
            yield {"algorithm": algorithm, **dict(zip(order, values, strict=True))}


def _experiment(base: Mapping[str, Any], point: Mapping[str, Any], data_root: Path | None) -> Experiment:
    """Return one cell's experiment, checked as far as that is possible without running it."""
    try:
        table = {"engine": "inprocess", **base, **{key: value for key, value in point.items() if "." not in key}}
        table = with_overrides(_plain(table), [f"{key}={value}" for key, value in point.items() if "." in key])
        experiment = resolved(experiment_from(table), data_root)
        client_shards(experiment, data_root)
        build_model(experiment, load(experiment.data, data_root))
    except UserError as error:
        where = ", ".join(f"{key}={_text(value)}" for key, value in point.items())
        raise UserError(f"cell {where}: {error}") from error
    return experiment


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``table`` with settings objects (defaults of an axis) as tables."""
    return {
        key: value if isinstance(value, str | int | float | dict | list) else _as_table(value)
        for key, value in table.items()
    }


def _as_table(settings: Any) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in field_defaults(type(settings))}


def _flat(grid: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Turn TOML's nested ``local.epochs = [1, 5]`` into the key ``local.epochs``."""
    for key, value in grid.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _label(settings: Any) -> str:
    """Return how a method or a split is written in the table, with the parameters that are not the default."""
    defaults = field_defaults(type(settings))
    changed = {name: getattr(settings, name) for name, default in defaults.items() if getattr(settings, name) != default}
    is_split = not isinstance(settings, Settings)
    if is_split:
        text = short_form(settings)
        if settings.kind in {"label-k", "dirichlet"}:
            text = f"{settings.k}-Label" if settings.kind == "label-k" else f"Dir({settings.alpha})"
        changed.pop(next((name for name in defaults if name != "kind"), ""), None)
    else:
        text = {"Scaffold": "SCAFFOLD"}.get(type(settings).__name__, type(settings).__name__)
    return text + (f" ({', '.join(f'{name}={value}' for name, value in changed.items())})" if changed else "")


def _extra_labels(point: Mapping[str, Any], extra: Iterable[str], experiment: Experiment) -> list[str]:
    is_bound = experiment.algorithm.kind == "centralized"
    return [f"{key}={_text(point[key])}" for key in extra if not (is_bound and key.split(".")[0] in CENTRALIZED)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _directory(experiment: Experiment, data_root: Path | None) -> str:
    dataset = load(experiment.data, data_root)
    content = experiment.model_dump(mode="json", exclude={"engine", "round_timeout"})
    records = [len(dataset.train), len(dataset.test), dataset.note]
    digest = hashlib.sha256(json.dumps([content, records], sort_keys=True).encode()).hexdigest()[:8]
    split = "" if experiment.algorithm.kind == "centralized" else short_form(experiment.partition)
    readable = f"{_label(experiment.algorithm)} {experiment.data} {split} seed {experiment.seed}"
    return f"{re.sub(r'[^a-z0-9.]+', '-', readable.lower())[:80].strip('-.')}-{digest}"


def _caption(cells: list[Cell], bounds: frozenset[str], data_root: Path | None) -> tuple[str, ...]:
    federated = [cell.experiment for cell in cells if cell.row not in bounds] or [cell.experiment for cell in cells]
    local = [experiment.local for experiment in federated]
    seeds = list(dict.fromkeys(cell.seed for cell in cells))
    names = list(dict.fromkeys(cell.experiment.data for cell in cells))
    notes = {name: load(name, data_root).note for name in names}
    spread = f"mean ± sample standard deviation over seeds {_values(seeds)}" if len(seeds) > 1 else f"one seed ({seeds[0]})"
    return (
        f"Test accuracy in percent, {spread}. last: after the last round; best: the best evaluated round, picked on the "
        "test set and so optimistic.",
        f"{_values(data_label(name) for name in names)}; {_values(e.clients for e in federated)} clients, "
        f"sampler {_values(short_form(e.sampler) for e in federated)}, model {_values(e.model for e in federated)}; "
        f"{_values(e.rounds for e in federated)} rounds of {_values(one.epochs for one in local)} local epochs, "
        f"batch size {_values(one.batch_size for one in local)}, SGD with learning rate "
        f"{_values(one.learning_rate for one in local)} ({_values(short_form(one.schedule) for one in local)}), momentum "
        f"{_values(one.momentum for one in local)}, weight decay {_values(one.weight_decay for one in local)}.",
        *(f"{data_label(name)} here: {note}." for name, note in notes.items() if note),
        *(["Centralized is the upper bound: the same model and optimiser with all training records in one place, as many "
           "epochs in total; it does not compete."] if bounds else []),
    )  # fmt: skip


def _values(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))
