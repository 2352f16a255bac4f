"""Chooses the engine of a run. If the setting ``engine`` is ``auto``, a short timing finds the faster engine."""

import importlib.util
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from flwr.clientapp import ClientApp

from clients.app import answer_together, build_client_app, train_together
from clients.client_task import ClientRuntime, Grouped, RuntimeFactory
from fl_sim.engines.batching import ClientBatching
from fl_sim.engines.grid import Groups, InProcessGrid, LocalGrid, Progress
from fl_sim.engines.own_ray import choose_token
from fl_sim.engines.remote import RemoteWorkers, Signer
from fl_sim.errors import UserError, in_a_line
from fl_sim.experiment.device import has_gpus_elsewhere
from fl_sim.experiment.experiment import defined_in_script, own_modules
from fl_sim.experiment.groups import Auto, Engine, InProcess, Ray
from fl_sim.experiment.job import Job, check_precision
from fl_sim.importing import settled
from fl_sim.kinds import kind_of
from fl_sim.local_plan import fields_in_use
from fl_sim.native.kernel import load_kernel
from fl_sim.native.request import RECEIVED, unknown_settings
from fl_sim.params import num_parameters
from fl_sim.simulation.client_runtime import (
    cores,
    generator_threads,
    local_engine,
    local_settings,
    side_by_side,
    stack_of,
    steps_by_client,
    workers_of,
)
from fl_sim.simulation.rounds import procedure_of, runtime_of
from fl_sim.simulation.stage import stages_of
from fl_sim.simulation.timing import Stopwatch, Work
from fl_sim.training.courses import StepByStep
from fl_sim.training.trainer import Training
from fl_sim.types import LocalSettings

RAY_START_SECONDS = 10.0
"""Seconds to start Ray and to import torch in its actors (6 to 12 s measured on two cores)."""

LEAST_PRODUCTS = 1e7
"""The smallest amount of computation that is sent to a worker at once: about a millisecond on one core.

The unit is the number of model parameters times the number of records.
"""

MOST_NUMBERS = 2**24
"""The largest number of model parameters, summed over clients, that a worker trains in one call.

This bounds the memory: 64 MiB of models and 64 MiB of momentum, in addition to the updates.
"""


MOST_CACHED = 2**20
"""The largest number of parameters, summed over clients, in one call of a worker that trains clients step by step.

With more parameters, the models of these clients would not fit into the CPU's cache. Measured on two cores, for one
step of ten APFL clients: with a model of 26,000 parameters, one call for all ten took 10 % less time than ten calls.
With 532,000 parameters, one call took 35 % more time.
"""


@dataclass(frozen=True)
class EngineChoice:
    """The chosen engine. ``why``: the reason, in words. ``trainer``: a description of the clients' trainer."""

    kind: str
    why: str
    trainer: str


FLOWER = EngineChoice(
    "flower",
    "engine flower: Flower's own runtime started this run",
    "unknown: each node trains with the native trainer if it has one, else with PyTorch",
)


@contextmanager
def open_engine(job: Job, on_reply: Progress) -> Iterator[tuple[LocalGrid, EngineChoice]]:
    """Start the job's engine; yield its Grid (which delivers messages) and the ``EngineChoice``; close the Grid."""
    check_trainer(job)  # this check comes before choose(), because choose() may spend a minute on timing
    engine, why = choose(job)
    num_clients, workers, stack = job.experiment.num_clients, workers_of(engine, job), stack_of(engine, job)
    grid: LocalGrid
    if isinstance(engine, Ray):
        if importlib.util.find_spec("ray") is None:
            raise UserError("engine=ray needs Ray, which is not installed: pip install ray, or set engine=inprocess")
        if not engine.address:
            choose_token()  # sets Ray's access token before Ray is imported, because the import reads the token
        # Ray's modules are imported here, so that the other engines do not need Ray.
        from fl_sim.engines.ray import RayGrid  # noqa: PLC0415
        from fl_sim.engines.ray_start import RayResources  # noqa: PLC0415

        resources = RayResources(engine.actors, engine.cpus, engine.gpus, engine.address, engine.threads)
        batching = batching_of(job, runtime_of, stack)
        if engine.address:
            # The code for remote workers is imported here, because most runs have none.
            from fl_sim.simulation.remote_workers import (  # noqa: PLC0415
                ClientStore,
                WorkerSetup,
                worker_app,
                worker_handler,
            )

            signer = Signer.fresh()
            grid = RayGrid(
                worker_app, num_clients, resources, on_reply,
                batching and replace(batching, handler=partial(worker_handler, stacked=stack > 1)),
                RemoteWorkers(WorkerSetup.of(job, signer), ClientStore(job, signer), own_modules(job.experiment)),
                say=lambda line: print(f"fl-sim: {in_a_line(line)}", file=sys.stderr),
            )  # fmt: skip
        else:
            grid = RayGrid(client_app, num_clients, resources, on_reply, batching)
    else:
        runtime = procedure_of(job).runtime()

        def here(*_: object) -> ClientRuntime:
            return runtime

        batching = batching_of(job, here, stack)
        tasks = runtime.tasks
        in_threads = frozenset(name for name, task in tasks.items() if task.runs_in_threads)
        grouped = frozenset(name for name, task in tasks.items() if isinstance(task, Grouped))
        groups = Groups(grouped, answer_together(here), generator_threads(engine)) if grouped else None
        grid = InProcessGrid(
            build_client_app(here), num_clients, on_reply,
            workers=workers, batching=batching, groups=groups, in_threads=in_threads,
        )  # fmt: skip
    try:
        with settled():
            yield grid, EngineChoice(engine.kind, why, trainer_line(job, workers, stack))
    finally:
        grid.close()


