"""Local training and evaluation. The compiled trainer is used if it supports the model, otherwise PyTorch.

Both trainers receive the local objective as a LocalPlan, so an algorithm does not depend on the choice of trainer.
Their results agree up to float32 rounding. If the model has dropout, the results agree in distribution only, because
each trainer draws its own random masks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import Lock, local
from typing import Protocol, Self, get_args, runtime_checkable

import numpy as np
import torch
from torch import nn

from fl_sim import models, token_models
from fl_sim.local_plan import LocalPlan, fields_in_use
from fl_sim.native.differentiable import CompiledPasses
from fl_sim.native.kernel import Kernel, Rows
from fl_sim.native.layers import Stack, describe, slower_here
from fl_sim.native.request import RECEIVED, TAKES, TERMS, Draws, KernelJob, tensors_of
from fl_sim.params import all_norms_in, copied, flattened, frozen_in, is_finite, vector_in, zeros_like
from fl_sim.seeding import process_alone, process_state
from fl_sim.training.evaluation import EVALUATION_BATCH, Scores, evaluate, ready, score
from fl_sim.training.features import head_of, sums_by_class, with_features
from fl_sim.training.loop import train
from fl_sim.training.losses import LogitsOf, terms_of
from fl_sim.training.records import Records, Scale, arithmetic
from fl_sim.types import LocalSettings, LocalTask, Params, Precision, Trained

_PLAIN = {
    nn.Sequential, nn.Identity, nn.Flatten, nn.Linear, nn.Conv1d, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.ReLU,
    nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.Embedding, nn.ModuleList,
}  # fmt: skip
"""The classes of layers that draw no random numbers."""


@dataclass(frozen=True)
class LocalJob:
    """The local training of one client: the arguments of ``fl_sim.training.loop.train`` without the model.

    ``seed``: a function that seeds the global random generators of torch, NumPy and Python. A model may use these
    generators, for example for dropout. The function is called before PyTorch trains. The compiled trainer does not
    call it, and draws a key for its dropout masks from ``generator``, after all other random numbers.
    """

    task: LocalTask
    plan: LocalPlan
    records: Records
    generator: np.random.Generator
    seed: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        """Raise ValueError if the plan trains no or unknown parameters. Most trainers do not check this."""
        for names in (self.plan.trained, *(phase.names for phase in self.plan.phases)):
            if names is not None and not (names and names <= self.task.params.keys()):
                unknown = ", ".join(sorted(names - self.task.params.keys())) or "no parameter"
                raise ValueError(
                    f"the local plan trains {unknown}, and the model has {', '.join(self.task.params)}: "
                    "name one or more of these"
                )

    @cached_property
    def asks_for(self) -> frozenset[str]:
        """Return the names of the fields of the job's settings and local plan that differ from their defaults.

        A trainer can execute this job only if it supports all these fields.
        """
        return fields_in_use(self.task.settings) | fields_in_use(self.plan)

    @property
    def num_steps(self) -> int:
        """Return the number of local steps."""
        return self.task.settings.num_steps(len(self.records))

    def in_phase(self, number: int) -> Self:
        """Return the job for phase ``number`` of the plan. Phases are counted from 0.

        A phase trains some of the parameters for some epochs. If the plan has no phases, this job is returned
        unchanged.
        """
        if not self.plan.phases:
            return self
        phase, private = self.plan.phases[number], self.plan.private
        if private is not None:  # each phase draws new noise
            private = replace(private, stream=f"{private.stream}, phase {number}")
        plan = replace(self.plan, phases=(), trained=phase.names, private=private)
        return replace(self, plan=plan, task=replace(self.task, settings=phase.settings(self.task.settings)))


class LocalTrainer(Protocol):
    """The interface of a trainer. A worker has a list of trainers.

    The first trainer in the list that supports a job executes the job.
    """

    def supports(self, job: LocalJob) -> bool:
        """Return True if this trainer supports the settings, the local plan and the records of ``job``."""
        ...

    def train(self, job: LocalJob) -> Trained:
        """Train one client and return the result. All random numbers must come from ``job.generator``."""
        ...


@runtime_checkable
class Training(Protocol):
    """The interface of an algorithm with its own trainers. They have priority over fl-sim's trainers."""

    def trainers(self, model: nn.Module) -> Sequence[LocalTrainer]:
        """Return the algorithm's trainers. ``model``: provides the architecture; its weights may be overwritten."""
        ...


