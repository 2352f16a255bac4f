"""The forecast of a run: its amount of computation, its seconds on this machine, and the bytes that it sends."""

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
import torch

from clients.client_task import ClientRuntime, PredictingStart, TrainingStart
from clients.train import further_job
from fl_sim.data.naming import short_label
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.frozen_body import BATCH, FrozenBody, parts_of
from fl_sim.experiment.groups import InProcess
from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of
from fl_sim.local_plan import FurtherModels, LocalAlgorithm, LocalPlan, fields_in_use
from fl_sim.one_of import as_table
from fl_sim.params import detached, trainable
from fl_sim.seeding import rng
from fl_sim.simulation.client_runtime import (
    clients_at_once,
    local_engine,
    local_settings,
    side_by_side,
    sizes_trained_on,
    stack_of,
    steps_by_client,
    threads_of,
)
from fl_sim.simulation.stage import Procedure, stages_of
from fl_sim.simulation.timing import Stopwatch, Work, public_records
from fl_sim.training.courses import StepByStep
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Training
from fl_sim.types import LocalTask, Traffic
from strategies.samplers import num_asked


@dataclass(frozen=True)
class Estimate:
    """The forecast of a whole run.

    ``seconds``: the time of the run on this machine without other load; None without a timing. If ``at_least`` is True,
    the run takes at least ``seconds``. ``synthetic_seconds``: the part of ``seconds`` for making synthetic records.
    Several runs can use the same synthetic records. ``traffic``: the bytes of arrays to and from all clients in all
    rounds; None for algorithms without rounds (PATE and TSTR), or if the bytes were not counted. ``once``: the
    approximate bytes before or after the rounds, {purpose: bytes}. ``left_out``: descriptions of the computations that
    were not timed, or only partly timed.
    """

    seconds: float | None
    traffic: Traffic | None
    once: Mapping[str, Traffic] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    synthetic_seconds: float = 0.0
    at_least: bool = False

    @property
    def total(self) -> Traffic | None:
        """Return the sum of all bytes of the run; None if no bytes were counted."""
        counted = [*([self.traffic] if self.traffic else []), *self.once.values()]
        return sum(counted, Traffic(0, 0)) if counted else None


NOTHING: Final = Estimate(None, None)
"""The empty forecast: no seconds and no bytes."""


def estimate_of(
    works: Sequence[Work],
    watch: Stopwatch | None,
    traffic: Mapping[str, Traffic],
    *,
    made: Collection[str] = (),
) -> Estimate:
    """Return the forecast of a run. ``works``: all computations of the run, such as local training and evaluation.

    ``watch``: the stopwatch with the timings; None for a forecast without seconds. ``traffic``: {purpose: bytes}, with
    the key ``rounds`` for all rounds. ``made``: the names of shared results that exist already and cost no time.
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
"""The largest number of minibatch steps in the timing of one client's local training."""

MOST_MEASURED: Final = 512
"""The largest number of records in the timing of an evaluation."""

# These settings do not change the duration of a minibatch step. The first set names settings of the experiment, the
# second set names settings in its section ``local``.
_NOT_OF_A_STEP: Final = {
    "partition", "clients", "aggregator", "sampler", "attack", "calibrate", "compress", "devices", "server",
    "preprocess", "rounds", "evaluate_every", "evaluate", "seed", "partition_seed", "model_seed", "sampling_seed",
    "engine", "round_timeout", "forgotten", "keep_every", "left_out",
}  # fmt: skip
_NOT_OF_A_LOCAL_STEP: Final = {"epochs", "steps", "learning_rate", "schedule", "momentum", "weight_decay"}


