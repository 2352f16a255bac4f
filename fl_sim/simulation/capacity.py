"""What one process can do with a job at a time: threads, clients side by side, clients as one computation."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits

from fl_sim.errors import UserError
from fl_sim.experiment.groups import Auto, Engine, InProcess, Ray
from fl_sim.experiment.job import Job
from fl_sim.kinds import hides_clients

STACK_ON_GPU = 100
"""Clients that are trained as one computation on a GPU unless the experiment says otherwise."""


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def fixed_threads(threads: int) -> Iterator[None]:
    """Fix torch's threads and those of numpy's linear algebra for a while, and put them back.

    Their number changes the last bits of every sum. And where other processes keep the cores busy, OpenBLAS' threads
    wait for each other by spinning: decompositions of 60 x 60 numbers took up to 25 times as long with two as with one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(threads, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


def generator_threads(engine: Engine) -> int:
    """Return how many threads of this process train clients' generators: they are trained on the CPU, by PyTorch."""
    return (engine.workers if isinstance(engine, InProcess) else 0) or cores()


def workers_of(engine: Engine, job: Job) -> int:
    """Return how many clients ``engine`` trains at a time in this process."""
    if not isinstance(engine, InProcess):
        return 1
    return min(threads_of(engine, job), job.experiment.num_clients)


def threads_of(engine: Engine, job: Job) -> int:
    """Return how many threads of this process may run the job's model at once."""
    if job.device.type != "cpu" or not job.trainer.is_parallel(job.dataset.input_shape):
        return 1
    return (engine.workers if isinstance(engine, InProcess) else 0) or cores()


def stack_of(engine: Engine, job: Job) -> int:
    """Return how many clients ``engine`` trains as one computation; 1 means it does not stack them.

    Always 1 where the aggregator hides clients: the last bits of a client in a stack depend on the others, by which one
    client would move every update; and where clients work at their own pace, as who is in a stack then depends on where
    a run stopped.
    Raises UserError where more are asked for than the model allows.
    """
    if isinstance(engine, Auto) or engine.stack == 1 or hides_clients(job.experiment.aggregator):
        return 1
    if not job.experiment.is_synchronous:
        return 1
    asked = engine.stack or _stack_on_gpu(engine, job)
    stackable = asked == 1 or job.trainer.is_stackable()
    if not stackable and engine.stack:
        raise UserError(
            f"engine.stack={engine.stack}: this model cannot be trained on many clients at once, as it draws random "
            "numbers, or is made of layers that are not known to treat every record by itself; leave engine.stack out"
        )
    return min(asked, job.experiment.num_clients) if stackable else 1


def _stack_on_gpu(engine: InProcess | Ray, job: Job) -> int:
    experiment = job.experiment
    if isinstance(engine, InProcess):
        return STACK_ON_GPU if job.device.type == "cuda" else 1
    share = math.ceil(experiment.sampler.expected_size(experiment.num_clients) / max(1, engine.actors))
    return min(STACK_ON_GPU, share) if engine.gpus else 1
