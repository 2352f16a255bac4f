"""Execution of all runs of a table. The files of the table are written while the runs execute."""

import io
import json
import math
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fl_sim.experiment.experiment import Experiment
from fl_sim.report.files import PrivacyStatement
from fl_sim.report.measures import Value, best_of, flat_settings, measures, share_in
from fl_sim.report.payments import bills_of
from fl_sim.report.progress import TableProgress
from fl_sim.report.runs import Problem, read_all
from fl_sim.report.table import SeedResult, Table
from fl_sim.report.table_files import write_rounds, write_table
from fl_sim.simulation.client_runtime import cores
from fl_sim.simulation.stage import stage_kinds, titles_of
from fl_sim.simulation.timing import Stopwatch
from fl_sim.tables.earlier_runs import check_earlier, finished_result
from fl_sim.tables.forecast import Forecast, forecast, search_forecasts, search_in_words, time_in_words
from fl_sim.tables.labels import data_label, duration_in_words, text
from fl_sim.tables.plan import Cell, Plan, TableSettings, tuned
from fl_sim.tables.tuning import TRIALS, SearchResult, TrialResult, known_choices, searches_of, tune, values_of
from fl_sim.tables.tuning_space import Rung, Tune
from fl_sim.tables.workers import (
    Budget,
    Event,
    Failed,
    Finished,
    Postponed,
    Preparing,
    RoundDone,
    Started,
    Stopped,
    run_all,
    with_share_of_cores,
)
from fl_sim.tracking.observers import NO_TRACKING, Tracking
from strategies.algorithm import Alone

CELLS = "cells"


@dataclass
class TableState:
    """The plan of a table, the results of its hyperparameter searches, and the outcomes of its runs so far.

    ``choices``: the results of the hyperparameter searches. ``outcomes``: {name of the run directory: outcome of the
    run}.
    """

    settings: TableSettings
    plan: Plan
    choices: tuple[SearchResult, ...] = ()
    outcomes: dict[str, Finished | Failed] = field(default_factory=dict)

    def num_finished(self) -> int:
        """Return the number of finished runs."""
        return sum(isinstance(outcome, Finished) for outcome in self.outcomes.values())

    def failures(self) -> list[str]:
        """Return a text "name (error)" for each failed run."""
        return [f"{name} ({outcome.error})" for name, outcome in self.outcomes.items() if isinstance(outcome, Failed)]

    def tuned(self, choices: tuple[SearchResult, ...], plan: Plan) -> None:
        """Store the results of the hyperparameter search, and the plan of the table with the chosen values."""
        self.choices, self.plan = choices, plan
        for name in ("_flat_settings", "_titles"):  # drops cached values of the old plan
            vars(self).pop(name, None)

    @cached_property
    def _flat_settings(self) -> dict[str, dict[str, Value]]:
        return {name: flat_settings(run.model_dump(mode="json")) for name, run in self.plan.runs.items()}

    @cached_property
    def _titles(self) -> dict[str, str]:
        return titles_of(self.plan.runs.values())

    def table(self) -> Table:
        """Return the table with the results so far. It is written to the table's files and displayed."""
        plan = self.plan
        alone = self._alone()
        results = tuple(self._result(cell, alone.get((cell.column, cell.seed))) for cell in plan.cells)
        # model_dump is not used here, because its result may contain infinity, which JSON does not have.
        settings = json.loads(self.settings.model_dump_json())
        table = Table(
            plan.rows, plan.columns, plan.upper_bounds, results, plan.caption, settings, labels=plan.labels,
            reference=plan.reference, alone=frozenset(cell.row for cell in plan.cells if _is_alone(cell)),
            titles=self._titles, heat_maps=plan.heat_maps,
        )  # fmt: skip
        if (search := self.settings.tune) is None:
            return table
        once = all(cell.experiment.evaluate.test == "last" for cell in plan.cells)
        lines = (*plan.caption, *search_caption(self.choices, search, plan.labels, once=once))
        return replace(table, caption=lines, tuning=tuple(search_json(self.choices, search)))

    def _alone(self) -> dict[tuple[str, int], Mapping[str, Any]]:
        """Return {(column, seed): result} of the finished runs without federation.

        In such a run, each client trains a model only on its own records.
        """
        return {
            (cell.column, cell.seed): outcome.result
            for cell in self.plan.cells
            if _is_alone(cell)
            if isinstance(outcome := self.outcomes.get(cell.name), Finished)
        }

    def _result(self, cell: Cell, alone: Mapping[str, Any] | None) -> SeedResult:
        """Return the result of a cell for one seed.

        ``alone``: the result of the run with the same partition but without federation (each client trains only on its
        own records); None if there is no such run.
        """
        place = (cell.row, cell.column, cell.seed)
        directory = f"{CELLS}/{cell.name}"
        outcome = self.outcomes.get(cell.name)
        settings = self._flat_settings[cell.name]
        if outcome is None:
            return SeedResult(*place, "missing", directory, settings=settings)
        if isinstance(outcome, Failed):
            return SeedResult(*place, "failed", directory, error=outcome.error, settings=settings)
        result = outcome.result
        statements = tuple(PrivacyStatement.model_validate(one) for one in result["privacy"])
        last, best, numbers = result["final_accuracy"], result["best_accuracy"], measures(result)
        if alone is not None and alone is not result:
            for kind in stage_kinds(cell.experiment):
                numbers |= kind.compared(alone, result)
        unknown = ""
        if measure := self.settings.measure:
            last, best = (share_in(numbers, name) for name in (measure, best_of(measure)))
            if last is None and cell.row not in self.plan.upper_bounds:
                unknown = f"the run has no measure {measure}"
        return SeedResult(
            *place, "finished", directory, last, last if best is None else best, statements=statements,
            warnings=tuple(filter(None, [result["stopped"], *result["warnings"], unknown])),
            settings=settings, measures=numbers,
        )  # fmt: skip


