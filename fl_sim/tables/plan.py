"""The plan of a table: its rows (methods), columns (data set and partition) and cells.

All cells are checked before the first run starts.
"""

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from pydantic import BeforeValidator, Field, ValidationError

from fl_sim.data.places import look_for
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides, with_values
from fl_sim.importing import importing
from fl_sim.kinds import kind_of, short_form
from fl_sim.mistakes import explain, guess, shortened
from fl_sim.report.heat_map import HeatMap, column_groups, row_groups
from fl_sim.report.row_names import outside_brackets
from fl_sim.settings import Settings, flat, read_table
from fl_sim.tables.heat_maps import HeatMapAxes, MappedRow, heat_maps_of
from fl_sim.tables.labels import (
    SEEDS,
    RowName,
    caption,
    data_label,
    differences,
    label,
    method,
    row_labels,
    run_name,
    seed_of_means,
    text,
    varied_parameters,
)
from fl_sim.tables.tuning_space import Tune

if TYPE_CHECKING:
    from fl_sim.experiment.job import Job

MOST_CELLS = 10_000
"""Largest number of cells of a table. A larger table would take minutes to check, and would be too large to read."""

T = TypeVar("T")

_IN_THE_NAME = ("algorithm", "preprocess", "server")
_LABEL = "label"
"""Key in an entry of ``grid.algorithm``. The value of this key is the user's own name of the row."""

Point: TypeAlias = Mapping[str, Any]
"""A point of the grid, {setting: value}: the settings of a cell that replace or extend [base]. Keys may be dotted."""

AXES = ("algorithm", "data", "partition", "seed")
"""Settings that are always axes of the grid. An axis that is not in [grid] has one value."""

CENTRALIZED: Point = {
    "algorithm": "centralized", "partition": "iid", "clients": 1, "sampler": "full", "aggregator": "mean",
    "preprocess": "none", "attack": "none", "calibrate": "none", "compress": "none",
    "partition_seed": None, "sampling_seed": None,
    "forgotten": (),
}  # fmt: skip
"""The settings of the row Centralized in every column: centralized training without partition and clients."""

_FEDAVG: Point = {"algorithm": "fedavg", "preprocess": "none", "calibrate": "none"}


def _are_grids(given: Any) -> Any:
    several = given if isinstance(given, list | tuple) else [given]
    if several and all(isinstance(one, Mapping) for one in several):
        return given
    raise ValueError("give one table, [grid], or several tables, [[grid]]")


class TableSettings(Settings):
    """The settings of a table, as in its TOML file.

    ``base``: settings of all cells. ``grid``: {setting: list of values}; the table has a cell for each combination of
    values. ``grid`` may be a list of grids, ``[[grid]]`` in a file; the table then has the cells of all grids. An entry
    of ``grid.algorithm`` may set more than the algorithm, as in ``{algorithm = "fedavg", preprocess = "da-fl"}``. The
    key ``label`` of an entry is the name of its row. ``centralized``: True adds the row Centralized, with centralized
    training. ``tune``: the hyperparameter search before the cells run; None: no search. ``reference``: the name or
    short label of the row with which the other rows are compared; empty: the row with the highest mean. ``measure``:
    the measure in [0, 1] that the table shows, by its dotted name in ``result.json``, such as ``personal.own_accuracy``
    or ``macro_f1``; empty: the accuracy of the server's model. ``heat_map``: the axes of the heat maps in a report;
    None: no heat map.
    """

    base: dict[str, Any] = Field(default_factory=dict)
    grid: Annotated[dict[str, Any] | tuple[dict[str, Any], ...], BeforeValidator(_are_grids)] = Field(
        default_factory=dict
    )
    centralized: bool = True
    tune: Tune | None = None
    reference: str = ""
    measure: str = Field("", pattern=r"^[a-z0-9_.]*$")
    heat_map: HeatMapAxes | None = None

    @property
    def grids(self) -> list[dict[str, Any]]:
        """Return the grids as a list of flat dictionaries, with keys such as "local.momentum"."""
        return [dict(flat(grid)) for grid in (self.grid if isinstance(self.grid, tuple) else (self.grid,))]


