"""A grid of experiments: methods in rows, data sets and splits in columns; every cell is checked before one runs."""

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
from fl_sim.mistakes import explain, shortened
from fl_sim.settings import Settings, flat, read_table
from fl_sim.tables.labels import SEEDS, caption, data_label, differences, label, method, run_name, seed_of_means, text
from fl_sim.tables.tuning_space import Tune

if TYPE_CHECKING:
    from fl_sim.experiment.job import Job

MOST_CELLS = 10_000
"""A table of more cells would be checked for minutes before the first one runs, and nobody could read it."""

T = TypeVar("T")

_IN_THE_NAME = ("algorithm", "preprocess", "server")

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


def _are_grids(given: Any) -> Any:
    several = given if isinstance(given, list | tuple) else [given]
    if several and all(isinstance(one, Mapping) for one in several):
        return given
    raise ValueError("give a table, [grid], or several of them, [[grid]]")


class TableSettings(Settings):
    """``base``: settings of every cell; ``grid``: lists of values by key; ``centralized`` adds the upper-bound row.

    ``grid`` may be several such grids, ``[[grid]]`` in a file: the table has the cells of all of them.
    ``tune``: how settings are searched for before the cells run; None: they are as given.
    An entry of ``grid.algorithm`` may set more than the algorithm: ``{algorithm = "fedavg", preprocess = "da-fl"}``.
    """

    base: dict[str, Any] = Field(default_factory=dict)
    grid: Annotated[dict[str, Any] | tuple[dict[str, Any], ...], BeforeValidator(_are_grids)] = Field(
        default_factory=dict
    )
    centralized: bool = True
    tune: Tune | None = None

    @property
    def grids(self) -> list[dict[str, Any]]:
        """Return every grid with the keys of its values, dots and all."""
        return [dict(flat(grid)) for grid in (self.grid if isinstance(self.grid, tuple) else (self.grid,))]


@dataclass(frozen=True)
class Cell:
    """One experiment's place in the table. Upper bounds stand in several columns with the same experiment."""

    row: str
    column: str
    seed: int
    """The one over which the table has means."""
    experiment: Experiment
    name: str
    """Name of the run's directory: readable, and different for different settings or records."""
    point: Point = field(compare=False)
    """What the cell lays over the base."""


@dataclass(frozen=True)
class Plan:
    """A table before it is filled."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    upper_bounds: frozenset[str]
    caption: tuple[str, ...]
    over: str = "seed"
    """Which of the seeds the cells of a row and column differ in."""

    @property
    def runs(self) -> dict[str, Experiment]:
        """Return {directory name: experiment}, each experiment once, in the order of the rows."""
        return {cell.name: cell.experiment for cell in self.cells}


def deadline_after(hours: float | None) -> float:
    """Return when ``hours`` from now are over, by ``time.monotonic``; None: never. Raises UserError for no time."""
    if hours is None:
        return math.inf
    if not 0 < hours < math.inf:
        raise UserError(f"budget {hours:g} is no time to fill a table in: give hours, such as 2.5, or leave it out")
    return time.monotonic() + 3600 * hours


def read_settings(path: Path, overrides: list[str]) -> TableSettings:
    """Read a table's TOML file and lay ``key=value`` settings over it, as ``table_settings`` does."""
    return table_settings(read_table(path), overrides, str(path))


