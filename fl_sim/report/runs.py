"""Reads runs and tables on disk. Every file is checked. A damaged file is reported, and the other files are read."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from fl_sim.errors import UserError
from fl_sim.mistakes import shortened
from fl_sim.report.files import CellFile, HeatMapFile, ResultFile, RunConfig, TableFile, read_json
from fl_sim.report.heat_map import HeatMap
from fl_sim.report.measures import Spent
from fl_sim.report.table import SeedResult, Table
from fl_sim.report.table_files import VERSION
from fl_sim.settings import read_table
from fl_sim.store.run_directory import CONFIG, RESULT, ROUNDS, RoundRecord, read_identity, read_rounds

TABLE, TUNING = "table.json", "tuning"
WANTED = "give a directory that 'fl-sim run --out' or 'fl-sim table --out' wrote, or a folder of such directories"
_DEEPEST = 6
"""Number of levels of subfolders that are searched for runs."""


@dataclass(frozen=True)
class SavedRun:
    """The content of a run directory.

    ``config``: the settings that a report uses. ``settings``: all settings in ``config.toml``. ``result``: the content
    of ``result.json``; None if the file is missing. ``row``, ``column``, ``label``: the place of the run in its table:
    row, column and the row's short label. Each of these three fields is empty if the run is in no table, or if the
    table has several such names for the run. ``identity``: digests of the user's own records and code, if the run
    directory has them.
    """

    path: Path
    config: RunConfig
    settings: Mapping[str, Any]
    rounds: tuple[RoundRecord, ...]
    result: ResultFile | None
    row: str = ""
    column: str = ""
    label: str = ""
    identity: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """Return the status of the run: finished, failed, interrupted or unfinished."""
        return self.result.status if self.result else "unfinished"

    @property
    def voted(self) -> bool:
        """Return True for a run of PATE, where teachers vote. Its rounds are training epochs of the student."""
        return self.result is not None and self.result.pate is not None

    @property
    def preprocess(self) -> Mapping[str, Any] | None:
        """Return the settings of the preprocessing; None for a run without preprocessing."""
        return None if self.config.preprocess.kind == "none" else self.settings["preprocess"]

    @property
    def error(self) -> str:
        """Return the reason why the run is not finished; empty for a finished run."""
        done = f"after {len(self.rounds)} of {self.config.rounds} rounds"
        if self.result is None:
            return f"no {RESULT}: the run is still running, or was killed {done}"
        if self.status == "interrupted":
            return f"interrupted {done}; the same command resumes the run"
        return "" if self.status == "finished" else f"{self.result.error or 'no reason given'} ({done})"

    @property
    def spent_beforehand(self) -> Spent:
        """Return the bytes and seconds before the first round.

        The bytes are None if the size of any message is unknown.
        """
        if self.result is None:
            return Spent()
        before = [one for one in self.result.bytes.before.values() if one is not None]
        known = len(before) == len(self.result.bytes.before)
        return Spent(sum(one.down + one.up for one in before) if known else None, self.result.seconds.preprocess)

    @property
    def privacy_in_short(self) -> str:
        """Return the privacy of the run as an entry of a table, such as ``epsilon 3.2 per client`` or ``none``."""
        if self.result is None:
            return "not stated"
        return "; ".join(dict.fromkeys(one.in_short for one in self.result.privacy)) or "none"


@dataclass(frozen=True)
class Problem:
    """A line of the report's list of problems: the reason (``error``) why a run or table is missing or incomplete."""

    path: Path
    error: str


@dataclass
class Found:
    """All runs and tables that were found on disk.

    ``runs``: the runs that the report shows. ``read``: all runs that were read. They include runs that the report does
    not show, because such runs have a privacy cost, too. ``num_unread``: the number of run directories that could not
    be read. ``tables``: {directory: table}. ``problems``: the reasons for missing or incomplete runs.
    """

    runs: list[SavedRun] = field(default_factory=list)
    read: list[SavedRun] = field(default_factory=list)
    num_unread: int = 0
    tables: dict[Path, Table] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def has_statements(self) -> bool:
        """Return True if any run has a privacy statement."""
        return any(run.result and run.result.privacy for run in self.read)