@dataclass(frozen=True)
class Cell:
    """One experiment and its position in the table.

    In the row Centralized, one experiment can belong to several columns, because centralized training has no partition.
    """

    row: str
    column: str
    seed: int
    """The value of the seed over which the table averages."""
    experiment: Experiment
    name: str
    """Name of the run directory. Experiments with different settings or different records have different names."""
    point: Point = field(compare=False)


@dataclass(frozen=True)
class Plan:
    """The plan of a table, after all checks: rows, columns, cells and caption."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    upper_bounds: frozenset[str]
    caption: tuple[str, ...]
    over: str = "seed"
    """Name of the seed setting over which the table averages, such as "model_seed"."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """{row: short label}."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """{row: settings that are neither in the label of the row nor in another line of the caption}."""
    reference: str = ""
    """Name of the row with which the other rows are compared; empty: the row with the highest mean."""
    heat_maps: tuple[HeatMap, ...] = ()

    @property
    def runs(self) -> dict[str, Experiment]:
        """Return {name of the run directory: experiment} in the order of the rows. Each experiment occurs once."""
        return {cell.name: cell.experiment for cell in self.cells}


def deadline_after(hours: float | None) -> float:
    """Return the time ``hours`` hours from now, by the clock ``time.monotonic``; infinity for None.

    Raises UserError unless ``hours`` is positive and finite.
    """
    if hours is None:
        return math.inf
    if not 0 < hours < math.inf:
        raise UserError(
            f"budget {hours:g}: the time for a table is a positive number of hours: give hours, such as 2.5, or leave "
            "the budget out for no limit"
        )
    return time.monotonic() + 3600 * hours


def read_settings(path: Path, overrides: list[str]) -> TableSettings:
    """Return the settings in a table's TOML file, changed by ``key=value`` overrides as in ``table_settings``."""
    return table_settings(read_table(path), overrides, str(path))


def table_settings(table: Mapping[str, Any], overrides: list[str], where: str) -> TableSettings:
    """Return the settings of a table, changed by ``key=value`` overrides from the command line.

    ``table``: the content of the TOML file. ``where``: the name of the file, for error messages. An override changes
    [grid] in three cases: its setting is in [grid], or in ``AXES`` (algorithm, data, partition, seed), or it gives
    several seeds, as in ``seed=0,1,2``. Its value is then a list of values. An override such as ``tune.trials=4``
    changes [tune]. All other overrides change [base]. Raises UserError for invalid overrides.
    """
    changed: dict[str, Any] = {}
    tune = dict(table.get("tune", {}))
    others = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in {"centralized", "reference", "measure"}:
            changed[key] = value
        elif key.startswith("tune."):
            if key.split(".")[1] in {"space", "spaces"}:
                raise UserError(
                    f"{shortened(override)!r}: KEY=VALUE cannot change a search space: change [tune.space] in the file"
                )
            tune[key.removeprefix("tune.")] = value
            changed["tune"] = tune
        else:
            others.append(override)
    try:
        settings = TableSettings.model_validate({**table, **changed})
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, TableSettings, '')}") from error
    grids = settings.grids
    base = []
    for override in others:
        key, _, value = override.partition("=")
        is_everywhere = key in AXES or (key in SEEDS and "," in value)
        if spanned := [grid for grid in grids if is_everywhere or key in grid]:
            for grid in spanned:
                grid[key] = value.split(",")
        else:
            base.append(override)
    # The default engine of a table is not "auto", because the parallel runs of a table already use all cores.
    start = {"engine": "inprocess", **settings.base}
    given = tuple(grids) if isinstance(settings.grid, tuple) else grids[0]
    return settings.model_copy(update={"base": with_overrides(start, base), "grid": given})