def table_settings(table: Mapping[str, Any], overrides: list[str], where: str) -> TableSettings:
    """Return the settings of a ``table`` from ``where`` with ``key=value`` settings over it.

    Keys that the grid spans take lists (``seed=0,1,2``), in every grid that they span; all others go to [base]. Raises
    UserError for invalid ones.
    """
    centralized = [text.partition("=")[2] for text in overrides if text.startswith("centralized=")]
    table = {**table, **({"centralized": centralized[-1]} if centralized else {})}
    table, overrides = _with_tune(table, overrides)
    try:
        settings = TableSettings.model_validate(table)
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, TableSettings, '')}") from error
    grids = settings.grids
    # Cells side by side already fill the cores.
    start = {"engine": "inprocess", **settings.base}
    base = []
    for override in overrides:
        key, _, value = override.partition("=")
        is_everywhere = key in AXES or (key in SEEDS and "," in value)
        if spanned := [grid for grid in grids if is_everywhere or key in grid]:
            for grid in spanned:
                grid[key] = value.split(",")
        elif key != "centralized":
            base.append(override)
    given = tuple(grids) if isinstance(settings.grid, tuple) else grids[0]
    return settings.model_copy(update={"base": with_overrides(start, base), "grid": given})


def plan_table(
    settings: TableSettings, data_root: Path | None = None, say: Callable[[str], object] = lambda _: None
) -> Plan:
    """Expand the grid and check every cell: its settings, its data, its split and its model; ``say`` hears how far.

    Raises UserError that names the first cell that could not run.
    """
    grids = settings.grids
    for key, values in (item for grid in grids for item in grid.items()):
        if not isinstance(values, list) or not values:
            raise UserError(f"grid.{key} = {values!r}: give a list of one or more values, such as {key} = [{values!r}]")
    if (num_cells := sum(math.prod(map(len, grid.values())) for grid in grids)) > MOST_CELLS:
        raise UserError(f"the grid has {num_cells:,} cells, a table at most {MOST_CELLS:,}: make several tables of it")
    placed = _all_placed(settings, data_root, say)
    varied, over = differences([cell.experiment for _, cell in placed]), seed_of_means(_values_of_all(grids))
    cells: dict[tuple[str, str, int], Cell] = {}
    bounds: dict[str, None] = {}
    for point, one in placed:
        row = ", ".join([method(one.experiment, varied), *_further(point, over)])
        if is_bound(point):
            bounds[row] = None
        seed = getattr(one.experiment, over)  # an upper bound has no split and no cohorts: None
        place = (row, one.column, one.experiment.seed if seed is None else seed)
        cell = Cell(*place, one.experiment, one.name, point)
        if cells.setdefault(place, cell) != cell:
            one_kind, other = (kind_of(each.experiment.algorithm) for each in (cells[place], cell))
            raise UserError(
                f"two cells stand in row {row}, column {one.column}, seed {place[2]}: {one_kind} and {other} have one "
                "title, or the row tells not what they differ in; give each class a title of its own"
            )
    rows = [row for row in dict.fromkeys(cell.row for cell in cells.values()) if row not in bounds] + list(bounds)
    columns = tuple(dict.fromkeys(cell.column for cell in cells.values()))
    ordered = sorted(cells.values(), key=lambda cell: (rows.index(cell.row), columns.index(cell.column)))
    words = _caption(ordered, bounds, [one for _, one in placed])
    return Plan(tuple(rows), columns, tuple(ordered), frozenset(bounds), words, over)


def tuned(
    settings: TableSettings, plan: Plan, chosen: Mapping[tuple[str, str], Mapping[str, Any]], data_root: Path | None
) -> Plan:
    """Return ``plan`` with the values that a search has ``chosen`` for {(row, column)}, to be tested once at the end.

    The rows keep their names.
    """
    points = [{**cell.point, **chosen.get((cell.row, cell.column), {}), "evaluate.test": "last"} for cell in plan.cells]
    placed = [_placed(settings, point, data_root) for point in points]
    cells = tuple(
        replace(cell, experiment=one.experiment, name=one.name, point=point)
        for cell, point, one in zip(plan.cells, points, placed, strict=True)
    )
    return replace(plan, cells=cells, caption=_caption(cells, plan.upper_bounds, placed))


def experiments(settings: TableSettings) -> list[Experiment]:
    """Return the experiment of every cell as its settings say: neither data nor split are looked at.

    Raises UserError that names the first cell whose settings do not go together.
    """
    return [experiment_at(settings.base, as_run(point)) for point in _points(settings)]


