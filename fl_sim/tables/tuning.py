"""Settings are searched for before a table is filled: successive halving, the same for every method in every column."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fl_sim.errors import RunError
from fl_sim.experiment.experiment import Experiment
from fl_sim.store import run_directory
from fl_sim.tables.plan import Plan, TableSettings
from fl_sim.tables.tuning_space import Values
from fl_sim.tables.tuning_trials import (
    Choice,
    Search,
    Trial,
    Tried,
    drawn_trials,
    experiment_of,
    searches_of,
    trial_name,
)
from fl_sim.tables.tuning_words import csv_text
from fl_sim.tables.workers import Event, Failed, Finished

TRIALS, LOG = "tuning", "tuning.csv"

Runner: TypeAlias = Callable[[Mapping[str, Experiment], Mapping[str, str]], Iterable[Event]]
"""Runs {name: experiment}, each known to the user by its {name: label}, and tells what happens."""


@dataclass
class _Log:
    """All that was tried so far, on the disk, too."""

    path: Path
    tried: list[Tried] = field(default_factory=list)

    def add(self, tried: Iterable[Tried]) -> None:
        self.tried += tried
        run_directory.write_text(self.path, csv_text(self.tried))


def tune(settings: TableSettings, plan: Plan, out: Path, run: Runner, data_root: Path | None) -> tuple[Choice, ...]:
    """Search for the settings of every method in every column, and return what was chosen.

    Trials are runs in ``out / TRIALS``: what is finished is not run again. ``run`` is given the trials of one rung
    after another. Raises UserError as ``searches_of`` does, RunError for a trial that could not run, and where all
    trials of a search diverge.
    """
    assert settings.tune is not None, "a table that tunes nothing"
    searches = searches_of(settings, plan, data_root)
    out.mkdir(parents=True, exist_ok=True)
    log = _Log(out / LOG)
    alive = {search.place: drawn_trials(search, settings.tune) for search in searches}
    for step in range(max((len(search.rungs) for search in searches), default=0)):
        racing = [search for search in searches if step < len(search.rungs)]
        trials = [trial for search in racing for trial in alive[search.place]]
        tried = _tried(settings, trials, step, run, out / TRIALS, data_root)
        log.add(tried)
        for search in racing:
            alive[search.place] = _best(search, [one for one in tried if one.trial.search is search], step)
    return tuple(_choice(search, log.tried) for search in searches)


def _tried(
    settings: TableSettings, trials: Sequence[Trial], step: int, run: Runner, folder: Path, data_root: Path | None
) -> list[Tried]:
    """Run ``trials`` on their rung, those with the same settings once, and return what they came to."""
    names: list[str] = []
    runs: dict[str, Experiment] = {}
    labels: dict[str, str] = {}
    for trial in trials:
        rung = trial.search.rungs[step]
        experiment = experiment_of(settings, trial, rung.rounds)
        names.append(trial_name(experiment, data_root))
        runs[names[-1]] = experiment
        labels.setdefault(names[-1], f"{trial.search.words}, trial {trial.number}, {rung.rounds} rounds")
    outcomes = {event.name: event for event in run(runs, labels) if isinstance(event, Finished | Failed)}
    found = []
    for trial, name in zip(trials, names, strict=True):
        outcome, rounds = outcomes[name], trial.search.rungs[step].rounds
        if isinstance(outcome, Failed) and not outcome.diverged:
            raise RunError(
                f"trial {trial.number} of {trial.search.words} failed, in {folder / name}: {outcome.error}; what is "
                "finished stays, and the same command goes on from there"
            )
        accuracy = _accuracy(outcome.result) if isinstance(outcome, Finished) else None
        error = outcome.error if isinstance(outcome, Failed) else ""
        found.append(Tried(trial, step + 1, rounds, name, accuracy, _seconds(folder / name), error))
    return found


def _accuracy(result: Mapping[str, Any]) -> float:
    """Return what a trial is judged by: accuracy on validation, or on the test records of a public data set."""
    accuracy = result["validation"]["final_accuracy"] if "validation" in result else result["final_accuracy"]
    assert isinstance(accuracy, float), "the last round is evaluated"
    return accuracy


def _seconds(directory: Path) -> float:
    result = run_directory.read_result(directory) or {}
    seconds = result.get("seconds", {})
    return float(seconds.get("preprocess", 0.0)) + float(seconds.get("train", 0.0))


def _best(search: Search, tried: Sequence[Tried], step: int) -> list[Trial]:
    """Return the trials that go on to the next rung, the best first. Raises RunError where all of them diverged."""
    left = ranked(tried)
    if not left:
        raise RunError(
            f"tuning {search.words}: all {len(tried)} trials of {search.rungs[step].rounds} rounds diverged, the first "
            f"of them: {tried[0].error}; give [tune] a space with smaller values, such as a lower learning rate"
        )
    places = search.rungs[step + 1].trials if step + 1 < len(search.rungs) else 1
    return [one.trial for one in left[:places]]


def ranked(tried: Iterable[Tried]) -> list[Tried]:
    """Return the trials that did not diverge, the most accurate first; of equal ones the earlier trial."""
    left = [one for one in tried if one.accuracy is not None]
    return sorted(left, key=lambda one: (-(one.accuracy or 0.0), one.trial.number))


def _choice(search: Search, tried: Iterable[Tried]) -> Choice:
    own = tuple(one for one in tried if one.trial.search is search)
    return Choice(search, ranked(one for one in own if one.rung == len(search.rungs))[0], own)


def values_of(choices: Iterable[Choice]) -> dict[tuple[str, str], Values]:
    """Return {(row, column): the values chosen there}."""
    return {choice.search.place: choice.best.trial.values for choice in choices}
