"""Courses: the local training of a client as a sequence of training jobs. For algorithms with special local steps.

Most algorithms describe their local objective by a local plan. A course is for steps that no local plan can describe,
such as a gradient at a mixture of two models. A course yields one job after another. A job may depend on the results of
earlier jobs. The run's trainer executes all jobs: the compiled trainer, the stacked trainer, or PyTorch's loop.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fl_sim.local_plan import LocalPlan
from fl_sim.own_code import check_returned, error_context
from fl_sim.params import layout_of, zeros_like
from fl_sim.seeding import seed_process
from fl_sim.training.loop import batches
from fl_sim.training.records import Records, black_of, moved
from fl_sim.training.trainer import LocalJob
from fl_sim.types import Augment, LocalSettings, Params, Trained

Course: TypeAlias = Generator[Sequence[LocalJob], Sequence[Trained], Trained]
"""A generator that yields jobs, receives one result per job, and finally returns the result of the whole training."""

_ANY_MOMENTUM = 0.5
"""The momentum of a ``gradient_job``. If it is not 0, the momentum buffer after the first step is the gradient."""


@runtime_checkable
class StepByStep(Protocol):
    """The interface of an algorithm that defines its own local steps, by the method ``course``.

    Such an algorithm must not have the methods ``trainers`` (additional trainers) or ``further`` (additional models).
    """

    def course(self, job: LocalJob) -> Course:
        """Return the local training of a client, as a generator of training jobs.

        ``job``: the job that the trainer would execute if the algorithm had no method ``course``. All random numbers
        must come from ``stream(job, number)``.
        """
        ...


def follow(
    algorithm: StepByStep, jobs: Sequence[LocalJob], train: Callable[[Sequence[LocalJob]], Sequence[Trained]]
) -> list[Trained]:
    """Train the clients of ``jobs`` by the algorithm's courses. Return one result per client, in the order of ``jobs``.

    ``train``: the trainer, a function from jobs to results. Each call contains the next jobs of all clients.
    """
    courses = [algorithm.course(job) for job in jobs]
    results: dict[int, Trained] = {}
    answers: dict[int, Sequence[Trained] | None] = dict.fromkeys(range(len(courses)))
    while answers:
        asked: dict[int, Sequence[LocalJob]] = {}
        for place, answer in answers.items():
            with error_context(f"course of {type(algorithm).__name__}"):
                wanted, result = _advanced(courses[place], answer)
            if wanted is None:
                check_returned(result, Trained, algorithm.course)
                results[place] = result
            else:
                asked[place] = wanted
        together = [job for wanted in asked.values() for job in wanted]
        trained = iter(train(together) if together else ())
        answers = {place: [next(trained) for _ in wanted] for place, wanted in asked.items()}
    return [results[place] for place in range(len(jobs))]


def _advanced(course: Course, answer: Any) -> tuple[Sequence[LocalJob] | None, Any]:
    """Resume the generator ``course`` by sending it ``answer``, the results of its last jobs.

    Return (next jobs, None), or (None, result) if the course has ended.
    """
    try:
        return course.send(answer), None
    except StopIteration as end:
        return None, end.value


def steps_of(job: LocalJob, number: int = 0) -> Iterator[LocalJob]:
    """Split ``job`` into local steps: yield one job for each step. Each of these jobs trains one step on one batch.

    ``number``: 0 for the batches that the trainer would draw for ``job``. Any other number gives other, independent
    batches. This function augments the images, so all jobs with the same batch use the same augmented images.
    """
    task, (inputs, labels) = job.task, job.records.tensors()
    settings, device, draws = task.settings, inputs.device, stream(job, number)
    augment, black = settings.augment, black_of(settings.augment, inputs.device)
    inside = _InOrder(stream(job, number, inside=True).bit_generator)
    for batch, moves in batches(settings, len(labels), draws, device):
        chosen = inputs.index_select(0, batch)  # four times as fast as inputs[batch]
        records = Records.of(moved(chosen, moves, augment, black), labels.index_select(0, batch))
        one = _changed(settings, batch_size=len(batch), epochs=1, steps=1, augment=Augment())
        seed = partial(seed_process, int(inside.integers(2**63)), "step")
        yield LocalJob(replace(task, settings=one), job.plan, records, inside, seed)


def stream(job: LocalJob, number: int, *, inside: bool = False) -> np.random.Generator:
    """Return the random generator with this ``number`` for a client's ``job``.

    Generators with different ``number`` or ``inside`` are independent. Generator 0 draws the batches. ``inside``: True
    for random numbers inside of steps, such as dropout.
    """
    bits: Any = job.generator.bit_generator
    return np.random.Generator(bits.jumped(2 * number + inside) if number or inside else bits)


def at(
    step: LocalJob, params: Params, plan: LocalPlan | None = None, *, statistics: Params | None = None, **settings: Any
) -> LocalJob:
    """Return a copy of the training job ``step`` that starts from the parameters ``params``.

    ``plan``, ``statistics`` (running statistics) and ``settings``, such as ``learning_rate=0.1``, replace the values of
    ``step`` if they are given.
    """
    before = step.task
    task = replace(
        before,
        params=params,
        settings=_changed(before.settings, **settings),
        statistics=before.statistics if statistics is None else statistics,
    )
    return replace(step, task=task, plan=step.plan if plan is None else plan)


def gradient_job(
    step: LocalJob, params: Params, plan: LocalPlan | None = None, *, statistics: Params | None = None, **settings: Any
) -> LocalJob:
    """Return a job that computes the gradient at the parameters ``params``, on the batch of the job ``step``.

    The function ``gradient_in`` extracts the gradient from the result of this job. The gradient includes the loss terms
    of the plan and clipping, but no weight decay.
    """
    changed = {**settings, "momentum": _ANY_MOMENTUM, "weight_decay": 0.0}
    return at(step, params, plan, statistics=statistics, **changed)


def gradient_in(trained: Trained) -> Params:
    """Return the gradient that a ``gradient_job`` has computed, from its result ``trained``.

    The gradient of a parameter that the loss does not depend on is zero.
    """
    found = trained.momentum_buffers
    if layout_of(found) == layout_of(trained.params):
        return found
    return {**zeros_like(trained.params), **found}


@lru_cache(maxsize=256)  # cached: there are many steps, but few different settings
def _changed(settings: LocalSettings, **changes: Any) -> LocalSettings:
    return replace(settings, **changes)


class _InOrder(np.random.Generator):
    """A random generator whose permutations do not shuffle, so that a job does not reorder its records."""

    def permutation(self, x: Any, axis: int = 0) -> NDArray[np.int64]:
        """Return the numbers from 0 to x - 1 in ascending order."""
        del axis
        return np.arange(x)
