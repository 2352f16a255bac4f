"""What runs and searches will take, before they run: what is there already, seconds and bytes, and the privacy bill."""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job, job_of
from fl_sim.privacy.bill import Bill, RunPayments, bills
from fl_sim.privacy.loss_distribution import NoTimeError, begun_only_if
from fl_sim.simulation.engine_choice import check_trainer
from fl_sim.simulation.forecast import NOTHING, Estimate, estimate_of
from fl_sim.simulation.rounds import planned_bill, procedure_of
from fl_sim.simulation.stage import Procedure, stages_of
from fl_sim.simulation.timing import Say, Stopwatch, Work
from fl_sim.store.run_directory import read_rounds
from fl_sim.tables.earlier_runs import can_extend, finished_result, trial_directory
from fl_sim.tables.plan import TableSettings, by_records
from fl_sim.tables.tuning import TRIALS, Search, experiment_of, proposed_trial, turns
from fl_sim.types import Traffic
from strategies.layer import layer_kinds

_NOT_OF_A_MESSAGE: Final = {"partition", "seed", "partition_seed", "model_seed", "sampling_seed"}

START_SECONDS = 4.0
"""What a process takes until it trains: Python, torch and the data."""


@dataclass(frozen=True)
class Forecast:
    """What is known of a run beforehand. ``rounds``: how many it will have, ``done`` how many of them it has.

    ``estimate``: of all its rounds. ``has_pool``: whether its synthetic records are there, or come from a run before it
    in the list. ``paid``: what it releases, None where that was not asked for. ``told``: what else there is
    to know of its privacy, sentences.
    """

    name: str
    rounds: int
    done: int
    is_finished: bool
    estimate: Estimate
    has_pool: bool
    paid: RunPayments | None = None
    told: tuple[str, ...] = ()

    @property
    def seconds_left(self) -> float | None:
        """Return how long what is missing of it takes; None where nothing was timed."""
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
    """Return what each of ``runs`` {directory in ``cells``: experiment} takes.

    ``watch``: times each kind of work once, unless it has before; None: nothing is timed. ``billed``: whether a
    further PLD may be begun to say what private runs cost, which is said by RDP at first; None: neither that is worked
    out nor which bytes travel. ``timed_own_models``: whether models of
    the user's own are tried, which may end this process. ``say`` hears what is done next. Nothing is trained but the
    timed pieces, on public test records, and nothing is written.
    Raises UserError where a run cannot train here at the precision that it asks for.
    """
    seen: set[str] = set()
    kinds: dict[str, Work] = {}
    looked_at: dict[int, _LookedAt] = {}
    rough: dict[int, Experiment] = {}
    messages: dict[str, Mapping[str, Traffic]] = {}
    in_turn = by_records(runs.items(), lambda run: (run[1].data, run[1].features))
    for number, (place, (name, experiment)) in enumerate(in_turn, 1):
        say(f"looking at run {number:,} of {len(runs):,}")
        job = job_of(experiment, data_root)
        is_finished = finished_result(cells / name, job.experiment, data_root) is not None
        if not is_finished:
            check_trainer(job)
        procedure, made = procedure_of(job), _made(job, seen)
        works = () if is_finished else tuple(procedure.work())
        is_timed = watch is not None and (timed_own_models or ":" not in job.experiment.model)
        for work in works if is_timed else ():
            if work.makes not in made:
                kinds.setdefault(work.kind, work)
        known = Forecast(name, job.experiment.rounds, rounds_done(cells / name), is_finished, NOTHING, bool(made))
        if billed:
            known, is_exact = _priced(known, job, lambda: False)
            rough.update({} if is_exact else {place: experiment})
        # Without its job: thousands of splits would fill the memory.
        works = tuple(replace(work, ready=work.ready and _forgotten) for work in works)
        traffic = _traffic_of(procedure, messages) if billed else {}
        looked_at[place] = _LookedAt(known, works, made, traffic, watch if is_timed else None)
    if watch is not None:
        watch.time_all(kinds.values(), say)
    for place, experiment in rough.items():
        if not (billed and billed()):
            break
        say(f"adding up what {looked_at[place].known.name} costs in privacy")
        known, _ = _priced(looked_at[place].known, job_of(experiment, data_root), billed)
        looked_at[place] = looked_at[place]._replace(known=known)
    return [looked_at[place].forecast() for place in range(len(looked_at))]


