"""Runs and tables found again on disk: every file is checked, a damaged one is named and costs no other."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from fl_sim.errors import UserError
from fl_sim.mistakes import shortened
from fl_sim.report.files import CellFile, Outcome, RunConfig, TableFile, read_json
from fl_sim.report.table import SeedResult, Table
from fl_sim.report.table_files import VERSION
from fl_sim.settings import read_table
from fl_sim.store.run_directory import CONFIG, RESULT, ROUNDS, RoundRecord, read_identity, read_rounds

TABLE, TUNING = "table.json", "tuning"
_DEEPEST = 6


@dataclass(frozen=True)
class Run:
    """A run directory. ``settings``: all of ``config.toml``; ``outcome`` None: there is no ``result.json``.

    ``row`` and ``column``: what a table above it calls its method and its split, where there is one and it stands in
    one place of it. ``identity``: of records and code that are the user's own, as far as the run tells.
    """

    path: Path
    config: RunConfig
    settings: Mapping[str, Any]
    rounds: tuple[RoundRecord, ...]
    outcome: Outcome | None
    row: str = ""
    column: str = ""
    identity: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """Return finished, failed, interrupted or unfinished."""
        return self.outcome.status if self.outcome else "unfinished"

    @property
    def voted(self) -> bool:
        """Return whether clients voted once, so that rounds are epochs of a student; as far as the run says so."""
        return self.outcome is not None and self.outcome.pate is not None

    @property
    def preprocess(self) -> Mapping[str, Any] | None:
        """Return the settings of what clients do before the first round, None where they do nothing."""
        return None if self.config.preprocess.kind == "none" else self.settings["preprocess"]

    @property
    def error(self) -> str:
        """Return why the run is not finished, in words; empty where it is."""
        done = f"after {len(self.rounds)} of {self.config.rounds} rounds"
        if self.outcome is None:
            return f"no {RESULT}: still running, or killed {done}"
        if self.status == "interrupted":
            return f"interrupted {done}; the same command goes on from there"
        return "" if self.status == "finished" else f"{self.outcome.error or 'no reason given'} ({done})"


@dataclass(frozen=True)
class Problem:
    """Something that is not in the report as it should be, and why."""

    path: Path
    error: str


@dataclass
class Found:
    """All that was found: ``tables`` by their directories, and what could not be read.

    ``read``: all runs, also those that are not shown: what they released is paid for all the same. ``num_unread``: how
    many run directories could not be read.
    """

    runs: list[Run] = field(default_factory=list)
    read: list[Run] = field(default_factory=list)
    num_unread: int = 0
    tables: dict[Path, Table] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def find(directories: Sequence[Path]) -> Found:
    """Read every run and table in or below ``directories``, up to six levels down.

    A table's runs come in the order of its rows; runs under it that it does not name are left out and reported. Raises
    UserError for a directory that is none, that holds no run, and where not one run can be read.
    """
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"{directory} is {'no directory' if directory.exists() else 'not there'}: {WANTED}")
        if next(places_in(directory), None) is None:
            raise UserError(
                f"no run in {directory}: no {CONFIG}, {ROUNDS}, {RESULT} or {TABLE} up to {_DEEPEST} folders deep; "
                f"{WANTED}"
            )
    found = read_all(directories)
    _obey_tables(found)
    if not any(record.test_accuracy is not None for run in found.runs for record in run.rounds):
        reasons = [f"{run.path}: {run.error or f'no evaluated round in {ROUNDS}'}" for run in found.runs]
        reasons += [f"{problem.path}: {problem.error}" for problem in found.problems]
        more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
        raise UserError(f"nothing to show, no run with an evaluated round: {'; '.join(reasons[:5])}{more}")
    return found


def read_all(directories: Sequence[Path]) -> Found:
    """Read every run and table in or below ``directories``, up to six levels down, each once; none may be there."""
    found = Found()
    seen: set[Path] = set()
    for place in (place for directory in directories for place in places_in(directory)):
        if place.resolve() not in seen:
            seen.add(place.resolve())
            _take(place, found)
    found.read = list(found.runs)
    return found


WANTED = "give a directory that 'fl-sim run --out' or 'fl-sim table --out' wrote, or one that holds such directories"


def places_in(top: Path) -> Iterator[Path]:
    """Yield the run and table directories in ``top``, in order; the trials of a table's search are no results."""
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
            if run.status == "finished" and run.outcome and run.outcome.rounds != len(run.rounds):
                error = f"{ROUNDS} holds {len(run.rounds)} of {run.outcome.rounds} rounds: its curve is cut short"
                found.problems.append(Problem(place, error))
    except (OSError, ValueError) as error:
        found.num_unread += not (place / TABLE).exists()
        found.problems.append(Problem(place, str(error)))


