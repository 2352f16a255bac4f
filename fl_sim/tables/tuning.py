"""Hyperparameter search before the runs of a table, by successive halving, with the same effort for every method.

A trial is one choice of hyperparameter values. A rung is one stage of successive halving. The best trials of a rung
continue on the next rung, with more rounds. The file ``tuning.csv`` lists all trials.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fl_sim.data import contents_of
from fl_sim.data.naming import is_own
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.kinds import field_defaults, kind_of
from fl_sim.settings import flat
from fl_sim.store import run_directory
from fl_sim.tables.earlier_runs import trial_directory, trial_outcome
from fl_sim.tables.plan import AXES, CENTRALIZED, Cell, Plan, TableSettings, as_run, experiment_at, is_bound, job_at
from fl_sim.tables.tuning_space import (
    Method,
    Rung,
    Space,
    Tune,
    Values,
    check_installed,
    drawn,
    proposed,
    rungs,
    spaces,
)
from fl_sim.tables.workers import Event, Failed

TRIALS, LOG = "tuning", "tuning.csv"

Runner: TypeAlias = Callable[[Mapping[str, Experiment], Mapping[str, str]], Iterable[Event]]
"""A function that executes runs and yields their events. Arguments: {name: experiment} and {name: displayed label}."""


@dataclass(frozen=True, eq=False)
class Search:
    """The search for the hyperparameters of one row in one column of the table.

    ``cell``: the cell with the first seed; the trials have the seed and the partition of this cell. ``space``: the
    search space. ``rungs``: the stages of successive halving.
    """

    cell: Cell
    space: Space
    rungs: tuple[Rung, ...]

    @property
    def place(self) -> tuple[str, str]:
        """Return (row, column) of the search."""
        return self.cell.row, self.cell.column

    @property
    def title(self) -> str:
        """Return the title of the search for messages: "row, column"."""
        return f"{self.cell.row}, {self.cell.column}"


@dataclass(frozen=True, eq=False)
class Trial:
    """One choice of hyperparameter values in a search. ``number``: number of the trial, from 1."""

    search: Search
    number: int
    values: Values


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial on one rung (stage of successive halving).

    ``rung``: number of the rung, from 1. ``rounds``: total number of rounds of the trial. ``trained``: number of rounds
    trained on this rung. It is smaller than ``rounds`` if the trial extends its run of the previous rung. ``name``:
    name of the run directory. ``accuracy``: in [0, 1]; None if the trial diverged. ``error``: the error message of a
    trial that diverged. ``seconds``: time of the trained rounds; the time of a private run is rounded up.
    """

    trial: Trial
    rung: int
    rounds: int
    trained: int
    name: str
    accuracy: float | None
    seconds: float
    error: str = ""

    @property
    def status(self) -> Literal["finished", "diverged"]:
        """Return the status of the trial for ``tuning.csv``."""
        return "diverged" if self.accuracy is None else "finished"


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    ``best``: the best trial on the last rung. ``tried``: the results of all trials on all their rungs.
    """

    search: Search
    best: TrialResult
    tried: tuple[TrialResult, ...]

    @property
    def at_end(self) -> list[str]:
        """Return the settings whose best value is near an end of the search space: the space may be too narrow."""
        space = self.search.space
        return [key for key, value in self.best.trial.values.items() if space[key].is_at_end(value)]


def searches_of(settings: TableSettings, plan: Plan, data_root: Path | None) -> tuple[Search, ...]:
    """Return the hyperparameter searches of a table with a section [tune], one search per row and column.

    The searches are checked as far as possible without training. Raises UserError for an invalid search space, for a
    value that is invalid for a method, for a search that would read private records, and for trials that cannot run.
    """
    tune = settings.tune
    assert tune is not None, "a table that tunes nothing"
    if tune.search == "optuna":
        check_installed()
    firsts: dict[tuple[str, str], Cell] = {}
    for cell in plan.cells:
        firsts.setdefault((cell.row, cell.column), cell)
    found = spaces(tune, {cell.row: _method(cell) for cell in firsts.values()}.values(), CENTRALIZED)
    _check_records(tune, [cell for cell in firsts.values() if found[cell.row]], data_root)
    searches = tuple(
        Search(cell, found[cell.row], rungs(tune.trials, tune.rounds or cell.experiment.rounds, tune.halving))
        for cell in firsts.values()
        if found[cell.row]
    )
    if not searches:
        raise UserError("[tune] has no setting to search for: name one in [tune.space], such as local.learning_rate")
    for search in {search.cell.row: search for search in searches}.values():
        usual = drawn(search.space, tune.seed, 0)
        for key, dimension in search.space.items():
            for value in dimension.extremes():
                experiment_of(settings, Trial(search, 1, {**usual, key: value}), search.rungs[0].rounds)
    for search in searches:
        _check_trials(settings, search, data_root)
    return searches


def trial_batches(tune: Tune) -> list[range]:
    """Return the batches of a search's trials, as ranges of trial indices (from 0).

    The values of all trials in a batch are drawn at the same time. A random search is one batch. In a search by Optuna,
    the first batch contains a quarter of all trials, with random values. Each later trial is a separate batch,
    because its values depend on all earlier results.
    """
    drawn_first = tune.trials if tune.search == "random" else max(1, tune.trials // 4)
    return [range(drawn_first), *(range(number, number + 1) for number in range(drawn_first, tune.trials))]


def proposed_trial(search: Search, tune: Tune, number: int, tried: Sequence[TrialResult]) -> Trial:
    """Return the trial with index ``number`` (from 0) of a search.

    ``tried``: the results of the earlier trials. Optuna uses them to propose the hyperparameter values of the trial.
    """
    if number in trial_batches(tune)[0]:
        return Trial(search, number + 1, drawn(search.space, tune.seed, number))
    before = [(one.trial.values, one.accuracy) for one in tried]
    return Trial(search, number + 1, proposed(search.space, before, tune.seed))


def experiment_of(settings: TableSettings, trial: Trial, rounds: int) -> Experiment:
    """Return the experiment of a trial with ``rounds`` rounds. Raise UserError for invalid hyperparameter values."""
    assert settings.tune is not None
    return experiment_at(settings.base, _point(settings.tune, trial, rounds))


def tune(
    settings: TableSettings, plan: Plan, out: Path, run: Runner, data_root: Path | None
) -> tuple[SearchResult, ...]:
    """Search for the best hyperparameters of every row in every column, and return the results of all searches.

    The trials are runs in ``out / TRIALS``. Finished trials are not repeated. ``run``: a function that executes several
    runs. One call of ``run`` executes a batch of new trials, or continues the best trials on the next rung (stage of
    successive halving). Raises UserError like ``searches_of``. Raises RunError for a trial that failed without
    diverging, and if all trials of a search diverge.
    """
    searches = searches_of(settings, plan, data_root)
    out.mkdir(parents=True, exist_ok=True)
    return _search_results(settings, searches, _Log(out / LOG), out / TRIALS, run, data_root)


def known_choices(
    settings: TableSettings, searches: Sequence[Search], out: Path, data_root: Path | None
) -> tuple[SearchResult, ...] | None:
    """Return the results of ``searches`` from their files in ``out``; None if any search is unfinished.

    No run is started, and no file is written.
    """

    def run(runs: Mapping[str, Experiment], labels: Mapping[str, str]) -> Iterable[Event]:
        del runs, labels
        raise _Unknown

    try:
        return _search_results(settings, searches, _Log(None), out / TRIALS, run, data_root)
    except _Unknown:
        return None


def ranked(tried: Iterable[TrialResult]) -> list[TrialResult]:
    """Return the trials that did not diverge, the highest accuracy first. Ties are sorted by trial number."""
    left = [one for one in tried if one.accuracy is not None]
    return sorted(left, key=lambda one: (-(one.accuracy or 0.0), one.trial.number))


def values_of(choices: Iterable[SearchResult]) -> dict[tuple[str, str], Values]:
    """Return the chosen hyperparameter values, {(row, column): {setting: value}}."""
    return {choice.search.place: choice.best.trial.values for choice in choices}


def csv_text(tried: Iterable[TrialResult]) -> str:
    """Return the text of ``tuning.csv``: a line for each trial on each rung. Accuracies are in [0, 1]."""
    table = [
        {
            "row": one.trial.search.cell.row, "column": one.trial.search.cell.column, "trial": one.trial.number,
            "rung": one.rung, "rounds": one.rounds, "trained": one.trained, "values": json.dumps(one.trial.values),
            "accuracy": one.accuracy, "status": one.status, "seconds": one.seconds, "dir": one.name, "error": one.error,
        }
        for one in tried
    ]  # fmt: skip
    lines = io.StringIO()
    writer = csv.DictWriter(lines, list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return lines.getvalue()


class _Unknown(Exception):  # noqa: N818 (not an error)
    """Raised in a function that only reads finished searches, if a trial has no stored result."""


@dataclass
class _Log:
    """The results of all trials so far.

    ``path``: the file to which the results are also written; None for no file.
    """

    path: Path | None
    tried: list[TrialResult] = field(default_factory=list)

    def add(self, tried: Iterable[TrialResult]) -> None:
        self.tried += tried
        if self.path is not None:
            run_directory.write_text(self.path, csv_text(self.tried))

    def of(self, search: Search) -> list[TrialResult]:
        return [one for one in self.tried if one.trial.search is search]


def _method(cell: Cell) -> Method:
    spanned = {key for key, _ in flat(cell.point) if key.split(".")[0] not in {*AXES, "preprocess"}}
    # The row's name states all parameters that differ from their defaults. A search would make this name untrue, so
    # these parameters cannot be tuned.
    for part in ("algorithm", "preprocess"):
        value = getattr(cell.experiment, part)
        defaults = field_defaults(type(value))
        spanned |= {f"{part}.{name}" for name, default in defaults.items() if getattr(value, name) != default}
    return Method(cell.row, kind_of(cell.experiment.algorithm), frozenset(spanned), is_bound(cell.point))


def _check_records(tune: Tune, cells: list[Cell], data_root: Path | None) -> None:
    if tune.data and (same := _same_records(tune.data, [cell.experiment.data for cell in cells], data_root)):
        other = "" if same == tune.data else f" holds records of {same}, which"
        raise UserError(
            f"tune.data={tune.data}{other} is also the data set of the table, so trials would be compared on the "
            "table's test records: set tune.data to another public data set, or leave tune.data out"
        )
    for cell in cells:
        if cell.experiment.is_private and not tune.data:
            raise UserError(
                f"row {cell.row} promises privacy, and a search on {cell.experiment.data} would read private records "
                'without noise: name a public data set for the search, tune.data = "NAME"; the runs of the table still '
                f"train on {cell.experiment.data}"
            )


def _same_records(data: str, others: Sequence[str], data_root: Path | None) -> str:
    """Return the first of the data sets ``others`` that has the same training or test records as ``data``.

    If there is no such data set, return "".
    """
    trained, tested = contents_of(data, data_root)
    for other in dict.fromkeys(others):
        if other == data or not {trained, tested}.isdisjoint(contents_of(other, data_root)):
            return other
    return ""


def _check_trials(settings: TableSettings, search: Search, data_root: Path | None) -> None:
    """Raise UserError if a trial has invalid settings, or if its model differs from the model of the table's runs.

    Only the first batch is checked. The values of later trials are unknown, because they depend on earlier results.
    """
    tune, shortest = settings.tune, search.rungs[0].rounds
    assert tune is not None
    known = [proposed_trial(search, tune, number, ()) for number in trial_batches(tune)[0]]
    for trial in known:
        experiment_of(settings, trial, shortest)
    ours = search.cell.experiment
    model = job_at(settings.base, _point(tune, known[0], shortest), data_root).experiment.model
    if model.name != ours.model.name and "model" not in search.space:
        raise UserError(
            f"row {search.cell.row} trains model={ours.model.name} on {ours.data}, but the default model for "
            f"tune.data={tune.data} is model={model.name}: set model in [base], so that the search has the same model"
        )


def _point(tune: Tune, trial: Trial, rounds: int) -> dict[str, Any]:
    """Return the settings of a trial: the settings of its table cell, updated with the trial's hyperparameters.

    Trials are evaluated on validation records, or on the test records of the public data set ``tune.data``.
    """
    cell = trial.search.cell
    judged: dict[str, Any] = {"evaluate.validation": tune.validation, "evaluate.test": "never"}
    if tune.data:
        judged = {"data": tune.data, "evaluate.validation": 0, "evaluate.test": "rounds"}
        if is_own(tune.data) and cell.experiment.is_private:
            judged["evaluate.test_is_public"] = True  # tune.data is public, so its test records may evaluate trials
    whole = {"rounds": rounds, "evaluate_every": 1, "evaluate.patience": 0, "evaluate.target_accuracy": 0}
    return dict(as_run({**cell.point, **trial.values, **whole, **judged}))


def _search_results(
    settings: TableSettings, searches: Sequence[Search], log: _Log, folder: Path, run: Runner, data_root: Path | None
) -> tuple[SearchResult, ...]:
    tune = settings.tune
    assert tune is not None, "a table that tunes nothing"
    for numbers in trial_batches(tune):
        trials = [proposed_trial(search, tune, number, log.of(search)) for search in searches for number in numbers]
        log.add(_results(settings, trials, log.tried, run, folder, data_root))
    for step in range(1, max(len(search.rungs) for search in searches)):
        racing = [search for search in searches if step < len(search.rungs)]
        trials = [trial for search in racing for trial in _best(search, log.of(search), step)]
        log.add(_results(settings, trials, log.tried, run, folder, data_root))
    choices = []
    for search in searches:
        tried = log.of(search)
        (winner,) = _best(search, tried, len(search.rungs))
        best = next(one for one in reversed(tried) if one.trial is winner)
        choices.append(SearchResult(search, best, tuple(tried)))
    return tuple(choices)


@dataclass(frozen=True)
class _Entry:
    """A trial on one rung (stage of successive halving), with the run of the trial.

    ``after``: the number of rounds that the run already trained on an earlier rung.
    """

    trial: Trial
    rung: int
    experiment: Experiment
    directory: Path
    after: int


def _results(
    settings: TableSettings,
    trials: Sequence[Trial],
    earlier: Sequence[TrialResult],
    run: Runner,
    folder: Path,
    data_root: Path | None,
) -> list[TrialResult]:
    """Execute ``trials`` on their next rung (stage), and return the results of these trials.

    ``earlier``: the results of previous rungs. Trials that differ only in the number of rounds share one run, which has
    the rounds of the longest trial. The results of the shorter trials are read from the first rounds of this run.
    Raises RunError, with the reason, for a failed trial.
    """
    last = {one.trial: one for one in earlier}
    entries = [_entry_of(settings, trial, last.get(trial), folder, data_root) for trial in trials]
    unknown: dict[str, _Entry] = {}
    for entry in entries:
        if trial_outcome(entry.directory, entry.experiment, entry.after, data_root) is None:
            other = unknown.get(entry.directory.name, entry)
            unknown[entry.directory.name] = max(other, entry, key=lambda one: one.experiment.rounds)
    runs = {name: entry.experiment for name, entry in unknown.items()}
    labels = {
        name: f"{entry.trial.search.title}, trial {entry.trial.number}, {entry.experiment.rounds} rounds"
        for name, entry in unknown.items()
    }
    events = run(runs, labels) if runs else ()
    errors = {event.name: event.error for event in events if isinstance(event, Failed)}
    results = []
    for entry in entries:
        trial, name, rounds = entry.trial, entry.directory.name, entry.experiment.rounds
        outcome = trial_outcome(entry.directory, entry.experiment, entry.after, data_root)
        if outcome is None:
            raise RunError(
                f"trial {trial.number} of {trial.search.title} failed, in {entry.directory}: {errors.get(name, '')}; "
                "finished trials are kept, and the same command continues with the others"
            )
        results.append(
            TrialResult(
                trial, entry.rung, rounds, outcome.trained, name, outcome.accuracy, outcome.seconds, outcome.error
            )
        )
    return results


def _entry_of(
    settings: TableSettings, trial: Trial, last: TrialResult | None, folder: Path, data_root: Path | None
) -> _Entry:
    step = last.rung if last else 0
    experiment = experiment_of(settings, trial, trial.search.rungs[step].rounds)
    directory = trial_directory(experiment, folder, data_root)
    after = last.rounds if last and last.name == directory.name else 0
    return _Entry(trial, step + 1, experiment, directory, after)


def _best(search: Search, tried: Iterable[TrialResult], step: int) -> list[Trial]:
    """Return the trials that continue on the rung (stage) with index ``step`` (from 0), the best trial first.

    After the last rung, only the best trial of the search is returned. ``tried``: the results of the search so far.
    Raises RunError if all trials of the previous rung diverged.
    """
    before = [one for one in tried if one.rung == step]
    left = ranked(before)
    if not left:
        raise RunError(
            f"tuning {search.title}: all {len(before)} trials of {search.rungs[step - 1].rounds} rounds diverged; the "
            f"error of the first trial: {before[0].error}; give [tune.space] smaller values, such as lower learning "
            "rates"
        )
    places = search.rungs[step].trials if step < len(search.rungs) else 1
    return [one.trial for one in left[:places]]
