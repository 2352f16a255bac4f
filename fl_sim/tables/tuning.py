"""Settings are searched for before a table is filled, by the same halving for every method; and what is said of it."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fl_sim.errors import RunError
from fl_sim.experiment.experiment import Experiment
from fl_sim.store import run_directory
from fl_sim.tables.labels import data_label, text
from fl_sim.tables.plan import Plan, TableSettings
from fl_sim.tables.tuning_space import Rung, Tune, Values
from fl_sim.tables.tuning_trials import (
    Choice,
    Outcome,
    Search,
    Trial,
    Tried,
    directory_of,
    experiment_of,
    outcome_in,
    proposed_trial,
    searches_of,
    turns,
)
from fl_sim.tables.workers import Event, Failed

TRIALS, LOG = "tuning", "tuning.csv"

Runner: TypeAlias = Callable[[Mapping[str, Experiment], Mapping[str, str]], Iterable[Event]]
"""Runs {name: experiment}, each known to the user by its {name: label}, and tells what happens."""


def tune(settings: TableSettings, plan: Plan, out: Path, run: Runner, data_root: Path | None) -> tuple[Choice, ...]:
    """Search for the settings of every method in every column, and return what was chosen.

    Trials are runs in ``out / TRIALS``: what is finished is not run again. ``run`` is given the trials of one rung
    after another. Raises UserError as ``searches_of`` does, RunError for a trial that could not run, and where all
    trials of a search diverge.
    """
    searches = searches_of(settings, plan, data_root)
    out.mkdir(parents=True, exist_ok=True)
    return _searched(settings, searches, _Log(out / LOG), out / TRIALS, run, data_root)


def known_choices(
    settings: TableSettings, searches: Sequence[Search], out: Path, data_root: Path | None
) -> tuple[Choice, ...] | None:
    """Return what a search that is done has chosen, else None. Nothing is run and nothing is written."""

    def run(runs: Mapping[str, Experiment], labels: Mapping[str, str]) -> Iterable[Event]:
        del runs, labels
        raise _Unknown

    try:
        return _searched(settings, searches, _Log(None), out / TRIALS, run, data_root)
    except _Unknown:
        return None


def ranked(tried: Iterable[Tried]) -> list[Tried]:
    """Return the trials that did not diverge, the most accurate first; of equal ones the earlier trial."""
    left = [one for one in tried if one.accuracy is not None]
    return sorted(left, key=lambda one: (-(one.accuracy or 0.0), one.trial.number))


def values_of(choices: Iterable[Choice]) -> dict[tuple[str, str], Values]:
    """Return {(row, column): the values chosen there}."""
    return {choice.search.place: choice.best.trial.values for choice in choices}


def csv_text(tried: Iterable[Tried]) -> str:
    """Return one line for each trial on each of its rungs, accuracies in [0, 1]."""
    lines = io.StringIO()
    table = [_line(one) for one in tried]
    writer = csv.DictWriter(lines, list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return lines.getvalue()


def as_json(choices: Iterable[Choice], tune: Tune) -> list[dict[str, Any]]:
    """Return what ``table.json`` says of each search; accuracies in percent, as all of it has them."""
    return [
        {
            "row": choice.search.cell.row, "column": choice.search.cell.column, "seed": choice.search.cell.seed,
            "values": dict(choice.best.trial.values),
            "accuracy": 100 * (choice.best.accuracy or 0.0), "at_end": choice.at_end,
            "judged_on": f"test records of {tune.data}" if tune.data else "validation",
            "trials": choice.search.rungs[0].trials,
            "rungs": [[rung.trials, rung.rounds] for rung in choice.search.rungs],
            **_spent(choice.tried),
        }
        for choice in choices
    ]  # fmt: skip


def caption(choices: Sequence[Choice], tune: Tune) -> tuple[str, ...]:
    """Return what a reader must know of the searches, and what each came to."""
    if not choices:
        return ("The search for the settings of the methods is not done, so none of the table's own runs has begun.",)
    spent = _spent(one for choice in choices for one in choice.tried)
    plans = "; ".join(dict.fromkeys(_rungs(choice.search.rungs) for choice in choices))
    judged = (
        f"on {data_label(tune.data)}, public records in place of the table's own, with the same splits and clients, "
        "judged by its test records"
        if tune.data
        else f"judged on {_judges(tune.validation)}; no trial looks at the test records"
    )
    drawn = "at random" if tune.search == "random" else "by Optuna's TPE"
    seeds = ", ".join(dict.fromkeys(str(choice.search.cell.seed) for choice in choices))
    diverged = f", of which {spent['diverged']} diverged" if spent["diverged"] else ""
    held_out = any(choice.search.cell.experiment.evaluate.validation not in {0.0, "given"} for choice in choices)
    first = (
        f"Tuned: for every method in every column {plans}; values drawn {drawn} (tune.seed {tune.seed}), the same ones "
        f"of shared settings for all methods; {judged}. Trials have the first of the table's seeds ({seeds}). All "
        f"searches together took {spent['runs']} runs{diverged}, {spent['rounds']:,} rounds and "
        f"{spent['seconds']:,.0f} s; tuning.csv lists them. The runs of the table "
        f"{'' if held_out else 'train on all training records and '}look at the test records once, at the end."
    )
    rows = [_row(row, [one for one in choices if one.search.cell.row == row]) for row in _rows(choices)]
    ends = [f"{choice.search.words}: {', '.join(choice.at_end)}" for choice in choices if choice.at_end]
    wider = f"Chosen at an end of what could be drawn, so a wider space may do better: {'; '.join(ends)}."
    return first, *rows, *([wider] if ends else [])


class _Unknown(Exception):  # noqa: N818 (not an error)
    """Some trial has no outcome yet."""


@dataclass
class _Log:
    """All that was tried so far, on the disk, too; ``path`` None: nothing is written."""

    path: Path | None
    tried: list[Tried] = field(default_factory=list)

    def add(self, tried: Iterable[Tried]) -> None:
        self.tried += tried
        if self.path is not None:
            run_directory.write_text(self.path, csv_text(self.tried))

    def of(self, search: Search) -> list[Tried]:
        return [one for one in self.tried if one.trial.search is search]


def _searched(
    settings: TableSettings,
    searches: Sequence[Search],
    log: _Log,
    folder: Path,
    run: Runner,
    data_root: Path | None,
) -> tuple[Choice, ...]:
    assert settings.tune is not None, "a table that tunes nothing"

    def climb(trials: Sequence[Trial]) -> None:
        log.add(_tried(settings, trials, log.tried, run, folder, data_root))

    for numbers in turns(settings.tune):
        climb(
            [proposed_trial(search, settings.tune, number, log.of(search)) for search in searches for number in numbers]
        )
    for step in range(1, max(len(search.rungs) for search in searches)):
        racing = [search for search in searches if step < len(search.rungs)]
        climb([trial for search in racing for trial in _best(search, log.of(search), step)])
    return tuple(_choice(search, log.of(search)) for search in searches)


def _tried(
    settings: TableSettings,
    trials: Sequence[Trial],
    earlier: Sequence[Tried],
    run: Runner,
    folder: Path,
    data_root: Path | None,
) -> list[Tried]:
    """Run ``trials`` on their next rung and return what they came to.

    Those with the same settings run once, for the most rounds that any of them has: the others are its first rounds.
    """
    last = {one.trial: one for one in earlier}
    entries = [_entered(settings, trial, last.get(trial), folder, data_root) for trial in trials]
    unknown: dict[str, _Entry] = {}
    for entry in entries:
        if entry.outcome() is None:
            other = unknown.get(entry.directory.name, entry)
            unknown[entry.directory.name] = max(other, entry, key=lambda one: one.experiment.rounds)
    runs = {name: entry.experiment for name, entry in unknown.items()}
    errors: dict[str, str] = {}
    if runs:
        labels = {name: unknown[name].label for name in runs}
        errors = {event.name: event.error for event in run(runs, labels) if isinstance(event, Failed)}
    return [entry.tried(errors.get(entry.directory.name, "")) for entry in entries]


@dataclass(frozen=True)
class _Entry:
    """A trial enters a rung, which counts from 1; ``after``: so many of its rounds the rung before has paid for."""

    trial: Trial
    rung: int
    experiment: Experiment
    directory: Path
    after: int
    data_root: Path | None

    @property
    def label(self) -> str:
        return f"{self.trial.search.words}, trial {self.trial.number}, {self.experiment.rounds} rounds"

    def outcome(self) -> Outcome | None:
        return outcome_in(self.directory, self.experiment, self.after, self.data_root)

    def tried(self, error: str) -> Tried:
        """Return what came of it. Raises RunError, with the ``error`` that was told, where it has no outcome."""
        outcome = self.outcome()
        if outcome is None:
            raise RunError(
                f"trial {self.trial.number} of {self.trial.search.words} failed, in {self.directory}: {error}; what is "
                "finished stays, and the same command goes on from there"
            )
        return Tried(
            self.trial, self.rung, self.experiment.rounds, outcome.trained, self.directory.name, outcome.accuracy,
            outcome.seconds, outcome.error,
        )  # fmt: skip


def _entered(settings: TableSettings, trial: Trial, last: Tried | None, folder: Path, data_root: Path | None) -> _Entry:
    rungs, step = trial.search.rungs, last.rung if last else 0
    experiment = experiment_of(settings, trial, rungs[step].rounds)
    directory = directory_of(experiment, folder, data_root)
    after = last.rounds if last and last.name == directory.name else 0
    return _Entry(trial, step + 1, experiment, directory, after, data_root)


def _best(search: Search, tried: Iterable[Tried], step: int) -> list[Trial]:
    """Return the trials that go on to rung ``step``, from 0, the best first; after the last rung the best alone.

    Raises RunError where all of the rung before diverged.
    """
    before = [one for one in tried if one.rung == step]
    left = ranked(before)
    if not left:
        raise RunError(
            f"tuning {search.words}: all {len(before)} trials of {search.rungs[step - 1].rounds} rounds diverged, the "
            f"first of them: {before[0].error}; give [tune] a space with smaller values, such as a lower learning rate"
        )
    places = search.rungs[step].trials if step < len(search.rungs) else 1
    return [one.trial for one in left[:places]]


def _choice(search: Search, tried: Sequence[Tried]) -> Choice:
    (winner,) = _best(search, tried, len(search.rungs))
    return Choice(search, next(one for one in reversed(tried) if one.trial is winner), tuple(tried))


def _line(one: Tried) -> dict[str, Any]:
    row, column = one.trial.search.place
    return {
        "row": row, "column": column, "trial": one.trial.number, "rung": one.rung, "rounds": one.rounds,
        "trained": one.trained, "values": json.dumps(one.trial.values), "accuracy": one.accuracy, "status": one.status,
        "seconds": one.seconds, "dir": one.name, "error": one.error,
    }  # fmt: skip


def _rows(choices: Iterable[Choice]) -> list[str]:
    return list(dict.fromkeys(choice.search.cell.row for choice in choices))


def _row(row: str, choices: Iterable[Choice]) -> str:
    found = (f"{choice.search.cell.column} {_values(choice.best.trial.values)}" for choice in choices)
    return f"{row}, chosen: {'; '.join(found)}."


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={text(value)}" for key, value in values.items())


def _judges(validation: float | str) -> str:
    if validation == "given":
        return "the validation records that the data come with"
    return f"{100 * float(validation):g} % of every client's training records, which trials do not train on"


def _rungs(rungs: Sequence[Rung]) -> str:
    first, *others = rungs
    words = f"{first.trials} trials of {first.rounds} rounds"
    return words + "".join(f", the best {rung.trials} of them {rung.rounds} rounds" for rung in others)


def _spent(tried: Iterable[Tried]) -> dict[str, Any]:
    """Return what the runs of trials cost: the same settings are run once, whoever asks for them."""
    runs = {(one.name, one.rung): one for one in tried}.values()
    return {
        "runs": len({one.name for one in runs}),
        "diverged": sum(one.status == "diverged" for one in runs),
        "rounds": sum(one.trained for one in runs),
        "seconds": sum(one.seconds for one in runs),
    }