def read_run(path: Path) -> Run:
    """Read a run directory; raises OSError or ValueError that names the damaged or missing file."""
    if not (path / CONFIG).exists():
        raise ValueError(f"{CONFIG} is missing, so its settings are not known")
    with _naming(CONFIG):
        settings = read_table(path / CONFIG)
        config = RunConfig.model_validate(settings)
    outcome = None
    if (path / RESULT).exists():
        with _naming(RESULT):
            outcome = Outcome.model_validate(read_json(path / RESULT))
    with _naming(ROUNDS):
        rounds = TypeAdapter(list[RoundRecord]).validate_python([asdict(record) for record in read_rounds(path)])
    if any(after.round <= before.round for before, after in pairwise(rounds)) or (rounds and rounds[-1].round > 10**9):
        raise ValueError(f"{ROUNDS} is damaged: its rounds are not in order")
    if not rounds and outcome and outcome.status == "finished":
        raise ValueError(f"{ROUNDS} is missing or holds no readable round")
    return Run(path, config, settings, tuple(rounds), outcome, identity=read_identity(path))


class _naming:  # noqa: N801 (used as a function)
    """Say in the error which file it is about."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{self._name} is damaged: {f'{where}: ' if where else ''}{first['msg']}") from error
        if isinstance(error, ValueError):
            raise ValueError(f"{self._name} is damaged: {error}") from error


def read_json_table(place: Path) -> Table:
    """Read a table back from its ``table.json``, of this version or an older one.

    Raises OSError or ValueError that names the file, where it is damaged or of a newer version.
    """
    with _naming(TABLE):
        content = read_json(place / TABLE)
        version = content.get("version", 1) if isinstance(content, dict) else 1
        if type(version) is int and version in range(1, VERSION + 1):
            file = TableFile.model_validate(content)
            results = tuple(result for cell in file.cells for result in _seeds(cell))
            return Table(
                tuple(file.rows), tuple(file.columns), frozenset(file.upper_bounds), results, tuple(file.caption)
            )
    raise ValueError(
        f"{TABLE} is of version {shortened(repr(version))}, and this fl-sim reads versions 1 to {VERSION}: take the "
        "fl-sim that wrote it, or let 'fl-sim table' of this one write it again from its runs"
    )


def _seeds(cell: CellFile) -> Iterator[SeedResult]:
    """Take a cell apart again. Its values come back as accuracies in [0, 1].

    An older file has no status a seed: all seeds without a value have the cell's there, and all of its errors.
    """
    statuses = cell.statuses or [cell.status] * len(cell.seeds)
    is_one_each = bool(cell.statuses) and cell.statuses.count("failed") == len(cell.errors)
    errors = iter(cell.errors) if is_one_each else repeat("; ".join(cell.errors))
    for number, (seed, directory, last, best, told) in enumerate(
        zip(cell.seeds, cell.dir, cell.values, cell.best_values, statuses, strict=True)
    ):
        place = (cell.row, cell.column, seed)
        if last is None or best is None:
            status: Literal["failed", "missing"] = "missing" if told == "finished" else told
            yield SeedResult(*place, status, directory, error=next(errors) if status == "failed" else "")
        else:
            measures = {name: values[number] for name, values in cell.measures.items() if number < len(values)}
            numbers = {name: value for name, value in measures.items() if value is not None}
            yield SeedResult(*place, "finished", directory, last / 100, best / 100, measures=numbers)


def _obey_tables(found: Found) -> None:
    """Put each table's runs in the order of its rows, under its names, and leave out those that it does not name."""
    order: dict[Path, int] = {}
    rows: dict[Path, set[str]] = {}
    columns: dict[Path, set[str]] = {}
    for place, table in found.tables.items():
        for result in table.results:
            path = place / result.directory
            order.setdefault(path, len(order))
            rows.setdefault(path, set()).add(result.row)
            columns.setdefault(path, set()).add(result.column)
    for run in list(found.runs):
        if run.path not in order and any(place in run.path.parents for place in found.tables):
            found.runs.remove(run)
            error = f"left out: the {TABLE} above it does not name it, so it comes from other settings"
            found.problems.append(Problem(run.path, error))
    # sorted() keeps the order of the command line among runs outside tables.
    ordered = sorted(found.runs, key=lambda run: order.get(run.path, len(order)))
    found.runs = [
        replace(run, row=_only(rows.get(run.path, set())), column=_only(columns.get(run.path, set())))
        for run in ordered
    ]


def _only(names: set[str]) -> str:
    return next(iter(names)) if len(names) == 1 else ""
