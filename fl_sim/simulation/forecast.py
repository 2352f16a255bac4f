"""The forecast of a run: the work of its rounds, seconds on this machine, and bytes on the wire."""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

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
from fl_sim.simulation.client_runtime import (
    clients_at_once,
    here,
    local_settings,
    side_by_side,
    sizes_trained_on,
    stack_of,
    steps_by_client,
    threads_of,
)
from fl_sim.simulation.stage import Procedure, Stage, stages_of
from fl_sim.simulation.timing import Stopwatch, Work, public_records
from fl_sim.training.loop import resident
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Training
from fl_sim.types import LocalTask, Traffic


@dataclass(frozen=True)
class Estimate:
    """What a whole run is expected to take.

    ``seconds``: on this machine, by itself; None where nothing was timed, and ``at_least`` where not all was.
    ``synthetic_seconds``: those of them that go into what is made once for several runs, synthetic records.
    ``traffic``: bytes of arrays to and from all clients in all rounds; None where there are none (PATE and TSTR), and
    where it was not counted. ``once``: those of what travels before or after the rounds, about, by what it is.
    ``left_out``: what is not in the time, or only in part, in words.
    """

    seconds: float | None
    traffic: Traffic | None
    once: Mapping[str, Traffic] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    synthetic_seconds: float = 0.0
    at_least: bool = False

    @property
    def total(self) -> Traffic | None:
        """Return all bytes together; None where none were counted."""
        counted = [*([self.traffic] if self.traffic else []), *self.once.values()]
        return sum(counted, Traffic(0, 0)) if counted else None


NOTHING: Final = Estimate(None, None)
"""Where nothing was timed nor counted."""


def estimate_of(
    works: Sequence[Work],
    watch: Stopwatch | None,
    traffic: Mapping[str, Traffic],
    *,
    made: Collection[str] = (),
) -> Estimate:
    """Return what ``works`` take by what ``watch`` has timed; None: nothing was.

    ``traffic``: bytes by what they are, those of ``rounds`` among them. ``made``: names of what is there already.
    """
    once = dict(traffic)
    of_rounds = once.pop("rounds", None)
    ahead = [work for work in works if (work.turns or work.pieces) and work.makes not in made]
    if watch is None:
        return Estimate(None, of_rounds, once, tuple(work.what for work in ahead if not work.ready))
    timings = [(work, watch.timing(work)) for work in ahead]
    untimed = [work.what for work, timing in timings if timing.why_not]
    partly = [f"most of {work.what}" for work, timing in timings if timing.at_least]
    seconds = sum(map(watch.seconds, ahead)) if len(untimed) < len(ahead) else None
    return Estimate(
        seconds,
        of_rounds,
        once,
        (*untimed, *partly),
        sum(watch.seconds(work) for work in ahead if work.makes),
        at_least=bool(partly) or any(timing.why_not and work.ready for work, timing in timings),
    )


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


def work_of_rounds(procedure: Procedure, algorithm: LocalAlgorithm, trainings: float) -> tuple[Work, ...]:
    """Return training, of clients that train ``trainings`` times on average, measuring, and what the stages do."""
    job, stages = procedure.job, stages_of(procedure.job)
    evaluate, rounds = job.experiment.evaluate, job.experiment.rounds
    times = -(-rounds // job.experiment.evaluate_every)  # the last round is measured in any case
    tested = {"rounds": times, "last": 1, "never": 0}[evaluate.test]
    clients = training_work(procedure, algorithm, trainings)
    return (
        clients,
        server_steps(clients, sum(stage.num_server_steps() for stage in stages)),
        evaluation_work(procedure, tested * len(job.dataset.test) + times * job.num_validated),
        *(work for stage in stages for work in stage.work()),
    )


def training_work(procedure: Procedure, algorithm: LocalAlgorithm, trainings: float) -> Work:
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


def evaluation_work(procedure: Procedure, records: int) -> Work:
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
    records = resident(public_records(job, size * steps), job.dataset, job.device)
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


def _measured(procedure: Procedure, count: int) -> Callable[[], object]:
    job = procedure.job
    records = resident(public_records(job, count), job.dataset, job.device)
    params = procedure.beginning().model or detached(job.model().named_parameters())

    return _awaited(job, lambda: job.trainer.evaluate(params, records.inputs, records.labels, scale=records.scale))