def client_app() -> ClientApp:
    """Return the ClientApp for other processes. Ray's actors and Flower's runtime call this function."""
    return build_client_app(runtime_of)


def batching_of(job: Job, runtime_of: RuntimeFactory, stack: int) -> ClientBatching | None:
    """Return the settings for calls in which a worker trains several clients; None if such calls would save no time.

    ``stack``: the number of clients in one computation.
    """
    if stack == 1 and not trains_natively(job):
        return None
    handler = partial(train_together, runtime_of, stacked=stack > 1)
    parameters = max(num_parameters(dict(one.model().named_parameters())) for one in job.by_architecture)
    records = max(1, min(job.experiment.local.batch_size, len(job.shards.records) / len(job.shards)))
    steps, least = steps_by_client(job), math.ceil(LEAST_PRODUCTS / (parameters * records))
    # A StepByStep algorithm calls the trainer once per local step. Such a short call saves time only with many clients.
    if isinstance(job.experiment.algorithm, StepByStep):
        cohort = job.experiment.sampler.expected_size(job.experiment.num_members)
        each = cohort / workers_of(local_engine(job.experiment.engine), job)
        least = max(least, math.ceil(min(each, MOST_CACHED / parameters) * steps.mean()))
    return ClientBatching(handler, steps, stack, least, max(1, MOST_NUMBERS // parameters))


def choose(job: Job) -> tuple[Engine, str]:
    """Return the engine of the run, and the reason for it in words.

    Raises UserError if the engine is ``ray`` and the settings use code from the running script.
    """
    experiment, engine = job.experiment, job.experiment.engine
    if isinstance(engine, Ray) and (script := defined_in_script(experiment)):
        raise UserError(
            f"engine=ray: {script} is defined in the running script, which Ray's processes cannot import: put it in a "
            "separate module, or set engine=inprocess"
        )
    if not isinstance(engine, Auto):
        return engine, f"engine {engine.kind}, as set"
    workers = min(cores(), max(1, round(experiment.sampler.expected_size(experiment.num_members))))
    alone = InProcess(threads=engine.threads)
    if why := _why_alone(job, workers):
        return alone, f"engine inprocess: {why}"
    seconds, beforehand = estimated_seconds(job), seconds_of_stages(job) / side_by_side(workers)
    parallel = RAY_START_SECONDS + seconds / side_by_side(workers) + beforehand
    seconds += beforehand  # without Ray, stages (outside of the rounds) run in parallel threads
    times = f"about {seconds:.0f} s of training in process, {parallel:.0f} s with {workers} Ray actors and their start"
    if parallel < seconds:
        return Ray(actors=workers, threads=engine.threads), f"engine ray: {times}"
    return alone, f"engine inprocess: {times}"


def _why_alone(job: Job, workers: int) -> str:
    """Return the reason why ``workers`` Ray actors cannot be faster than one process; empty if Ray may be faster."""
    if script := defined_in_script(job.experiment):
        return f"other processes cannot import {script}, which the running script defines"
    if job.device.type == "cuda":
        return "there is a GPU, which one process keeps busy"
    if workers < 2:
        return "with one client at a time, or one core, clients cannot run in parallel"
    if trains_natively(job):
        return "the native trainer keeps all cores busy in one process"
    return "Ray is not installed" if importlib.util.find_spec("ray") is None else ""


def trains_natively(job: Job) -> bool:
    """Return True if the native trainer (the compiled C++ trainer, for CPUs) supports this job's local training."""
    if job.device.type != "cpu":
        return False
    plan, settings = procedure_of(job).typical_plan(), _typical_settings(job)
    return all(one.trainer.is_native(job.input_shape, plan, settings) for one in job.by_architecture)


def _takes_private_steps(job: Job) -> bool:
    """Return True if the native trainer (compiled C++) supports this job's DP-SGD steps, one client at a time."""
    plan, shape = procedure_of(job).typical_plan(), job.input_shape
    return job.device.type == "cpu" and job.trainer.has_compiled_private_steps(shape, plan, _typical_settings(job))


def trainer_line(job: Job, workers: int, stack: int = 1) -> str:
    """Return a description of the trainer (the code that trains clients), with its precision if this is not float32.

    ``workers``: the number of threads. ``stack``: the number of clients in one computation.
    """
    if isinstance(job.experiment.algorithm, Training):
        return f"algorithm {kind_of(job.experiment.algorithm)}'s own trainers, one client after another; else PyTorch"
    precision = "" if job.experiment.local.precision == "float32" else f", {job.experiment.local.precision}"
    if stack > 1:
        return f"stacked trainer on {job.device.type}, {stack} clients as one computation{precision}"
    threads = f"{workers} {'thread' if workers == 1 else 'threads'}"
    kernel, why_not = load_kernel()
    if trains_natively(job) or _takes_private_steps(job):
        by_amx = " by AMX" if "bfloat16" in precision and kernel is not None and kernel.has_amx else ""
        return f"native trainer, {threads}{precision}{by_amx}"
    if kernel is None and job.device.type == "cpu":
        return f"PyTorch trains, {threads}: there is no native trainer here, {why_not}"
    return f"PyTorch trains, {threads}{precision}{_not_native(job) if kernel is not None else ''}"


def _not_native(job: Job) -> str:
    """Return a phrase with the settings of ``job`` that the native (compiled C++) trainer does not support, or ""."""
    local, settings = job.experiment.local, _typical_settings(job)
    unknown = [f"local.{name}={getattr(local, name)}" for name in unknown_settings(settings)]
    if settings.augment.moves and (terms := sorted(fields_in_use(procedure_of(job).typical_plan()) & RECEIVED)):
        unknown.append(f"local.augment={local.augment} together with {' and '.join(terms)}")
    if slower := job.trainer.slower_by_kernel(job.input_shape):
        unknown.append(slower)
    return f": the native trainer does not support {', '.join(unknown)}" if unknown else ""


def check_trainer(job: Job) -> None:
    """Raise UserError if the clients' trainer in this process does not support the setting ``local.precision``."""
    check_precision(job)
    if job.experiment.local.precision != "bfloat16" or job.device.type != "cpu" or has_gpus_elsewhere(job.experiment):
        return
    if stack_of(job.experiment.engine, job) == 1 and not trains_natively(job):
        raise UserError(
            "local.precision=bfloat16 is for the native trainer and for GPUs, and here PyTorch trains"
            f"{_not_native(job)}; leave it out"
        )


def _typical_settings(job: Job) -> LocalSettings:
    return local_settings(job, job.experiment.local.learning_rate)


def estimated_seconds(job: Job) -> float:
    """Estimate the seconds of all local training in a run from a few timed steps.

    The estimate assumes that clients train one after another.
    """
    return _seconds_of(work for work in procedure_of(job).work() if work.turns and not work.makes)


def seconds_of_stages(job: Job) -> float:
    """Estimate the seconds of all computation in stages (code before and after the rounds), from short timings.

    The estimate assumes that clients compute one after another.
    """
    return _seconds_of(work for stage in stages_of(job) for work in stage.work())


def _seconds_of(works: Iterable[Work]) -> float:
    alone, watch = [replace(work, at_once=1.0) for work in works], Stopwatch()
    watch.time_all(alone)
    return sum(map(watch.seconds, alone))
