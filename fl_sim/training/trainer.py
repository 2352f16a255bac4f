"""Local training of one client or many, and evaluation, by compiled code where the model allows it, else by PyTorch.

Algorithms do not know which: both take a LocalPlan, and they agree to float32 rounding. With dropout they agree in
distribution alone, as each draws in its own way what is left out.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock, local
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from fl_sim import models
from fl_sim.local_plan import LocalPlan, fields_in_use
from fl_sim.native.kernel import Kernel
from fl_sim.native.layers import Stack, describe, slower_here
from fl_sim.native.request import RECEIVED, TAKES, TERMS, Draws, KernelJob, tensors_of
from fl_sim.params import all_norms_in, is_finite, vector_in
from fl_sim.seeding import process_alone, process_state
from fl_sim.training.evaluation import EVALUATION_BATCH, Scores, evaluate, ready, score
from fl_sim.training.features import head_of, sums_by_class
from fl_sim.training.loop import train
from fl_sim.training.losses import LogitsOf
from fl_sim.training.records import Records, Scale, arithmetic
from fl_sim.types import LocalSettings, LocalTask, Params, Precision, Trained

_PLAIN = {
    nn.Sequential, nn.Identity, nn.Flatten, nn.Linear, nn.Conv1d, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.ReLU,
    nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
}  # fmt: skip
"""Layers that draw no random numbers."""


@dataclass(frozen=True)
class LocalJob:
    """One client's local training: the arguments of ``fl_sim.training.loop.train`` besides the model.

    ``seed`` is called before PyTorch trains, for what a model draws by itself (dropout) from the generators of torch,
    NumPy or Python. The compiled trainer's dropout is keyed by a last draw from ``generator``.
    """

    task: LocalTask
    plan: LocalPlan
    records: Records
    generator: np.random.Generator
    seed: Callable[[], None] = lambda: None

    @cached_property
    def asks_for(self) -> frozenset[str]:
        """Return the fields of the settings and of the plan that a trainer must know in order to take this job."""
        return fields_in_use(self.task.settings) | fields_in_use(self.plan)

    @property
    def num_steps(self) -> int:
        """Return the number of local steps."""
        return self.task.settings.num_steps(len(self.records))


class LocalTrainer(Protocol):
    """A trainer of clients. The first of a runtime's trainers that supports a job trains it."""

    def supports(self, job: LocalJob) -> bool:
        """Return True if it does all that ``job`` asks for: its settings, its plan, its records."""
        ...

    def train(self, job: LocalJob) -> Trained:
        """Train one client; all it draws comes from ``job.generator``."""
        ...


@runtime_checkable
class Training(Protocol):
    """An algorithm with trainers of its own, which are asked before the project's."""

    def trainers(self, model: nn.Module) -> Sequence[LocalTrainer]:
        """Return them; ``model`` is theirs: it lends its architecture, and its weights may be overwritten."""
        ...


