"""The searches of a table and their trials: all is checked before one runs; where each runs, and what it came to."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fl_sim.data import contents_of, load
from fl_sim.data.naming import is_own
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.identity import identity_of
from fl_sim.experiment.job import resolved
from fl_sim.kinds import field_defaults, kind_of
from fl_sim.settings import flat, read_table
from fl_sim.simulation.resuming import objection
from fl_sim.store import run_directory
from fl_sim.store.run_directory import CHECKPOINT, RoundRecord, read_rounds
from fl_sim.tables.labels import run_name
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


@dataclass(frozen=True, eq=False)
class Search:
    """What is tuned: one row in one column, on the split of its first seed, which ``cell`` has."""

    cell: Cell
    space: Space
    rungs: tuple[Rung, ...]

    @property
    def place(self) -> tuple[str, str]:
        """Return the row and the column."""
        return self.cell.row, self.cell.column

    @property
    def words(self) -> str:
        """Return the row and the column for messages."""
        return f"{self.cell.row}, {self.cell.column}"


@dataclass(frozen=True, eq=False)
class Trial:
    """One set of values of a search; ``number`` counts from 1."""

    search: Search
    number: int
    values: Values


@dataclass(frozen=True)
class Tried:
    """What a trial came to on a rung, which counts from 1; ``accuracy`` in [0, 1] is None where it diverged.

    ``rounds``: how many it has on this rung; ``trained``: how many of them it trained for it, as it goes on after the
    rung before where it can. ``seconds`` of these, known only roughly where the run is private. ``name``: its
    directory's.
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
        """Return how it ended."""
        return "diverged" if self.accuracy is None else "finished"


@dataclass(frozen=True)
class Choice:
    """What a search came to: its best trial, and all that was tried."""

    search: Search
    best: Tried
    tried: tuple[Tried, ...]

    @property
    def at_end(self) -> list[str]:
        """Return the knobs whose chosen value lies at an end of what could be drawn: better ones may lie beyond."""
        space = self.search.space
        return [key for key, value in self.best.trial.values.items() if space[key].is_at_end(value)]


def searches_of(settings: TableSettings, plan: Plan, data_root: Path | None) -> tuple[Search, ...]:
    """Return what ``settings.tune`` searches for, checked as far as that is possible without training.

    Raises UserError for a space that cannot be searched, for a value in it that a method refuses, for private records
    that a search would read, and for trials that could not run.
    """
    tune = settings.tune
    assert tune is not None, "a table that tunes nothing"
    if tune.search == "optuna":
        check_installed()
    firsts: dict[tuple[str, str], Cell] = {}
    for cell in plan.cells:
        firsts.setdefault((cell.row, cell.column), cell)
    found = spaces(tune, {cell.row: _method(cell) for cell in firsts.values()}.values(), CENTRALIZED)
    _check_records(tune, list(firsts.values()), data_root)
    searches = tuple(
        Search(cell, found[cell.row], rungs(tune.trials, tune.rounds or cell.experiment.rounds, tune.halving))
        for cell in firsts.values()
        if found[cell.row]
    )
    if not searches:
        raise UserError("tune has nothing to search for: name a knob in [tune.space], such as local.learning_rate")
    for search in {search.cell.row: search for search in searches}.values():
        for values in _extremes(search.space, tune.seed):
            experiment_of(settings, Trial(search, 1, values), search.rungs[0].rounds)
    for search in searches:
        _check_trials(settings, search, data_root)
    return searches