def plan_table(
    settings: TableSettings, data_root: Path | None = None, say: Callable[[str], object] = lambda _: None
) -> Plan:
    """Return the plan of a table: the cells of its grids, each with checked settings, data, partition and model.

    ``data_root``: the folder of the data sets; None: the default folder. ``say``: function that receives progress
    messages. Raises UserError for the first invalid cell. The error message states the settings of the cell.
    """
    grids = settings.grids
    for key, values in (item for grid in grids for item in grid.items()):
        if not isinstance(values, list) or not values:
            raise UserError(f"grid.{key} = {values!r}: give a list of one or more values, such as {key} = [{values!r}]")
    if (num_cells := sum(math.prod(map(len, grid.values())) for grid in grids)) > MOST_CELLS:
        raise UserError(
            f"the grid has {num_cells:,} cells, and a table may have at most {MOST_CELLS:,}: split it into tables"
        )
    placed = _all_placed(settings, data_root, say)
    values_of: dict[str, list[Any]] = {}
    for key, values in (item for grid in grids for item in grid.items()):
        known = values_of.setdefault(key, [])
        known += [value for value in values if value not in known]
    varied, over = differences([cell.experiment for _, cell in placed]), seed_of_means(values_of)
    own = varied_parameters(part for _, one in placed for part in (one.experiment.algorithm, one.experiment.server))
    cells: dict[tuple[str, str, int], Cell] = {}
    bounds: dict[str, None] = {}
    names: dict[str, RowName] = {}
    for point, one in placed:
        row, name = _row(point, one.experiment, varied, own, _further(point, over), values_of)
        names.setdefault(row, name)
        if is_bound(point):
            bounds[row] = None
        # If centralized training does not use the seed setting ``over``, this setting is None. Then ``seed`` is used
        # instead.
        seed = getattr(one.experiment, over)
        place = (row, one.column, one.experiment.seed if seed is None else seed)
        cell = Cell(*place, one.experiment, one.name, point)
        if cells.setdefault(place, cell) != cell:
            one_kind, other = (kind_of(each.experiment.algorithm) for each in (cells[place], cell))
            raise UserError(
                f"row {row}, column {one.column}, seed {place[2]} would hold two different runs: {one_kind} and "
                f"{other} have the same title, or the row's name does not state their difference; give each class its "
                "own title, or each entry of grid.algorithm its own label"
            )
    rows = [row for row in dict.fromkeys(cell.row for cell in cells.values()) if row not in bounds] + list(bounds)
    columns = tuple(dict.fromkeys(cell.column for cell in cells.values()))
    ordered = sorted(cells.values(), key=lambda cell: (rows.index(cell.row), columns.index(cell.column)))
    found = row_labels({row: names[row] for row in rows})
    labels, left_out = ({row: both[part] for row, both in found.items()} for part in (0, 1))
    plan = Plan(tuple(rows), columns, tuple(ordered), frozenset(bounds), (), over, labels, left_out)
    plan = replace(plan, heat_maps=_heat_maps(settings.heat_map, plan, names, values_of))
    reference = _reference(settings.reference, plan)
    return replace(plan, reference=reference, caption=_caption(plan, [one for _, one in placed], settings.measure))


def tuned(
    settings: TableSettings, plan: Plan, chosen: Mapping[tuple[str, str], Mapping[str, Any]], data_root: Path | None
) -> Plan:
    """Return ``plan`` with the values that the hyperparameter search chose.

    ``chosen``: {(row, column): {setting: value}}. In the new plan, each run uses the test records only once, after its
    last round, unless [base] sets evaluate.test. The names of the rows do not change.
    """
    test = {} if "evaluate.test" in dict(flat(settings.base)) else {"evaluate.test": "last"}
    points = [{**cell.point, **chosen.get((cell.row, cell.column), {}), **test} for cell in plan.cells]
    placed = [_placed(settings, point, data_root) for point in points]
    cells = tuple(
        replace(cell, experiment=one.experiment, name=one.name, point=point)
        for cell, point, one in zip(plan.cells, points, placed, strict=True)
    )
    plan = replace(plan, cells=cells)
    return replace(plan, caption=_caption(plan, placed, settings.measure))