def find(directories: Sequence[Path]) -> Found:
    """Return all runs and tables in ``directories`` and their subfolders, up to six levels deep, for a report.

    The runs of a table are sorted by the table's rows. A run is left out and reported if it is in the folder of a table
    but not in the table. Raises UserError for a missing directory, for a directory without runs, and if no run has an
    evaluated round.
    """
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"{directory} {'is no directory' if directory.exists() else 'does not exist'}: {WANTED}")
        if next(places_in(directory), None) is None:
            raise UserError(
                f"no run in {directory}: no {CONFIG}, {ROUNDS}, {RESULT} or {TABLE} up to {_DEEPEST} folders deep; "
                f"{WANTED}"
            )
    found = read_all(directories)
    _apply_tables(found)
    if not any(record.test_accuracy is not None for run in found.runs for record in run.rounds):
        reasons = [f"{run.path}: {run.error or f'no evaluated round in {ROUNDS}'}" for run in found.runs]
        reasons += [f"{problem.path}: {problem.error}" for problem in found.problems]
        more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
        raise UserError(f"nothing to show: no run has an evaluated round: {'; '.join(reasons[:5])}{more}")
    return found


def read_all(directories: Sequence[Path]) -> Found:
    """Return all runs and tables in ``directories`` and their subfolders, up to six levels deep.

    Each run is read once. The result may be empty.
    """
    found = Found()
    seen: set[Path] = set()
    for place in (place for directory in directories for place in places_in(directory)):
        if place.resolve() not in seen:
            seen.add(place.resolve())
            _take(place, found)
    found.read = list(found.runs)
    return found


def places_in(top: Path) -> Iterator[Path]:
    """Yield the directories of runs and tables in ``top``, sorted by name.

    The trials of hyperparameter searches are left out.
    """
    for folder, below, files in os.walk(top):
        path = Path(folder)
        if not {CONFIG, ROUNDS, RESULT, TABLE}.isdisjoint(files):
            yield path
        deep = len(path.relative_to(top).parts) >= _DEEPEST
        trials = {TUNING} if TABLE in files else set()
        below[:] = [] if deep else sorted(name for name in below if not name.startswith(".") and name not in trials)


def _take(place: Path, found: Found) -> None:
    try:
        if (place / TABLE).exists():
            found.tables[place] = read_json_table(place)
        else:
            run = read_run(place)
            found.runs.append(run)
            if run.status == "finished" and run.result and run.result.rounds != len(run.rounds):
                error = f"{ROUNDS} has {len(run.rounds)} of {run.result.rounds} rounds: the curve is incomplete"
                found.problems.append(Problem(place, error))
    except (OSError, ValueError) as error:
        found.num_unread += not (place / TABLE).exists()
        found.problems.append(Problem(place, str(error)))


def read_run(path: Path) -> SavedRun:
    """Return the run in the directory ``path``.

    Raises OSError or ValueError, with the name of the file, for a damaged or missing file.
    """
    if not (path / CONFIG).exists():
        raise ValueError(f"{CONFIG} is missing, so the settings of the run are unknown")
    with _naming(CONFIG):
        settings = read_table(path / CONFIG)
        config = RunConfig.model_validate(settings)
    result = None
    if (path / RESULT).exists():
        with _naming(RESULT):
            result = ResultFile.model_validate(read_json(path / RESULT))
    with _naming(ROUNDS):
        rounds = TypeAdapter(list[RoundRecord]).validate_python([asdict(record) for record in read_rounds(path)])
    if any(after.round <= before.round for before, after in pairwise(rounds)) or (rounds and rounds[-1].round > 10**9):
        raise ValueError(f"{ROUNDS} is damaged: its rounds are not in order")
    if not rounds and result and result.status == "finished":
        raise ValueError(f"{ROUNDS} is missing or has no readable round")
    return SavedRun(path, config, settings, tuple(rounds), result, identity=read_identity(path))


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{name} is damaged: {f'{where}: ' if where else ''}{first['msg']}") from error
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error}") from error