def seconds_together(found: Iterable[Forecast], jobs: int) -> float | None:
    """Return how long the rest takes, ``jobs`` runs side by side, each begun in its turn as soon as one has ended.

    0 where nothing is left. Those that were not timed are left out; None where all of them are.
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
    """Return how many runs there are, and how long the rest of them takes."""
    num_finished = sum(one.is_finished for one in found)
    told = f"{len(found)} run{'' if len(found) == 1 else 's'}, {num_finished} finished"
    if not (seconds := seconds_together(found, jobs)):
        return told
    beside = f" with {jobs} side by side" if jobs > 1 else ""
    about = "at least" if any(one.estimate.at_least for one in found) else "about"
    told += f"; the rest takes {about} {in_time(seconds)}{beside}, by steps that were timed just now"
    unknown = sum(one.seconds_left is None for one in found)
    return f"{told} ({unknown} of them were not, and come on top)" if unknown else told


def bills_of(found: Iterable[Forecast]) -> list[Bill]:
    """Return what all of them together cost the records that they are about. Takes seconds where some are private."""
    return bills([one.paid for one in found if one.paid is not None])


def in_time(seconds: float) -> str:
    """Return a time that is not known exactly in words.

    >>> [in_time(seconds) for seconds in (0.4, 59, 1500, 45000)]
    ['1 s', '59 s', '25 min', '12.5 h']
    """
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def rounds_done(directory: Path) -> int:
    """Return how many rounds the run in ``directory`` has."""
    with suppress(UserError):  # what is damaged is told when the run is taken up
        return len(read_rounds(directory))
    return 0


@dataclass(frozen=True)
class SearchForecast:
    """What the search for a row's settings in a column takes: ``rounds`` that its trials train, ``done`` of them.

    ``seconds_left``: of the rest, one run at a time; None where nothing was timed.
    """

    search: Search
    rounds: int
    done: int
    seconds_left: float | None


def search_forecasts(
    settings: TableSettings,
    searches: Sequence[Search],
    out: Path,
    data_root: Path | None,
    runs: Sequence[Forecast],
) -> list[SearchForecast]:
    """Return what the ``searches`` of the table in ``out`` take, those with the same trials once.

    ``runs``: what the table's own runs take, by which the rounds of trials are timed.
    """
    whole = {one.name: one.estimate.seconds for one in runs}
    found: dict[tuple[str, ...], SearchForecast] = {}
    for search in searches:
        directories = _directories(settings, search, out / TRIALS, data_root)
        rounds = _rounds(settings, search)
        done = min(rounds, sum(map(rounds_done, directories)))
        seconds = whole[search.cell.name]
        left = None if seconds is None else seconds / search.cell.experiment.rounds * (rounds - done)
        found.setdefault(tuple(path.name for path in directories), SearchForecast(search, rounds, done, left))
    return list(found.values())


def search_in_words(searches: Sequence[SearchForecast], jobs: int) -> str:
    """Return how much there is to search, what of it is done, and how long the rest takes, ``jobs`` side by side."""
    rounds, done = sum(one.rounds for one in searches), sum(one.done for one in searches)
    trials = sum(one.search.rungs[0].trials for one in searches)
    told = (
        f"{len(searches)} search{'' if len(searches) == 1 else 'es'} for settings, one a row and column: {trials} "
        f"trials with {rounds:,} rounds together, {done:,} of them done"
    )
    seconds = [one.seconds_left for one in searches if one.seconds_left is not None]
    if len(seconds) < len(searches):
        return told
    return (
        f"{told}; the rest takes about {in_time(sum(seconds) / jobs)}{f' with {jobs} side by side' if jobs > 1 else ''}"
    )


class _LookedAt(NamedTuple):
    """A run of which all is known but what its ``works`` take; ``made``: names of what is there already."""

    known: Forecast
    works: tuple[Work, ...]
    made: frozenset[str]
    traffic: Mapping[str, Traffic]
    watch: Stopwatch | None

    def forecast(self) -> Forecast:
        """Return it with what its work takes by what ``watch`` has timed."""
        return replace(self.known, estimate=estimate_of(self.works, self.watch, self.traffic, made=self.made))


def _traffic_of(procedure: Procedure, known: dict[str, Mapping[str, Traffic]]) -> Mapping[str, Traffic]:
    """Return the bytes of a run; without stages they are those of all runs that differ in split and seeds alone."""
    if stages_of(procedure.job):
        return procedure.traffic()
    alike = procedure.job.experiment.model_dump_json(exclude=_NOT_OF_A_MESSAGE)
    if alike not in known:
        known[alike] = procedure.traffic()
    return known[alike]


def _priced(known: Forecast, job: Job, may_begin: Callable[[], bool]) -> tuple[Forecast, bool]:
    """Return a run with what it costs, by RDP alone where no PLD ``may_begin``, and whether each had its time."""
    refused: list[bool] = []

    def noted() -> bool:
        refused.extend([] if (may := may_begin()) else [True])
        return may

    with begun_only_if(noted):
        return replace(known, paid=planned_bill(job), told=_told_of(job.experiment)), not refused


def _forgotten(*_: int) -> Callable[[], object]:
    raise AssertionError("each kind of work is timed by the first run that has it")


def _told_of(experiment: Experiment) -> tuple[str, ...]:
    with suppress(NoTimeError):  # for a PLD that some of it takes
        return tuple(said for kind in layer_kinds(experiment) for said in kind.told(experiment))
    return ()


def _made(job: Job, seen: set[str]) -> frozenset[str]:
    """Return the names of what stages need not make: it is there, or an earlier run in the list makes it."""
    needed = [(stage.key(), stage) for stage in stages_of(job) if stage.key()]
    there = frozenset(key for key, stage in needed if key in seen or stage.is_made())
    seen.update(key for key, _ in needed)
    return there


def _directories(settings: TableSettings, search: Search, folder: Path, data_root: Path | None) -> list[Path]:
    """Return where those trials run that are known from the beginning, which is all of them unless Optuna is asked."""
    assert settings.tune is not None
    trials = [proposed_trial(search, settings.tune, number, ()) for number in turns(settings.tune)[0]]
    rounds = search.rungs[0].rounds
    return list(
        dict.fromkeys(trial_directory(experiment_of(settings, trial, rounds), folder, data_root) for trial in trials)
    )


def _rounds(settings: TableSettings, search: Search) -> int:
    """Return how many rounds the trials of a search train, all rungs together."""
    assert settings.tune is not None
    trial = proposed_trial(search, settings.tune, 0, ())
    total, before = 0, 0
    for rung in search.rungs:
        on = can_extend(experiment_of(settings, trial, rung.rounds))
        total += rung.trials * (rung.rounds - before if on else rung.rounds)
        before = rung.rounds
    return total