def by_records(given: Iterable[T], records_of: Callable[[T], object]) -> list[tuple[int, T]]:
    """Return (place, one) of all that is ``given``, those on the same records together.

    >>> by_records(["b1", "a1", "b2"], lambda one: one[0])
    [(0, 'b1'), (2, 'b2'), (1, 'a1')]
    """
    groups: dict[str, list[tuple[int, T]]] = {}
    for place, one in enumerate(given):
        groups.setdefault(str(records_of(one)), []).append((place, one))
    return [each for group in groups.values() for each in group]


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


def _with_tune(table: Mapping[str, Any], overrides: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Lay ``tune.trials=4`` and the like over the table, and return it with the other settings."""
    ours = [override for override in overrides if override.startswith("tune.")]
    tune = dict(table.get("tune", {}))
    for override in ours:
        key, _, value = override.removeprefix("tune.").partition("=")
        if key.partition(".")[0] in {"space", "spaces"}:
            raise UserError(f"{shortened(override)!r}: what a search may draw stands in the file, in [tune.space]")
        tune[key] = value
    return {**table, **({"tune": tune} if ours else {})}, [one for one in overrides if one not in ours]


def _caption(cells: Sequence[Cell], bounds: Collection[str], placed: Iterable["_Placed"]) -> tuple[str, ...]:
    federated = [cell.experiment for cell in cells if cell.row not in bounds]
    notes: dict[str, str] = {}
    shares: dict[str, float] = {}
    for one in placed:
        notes[one.experiment.data] = one.data_note
        if one.experiment.evaluate.test != "never":
            shares[one.experiment.data] = one.largest_class
    return caption(federated or [cell.experiment for cell in cells], notes, shares, has_bound=bool(bounds))


def _points(settings: TableSettings) -> Iterable[Point]:
    for grid in settings.grids:
        yield from points(settings.base, grid, centralized=settings.centralized)


def _values_of_all(grids: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values that any of ``grids`` has, each once."""
    values: dict[str, list[Any]] = {}
    for key, own in (item for grid in grids for item in grid.items()):
        values.setdefault(key, []).extend(value for value in own if value not in values[key])
    return values


class _Placed(NamedTuple):
    """What a point of the grid stands for. Its job is forgotten: thousands of splits would fill the memory."""

    column: str
    experiment: Experiment
    name: str
    data_note: str
    largest_class: float


def _placed(settings: TableSettings, point: Point, data_root: Path | None) -> _Placed:
    job = job_at(settings.base, as_federation(point), data_root)
    column = f"{data_label(job.experiment.data)} {label(job.experiment.partition)}"
    if is_bound(point):
        job = job_at(settings.base, as_run(point), data_root)
    labels, note = job.dataset.test.labels, job.dataset.note
    largest_class = float(np.bincount(labels).max() / len(labels))
    return _Placed(column, job.experiment, run_name(job.experiment, job.dataset), note, largest_class)


def _all_placed(
    settings: TableSettings, data_root: Path | None, say: Callable[[str], object]
) -> list[tuple[Point, _Placed]]:
    """Return every point with what it stands for. Points on the same records follow each other: these are kept."""
    given, placed = list(_points(settings)), dict[int, _Placed]()
    for number, (place, point) in enumerate(by_records(given, lambda one: (one.get("data"), one.get("features"))), 1):
        say(f"checking cell {number:,} of {len(given):,}")
        placed[place] = _placed(settings, point, data_root)
    return [(point, placed[place]) for place, point in enumerate(given)]


def _further(point: Point, over: str) -> list[str]:
    """Return what a row's name must say besides the method: all that spans the table, is in no column and no mean."""
    named = {*AXES, over, *(CENTRALIZED if is_bound(point) else _IN_THE_NAME)}
    further = flat(point, lambda value: not isinstance(value, Mapping) or "kind" in value)
    return [f"{key}={text(value)}" for key, value in further if key.split(".")[0] not in named]


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