def read_json_table(place: Path) -> Table:
    """Return the table in the folder ``place``, read from its ``table.json`` of this or an older format version.

    Raises OSError or ValueError, with the name of the file, for a damaged file or a newer format version.
    """
    with _naming(TABLE):
        content = read_json(place / TABLE)
        version = content.get("version", 1) if isinstance(content, dict) else 1
        if type(version) is int and version in range(1, VERSION + 1):
            file = TableFile.model_validate(content)
            results = tuple(result for cell in file.cells for result in _seeds(cell))
            return Table(
                tuple(file.rows), tuple(file.columns), frozenset(file.upper_bounds), results, tuple(file.caption),
                settings=file.settings.model_dump(), labels=file.labels, reference=file.reference,
                alone=frozenset(file.alone), titles=file.titles, heat_maps=tuple(map(_heat_map, file.heat_maps)),
            )  # fmt: skip
    raise ValueError(
        f"{TABLE} has format version {shortened(repr(version))}, and this fl-sim reads versions 1 to {VERSION}: use "
        "the fl-sim that wrote the file, or run 'fl-sim table' again to rewrite the file from the finished runs"
    )


def _heat_map(one: HeatMapFile) -> HeatMap:
    places = {(row, column): name for row, column, name in one.places}
    labels = tuple(one.row_labels), tuple(one.column_labels)
    return HeatMap(one.title, one.column, one.rows, one.columns, *labels, places)


def _seeds(cell: CellFile) -> Iterator[SeedResult]:
    """Yield the result of each seed of a cell of ``table.json``, with accuracies in [0, 1].

    An older file has only one status per cell. Each seed without an accuracy then gets the status and all errors of the
    cell.
    """
    statuses = cell.statuses or [cell.status] * len(cell.seeds)
    is_one_each = bool(cell.statuses) and cell.statuses.count("failed") == len(cell.errors)
    errors = iter(cell.errors) if is_one_each else repeat("; ".join(cell.errors))
    for number, (seed, directory, last, best, status) in enumerate(
        zip(cell.seeds, cell.dir, cell.values, cell.best_values, statuses, strict=True)
    ):
        place = (cell.row, cell.column, seed)
        if last is None or best is None:
            state: Literal["failed", "missing"] = "missing" if status == "finished" else status
            yield SeedResult(*place, state, directory, error=next(errors) if state == "failed" else "")
        else:
            measures = {name: values[number] for name, values in cell.measures.items() if number < len(values)}
            numbers = {name: value for name, value in measures.items() if value is not None}
            yield SeedResult(*place, "finished", directory, last / 100, best / 100, measures=numbers)


def with_table_names(runs: Iterable[SavedRun], tables: Mapping[Path, Table]) -> list[SavedRun]:
    """Return copies of ``runs`` with their names in ``tables``: the row, column and label of each run.

    ``tables``: {folder: table}. A name is empty if a run is in no table or has several names. For example, a run of
    centralized training belongs to several columns.
    """
    places: dict[Path, list[SeedResult]] = {}
    labels: dict[Path, set[str]] = {}
    for place, table in tables.items():
        for result in table.results:
            places.setdefault(place / result.directory, []).append(result)
            labels.setdefault(place / result.directory, set()).add(table.label(result.row))
    named = []
    for run in runs:
        rows = {one.row for one in places.get(run.path, ())}
        columns = {one.column for one in places.get(run.path, ())}
        own = labels.get(run.path, ())
        row, column, label = ("".join(names) if len(names) == 1 else "" for names in (rows, columns, own))
        named.append(replace(run, row=row, column=column, label=label))
    return named


def _apply_tables(found: Found) -> None:
    """Sort the runs of each table by row. Remove a run if it is in a table's folder but not in the table.

    An error message for each removed run is added to ``found.problems``.
    """
    order = dict.fromkeys(place / one.directory for place, table in found.tables.items() for one in table.results)
    position = {path: number for number, path in enumerate(order)}
    for run in list(found.runs):
        if run.path not in order and any(place in run.path.parents for place in found.tables):
            found.runs.remove(run)
            error = f"left out: {TABLE} of the table in this folder does not list the run, so it has other settings"
            found.problems.append(Problem(run.path, error))
    # Runs outside tables have equal sort keys, so sorted() keeps them in the order of the command line.
    ordered = sorted(found.runs, key=lambda run: position.get(run.path, len(order)))
    found.runs = with_table_names(ordered, found.tables)