def work_of_rounds(procedure: Procedure, algorithm: LocalAlgorithm, trainings: float) -> tuple[Work, ...]:
    """Return the computation of a run with rounds: local training, training at the server, evaluation and stages.

    ``trainings``: the number of local trainings in the run, divided by the expected cohort size. If rounds are
    synchronous, ``trainings`` is the number of rounds.
    """
    job, stages = procedure.job, stages_of(procedure.job)
    evaluate, rounds = job.experiment.evaluate, job.experiment.rounds
    times = -(-rounds // job.experiment.evaluate_every)  # the model after the last round is always measured
    tested = {"rounds": times, "last": 1, "never": 0}[evaluate.test]
    clients, *others = by_architecture(procedure, lambda one: training_work(one, algorithm, trainings))
    server_steps = sum(stage.num_server_steps() for stage in stages)
    cohort = job.experiment.sampler.expected_size(job.experiment.num_members)
    asked = trainings * num_asked(job.experiment.sampler, job.experiment.num_members) * float(job.shards.sizes.mean())
    return (
        clients,
        *others,
        replace(clients, turns=0.0, pieces=server_steps, at_once=1.0),  # server steps do not run in parallel
        evaluation_work(procedure, tested * len(job.dataset.test) + times * job.num_validated),
        evaluation_work(procedure, num_predicted_at_start(job, algorithm, trainings * cohort) + asked),
        *start_works(procedure, algorithm, trainings * cohort / job.experiment.num_members),
        *([features_work(job, job.body)] if isinstance(job.body, FrozenBody) else []),
        *(work for stage in stages for work in stage.work()),
    )


def by_architecture(procedure: Procedure, work_of: Callable[[Procedure], Work]) -> tuple[Work, ...]:
    """Return the amounts of the clients' computation, one ``Work`` for each model architecture.

    Each architecture has its own procedure. ``work_of``: a function that receives a procedure, and returns the
    computation of all clients as if all clients had the procedure's architecture.
    """
    procedures, clients = procedure.by_architecture, procedure.job.experiment.num_clients
    if len(procedures) == 1:
        return (work_of(procedure),)
    shares = [len(range(place, clients, len(procedures))) / clients for place in range(len(procedures))]
    works = map(work_of, procedures)
    return tuple(
        replace(work, turns=work.turns * share, pieces=work.pieces * share)
        for work, share in zip(works, shares, strict=True)
    )


def training_work(procedure: Procedure, algorithm: LocalAlgorithm, trainings: float) -> Work:
    """Return the amount of local training in a run: the numbers of local trainings, and of minibatch steps.

    ``trainings``: the number of local trainings in the run, divided by the expected cohort size.
    """
    job = procedure.job
    experiment, pooled = job.experiment, sum(stage.num_pooled() for stage in stages_of(job))
    steps, sizes = steps_by_client(job, pooled), sizes_trained_on(job, pooled)
    turns = trainings * experiment.sampler.expected_size(experiment.num_members)
    busy = sizes[sizes > 0]
    records = min(experiment.local.batch_size, max(1, round(float(busy.mean())))) if len(busy) else 1
    stack, plan = stack_of(local_engine(experiment.engine), job), procedure.typical_plan()
    is_plain = not fields_in_use(plan) and not isinstance(algorithm, Training | StepByStep | FurtherModels)
    how = "plain" if is_plain else kind_of(experiment.algorithm)
    beside = "" if stack == 1 else f" of {stack} clients at once"
    size = f"{records} record{'' if records == 1 else 's'}"
    return Work(
        f"a step{beside} of {experiment.model} on {short_label(experiment.data)} ({how}, {size})",
        _kind(experiment, "" if is_plain else as_table(experiment.algorithm, "json"), records, stack),
        turns * float(np.mean(steps > 0)) / stack,
        turns * int(steps.sum()) / len(steps) / stack,
        partial(_turn, job, algorithm, plan, stack),
        records,
        PROBE_STEPS,
        clients_at_once(experiment.engine, job),
        threads=experiment.engine.threads,
        clock=_clock_of(job),
    )


def num_predicted_at_start(job: Job, algorithm: LocalAlgorithm, starts: float) -> float:
    """Return the number of predictions on training records that clients make before their local trainings, in a run.

    Clients need such predictions, for example, to choose one of several models. The result is 0 for an algorithm
    without such predictions. ``starts``: the number of local trainings in the run, over all clients.
    """
    if not isinstance(algorithm, PredictingStart):
        return 0.0
    sizes = sizes_trained_on(job, sum(stage.num_pooled() for stage in stages_of(job)))
    return algorithm.start_passes * starts * float(sizes.mean())


def start_works(
    procedure: Procedure, algorithm: LocalAlgorithm, starts: float, *, before: Sequence[float] = (0.0,)
) -> tuple[Work, ...]:
    """Return the amount of training in the algorithm's method ``start``, in a run; empty if ``start`` does not train.

    The number of minibatch steps in a call of ``start`` depends on the number of the client's earlier calls.
    ``starts``: the number of calls by each client. ``before``: numbers of earlier calls. For each of these numbers, the
    result contains ``starts`` further calls by each client. Several numbers are used for measurements, because a
    measurement calls ``start`` once for every client without a change of its client state. Each minibatch step counts
    as a turn. The clients of one process start one after another.
    """
    if not isinstance(algorithm, TrainingStart):
        return ()
    job, engine = procedure.job, local_engine(procedure.job.experiment.engine)
    experiment, batch_size = job.experiment, job.experiment.local.batch_size
    pooled = sum(stage.num_pooled() for stage in stages_of(job))
    sizes = [size for size in sizes_trained_on(job, pooled)[job.members].tolist() if size]
    steps = sum(
        number
        * (algorithm.start_steps(size, batch_size, done + starts) - algorithm.start_steps(size, batch_size, done))
        for size, number in Counter(sizes).items()
        for done in before
    )
    records = min(batch_size, max(1, round(float(np.mean(sizes or 1)))))
    plan = algorithm.start_plan(detached(trainable(job.model()).items()))
    how = f"{kind_of(experiment.algorithm)} at the start of a client's turn"
    return (
        Work(
            f"a step of {experiment.model} on {short_label(experiment.data)} ({how}, {records} records)",
            _kind(experiment, as_table(experiment.algorithm, "json"), "start", records),
            steps,
            steps,
            partial(_turn, job, algorithm, plan, 1),
            records,
            at_once=1.0 if isinstance(engine, InProcess) else clients_at_once(engine, job),
            threads=experiment.engine.threads,
            clock=_clock_of(job),
        ),
    )


def evaluation_work(procedure: Procedure, records: float) -> Work:
    """Return the amount of computation for evaluating models on ``records`` records in total."""
    job = procedure.job

    def ready(size: int, pieces: int) -> Callable[[], object]:
        tested = job.source(public_records(job, size * pieces))
        params = procedure.beginning().model or detached(job.model().named_parameters())
        return _awaited(job, lambda: job.trainer.evaluate(params, tested.inputs, tested.labels, scale=tested.scale))

    return Work(
        f"measuring {job.experiment.model} on a record of {short_label(job.experiment.data)}",
        _kind(job.experiment, "measuring"), 0.0, records, ready, most=MOST_MEASURED,
        at_once=side_by_side(threads_of(local_engine(job.experiment.engine), job)),
        threads=job.experiment.engine.threads, clock=_clock_of(job),
    )  # fmt: skip


def features_work(job: Job, body: FrozenBody) -> Work:
    """Return the amount of computation for the features (the inputs of the head) of all records.

    The amount is 0 if an earlier run stored the features. ``body``: the frozen layers of the job's model before the
    head.
    """
    batches = 0 if body.place(job.dataset)[0].exists() else -(-sum(map(len, parts_of(job.dataset).values())) // BATCH)

    def ready(size: int, pieces: int) -> Callable[[], object]:
        examples = public_records(job, size * pieces)
        return _awaited(job, lambda: job.source(examples))

    return Work(
        f"features of {BATCH} records of {short_label(job.experiment.data)} before the head of {job.experiment.model}",
        _kind(job.experiment, "features"), 0.0, batches, ready, BATCH, most=MOST_MEASURED // BATCH,
        clock=time.perf_counter,  # the clock measures wall-clock time, because several threads compute features
    )  # fmt: skip


def _kind(experiment: Experiment, *what: object) -> str:
    """Return the key (``Work.kind``) under which the timing of a computation is stored for later forecasts.

    Two computations share one key, and so one timing, if their steps take equally long.
    """
    kept = experiment.model_dump(mode="json", exclude=_NOT_OF_A_STEP | {"algorithm", "local"})
    local = experiment.local.model_dump(mode="json", exclude=_NOT_OF_A_LOCAL_STEP)
    engine = experiment.engine.model_dump(mode="json", include={"stack", "threads", "graphs"})
    return json.dumps([what, kept, local, engine], sort_keys=True)


def _turn(
    job: Job, algorithm: LocalAlgorithm, plan: LocalPlan, stack: int, size: int, steps: int
) -> Callable[[], object]:
    """Return a function that trains ``steps`` minibatch steps of ``size`` records, so that its time can be measured.

    The function trains one client, or ``stack`` clients as one computation, with the trainer that a run would use. If
    the algorithm has further models, such as a personal model, the function trains these models, too.
    """
    experiment, chosen = job.experiment, job.experiment.local
    records = job.source(public_records(job, size * steps))
    settings = replace(local_settings(job, chosen.learning_rate), epochs=1, steps=0, batch_size=size)
    params = detached(trainable(job.model()).items())
    counts = records.whole().class_counts(job.dataset.num_classes)
    task = LocalTask(0, 0, 1, len(records), settings, params, class_counts=counts, initial=params)
    models = algorithm.further(task) if isinstance(algorithm, FurtherModels) else {}
    jobs = list[LocalJob]()
    for one in range(stack):
        batches = partial(rng, experiment.seed, "probe", one)
        jobs.append(LocalJob(task, plan, records.whole(), batches()))
        jobs += [further_job(jobs[-1], name, model, batches()) for name, model in models.items()]
    runtime = ClientRuntime(
        algorithm, job.model().to(job.device), _no_records, _no_records, partial(local_settings, job),
        experiment.num_clients, experiment.seed, threads=experiment.engine.threads, precision=job.precision,
        graphs=not isinstance(experiment.engine, InProcess) or experiment.engine.graphs,
    )  # fmt: skip

    def turn() -> object:
        return runtime.prepare(jobs, stacked=stack > 1)()

    return _awaited(job, turn)


def _no_records(*_: object) -> Records:
    raise AssertionError("timings use public test records, and never read the records of a client")


def _clock_of(job: Job) -> Callable[[], float]:
    return time.thread_time if job.device.type == "cpu" else time.perf_counter


def _awaited(job: Job, work: Callable[[], object]) -> Callable[[], object]:
    """Return a function for timing: it calls ``work``, and on a GPU it also waits until the GPU has finished."""

    def awaited() -> object:
        done = work()
        torch.cuda.synchronize(job.device)
        return done

    return awaited if job.device.type == "cuda" else work
