"""Forecasts of runs and hyperparameter searches: finished rounds, remaining seconds, bytes and privacy cost."""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job, job_of
from fl_sim.privacy.bill import RunPayments
from fl_sim.privacy.loss_distribution import NoTimeError, begun_only_if
from fl_sim.simulation.engine_choice import check_trainer
from fl_sim.simulation.forecast import NOTHING, Estimate, estimate_of
from fl_sim.simulation.rounds import planned_bill, procedure_of
from fl_sim.simulation.stage import Procedure, stages_of
from fl_sim.simulation.timing import Say, Stopwatch, Work
from fl_sim.store.run_directory import read_rounds
from fl_sim.tables.earlier_runs import can_extend, finished_result, trial_directory
from fl_sim.tables.plan import TableSettings, by_records
from fl_sim.tables.tuning import TRIALS, Search, experiment_of, proposed_trial, trial_batches
from fl_sim.types import Traffic
from strategies.layer import layer_kinds

_SEEDS: Final = {"seed", "partition_seed", "model_seed", "sampling_seed"}
_NOT_OF_A_MESSAGE: Final = {"partition", *_SEEDS}

START_SECONDS = 4.0
"""Assumed time, in seconds, in which a new process loads Python, torch and the data before training."""


@dataclass(frozen=True)
class Forecast:
    """The forecast of one run.

    ``rounds``: planned number of rounds. ``done``: number of finished rounds. ``estimate``: estimated time and bytes of
    the whole run. ``has_pool``: True if the run's synthetic records already exist, or if an earlier run of the table
    makes them. ``paid``: planned privacy cost; None if it was not computed. ``notes``: sentences about the privacy of
    the run.
    """

    name: str
    rounds: int
    done: int
    is_finished: bool
    estimate: Estimate
    has_pool: bool
    paid: RunPayments | None = None
    notes: tuple[str, ...] = ()

    @property
    def seconds_left(self) -> float | None:
        """Return the estimated seconds of the unfinished rounds; None if no time was estimated."""
        if self.is_finished:
            return 0.0
        return None if self.estimate.seconds is None else self.estimate.seconds * (1 - self.done / self.rounds)


def forecast(
    runs: Mapping[str, Experiment],
    cells: Path,
    data_root: Path | None,
    watch: Stopwatch | None,
    *,
    billed: Callable[[], bool] | None = None,
    timed_own_models: bool = True,
    say: Say = lambda _: None,
) -> list[Forecast]:
    """Return the forecasts of ``runs``, {name of the run directory: experiment}, in the same order.

    ``cells``: the folder with the run directories. ``watch``: the stopwatch for the time estimate; None: no time is
    estimated. The stopwatch times each kind of work once, such as a minibatch step of one model, on public test
    records. ``billed``: a function that returns True while there is time for another PLD computation (slow numerical
    privacy accounting). When ``billed`` returns False, the faster RDP accounting is used instead. If ``billed`` is
    None, neither privacy costs nor bytes are computed. ``timed_own_models``: False means that models of the user's own
    code are not timed, because they might crash this process. ``say``: function that receives progress messages. No
    file is written. Raises UserError for a run that cannot train on this machine with its precision.
    """
    seen: set[str] = set()
    kinds: dict[str, Work] = {}
    partial: dict[int, _Untimed] = {}
    rough: dict[int, Experiment] = {}
    messages: dict[str, Mapping[str, Traffic]] = {}
    shared: dict[str, tuple[Work, ...]] = {}
    sentences: dict[str, str] = {}
    ordered = by_records(runs.items(), lambda run: (run[1].data, run[1].features))
    for number, (place, (name, experiment)) in enumerate(ordered, 1):
        say(f"checking run {number:,} of {len(runs):,}")
        job = job_of(experiment, data_root)
        is_finished = finished_result(cells / name, job.experiment, data_root) is not None
        if not is_finished:
            check_trainer(job)
        procedure, made = procedure_of(job), _available_outputs(job, seen)
        works = () if is_finished else _works(procedure, shared)
        is_timed = watch is not None and (timed_own_models or ":" not in job.experiment.model.name)
        for work in works if is_timed else ():
            if work.makes not in made:
                kinds.setdefault(work.kind, work)
        known = Forecast(name, job.experiment.rounds, rounds_done(cells / name), is_finished, NOTHING, bool(made))
        if billed:
            known, is_exact = _with_privacy_cost(known, job, _frozen_in_words(job, sentences), lambda: False)
            if not is_exact:
                rough[place] = experiment
        traffic = _traffic(procedure, messages) if billed else {}
        partial[place] = _Untimed(known, _without_jobs(works), made, traffic, watch if is_timed else None)
    if watch is not None:
        watch.time_all(kinds.values(), say)
    for place, experiment in rough.items():
        if not (billed and billed()):
            break
        say(f"computing the privacy cost of {partial[place].known.name}")
        job = job_of(experiment, data_root)
        known, _ = _with_privacy_cost(partial[place].known, job, job.frozen_in_words, billed)
        partial[place] = partial[place]._replace(known=known)
    return [partial[place].forecast() for place in range(len(partial))]


