"""How fast this machine works at a job: a few steps and an evaluation are timed, on public test records."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from fl_sim.experiment.engine import Auto, InProcess
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.params import detached, trainable
from fl_sim.seeding import rng, torch_kept
from fl_sim.simulation.capacity import cores, fixed_threads, stack_of, workers_of
from fl_sim.simulation.procedure import procedure_of
from fl_sim.simulation.site import local_settings, steps_by_client
from fl_sim.simulation.stage import stages_of
from fl_sim.training.loop import resident
from fl_sim.training.records import Source
from fl_sim.training.trainer import LocalJob
from fl_sim.types import LocalTask

PROBE_STEPS = 8
"""Minibatch steps that are timed to guess how long the job takes."""

SHARE_PER_CORE = 0.9
"""How much of a further core is turned into speed."""

_NOT_OF_A_STEP = {
    "partition", "clients", "aggregator", "sampler", "attack", "calibrate", "compress", "devices", "server",
    "preprocess", "rounds", "evaluate_every", "evaluate", "seed", "partition_seed", "model_seed", "sampling_seed",
    "engine", "round_timeout",
}  # fmt: skip
_NOT_OF_A_LOCAL_STEP = {"epochs", "steps", "learning_rate", "schedule", "momentum", "weight_decay"}


@dataclass(frozen=True)
class Pace:
    """Seconds that work takes here, on one core or on the GPU.

    ``step``: a client's minibatch step, or its share in the step of a stack of clients. ``record``: to measure a model
    on one record.
    """

    step: float
    record: float


def kind_of_work(experiment: Experiment) -> str:
    """Return a text that is the same for experiments whose steps take the same time."""
    kept = experiment.model_dump(mode="json", exclude=_NOT_OF_A_STEP | {"local"})
    local = experiment.local.model_dump(mode="json", exclude=_NOT_OF_A_LOCAL_STEP)
    engine = experiment.engine.model_dump(mode="json", include={"stack", "threads", "graphs"})
    return json.dumps([kept, local, engine], sort_keys=True)


def pace_of(job: Job) -> Pace:
    """Time the work of ``job``, which takes a second or less; on a GPU some more, as that is warmed up first."""
    with torch_kept(), fixed_threads(job.experiment.engine.threads):
        return Pace(step_seconds(job), _evaluation_seconds(job))


def step_seconds(job: Job) -> float:
    """Return how long one client's step takes, with the trainer and the plan of the job's clients."""
    engine, chosen, records = job.experiment.engine, job.experiment.local, _sample(job)
    stack = stack_of(InProcess(threads=engine.threads) if isinstance(engine, Auto) else engine, job)
    task = LocalTask(
        0, 0, 1, len(records), replace(local_settings(job, chosen.learning_rate), epochs=1, steps=0),
        detached(trainable(job.model()).items()),
    )  # fmt: skip
    procedure = procedure_of(job)
    plan = procedure.typical_plan()
    jobs = [LocalJob(task, plan, records.whole(), rng(job.experiment.seed, "probe", one)) for one in range(stack)]
    site = procedure.site()
    train_all = site.stacked.train if stack > 1 else site.trainer.train_all
    num_steps = sum(one.num_steps for one in train_all(jobs))  # whose first call loads what others find
    return _seconds(job.device, lambda: train_all(jobs)) / num_steps


def num_steps(job: Job) -> float:
    """Return how many steps all clients of all rounds are expected to take together, on synthetic records, too."""
    experiment, pooled = job.experiment, sum(stage.num_pooled() for stage in stages_of(job))
    each = steps_by_client(job, pooled)
    cohort = experiment.sampler.expected_size(experiment.num_clients)
    return procedure_of(job).num_trainings * cohort * int(each.sum()) / len(each)


def clients_at_once(job: Job) -> float:
    """Return how many times as fast as one core or one GPU the job's engine is."""
    engine = job.experiment.engine
    if isinstance(engine, Auto):
        engine = InProcess(threads=engine.threads)
    cohort = max(1, round(job.experiment.sampler.expected_size(job.experiment.num_clients)))
    workers = workers_of(engine, job) if isinstance(engine, InProcess) else engine.actors or cores()
    return 1 + (min(workers, cohort) - 1) * SHARE_PER_CORE


def _sample(job: Job) -> Source:
    count = PROBE_STEPS * job.experiment.local.batch_size
    return resident(job.dataset.test.take(np.arange(min(len(job.dataset.test), count))), job.dataset, job.device)


def _evaluation_seconds(job: Job) -> float:
    records = _sample(job)
    params = procedure_of(job).beginning().model or detached(job.model().named_parameters())

    def evaluate() -> object:
        return job.trainer.evaluate(params, records.inputs, records.labels, scale=records.scale)

    evaluate()
    return _seconds(job.device, evaluate) / len(records)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return how long some work takes: on a CPU by the time that this thread computes, whoever else computes there."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start