def by_records(given: Iterable[T], records_of: Callable[[T], object]) -> list[tuple[int, T]]:
    """Return (index, item) for all ``given`` items, sorted so that items with the same records follow each other.

    Each data set is then loaded only once. ``records_of``: function from an item to a key of its records.

    >>> by_records(["b1", "a1", "b2"], lambda one: one[0])
    [(0, 'b1'), (2, 'b2'), (1, 'a1')]
    """
    order: dict[str, int] = {}
    return sorted(enumerate(given), key=lambda pair: order.setdefault(str(records_of(pair[1])), len(order)))


def points(base: Mapping[str, Any], grid: Mapping[str, list[Any]], *, centralized: bool) -> Iterable[dict[str, Any]]:
    """Yield all points (combinations of values) of a grid, one method after the other.

    ``base``: the settings in [base]. A setting of ``AXES`` that is not in the grid has its value from [base], or else
    its default. ``centralized``: True adds the row Centralized at the end.
    """
    axes = dict(grid)
    for axis in AXES:
        default = Experiment.model_fields[axis].default
        axes.setdefault(axis, [base.get(axis, default if isinstance(default, str | int) else short_form(default))])
    methods = [_together(entry, grid, base.get("algorithm", "fedavg")) for entry in axes.pop("algorithm")]
    methods += [{"algorithm": "centralized"}] if centralized else []
    extra = [key for key in axes if key not in AXES]
    order = [*extra, "data", "partition", "seed"]
    for one in methods:
        for values in itertools.product(*(axes[key] for key in order)):
            yield {**one, **dict(zip(order, values, strict=True))}


def is_bound(point: Point) -> bool:
    """Return True if ``point`` (a combination of grid values) belongs to the row Centralized (centralized training)."""
    algorithm = point["algorithm"]
    return (algorithm.get("kind") if isinstance(algorithm, dict) else algorithm) == "centralized"


def as_run(point: Point) -> Point:
    """Return the settings of the run of ``point`` (a combination of grid values).

    In the row Centralized, this run is centralized training.
    """
    return _outside(point, CENTRALIZED) if is_bound(point) else point


def as_federation(point: Point) -> Point:
    """Return the settings of ``point`` (a combination of grid values) that determine the name of its column.

    In the row Centralized, these are settings of FedAvg. The reason: centralized training has no partition, but the
    name of the column contains one.
    """
    return _outside(point, _FEDAVG) if is_bound(point) else point


def experiment_at(base: Mapping[str, Any], point: Point) -> Experiment:
    """Return the experiment with the settings ``base`` and ``point`` (a combination of grid values).

    Raises UserError if the experiment is invalid. The error message states the settings of the point.
    """
    with _naming(point):
        point = {key: value for key, value in point.items() if key != _LABEL}
        table = _laid_over(base, {key: value for key, value in point.items() if "." not in key})
        return experiment_from(with_values(table, [(key, value) for key, value in point.items() if "." in key]))


def job_at(base: Mapping[str, Any], point: Point, data_root: Path | None) -> "Job":
    """Return the job of ``point`` (a combination of grid values): the experiment with loaded data and partition.

    Settings, model and trainer are checked as far as possible without a run. Raises UserError for an invalid job. The
    error message states the settings of the point.
    """
    experiment = experiment_at(base, point)
    with _naming(point):
        look_for(experiment.data, data_root)
        # torch is imported only after the check of the settings, so that an error in a setting appears at once
        with importing():
            from fl_sim.experiment.job import job_of  # noqa: PLC0415
            from fl_sim.simulation.engine_choice import check_trainer  # noqa: PLC0415
        job = job_of(experiment, data_root)
        job.check_model()
        check_trainer(job)
    return job


def _heat_maps(
    axes: HeatMapAxes | None, plan: Plan, names: Mapping[str, RowName], spanned: Collection[str]
) -> tuple[HeatMap, ...]:
    """Return the layouts of the table's heat maps; an empty tuple if the table has none (``axes`` is None).

    ``spanned``: the names of the settings in [grid].
    """
    if axes is None:
        return ()
    rows: dict[str, MappedRow] = {}
    for cell in plan.cells:
        if cell.row not in plan.upper_bounds:
            name, chosen = names[cell.row], str(cell.point.get(_LABEL, ""))
            values = {key: value for key, value in name.further.items() if not chosen or key in spanned}
            rows.setdefault(cell.row, MappedRow(cell.row, chosen or name.method, values))
    return heat_maps_of(axes, rows.values(), plan.columns)