def seconds_together(found: Iterable[Forecast], jobs: int) -> float | None:
    """Return the estimated seconds until all runs are finished, with ``jobs`` runs in parallel, in the given order.

    Runs without a time estimate are left out. The result is 0 if all runs are finished, and None if no unfinished run
    has a time estimate.
    """
    left = [one.seconds_left for one in found if not one.is_finished]
    timed = [seconds for seconds in left if seconds is not None]
    if not timed:
        return None if left else 0.0
    busy = [START_SECONDS] * jobs
    for seconds in timed:
        heapq.heapreplace(busy, busy[0] + seconds)
    return max(busy)


def time_in_words(found: Sequence[Forecast], jobs: int) -> str:
    """Return a text about the number of runs, the number of finished runs, and the remaining time.

    ``jobs``: the number of parallel runs.
    """
    num_finished = sum(one.is_finished for one in found)
    line = f"{len(found)} run{'' if len(found) == 1 else 's'}, {num_finished} finished"
    if not (seconds := seconds_together(found, jobs)):
        return line
    about = "at least" if any(one.estimate.at_least for one in found) else "about"
    line += f"; the remaining rounds take {about} {in_time(seconds)}{_in_parallel(jobs)}, as estimated from timed steps"
    unknown = sum(one.seconds_left is None for one in found)
    return f"{line} ({unknown} of the runs could not be timed, and are not included)" if unknown else line


def in_time(seconds: float) -> str:
    """Return a duration, given in seconds, as rounded text in seconds, minutes or hours.

    >>> [in_time(seconds) for seconds in (0.4, 59, 1500, 45000)]
    ['1 s', '59 s', '25 min', '12.5 h']
    """
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def rounds_done(directory: Path) -> int:
    """Return the number of finished rounds of the run in ``directory``; 0 for a missing or damaged run."""
    with suppress(UserError):  # the resumed run will report the damage
        return len(read_rounds(directory))
    return 0


@dataclass(frozen=True)
class SearchForecast:
    """The forecast of one hyperparameter search.

    ``rounds``: total number of rounds of all trials. ``done``: number of finished rounds. ``seconds_left``: estimated
    seconds of all unfinished rounds, without parallel runs; None without a time estimate.
    """

    search: Search
    rounds: int
    done: int
    seconds_left: float | None


def search_forecasts(
    settings: TableSettings, searches: Sequence[Search], out: Path, data_root: Path | None, runs: Sequence[Forecast]
) -> list[SearchForecast]:
    """Return the forecasts of the hyperparameter ``searches`` of the table in ``out``.

    Searches with the same trials share one forecast. ``runs``: the forecasts of the table's own runs. A search belongs
    to one row and one column of the table. The estimate for a round of its trials is the time of a round of the table's
    run in this row and column.
    """
    whole = {one.name: one.estimate.seconds for one in runs}
    found: dict[tuple[str, ...], SearchForecast] = {}
    for search in searches:
        assert settings.tune is not None, "a table that tunes nothing"
        trials = [proposed_trial(search, settings.tune, number, ()) for number in trial_batches(settings.tune)[0]]
        shortest = search.rungs[0].rounds
        directories = dict.fromkeys(  # only the first batch: Optuna has not chosen later trials yet
            trial_directory(experiment_of(settings, trial, shortest), out / TRIALS, data_root) for trial in trials
        )
        rounds, before = 0, 0
        for rung in search.rungs:
            is_extended = can_extend(experiment_of(settings, trials[0], rung.rounds))
            rounds += rung.trials * (rung.rounds - before if is_extended else rung.rounds)
            before = rung.rounds
        done = min(rounds, sum(map(rounds_done, directories)))
        seconds = whole[search.cell.name]
        left = None if seconds is None else seconds / search.cell.experiment.rounds * (rounds - done)
        found.setdefault(tuple(path.name for path in directories), SearchForecast(search, rounds, done, left))
    return list(found.values())


def search_in_words(searches: Sequence[SearchForecast], jobs: int) -> str:
    """Return a text about the number of trials, the number of their rounds, and the remaining time.

    ``jobs``: the number of parallel runs.
    """
    rounds, done = sum(one.rounds for one in searches), sum(one.done for one in searches)
    trials = sum(one.search.rungs[0].trials for one in searches)
    line = (
        f"{len(searches)} search{'' if len(searches) == 1 else 'es'} for settings, one per row and column: {trials} "
        f"trials with {rounds:,} rounds in total, {done:,} of them done"
    )
    seconds = [one.seconds_left for one in searches if one.seconds_left is not None]
    if len(seconds) < len(searches):
        return line
    return f"{line}; the remaining rounds take about {in_time(sum(seconds) / jobs)}{_in_parallel(jobs)}"