def _is_alone(cell: Cell) -> bool:
    """Return True if the run of ``cell`` has no federation: each client trains a model only on its own records."""
    return isinstance(cell.experiment.algorithm, Alone) and cell.experiment.algorithm.is_alone


WRITE_SECONDS = 1.0
"""Minimum time in seconds between two writes of a table's files, because each write covers the whole table."""

WRITE_SHARE = 0.02
"""Writing the table's files takes at most this share of the elapsed time. Writing a thousand rows takes seconds."""


class TimeIsUp(Exception):  # noqa: N818 (an outcome, not an error)
    """Raised if the time budget ends before all runs are finished. The message is empty."""


def fill(
    state: TableState,
    out: Path,
    jobs: int | None,
    data_root: Path | None,
    *,
    progress: bool = True,
    deadline: float = math.inf,
    tracking: Tracking = NO_TRACKING,
    again: bool = False,
) -> None:
    """Execute all unfinished runs of a table, and store their outcomes in ``state`` and in the files in ``out``.

    If the table has a section [tune], the hyperparameter search comes first, in separate runs. ``jobs``: number of
    parallel runs; None: one per core. ``progress``: True shows progress and an estimate of the time on standard error.
    ``deadline``: the time, by the clock ``time.monotonic``, at which all runs stop. ``tracking``: the trackers of the
    table's runs; the trials of the search are not tracked. ``again``: True repeats earlier runs that were made from
    other records or with other code. Such a run is first moved to another directory. A failed run does not stop the
    table. Finished runs are kept.

    Raises TimeIsUp if any run is unfinished at the deadline, and the errors of ``check_earlier``, ``run_all`` and
    ``tune``.
    """
    runner = _Runner(out, jobs, data_root, deadline, progress=progress, again=again)
    if state.settings.tune is not None:
        runner.announce_search(state.settings, state.plan)
        choices = tune(state.settings, state.plan, out, partial(runner.run_all_of, TRIALS), data_root)
        state.tuned(choices, tuned(state.settings, state.plan, values_of(choices), data_root))
    labels = {}
    for cell in reversed(state.plan.cells):
        column = data_label(cell.experiment.data) if cell.row in state.plan.upper_bounds else cell.column
        labels[cell.name] = f"{state.plan.labels[cell.row]}, {column}, {state.plan.over.replace('_', ' ')} {cell.seed}"
    due, is_behind = -math.inf, False
    try:
        with closing(runner.run_all_of(CELLS, state.plan.runs, labels, tracking)) as events:
            for number, event in enumerate(events):
                if isinstance(event, Finished | Failed):
                    state.outcomes[event.name] = event
                elif number:  # the table's files are written after the first event, and at each run's end
                    continue
                is_behind = (begun := time.monotonic()) < due
                if not is_behind:
                    write_table(out, state.table())
                    now = time.monotonic()
                    due = now + max(WRITE_SECONDS, (now - begun) / WRITE_SHARE)
    finally:
        if is_behind:
            write_table(out, state.table())


