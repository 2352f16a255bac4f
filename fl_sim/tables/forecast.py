"""What runs will take, before they run: what is there already, seconds and bytes of the rest, and the privacy bill."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job, job_of
from fl_sim.privacy.bill import Bill, Paid, bills
from fl_sim.simulation.engine_choice import check_trainer
from fl_sim.simulation.estimate import Estimate, estimate_of
from fl_sim.simulation.pace import Pace, kind_of_work, pace_of
from fl_sim.simulation.planned_bill import planned
from fl_sim.simulation.stage import stages_of
from fl_sim.store.run_directory import read_rounds
from fl_sim.tables.workers import finished_result
from strategies.layer import layer_kinds

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
    paid: Paid | None = None
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
    paces: dict[str, Pace | None] | None,
    *,
    billed: bool = False,
    timed_own_models: bool = True,
) -> list[Forecast]:
    """Return what each of ``runs`` {directory in ``cells``: experiment} takes.

    ``paces``: of the kinds of work that were timed already, None for those that failed, to which new ones are added; or
    None: nothing is timed. ``billed``: whether it is worked out what private runs cost, and which bytes
    travel, which takes time. ``timed_own_models``: whether models of the user's own are tried, which may end this
    process. Nothing is trained but the timed steps, on public test records, and nothing is written.
    Raises UserError where a run cannot train here at the precision that it asks for.
    """
    pools: set[str] = set()
    making = partial(_seconds_of_making, {})
    found = []
    for name, experiment in runs.items():
        job = job_of(experiment, data_root)
        is_finished = finished_result(cells / name, job.experiment, data_root) is not None
        if not is_finished:
            check_trainer(job)
        has_pool = _has_pool(job, pools)
        is_timed = paces is not None and not is_finished and (timed_own_models or ":" not in job.experiment.model)
        pace = _pace(job, paces) if paces is not None and is_timed else None
        estimate = estimate_of(job, pace, has_pool=has_pool, making=making, counted=billed)
        paid, told = (planned(job), _told_of(job.experiment)) if billed else (None, ())
        done = rounds_done(cells / name)
        found.append(Forecast(name, job.experiment.rounds, done, is_finished, estimate, has_pool, paid, told))
    return found


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
    told += f"; the rest takes about {in_time(seconds)}{beside}, by steps that were timed just now"
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


def _told_of(experiment: Experiment) -> tuple[str, ...]:
    return tuple(said for kind in layer_kinds(experiment) for said in kind.told(experiment))


def _pace(job: Job, known: dict[str, Pace | None]) -> Pace | None:
    kind = kind_of_work(job.experiment)
    if kind not in known:
        known[kind] = None
        with suppress(Exception):  # what is wrong with the model or the method is told by the run itself
            known[kind] = pace_of(job)
    return known[kind]


def _seconds_of_making(known: dict[str, float], job: Job) -> float:
    """Return how long clients work before the first round; what is of one kind takes as long in all runs."""
    total = 0.0
    for stage in stages_of(job):
        kind = stage.kind_of_work()
        if not kind or kind not in known:
            known[kind] = stage.seconds()
        total += known[kind]
    return total


def _has_pool(job: Job, seen: set[str]) -> bool:
    made = [(stage.key(), stage) for stage in stages_of(job) if stage.key()]
    there = bool(made) and all(key in seen or stage.is_made() for key, stage in made)
    seen.update(key for key, _ in made)
    return there


def rounds_done(directory: Path) -> int:
    """Return how many rounds the run in ``directory`` has."""
    with suppress(UserError):  # what is damaged is told when the run is taken up
        return len(read_rounds(directory))
    return 0