class Trainer:
    """Trains and evaluates; ``model`` lends its architecture, and its weights may be overwritten.

    May be called from several threads. The compiled trainer runs in all of them at once, and so does PyTorch on
    models that draw no random numbers, a copy of the model in each thread; with dropout, whose generator is the
    process's, or an algorithm's own loss that draws when it is first asked, PyTorch takes one client after another.
    ``kernel`` None: always PyTorch. ``precision``: how exactly products are computed where models are trained; a
    compiled trainer takes "bfloat16" where ``kernel.has_bfloat16``.
    """

    def __init__(self, model: nn.Module, kernel: Kernel | None, precision: Precision = "float32") -> None:
        self._model = model
        self._kernel = kernel
        self._precision = precision
        self._stacks: dict[tuple[int, ...], Stack | None] = {}
        self._slower: dict[tuple[int, ...], str] = {}
        self._draws_nothing = all(map(_draws_nothing, model.modules()))
        self._loss_draws: bool | None = None
        self._lock = Lock()
        self._thread = local()

    def is_native(
        self,
        input_shape: tuple[int, ...],
        plan: LocalPlan = LocalPlan(),  # noqa: B008 (frozen)
        settings: LocalSettings | None = None,
    ) -> bool:
        """Return True if the compiled trainer takes this model on records of ``input_shape``, for such a ``plan``.

        ``settings``: how clients train, plainly where they are not given.
        """
        asked = fields_in_use(plan) | (frozenset() if settings is None else fields_in_use(settings))
        return self._taken(input_shape, plan, asked) is not None

    def slower_by_kernel(self, input_shape: tuple[int, ...]) -> str:
        """Return the reason, in words, to leave the model to PyTorch because that is faster; empty where it is not."""
        self._stack(input_shape)
        return self._slower[input_shape]

    def is_parallel(self, input_shape: tuple[int, ...]) -> bool:
        """Return True if several threads train at once."""
        return self._draws_nothing or self.is_native(input_shape)

    def is_stackable(self) -> bool:
        """Return True if stacks can train this model: no random numbers, and no record looks at another."""
        return self._draws_nothing and not all_norms_in(self._model)

    def train_all(self, jobs: Sequence[LocalJob]) -> list[Trained]:
        """Train clients, one after another, in as few calls of the compiled trainer as may be."""
        return self.prepare(jobs)()

    def prepare(self, jobs: Sequence[LocalJob]) -> Callable[[], list[Trained]]:
        """Return a function that trains, as ``train_all`` does, after all work in Python for the compiled trainer."""
        stacks = [self._native(job) for job in jobs]
        stack, kernel = next((one for one in stacks if one is not None), None), self._kernel
        if stack is None or kernel is None:
            return lambda: [self.train(job) for job in jobs]
        compiled: list[KernelJob] = []
        for job, own in zip(jobs, stacks, strict=True):
            if own is stack and len(job.records):
                draws = Draws.of(job.task, job.plan, len(job.records), job.generator)
                compiled.append(KernelJob(job.task, job.plan, *job.records.tensors(), draws))
        prepared = kernel.prepare(stack, compiled, self._precision)

        def train() -> list[Trained]:
            done, results = zip(compiled, prepared.train(), strict=True), list[Trained]()
            for job, own in zip(jobs, stacks, strict=True):
                if own is not stack:
                    results.append(self.train(job))
                elif not len(job.records):
                    sums = torch.zeros(stack.num_classes, stack.num_features) if job.plan.class_features else None
                    results.append(Trained(job.task.params, job.plan.momentum_buffers or {}, 0, None, sums))
                else:
                    given, trained = next(done)
                    if job.plan.class_features:
                        features = kernel.infer(
                            stack, vector_in(trained.params, stack.layout), given.inputs, "features"
                        )
                        sums = sums_by_class(features, given.labels, stack.num_classes)
                        trained = replace(trained, feature_sums=sums)
                    results.append(trained)
            return results

        return train

    def train(self, job: LocalJob) -> Trained:
        """Train one client."""
        if self._native(job) is not None:
            return self.train_all([job])[0]
        inputs, labels = job.records.tensors()
        if self._draws_nothing and (job.plan.loss_term is None or self._loss_draws is False):
            if not hasattr(self._thread, "model"):
                self._thread.model = copy.deepcopy(self._model)
            with arithmetic(inputs.device, self._precision):
                return train(self._thread.model, job.task, job.plan, inputs, labels, job.generator)
        with self._lock, process_alone(), arithmetic(inputs.device, self._precision):
            job.seed()
            before = process_state()
            trained = train(self._model, job.task, job.plan, inputs, labels, job.generator)
            self._loss_draws = self._loss_draws or process_state() != before
            return trained

    def evaluate(
        self,
        params: Params,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        *,
        scale: Scale | None = None,
        workers: int = 1,
    ) -> Scores:
        """Return the scores of ``params``, as ``fl_sim.training.evaluation.evaluate`` does.

        To float32 rounding, and the same for any number of ``workers``; where one is not finite it is PyTorch's.
        """
        if (logits_of := self._compiled(params, inputs)) is not None:
            scores = score(logits_of, inputs, labels, workers=workers)
            if math.isfinite(scores.loss):
                return scores
        with self._lock:
            return evaluate(self._model, params, inputs, labels, scale=scale, workers=workers)

    def logits(self, model: nn.Module, params: Params, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of (n, *input shape) records under ``params``, (n, classes).

        ``model``, of this trainer's architecture, is the caller's own: PyTorch runs on it, and overwrites its weights,
        where the compiled trainer does not take the records.
        """
        logits_of = self._compiled(params, inputs) or ready(model, params)
        with torch.inference_mode(), arithmetic(inputs.device):
            return torch.cat([logits_of(batch) for batch in torch.split(inputs, EVALUATION_BATCH)])

    def _compiled(self, params: Params, inputs: torch.Tensor) -> LogitsOf | None:
        """Return the compiled model; None where there is none, or where PyTorch decides about a NaN."""
        stack, kernel = self._stack(tuple(inputs.shape[1:])), self._kernel
        if stack is None or kernel is None or not _is_plain(inputs) or not is_finite({"params": params}):
            return None
        weights = vector_in(params, stack.layout)
        return (lambda records: kernel.infer(stack, weights, records)) if _is_plain(weights) else None

    def _native(self, job: LocalJob) -> Stack | None:
        """Return the model as the compiled trainer takes it; None where it does not take ``job``."""
        warm = job.plan.momentum_buffers
        if warm and warm.keys() != job.task.params.keys():
            return None
        if not all(_is_plain(source.inputs) for source, _ in job.records.parts):
            return None
        return self._taken(job.records.input_shape, job.plan, job.asks_for)

    def _taken(self, input_shape: tuple[int, ...], plan: LocalPlan, asked: frozenset[str]) -> Stack | None:
        """Return the model as the compiled trainer takes it; None where it does not know all that is ``asked``."""
        stack = self._stack(input_shape) if self._kernel is not None else None
        if stack is None or not asked <= TAKES or ("augment" in asked and asked & RECEIVED):
            return None
        if asked & {"contrast", "pull", "class_features"}:  # its features are what enters the last linear layer
            linear = [part for part in self._model.modules() if isinstance(part, nn.Linear)]
            if head_of(self._model) is not linear[-1]:
                return None
        if (mix := plan.mix) is not None:  # FedMix's loss needs second derivatives
            is_known = _is_plain(mix.inputs) and _is_plain(mix.labels) and not asked & TERMS
            return stack if is_known and (not mix.linearise or stack.is_piecewise_linear) else None
        for _, values, dtype, _ in tensors_of(plan, stack):
            if values.device.type != "cpu" or values.dtype is not dtype:
                return None
        return stack

    def _stack(self, input_shape: tuple[int, ...]) -> Stack | None:
        if input_shape not in self._stacks:
            stack = describe(self._model, input_shape)
            self._slower[input_shape] = "" if stack is None else slower_here(stack)
            self._stacks[input_shape] = None if self._slower[input_shape] else stack
        return self._stacks[input_shape]


def _draws_nothing(module: nn.Module) -> bool:
    """Return True if ``module`` is known to draw no random numbers: the user's own may do anything."""
    kind = type(module)
    return kind in _PLAIN or kind.__module__ == models.__name__


def _is_plain(values: torch.Tensor) -> bool:
    return values.device.type == "cpu" and values.dtype == torch.float32
