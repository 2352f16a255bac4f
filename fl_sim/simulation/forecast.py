"""What federated rounds will take: training and measuring, with the pieces of them that are timed."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

import numpy as np
import torch

from clients.client_task import ClientRuntime
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.groups import InProcess
from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of
from fl_sim.local_plan import LocalAlgorithm, LocalPlan, fields_in_use
from fl_sim.one_of import as_table
from fl_sim.params import detached, trainable
from fl_sim.seeding import rng
from fl_sim.simulation.capacity import stack_of, threads_of
from fl_sim.simulation.client_runtime import local_settings, sizes_trained_on, steps_by_client
from fl_sim.simulation.stage import Stage, stages_of
from fl_sim.simulation.work import Work, clients_at_once, here, public, side_by_side
from fl_sim.training.loop import resident
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Training
from fl_sim.types import LocalTask, ServerState

PROBE_STEPS: Final = 8
"""Minibatch steps that are timed at most to guess how long a client's turn takes."""

MOST_MEASURED: Final = 512
"""Records on which the measuring of a model is timed at most."""

_NOT_OF_A_STEP: Final = {
    "partition", "clients", "aggregator", "sampler", "attack", "calibrate", "compress", "devices", "server",
    "preprocess", "rounds", "evaluate_every", "evaluate", "seed", "partition_seed", "model_seed", "sampling_seed",
    "engine", "round_timeout",
}  # fmt: skip
_NOT_OF_A_LOCAL_STEP: Final = {"epochs", "steps", "learning_rate", "schedule", "momentum", "weight_decay"}


class Foretold(Protocol):
    """What of a procedure a forecast asks for."""

    @property
    def job(self) -> Job:
        """Return what is run."""
        ...

    def typical_plan(self) -> LocalPlan:
        """Return what clients' plans look like."""
        ...

    def beginning(self) -> ServerState:
        """Return what the server starts from."""
        ...