@dataclass
class _Runner:
    """Executes experiments in folders below ``out``, and shows the progress of their runs.

    ``jobs``: number of parallel runs; None: one per core. ``deadline``: the time, by the clock ``time.monotonic``, at
    which all runs stop. ``watch``: the stopwatch that times small parts of a run, to estimate the remaining time.
    ``again``: True repeats earlier runs that were made from other records or with other code.
    """

    out: Path
    jobs: int | None
    data_root: Path | None
    deadline: float
    watch: Stopwatch = field(default_factory=Stopwatch)
    progress: bool = field(default=True, kw_only=True)
    again: bool = field(default=False, kw_only=True)

    def run_all_of(
        self, folder: str, runs: Mapping[str, Experiment], labels: Mapping[str, str], tracking: Tracking = NO_TRACKING
    ) -> Generator[Event, None, None]:
        """Execute ``runs``, {name: experiment}, in ``folder``, and yield their events.

        ``labels``: {name: label of the run for the progress display}. Raises TimeIsUp at the end if the deadline left
        any run unfinished.
        """
        jobs = self.jobs or min(cores(), len(runs))
        messages = check_earlier(runs, self.out / folder, self.data_root, again=self.again)
        rounds = {labels[name]: experiment.rounds for name, experiment in runs.items()}
        with TableProgress(rounds, None if self.progress else io.StringIO()) as shown:
            for line in messages:
                shown.say(line)
            budget = self._budget(self.out / folder, runs, jobs, shown)
            left = 0
            with closing(run_all(runs, self.out / folder, jobs, self.data_root, budget, tracking)) as events:
                for event in events:
                    left += isinstance(event, Stopped | Postponed)
                    _show_event(shown, labels[event.name], event)
                    yield event
        if left:
            raise TimeIsUp

    def announce_search(self, settings: TableSettings, plan: Plan) -> None:
        """Show two estimated times: of the unfinished hyperparameter searches, and of the table's own runs.

        The table's own runs start after the searches.
        """
        searches = searches_of(settings, plan, self.data_root)
        if not self.progress or known_choices(settings, searches, self.out, self.data_root) is not None:
            return
        jobs = self.jobs or min(cores(), len(plan.runs))
        found = self._forecast(self.out / CELLS, plan.runs, jobs)
        ahead = search_forecasts(settings, searches, self.out, self.data_root, found)
        with TableProgress({}) as shown:
            shown.say(f"{search_in_words(ahead, jobs)}; after the search {time_in_words(found, jobs)}")

    def _forecast(self, folder: Path, runs: Mapping[str, Experiment], jobs: int) -> list[Forecast]:
        shared = {name: with_share_of_cores(experiment, jobs) for name, experiment in runs.items()}
        return forecast(shared, folder, self.data_root, self.watch, timed_own_models=False)

    def _budget(self, folder: Path, runs: Mapping[str, Experiment], jobs: int, shown: TableProgress) -> Budget | None:
        """Show the estimated time of the unfinished runs, and return the time budget for these runs.

        The result is None if there is no deadline, or if all runs are finished.
        """
        missing = [name for name, run in runs.items() if finished_result(folder / name, run, self.data_root) is None]
        is_limited = math.isfinite(self.deadline)
        if not missing:
            shown.say(f"all {len(runs)} runs are finished already: no run is repeated")
        if not missing or not (self.progress or is_limited):
            return None
        found = self._forecast(folder, runs, jobs)
        shown.say(time_in_words(found, jobs))
        begun = frozenset(one.name for one in found if one.done)
        return (
            Budget(self.deadline, {one.name: one.seconds_left or 0.0 for one in found}, begun) if is_limited else None
        )


def search_json(choices: Iterable[SearchResult], tune: Tune) -> list[dict[str, Any]]:
    """Return the section of ``table.json`` about the hyperparameter search; its accuracies are in percent."""
    return [
        {
            "row": choice.search.cell.row, "column": choice.search.cell.column, "seed": choice.search.cell.seed,
            "values": dict(choice.best.trial.values),
            "accuracy": 100 * (choice.best.accuracy or 0.0), "at_end": choice.at_end,
            "judged_on": f"test records of {tune.data}" if tune.data else "validation",
            "trials": choice.search.rungs[0].trials,
            "rungs": [[rung.trials, rung.rounds] for rung in choice.search.rungs],
            **_cost(choice.tried),
        }
        for choice in choices
    ]  # fmt: skip