def turns(tune: Tune) -> list[range]:
    """Return which trials of every search begin together, by their numbers from 0.

    All of them where they are drawn at random. Optuna is asked for one after another, once a quarter was drawn.
    """
    drawn_first = tune.trials if tune.search == "random" else max(1, tune.trials // 4)
    return [range(drawn_first), *(range(number, number + 1) for number in range(drawn_first, tune.trials))]


def proposed_trial(search: Search, tune: Tune, number: int, tried: Sequence[Tried]) -> Trial:
    """Return trial ``number``, from 0, of a search in which so much was ``tried`` before."""
    if number in turns(tune)[0]:
        return Trial(search, number + 1, drawn(search.space, tune.seed, number))
    before = [(one.trial.values, one.accuracy) for one in tried]
    return Trial(search, number + 1, proposed(search.space, before, tune.seed))


def experiment_of(settings: TableSettings, trial: Trial, rounds: int) -> Experiment:
    """Return the experiment of a trial of so many rounds. Raises UserError for values that the method refuses."""
    assert settings.tune is not None
    return experiment_at(settings.base, _point(settings.tune, trial, rounds))


@dataclass(frozen=True)
class Outcome:
    """What a trial came to: its accuracy in [0, 1], None where it diverged, and then of what.

    ``trained``: how many rounds it finished beyond those that another rung has paid for. ``seconds`` of these, known
    only roughly where the run is private.
    """

    accuracy: float | None
    trained: int
    seconds: float
    error: str = ""


def directory_of(experiment: Experiment, folder: Path, data_root: Path | None) -> Path:
    """Return where a trial runs on its rung.

    Trials with the same settings, of whatever row, are one run. It goes on from rung to rung in one directory, unless
    what it does depends on how many rounds it has, or what it could go on with was too large to be kept.
    """
    of_any_length = Experiment.model_validate({**dict(experiment), "rounds": 1})
    shared = folder / run_name(of_any_length, load(experiment.data, data_root, experiment.features))
    if goes_on(experiment) and _can_go_on(shared, experiment.rounds):
        return shared
    return folder / f"{shared.name}-{experiment.rounds}-rounds"


def goes_on(experiment: Experiment) -> bool:
    """Say whether a trial can get more rounds: what it does depends on nothing that more of them would change."""
    schedule, rounds = experiment.local.schedule, experiment.rounds
    return (
        not experiment.is_private
        and experiment.calibrate.kind == "none"
        and all(schedule.factor(each, rounds) == schedule.factor(each, rounds + 1) for each in range(1, rounds + 1))
    )


def outcome_in(directory: Path, experiment: Experiment, after: int, data_root: Path | None) -> Outcome | None:
    """Return what the trial ``experiment`` came to, None where it is not known yet, or is of other records or code.

    ``after``: how many of its rounds another rung has paid for. Raises UserError for a damaged log.
    """
    result = run_directory.read_result(directory) or {}
    if not (directory / run_directory.CONFIG).exists():
        return None
    chosen = resolved(experiment, data_root)
    if objection(chosen, directory, identity_of(chosen, data_root)):
        return None  # whoever runs it will say so
    records = read_rounds(directory)
    ended_here = read_table(directory / run_directory.CONFIG).get("rounds") == experiment.rounds
    new = records[after : experiment.rounds]
    cost = len(new), _seconds(new, result, anew=not after)
    if ended_here and result.get("status") == "finished" and result.get("rounds") == len(records):
        return Outcome(_final_accuracy(result), *cost)
    if result.get("diverged") and (ended_here or len(records) < experiment.rounds):
        return Outcome(None, *cost, str(result["error"]))
    if len(records) >= experiment.rounds:  # it has gone on since
        return Outcome(_accuracy(records[experiment.rounds - 1]), *cost)
    return None


def _check_trials(settings: TableSettings, search: Search, data_root: Path | None) -> None:
    """Check all that is known of the trials of a search before the first one: drawn values, data, split and model."""
    tune, shortest = settings.tune, search.rungs[0].rounds
    assert tune is not None
    known = [proposed_trial(search, tune, number, ()) for number in turns(tune)[0]]
    for trial in known:
        experiment_of(settings, trial, shortest)
    ours = search.cell.experiment
    model = job_at(settings.base, _point(tune, known[0], shortest), data_root).experiment.model
    if model != ours.model and "model" not in search.space:
        raise UserError(
            f"row {search.cell.row} trains model={ours.model} on {ours.data}, and would be tuned with model={model} on "
            f"tune.data={tune.data}: set model in [base]"
        )


def _point(tune: Tune, trial: Trial, rounds: int) -> dict[str, Any]:
    """Return the settings of a trial: of its cell, but for its values and what it is judged by."""
    judged: dict[str, Any] = (
        {"data": tune.data, "evaluate.validation": 0, "evaluate.test": "rounds", **_public_test(tune.data, trial)}
        if tune.data
        else {"evaluate.validation": tune.validation, "evaluate.test": "never"}
    )
    whole = {"rounds": rounds, "evaluate_every": 1, "evaluate.patience": 0, "evaluate.target_accuracy": 0}
    return dict(as_run({**trial.search.cell.point, **trial.values, **whole, **judged}))


def _public_test(data: str, trial: Trial) -> dict[str, Any]:
    """Return the setting that the test records of ``tune.data`` are public, as all of it is, where a trial needs it."""
    needs_it = is_own(data) and trial.search.cell.experiment.is_private
    return {"evaluate.test_is_public": True} if needs_it else {}


def _method(cell: Cell) -> Method:
    spanned = {key for key, _ in flat(cell.point) if key.split(".")[0] not in {*AXES, "preprocess"}}
    for part in ("algorithm", "preprocess"):  # whatever is not the default stands in the row's name
        value = getattr(cell.experiment, part)
        defaults = field_defaults(type(value))
        spanned |= {f"{part}.{name}" for name, default in defaults.items() if getattr(value, name) != default}
    return Method(cell.row, kind_of(cell.experiment.algorithm), frozenset(spanned), is_bound(cell.point))


def _check_records(tune: Tune, cells: list[Cell], data_root: Path | None) -> None:
    if tune.data and (same := _same_records(tune.data, [cell.experiment.data for cell in cells], data_root)):
        other = "" if same == tune.data else f" holds records of {same}, which"
        raise UserError(
            f"tune.data={tune.data}{other} is what the table itself is about, and trials on tune.data are judged by "
            "its test records: name another, public data set, or leave tune.data out"
        )
    for cell in cells:
        if cell.experiment.is_private and not tune.data:
            raise UserError(
                f"row {cell.row} promises privacy, and a search on {cell.experiment.data} would read private records "
                'without noise: name a public data set to search on, tune.data = "NAME"; the runs of the table stay '
                f"on {cell.experiment.data}"
            )


def _same_records(data: str, others: Sequence[str], data_root: Path | None) -> str:
    """Return which of ``others`` has records in common with ``data``, by their content; empty for none."""
    trained, tested = contents_of(data, data_root)
    for other in dict.fromkeys(others):
        if other == data or not {trained, tested}.isdisjoint(contents_of(other, data_root)):
            return other
    return ""


def _extremes(space: Space, seed: int) -> Iterator[Values]:
    """Yield values of trials in which one knob after another takes all that could be refused."""
    usual = drawn(space, seed, 0)
    for key, knob in space.items():
        for value in knob.extremes():
            yield {**usual, key: value}


def _can_go_on(directory: Path, rounds: int) -> bool:
    if not (directory / run_directory.CONFIG).exists() or (directory / CHECKPOINT).exists():
        return True
    return len(read_rounds(directory)) not in range(1, rounds)


def _final_accuracy(result: Mapping[str, Any]) -> float:
    """Return what a trial is judged by: accuracy on validation, or on the test records of a public data set."""
    accuracy = result["validation"]["final_accuracy"] if "validation" in result else result["final_accuracy"]
    assert isinstance(accuracy, float), "the last round is evaluated"
    return accuracy


def _accuracy(record: RoundRecord) -> float:
    accuracy = record.test_accuracy if record.validation_accuracy is None else record.validation_accuracy
    assert accuracy is not None, "every round of a trial is evaluated"
    return accuracy


def _seconds(records: list[RoundRecord], result: Mapping[str, Any], *, anew: bool) -> float:
    told = result.get("seconds", {})
    before = float(told.get("preprocess", 0.0)) if anew else 0.0
    timed = [record.seconds for record in records if record.seconds is not None]
    return before + (sum(timed) if len(timed) == len(records) else float(told.get("train", 0.0)))