def work_of_rounds(procedure: Foretold, algorithm: LocalAlgorithm, trainings: float) -> tuple[Work, ...]:
    """Return training, of clients that train ``trainings`` times on average, measuring, and what the stages do."""
    job, stages = procedure.job, stages_of(procedure.job)
    evaluate, rounds = job.experiment.evaluate, job.experiment.rounds
    times = -(-rounds // job.experiment.evaluate_every)  # the last round is measured in any case
    tested = {"rounds": times, "last": 1, "never": 0}[evaluate.test]
    clients = training(procedure, algorithm, trainings)
    return (
        clients,
        server_steps(clients, sum(stage.num_server_steps() for stage in stages)),
        measuring(procedure, tested * len(job.dataset.test) + times * job.num_validated),
        *(work for stage in stages for work in stage.work()),
    )


def training(procedure: Foretold, algorithm: LocalAlgorithm, trainings: float) -> Work:
    """Return the local training of all clients, each of which trains ``trainings`` times on average."""
    job = procedure.job
    experiment, stages = job.experiment, stages_of(job)
    steps, sizes = steps_by_client(job, _pooled(stages)), sizes_trained_on(job, _pooled(stages))
    turns = trainings * experiment.sampler.expected_size(experiment.num_clients)
    busy = sizes[sizes > 0]
    records = min(experiment.local.batch_size, max(1, round(float(busy.mean())))) if len(busy) else 1
    stack, plan = _stack(job), procedure.typical_plan()
    is_plain = not fields_in_use(plan) and not isinstance(algorithm, Training)
    how = "plain" if is_plain else kind_of(experiment.algorithm)
    beside = "" if stack == 1 else f" of {stack} clients at once"
    size = f"{records} record{'' if records == 1 else 's'}"
    return Work(
        f"a step{beside} of {experiment.model} on {experiment.data} ({how}, {size})",
        _kind(experiment, "" if is_plain else as_table(experiment.algorithm, "json"), records, stack),
        turns * float(np.mean(steps > 0)) / stack,
        turns * int(steps.sum()) / len(steps) / stack,
        lambda size, pieces: _turn(job, algorithm, plan, size, pieces),
        records,
        PROBE_STEPS,
        clients_at_once(experiment.engine, job),
        threads=experiment.engine.threads,
        clock=_clock_of(job),
    )


def measuring(procedure: Foretold, records: int) -> Work:
    """Return the measuring of models on ``records`` records, all together."""
    job = procedure.job
    at_once = side_by_side(threads_of(here(job.experiment.engine), job))
    what = f"measuring {job.experiment.model} on a record of {job.experiment.data}"
    return Work(
        what, _kind(job.experiment, "measuring"), 0.0, records,
        lambda size, pieces: _measured(procedure, size * pieces), most=MOST_MEASURED, at_once=at_once,
        threads=job.experiment.engine.threads, clock=_clock_of(job),
    )  # fmt: skip


def server_steps(clients: Work, steps: int) -> Work:
    """Return ``steps`` of training by the server alone, one after another, each like a step of ``clients``."""
    return replace(clients, turns=0.0, pieces=steps, at_once=1.0)


def _pooled(stages: Sequence[Stage]) -> int:
    """Return about how many records stages give to all clients to train on."""
    return sum(stage.num_pooled() for stage in stages)


def _stack(job: Job) -> int:
    return stack_of(here(job.experiment.engine), job)


def _clock_of(job: Job) -> Callable[[], float]:
    return time.thread_time if job.device.type == "cpu" else time.perf_counter


def _awaited(job: Job, work: Callable[[], object]) -> Callable[[], object]:
    """Return ``work`` as it is on a CPU; on a GPU, work that ends when the GPU has."""

    def awaited() -> object:
        done = work()
        torch.cuda.synchronize(job.device)
        return done

    return awaited if job.device.type == "cuda" else work


def _kind(experiment: Experiment, *what: object) -> str:
    """Return a text that is the same for experiments in which one kind of work takes the same time."""
    kept = experiment.model_dump(mode="json", exclude=_NOT_OF_A_STEP | {"algorithm", "local"})
    local = experiment.local.model_dump(mode="json", exclude=_NOT_OF_A_LOCAL_STEP)
    engine = experiment.engine.model_dump(mode="json", include={"stack", "threads", "graphs"})
    return json.dumps([what, kept, local, engine], sort_keys=True)


def _turn(job: Job, algorithm: LocalAlgorithm, plan: LocalPlan, size: int, steps: int) -> Callable[[], object]:
    """Make ready one client's turn, or that of a stack of clients, with the trainer that would take it."""
    experiment, chosen, stack = job.experiment, job.experiment.local, _stack(job)
    records = resident(public(job, size * steps), job.dataset, job.device)
    settings = replace(local_settings(job, chosen.learning_rate), epochs=1, steps=0, batch_size=size)
    task = LocalTask(0, 0, 1, len(records), settings, detached(trainable(job.model()).items()))
    jobs = [LocalJob(task, plan, records.whole(), rng(experiment.seed, "probe", one)) for one in range(stack)]
    runtime = ClientRuntime(
        algorithm, job.model().to(job.device), _no_records, _no_records, partial(local_settings, job),
        experiment.num_clients, experiment.seed, threads=experiment.engine.threads, precision=job.precision,
        graphs=not isinstance(experiment.engine, InProcess) or experiment.engine.graphs,
    )  # fmt: skip

    def turn() -> object:
        return runtime.prepare(jobs, stacked=stack > 1)()

    return _awaited(job, turn)


def _no_records(*_: object) -> Records:
    raise AssertionError("a timed step trains on public test records")


def _measured(procedure: Foretold, count: int) -> Callable[[], object]:
    job = procedure.job
    records = resident(public(job, count), job.dataset, job.device)
    params = procedure.beginning().model or detached(job.model().named_parameters())

    return _awaited(job, lambda: job.trainer.evaluate(params, records.inputs, records.labels, scale=records.scale))