def search_caption(
    choices: Sequence[SearchResult], tune: Tune, labels: Mapping[str, str] | None = None, *, once: bool = True
) -> tuple[str, ...]:
    """Return the lines of a table's caption about the hyperparameter search: plan, cost and chosen values.

    ``choices``: the results of the searches; empty before the searches finish. ``labels``: {row: short label}.
    ``once``: True if every run of the table uses the test records only once, after its last round.
    """
    if not choices:
        return ("The search for the settings of the methods is not finished, so no run of the table has started.",)
    cost = _cost(one for choice in choices for one in choice.tried)
    plans = "; ".join(dict.fromkeys(_rungs(choice.search.rungs) for choice in choices))
    if tune.data:
        judged = (
            f"trained and tested on the public data set {data_label(tune.data)} in place of the table's data, with the "
            "same partition and number of clients"
        )
    elif tune.validation == "given":
        judged = "evaluated on the validation records that the data come with; no trial uses the test records"
    else:
        judged = (
            f"evaluated on {100 * float(tune.validation):g} % of every client's training records, on which trials do "
            "not train; no trial uses the test records"
        )
    source = "at random" if tune.search == "random" else "by Optuna's TPE"
    seeds = ", ".join(dict.fromkeys(str(choice.search.cell.seed) for choice in choices))
    diverged = f", of which {cost['diverged']} diverged" if cost["diverged"] else ""
    shown = labels or {}
    tuned_rows = dict.fromkeys(choice.search.cell.row for choice in choices)
    when = "once, at the end" if once else "in every round"
    methods = f"{', '.join(shown.get(row, row) for row in tuned_rows)} alone" if tune.partial else "every method"
    held_out = any(choice.search.cell.experiment.evaluate.validation not in {0.0, "given"} for choice in choices)
    first = (
        f"Tuned: for {methods} in every column {plans}; values drawn {source} (tune.seed {tune.seed}); all "
        f"methods have the same values of shared settings; {judged}. Trials have the first of the table's seeds "
        f"({seeds}). All searches together took {cost['runs']} runs{diverged}, {cost['rounds']:,} rounds and "
        f"{cost['seconds']:,.0f} s; tuning.csv lists them. The runs of the table "
        f"{'' if held_out else 'train on all training records and '}use the test records {when}."
    )
    chosen: dict[str, list[str]] = {}
    for choice in choices:
        values = ", ".join(f"{key}={text(value)}" for key, value in choice.best.trial.values.items())
        row = choice.search.cell.row
        chosen.setdefault(shown.get(row, row), []).append(f"{choice.search.cell.column} {values}")
    rows = [f"{row}, chosen: {'; '.join(found)}." for row, found in chosen.items()]
    ends = [f"{choice.search.title}: {', '.join(choice.at_end)}" for choice in choices if choice.at_end]
    wider = f"Chosen at an end of the search space, so a wider space may contain better values: {'; '.join(ends)}."
    return first, *rows, *([wider] if ends else [])


def conclude(state: TableState, out: Path) -> tuple[Table, list[Problem]]:
    """Write the files of a finished table, with its privacy bill, and return (table, problems).

    The bill is the total privacy cost of all runs in ``out``, including runs that are no longer in the table. A problem
    is a run whose privacy cost could not be read.
    """
    found = read_all([out / CELLS])
    bills, problems = bills_of(found)
    table = replace(state.table(), bill=tuple(bills))
    write_table(out, table)
    write_rounds(out, table, {f"{CELLS}/{run.path.name}": run.rounds for run in found.read})
    return table, problems


def _reached(result: Mapping[str, Any]) -> str:
    last, best = result["final_accuracy"], result["best_accuracy"]
    if last is None and "validation" not in result:
        return "nothing was measured"
    if last is None:
        return f"{100 * result['validation']['final_accuracy']:.1f} % on validation"
    chosen_on = result.get("best_chosen_on", "test")
    if chosen_on == "last":  # "last": only the last model was tested
        return f"{100 * last:.1f} %"
    records = "the test set" if chosen_on == "test" else "validation"
    return f"last {100 * last:.1f} %, best {100 * best:.1f} % (picked on {records})"


def _show_event(progress: TableProgress, label: str, event: Event) -> None:
    match event:
        case Started(first_round=first_round):
            progress.started(label, first_round)
        case Preparing(what=what):
            progress.preparing(label, what)
        case RoundDone(record=record):
            progress.finished_round(label, record)
        case Finished(result=result):
            progress.closed(label, f"{_reached(result)}, {duration_in_words(result)}")
        case Failed(error=error):
            progress.closed(label, f"failed: {error}")
        case Stopped(last_round=last_round):
            progress.closed(label, f"stopped after round {last_round}: the time budget is used up")
        case Postponed():
            progress.say(f"{label}: not started, because the remaining time is too short")


def _rungs(rungs: Sequence[Rung]) -> str:
    first, *others = rungs
    further = "".join(f", the best {rung.trials} of them {rung.rounds} rounds" for rung in others)
    return f"{first.trials} trials of {first.rounds} rounds{further}"


def _cost(tried: Iterable[TrialResult]) -> dict[str, Any]:
    """Return the cost of the hyperparameter search: the numbers of runs, diverged trials, rounds and seconds.

    If several trials share one run, this run is counted once.
    """
    runs = {(one.name, one.rung): one for one in tried}.values()
    return {
        "runs": len({one.name for one in runs}),
        "diverged": sum(one.status == "diverged" for one in runs),
        "rounds": sum(one.trained for one in runs),
        "seconds": sum(one.seconds for one in runs),
    }