def _reference(wanted: str, plan: Plan) -> str:
    """Return the name of the row whose name or label is ``wanted``. Raise UserError for an unknown row.

    If ``wanted`` is "", return "".
    """
    found = [row for row in plan.rows if wanted in {row, plan.labels[row]}]
    if wanted and not found:
        known = list(plan.labels.values())
        raise UserError(
            f"reference = {shortened(repr(wanted))}: no row has this name{guess(wanted, known)}; rows are "
            f"{', '.join(known)}"
        )
    return found[0] if wanted else ""


def _caption(plan: Plan, placed: Iterable["_Placed"], measure: str) -> tuple[str, ...]:
    shown = [cell for cell in plan.cells if cell.row not in plan.upper_bounds] or plan.cells
    notes: dict[str, str] = {}
    shares: dict[str, float] = {}
    for one in placed:
        notes[one.experiment.data] = one.data_note
        if one.experiment.evaluate.test != "never" and one.largest_class is not None:
            shares[one.experiment.data] = one.largest_class
    lines = caption(
        [cell.experiment for cell in shown],
        notes,
        shares,
        has_bound=bool(plan.upper_bounds),
        places=_places(plan, [cell.row for cell in shown], [cell.column for cell in shown]),
        settings=_left_out(plan),
    )
    if not measure:
        return lines
    from fl_sim.report.table import title_of_measure  # noqa: PLC0415 (it loads torch, which settings do not need)
    from fl_sim.simulation.stage import titles_of  # noqa: PLC0415 (as above)

    titles = titles_of(cell.experiment for cell in plan.cells)
    return (f"Measure: {title_of_measure(measure, titles)}.", *lines)


def _places(plan: Plan, rows: Sequence[str], columns: Sequence[str]) -> list[list[str]]:
    """Return lists of names, each with one name per cell, by which the caption can refer to cells.

    The first two lists have the names of rows and of columns in heat maps, if there are heat maps. The last two lists
    have the names of the table's rows and columns.
    """
    groups = row_groups(plan.heat_maps), column_groups(plan.heat_maps)
    lines = [[names.get(row, "") for row in rows] for names in groups if names]
    return [*lines, [plan.labels[row] for row in rows], [*columns]]


def _left_out(plan: Plan) -> dict[str, str]:
    """Return {label of a row in the table or its heat maps: the row's settings that the caption does not state yet}."""
    groups, found = row_groups(plan.heat_maps), dict[str, dict[str, None]]()
    along = tuple(f"{one.columns}=" for one in plan.heat_maps)
    for row, left_out in plan.settings.items():
        parts = [part for part in outside_brackets(left_out, ", ") if not part.startswith(along)]
        found.setdefault(groups.get(row, plan.labels[row]), {})[", ".join(parts)] = None
    return {name: " or ".join(filter(None, some)) for name, some in found.items()}


class _Placed(NamedTuple):
    """The checked experiment of a point (a combination of grid values), without the job (data and partition).

    The job is left out, because the partitions of thousands of jobs would fill the memory. ``largest_class``: the share
    of the largest class in the test records; None for a model that predicts tokens.
    """

    column: str
    experiment: Experiment
    name: str
    data_note: str
    largest_class: float | None


def _placed(settings: TableSettings, point: Point, data_root: Path | None) -> _Placed:
    job = job_at(settings.base, as_federation(point), data_root)
    column = f"{data_label(job.experiment.data)} {label(job.experiment.partition)}"
    if is_bound(point):
        job = job_at(settings.base, as_run(point), data_root)
    labels, note = job.dataset.test.labels, job.dataset.note
    # Only a model for tokens may predict something other than classes. job.predicts_classes is slow: it builds the
    # model.
    predicts = not job.dataset.vocabulary or job.predicts_classes
    largest_class = float(np.bincount(labels).max() / len(labels)) if predicts else None
    return _Placed(column, job.experiment, run_name(job.experiment, job.dataset), note, largest_class)