class Trainer:
    """Trains and evaluates models, by the compiled trainer or by PyTorch.

    ``model``: provides the architecture; its weights may be overwritten. ``kernel``: the compiled trainer; None means
    always PyTorch. ``precision``: the precision of matrix products in training; the compiled trainer supports
    "bfloat16" if ``kernel.has_bfloat16`` is True.

    Several threads may call a Trainer. The compiled trainer trains clients in all threads in parallel. PyTorch does the
    same, with one copy of the model per thread, if training uses no global random generator. Otherwise PyTorch trains
    one client at a time. This happens if the model has dropout, or if an algorithm's loss drew random numbers when it
    was first used.
    """

    def __init__(self, model: nn.Module, kernel: Kernel | None, precision: Precision = "float32") -> None:
        self._model = model
        self._kernel = kernel
        self._precision = precision
        self._stacks: dict[tuple[int, ...], Stack | None] = {}
        self._slower: dict[tuple[int, ...], str] = {}
        self._has_frozen = any(not weight.requires_grad for weight in model.parameters())
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
        """Return True if the compiled trainer supports this model with records of ``input_shape`` and ``plan``.

        ``settings``: the local settings to support; None means plain SGD.
        """
        asked = fields_in_use(plan) | (frozenset() if settings is None else fields_in_use(settings))
        return self._taken(input_shape, plan, asked) is not None

    def has_compiled_private_steps(
        self, input_shape: tuple[int, ...], plan: LocalPlan, settings: LocalSettings
    ) -> bool:
        """Return True if the compiled trainer supports the private steps of ``plan``."""
        return plan.private is not None and self._privately_taken(input_shape, plan, settings) is not None

    def slower_by_kernel(self, input_shape: tuple[int, ...]) -> str:
        """Return the reason why PyTorch is faster than the compiled trainer, or "" if PyTorch is not faster."""
        self._stack(input_shape)
        return self._slower[input_shape]

    def is_parallel(self, input_shape: tuple[int, ...]) -> bool:
        """Return True if several threads can train clients in parallel."""
        return self._draws_nothing or self.is_native(input_shape)

    def is_stackable(self) -> bool:
        """Return True if ``StackedTrainer`` supports this model.

        The model must draw no random numbers, and have no batch statistics and no recurrent layers.
        """
        is_recurrent = any(isinstance(part, nn.RNNBase) for part in self._model.modules())
        return self._draws_nothing and not all_norms_in(self._model) and not is_recurrent

    def train_all(self, jobs: Sequence[LocalJob]) -> list[Trained]:
        """Train the clients of all jobs, with as few calls of the compiled trainer as possible; return the results."""
        return self.prepare(jobs)()

    def prepare(self, jobs: Sequence[LocalJob]) -> Callable[[], list[Trained]]:
        """Prepare the training of ``jobs`` by the compiled trainer. Return a function that then trains them.

        The returned function has the same results as ``train_all``.
        """
        stacks = [self._native(job) for job in jobs]
        stack, kernel = next((one for one in stacks if one is not None), None), self._kernel
        if stack is None or kernel is None:
            return lambda: [self.train(job) for job in jobs]
        compiled: list[KernelJob] = []
        whole = Completion(self._frozen if self._has_frozen else {})
        for job, own in zip(jobs, stacks, strict=True):
            if own is stack and len(job.records):
                draws = Draws.of(job.task, job.plan, len(job.records), job.generator)
                task, plan = whole.task(job.task), whole.plan(job.plan, job.task.params)
                compiled.append(KernelJob(task, plan, *job.records.tensors(), draws))
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
                    results.append(whole.trained(trained, job.task.params))
            return results

        return train

    def train(self, job: LocalJob) -> Trained:
        """Train the client of ``job`` and return the result."""
        if self._native(job) is not None:
            return self.train_all([job])[0]
        inputs, labels = job.records.tensors()
        if job.plan.private is not None and (trained := self._compiled_privately(job, inputs, labels)) is not None:
            return trained
        if self._draws_nothing and (job.plan.loss_term is None or self._loss_draws is False):
            if not hasattr(self._thread, "model"):
                with self._lock:  # wait while another thread uses this model
                    self._thread.model = copied(self._model)
            with arithmetic(inputs.device, self._precision):
                return _train(self._thread.model, job, inputs, labels, self._differentiable(job))
        with self._lock, process_alone(), arithmetic(inputs.device, self._precision):
            job.seed()
            before = process_state()
            trained = _train(self._model, job, inputs, labels, self._differentiable(job))
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
        """Return the scores of the model with weights ``params``: those of ``evaluation.evaluate``, up to rounding.

        The scores do not depend on the number of ``workers`` (threads). If the loss by the compiled code is not finite,
        PyTorch computes the scores.
        """
        if (logits_of := self._compiled(params, inputs)) is not None:
            scores = score(logits_of, inputs, labels, workers=workers)
            if math.isfinite(scores.loss):
                return scores
        with self._lock:
            return evaluate(self._model, params, inputs, labels, scale=scale, workers=workers)

    def logits(self, model: nn.Module, params: Params, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, (n, classes), of records (n, *input shape) for weights ``params``.

        ``model``: the caller's model; it has the architecture of this trainer's model. If the compiled trainer does not
        support the records, PyTorch uses the caller's model and overwrites its weights.
        """
        logits_of = self._compiled(params, inputs) or ready(model, params)
        with torch.inference_mode(), arithmetic(inputs.device):
            return torch.cat([logits_of(batch) for batch in torch.split(inputs, EVALUATION_BATCH)])

    def outputs(self, params: Params, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pair (logits (n, classes), features (n, d)) of records (n, *input shape) for weights ``params``.

        The features are the inputs of the model's head. Raises UserError if the model has no head.
        """
        with torch.inference_mode(), arithmetic(inputs.device):
            logits_of, features_of = (self._compiled(params, inputs, rows) for rows in get_args(Rows))
            if logits_of is None or features_of is None or not self._head_is_last:
                with self._lock:
                    model = ready(self._model, params)
                    pairs = [with_features(model, partial(model, one)) for one in torch.split(inputs, EVALUATION_BATCH)]
            else:
                pairs = [(logits_of(one), features_of(one)) for one in torch.split(inputs, EVALUATION_BATCH)]
        logits, features = zip(*pairs, strict=True)
        return torch.cat(logits), torch.cat(features)

    @cached_property
    def _frozen(self) -> Params:
        """The frozen parameters of the model. The compiled trainer needs them, because it uses all parameters."""
        return frozen_in(self._model)

    @property
    def _head_is_last(self) -> bool:
        """True if the model's head is its last linear layer.

        The compiled trainer returns the inputs of the last linear layer as the features.
        """
        linear = [part for part in self._model.modules() if isinstance(part, nn.Linear)]
        return bool(linear) and head_of(self._model) is linear[-1]

    def _compiled(self, params: Params, inputs: torch.Tensor, rows: Rows = "logits") -> LogitsOf | None:
        """Return a function of the compiled code that computes the logits or the features of records.

        ``rows``: the result of the function, "logits" or "features". Returns None if the compiled trainer does not
        support the model or the inputs, or if ``params`` contain infinite numbers or NaN.
        """
        stack, kernel = self._stack(tuple(inputs.shape[1:])), self._kernel
        if stack is None or kernel is None or not _is_plain(inputs) or not is_finite({"params": params}):
            return None
        weights = vector_in({**self._frozen, **params} if self._has_frozen else params, stack.layout)
        return (lambda records: kernel.infer(stack, weights, records, rows)) if _is_plain(weights) else None

    def _native(self, job: LocalJob) -> Stack | None:
        """Return the description of the model (a ``Stack``) that the compiled trainer needs.

        Return None if the compiled trainer does not support ``job``.
        """
        warm = job.plan.momentum_buffers
        if warm and warm.keys() != job.task.params.keys():
            return None
        if not all(_is_plain(source.inputs) for source, _ in job.records.parts):
            return None
        return self._taken(job.records.input_shape, job.plan, job.asks_for)

    def _differentiable(self, job: LocalJob) -> CompiledPasses | None:
        """Return compiled forward and backward passes of the model, for PyTorch's training loop with a loss term.

        The result is None if the loss term of ``job`` is not ``first_order``, or if the compiled trainer would not
        support ``job`` without this term.
        """
        term, kernel = job.plan.loss_term, self._kernel
        if term is None or not term.first_order or kernel is None or self._precision != "float32":
            return None
        stack = self._native(replace(job, plan=replace(job.plan, loss_term=None)))
        if stack is None or not self._draws_nothing or terms_of(job.plan) != (term,) or job.plan.mix is not None:
            return None
        return CompiledPasses(kernel, stack, self._frozen if self._has_frozen else {})

    def _compiled_privately(self, job: LocalJob, inputs: torch.Tensor, labels: torch.Tensor) -> Trained | None:
        """Train the client of ``job`` by private steps of the compiled trainer.

        Return None if the compiled trainer does not support these steps.
        """
        from fl_sim.training.private_steps import train_compiled  # noqa: PLC0415 (its cryptography loads slowly)

        kernel, warm = self._kernel, job.plan.momentum_buffers
        stack = self._privately_taken(job.records.input_shape, job.plan, job.task.settings)
        if stack is None or kernel is None or not job.num_steps or not len(labels):
            return None
        if (warm and warm.keys() != job.task.params.keys()) or not _is_plain(inputs):
            return None
        return train_compiled(kernel, stack, job.task, job.plan, (inputs, labels))

    def _privately_taken(self, input_shape: tuple[int, ...], plan: LocalPlan, settings: LocalSettings) -> Stack | None:
        """Return the description of the model (a ``Stack``) that compiled private steps need.

        Return None if the compiled trainer does not support these private steps.
        """
        from fl_sim.training.private_steps import is_compiled  # noqa: PLC0415 (its cryptography loads slowly)

        has_all = self._kernel is not None and self._precision == "float32" and not self._has_frozen
        # Compiled private steps add noise to all parameters, so no parameter may be frozen.
        stack = self._stack(input_shape) if has_all else None
        return stack if stack is not None and is_compiled(stack, plan, settings) else None

    def _taken(self, input_shape: tuple[int, ...], plan: LocalPlan, asked: frozenset[str]) -> Stack | None:
        """Return the description of the model (a ``Stack``) that the compiled trainer needs.

        Return None if the compiled trainer does not support the training. ``asked``: the names of all fields of
        ``plan`` and of the local settings that differ from their defaults.
        """
        stack = self._stack(input_shape) if self._kernel is not None else None
        asked = asked | {"trained"} if self._has_frozen else asked
        if (
            stack is None
            or not asked <= TAKES
            or ("augment" in asked and asked & RECEIVED)
            or asked >= {"trained", "ascent"}
        ):
            return None
        if asked & {"contrast", "pull", "class_features"} and not self._head_is_last:
            return None
        if (mix := plan.mix) is not None:  # FedMix's loss is compiled for piecewise linear models only
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


@dataclass(frozen=True)
class Completion:
    """Adds a model's ``frozen`` parameters to jobs of the compiled trainer, and removes them from its results.

    The compiled trainer needs all parameters, but clients receive and return only the trained parameters. Clients with
    the same received model share one completed model.
    """

    frozen: Params
    _shared: dict[int, tuple[Params, Params]] = field(default_factory=dict)

    def task(self, task: LocalTask) -> LocalTask:
        """Return ``task`` with all parameters of the model, including frozen ones."""
        return replace(task, params=self._with(task.params)) if self.frozen else task

    def plan(self, plan: LocalPlan, received: Params) -> LocalPlan:
        """Return ``plan`` for the model with all parameters. The ``frozen`` parameters are not trained.

        ``received``: the received model, without the frozen parameters.
        """
        if not self.frozen:
            return plan
        zeros = zeros_like(self.frozen)

        def filled(params: Params | None) -> Params | None:
            return {**zeros, **params} if params else params

        contrast = plan.contrast
        return replace(
            plan,
            trained=frozenset(received).difference(self.frozen) if plan.trained is None else plan.trained,
            gradient_offset=filled(plan.gradient_offset),
            step_offset=filled(plan.step_offset),
            momentum_buffers=filled(plan.momentum_buffers),
            contrast=replace(contrast, previous=self._with(contrast.previous)) if contrast is not None else None,
        )

    def trained(self, trained: Trained, received: Params) -> Trained:
        """Return the result ``trained`` without the frozen parameters. ``received`` does not have them, either."""
        if not self.frozen:
            return trained
        buffers = {name: value for name, value in trained.momentum_buffers.items() if name in received}
        return replace(
            trained, params=flattened({name: trained.params[name] for name in received}), momentum_buffers=buffers
        )

    def _with(self, params: Params) -> Params:
        if id(params) not in self._shared:  # the cache keeps ``params``, so that its id stays unique
            self._shared[id(params)] = (params, {**self.frozen, **params})
        return self._shared[id(params)][1]


def _train(
    model: nn.Module, job: LocalJob, inputs: torch.Tensor, labels: torch.Tensor, passes: CompiledPasses | None
) -> Trained:
    """Train one client by PyTorch. ``passes``: faster forward and backward passes of the model, or None.

    Private steps draw random numbers from the source in ``plan.private``, all other steps from the job's generator.
    """
    if job.plan.private is None:
        return train(model, job.task, job.plan, inputs, labels, job.generator, passes)
    from fl_sim.training.private_steps import train_privately  # noqa: PLC0415 (its cryptography loads slowly)

    return train_privately(model, job.task, job.plan, inputs, labels)


def _draws_nothing(module: nn.Module) -> bool:
    """Return True if ``module`` is known to draw no random numbers.

    A user-defined class declares this with the attribute ``draws_random_numbers = False``. For a user-defined class
    without this attribute, the result is False.
    """
    kind = type(module)
    if isinstance(module, nn.RNNBase):
        return kind in {nn.GRU, nn.LSTM} and not module.dropout
    if isinstance(draws := getattr(module, "draws_random_numbers", None), bool):
        return not draws
    return kind in _PLAIN or kind.__module__ in {models.__name__, token_models.__name__}


def _is_plain(values: torch.Tensor) -> bool:
    return values.device.type == "cpu" and values.dtype == torch.float32
