"""What a run will do: its kinds of work, each with a small piece that can be timed on public test records."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from fl_sim.experiment.groups import Auto, Engine, InProcess, Ray
from fl_sim.experiment.job import Job
from fl_sim.simulation.capacity import cores, generator_threads, workers_of
from fl_sim.types import Examples

SHARE_PER_CORE: Final = 0.9
"""How much of a further core is turned into speed."""

Ready = Callable[[int, int], Callable[[], object]]
"""(records of a piece, pieces) -> what does so many pieces of so many records each, in one turn."""


@dataclass(frozen=True)
class Work:
    """One kind of work: ``turns`` of it with ``pieces`` in them, all together, such as clients' turns and their steps.

    ``what``: a piece, in words. ``kind``: the same for work whose pieces take equally long. ``ready`` loads what a turn
    needs, and returns the turn; None: this work cannot be timed. ``records``: of a piece; ``most``: pieces of a turn
    that is timed. ``at_once``: how many turns go on at a time. ``makes``: the name of what the work leaves for all runs
    that need the same, empty for nothing. ``threads``: of torch. ``clock``: by which a turn is timed; on a CPU the time
    that this thread computes, whoever else computes there.
    """

    what: str
    kind: str = ""
    turns: float = 0.0
    pieces: float = 0.0
    ready: Ready | None = None
    records: int = 1
    most: int = 1
    at_once: float = 1.0
    makes: str = ""
    threads: int = 1
    clock: Callable[[], float] = time.thread_time


def clients_at_once(engine: Engine, job: Job) -> float:
    """Return how many times as fast as one core or one GPU ``engine`` trains clients."""
    engine, experiment = here(engine), job.experiment
    cohort = max(1, round(experiment.sampler.expected_size(experiment.num_clients)))
    workers = workers_of(engine, job) if isinstance(engine, InProcess) else engine.actors or cores()
    return side_by_side(min(workers, cohort))


def answers_at_once(job: Job) -> float:
    """Return how many times as fast as one core clients answer in threads, or in actors."""
    engine, clients = here(job.experiment.engine), job.experiment.num_clients
    workers = generator_threads(engine) if isinstance(engine, InProcess) else engine.actors or cores()
    return side_by_side(min(workers, clients))


def side_by_side(workers: int) -> float:
    """Return how many times as fast as one worker so many are.

    >>> side_by_side(1), side_by_side(3)
    (1.0, 2.8)
    """
    return 1 + (workers - 1) * SHARE_PER_CORE


def public(job: Job, count: int) -> Examples:
    """Return so many public test records, some of them twice where there are fewer."""
    test = job.dataset.test
    return test.take(np.arange(count) % len(test))


def here(engine: Engine) -> InProcess | Ray:
    """Return ``engine``, and for auto the one that is there without Ray."""
    return InProcess(threads=engine.threads) if isinstance(engine, Auto) else engine