def _all_placed(
    settings: TableSettings, data_root: Path | None, say: Callable[[str], object]
) -> list[tuple[Point, _Placed]]:
    given = [
        point for grid in settings.grids for point in points(settings.base, grid, centralized=settings.centralized)
    ]
    placed: dict[int, _Placed] = {}
    for number, (place, point) in enumerate(by_records(given, lambda one: (one.get("data"), one.get("features"))), 1):
        say(f"checking cell {number:,} of {len(given):,}")
        placed[place] = _placed(settings, point, data_root)
    return [(point, placed[place]) for place, point in enumerate(given)]


def _row(
    point: Point,
    experiment: Experiment,
    varied: Collection[str],
    own: Mapping[type, frozenset[str]],
    further: Mapping[str, str],
    spanned: Collection[str],
) -> tuple[str, RowName]:
    """Return (name of the table's row with ``point``, parts of this name). The parts are used for the short label.

    ``further``: the other settings in the name, {setting: value}. ``spanned``: the names of the settings in [grid]. If
    the user gave the row a label, the name consists of this label and of the ``spanned`` settings.
    """
    chosen = str(point.get(_LABEL, ""))
    named = {key: value for key, value in further.items() if not chosen or key in spanned}
    row = ", ".join([chosen or method(experiment, varied), *(f"{key}={value}" for key, value in named.items())])
    of_kinds = own[type(experiment.algorithm)] | own[type(experiment.server)]
    return row, RowName(method(experiment, varied, of_kinds), further, experiment, is_chosen=bool(chosen))


def _further(point: Point, over: str) -> dict[str, str]:
    """Return {setting: value as text} of the settings of ``point`` that the row's name states after the method.

    The result leaves out the settings that belong to the method or to the column. It also leaves out the seed setting
    ``over``, over which the table averages.
    """
    named = {*AXES, over, _LABEL, *(CENTRALIZED if is_bound(point) else _IN_THE_NAME)}
    further = flat(point, lambda value: not isinstance(value, Mapping) or "kind" in value)
    return {key: text(value) for key, value in further if key.split(".")[0] not in named}


def _together(entry: Any, grid: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """Return the settings that one entry of the list ``grid.algorithm`` stands for.

    The entry is an algorithm, or a TOML table of an algorithm and further settings. ``usual``: the algorithm of an
    entry that has only further settings.
    """
    if isinstance(entry, dict) and _LABEL in entry:
        others = {key: value for key, value in entry.items() if key != _LABEL}
        if not isinstance(entry[_LABEL], str) or not entry[_LABEL].strip():
            raise UserError(f"{_LABEL} = {entry[_LABEL]!r} in grid.algorithm: give the name of the row as text")
        return {**_together(others, grid, usual), _LABEL: entry[_LABEL].strip()}
    if not isinstance(entry, dict) or "kind" in entry or not set(entry) & set(Experiment.model_fields):
        return {"algorithm": entry}
    spanned = {key.split(".")[0] for key in grid} - {"algorithm"} | {"data", "partition", "seed"}
    if twice := sorted(set(entry) & spanned):
        raise UserError(
            f"an entry of grid.algorithm sets {', '.join(twice)}, which the table varies already: an entry may "
            "set only parts of a method, such as algorithm, preprocess or aggregator"
        )
    return {"algorithm": usual, **entry}


def _outside(point: Point, instead: Point) -> Point:
    """Return ``point`` updated with the settings in ``instead``.

    A setting of ``point``, such as "local.momentum", is removed if the first part of its name ("local") is in
    ``instead``.
    """
    return {key: value for key, value in point.items() if key.split(".")[0] not in instead} | dict(instead)


@contextmanager
def _naming(point: Point) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        where = ", ".join(f"{key}={text(value)}" for key, value in point.items())
        raise UserError(f"cell {where}: {error}") from error


def _laid_over(base: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """Return ``base`` updated with the settings ``point``. Nested settings are merged if they have no ``kind``."""
    merged = {**base, **point}
    for key, value in point.items():
        if isinstance(value, dict) and "kind" not in value and isinstance(base.get(key), dict):
            merged[key] = {**base[key], **value}
    return merged