def _in_parallel(jobs: int) -> str:
    return f" with {jobs} runs in parallel" if jobs > 1 else ""


class _Untimed(NamedTuple):
    """The data from which the time of a run is estimated. ``known``: the run's forecast, still without a time.

    ``works``: the run's computations, such as local training, each with its amount. ``made``: the keys (names) of stage
    outputs, such as synthetic records, that exist already and so take no time. ``traffic``: the bytes that the run
    transmits. ``watch``: the stopwatch that times each kind of computation.
    """

    known: Forecast
    works: tuple[Work, ...]
    made: frozenset[str]
    traffic: Mapping[str, Traffic]
    watch: Stopwatch | None

    def forecast(self) -> Forecast:
        return replace(self.known, estimate=estimate_of(self.works, self.watch, self.traffic, made=self.made))


def _traffic(procedure: Procedure, known: dict[str, Mapping[str, Traffic]]) -> Mapping[str, Traffic]:
    """Return the bytes that a run transmits.

    ``known``: a cache. Partition and seeds do not change the size of messages. So runs without stages (code before or
    after the rounds) share an entry if they differ only in partition and seeds.
    """
    if stages_of(procedure.job):
        return procedure.traffic()
    alike = procedure.job.experiment.model_dump_json(exclude=_NOT_OF_A_MESSAGE)
    if alike not in known:
        known[alike] = procedure.traffic()
    return known[alike]


def _works(procedure: Procedure, known: dict[str, tuple[Work, ...]]) -> tuple[Work, ...]:
    """Return the computations of a run, such as local training, each with its amount.

    ``known``: a cache, because building a model from a library takes a second. Runs without stages (code before or
    after the rounds) share an entry if they differ only in their seeds. The small differences between their numbers of
    local steps are ignored.
    """
    if stages_of(procedure.job):
        return tuple(procedure.work())
    alike = procedure.job.experiment.model_dump_json(exclude=_SEEDS)
    if alike in known:
        return known[alike]
    works = tuple(procedure.work())
    known[alike] = _without_jobs(works)
    return works


def _without_jobs(works: Iterable[Work]) -> tuple[Work, ...]:
    """Return ``works`` without references to jobs, because thousands of jobs and their partitions need much memory."""
    return tuple(replace(work, ready=work.ready and _never_called) for work in works)


def _frozen_in_words(job: Job, known: dict[str, str]) -> str:
    """Return the sentence on the frozen parameters of a run's model.

    Such parameters are not trained. ``known``: a cache; runs that differ only in their seeds share an entry.
    """
    alike = job.experiment.model_dump_json(exclude=_SEEDS)
    if alike not in known:
        known[alike] = job.frozen_in_words
    return known[alike]


def _with_privacy_cost(known: Forecast, job: Job, frozen: str, may_begin: Callable[[], bool]) -> tuple[Forecast, bool]:
    """Return (the forecast ``known`` with its privacy cost, True if every PLD computation was allowed).

    ``frozen``: a sentence on frozen parameters, or "". ``may_begin`` is called before each PLD computation (slow
    privacy accounting). If ``may_begin`` returns False, the cost is computed by the faster RDP accounting instead.
    """
    refused: list[bool] = []

    def noted() -> bool:
        refused.append(not may_begin())
        return not refused[-1]

    notes: tuple[str, ...] = ()
    with begun_only_if(noted):
        paid = planned_bill(job)
        with suppress(NoTimeError):  # if ``may_begin`` forbids a PLD computation, there are no notes
            notes = tuple(said for kind in layer_kinds(job.experiment) for said in kind.told(job.experiment))
    notes = (*notes, *([frozen] if frozen else []))
    return replace(known, paid=paid, notes=notes), not any(refused)


def _never_called(*_: int) -> Callable[[], object]:
    raise AssertionError("each kind of work is timed by the first run that has it")


def _available_outputs(job: Job, seen: set[str]) -> frozenset[str]:
    """Return the keys of the job's stage outputs (such as synthetic records) that the job need not compute.

    These outputs exist already, or an earlier run of the table will compute them. ``seen``: the keys of the outputs of
    earlier runs. This function adds the keys of this job to ``seen``.
    """
    needed = [(stage.key(), stage) for stage in stages_of(job) if stage.key()]
    there = frozenset(key for key, stage in needed if key in seen or stage.is_made())
    seen.update(key for key, _ in needed)
    return there
