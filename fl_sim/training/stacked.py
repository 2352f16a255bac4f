"""Trains many clients in one computation on a GPU.

If each client is trained separately, the launches of GPU kernels take most of the time. One computation for all clients
saves launches. The clients that are trained together are called a stack. Each model parameter is one tensor with a
leading axis for clients. The result for each client equals the result of ``fl_sim.training.loop.train`` up to float32
rounding. Clients are sorted by their number of steps, the largest number first. So the clients that are still in
training are always the first in the stack. Only the smaller last batch of an epoch is padded, with records of weight 0.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from fl_sim.native.request import Draws
from fl_sim.params import FlatParams, layout_of
from fl_sim.training.features import feature_sums
from fl_sim.training.records import Source, arithmetic, merged
from fl_sim.training.stacked_step import TAKES, Kind, StackedStep
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import Params, Precision, Trained

Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""A function that captures a step in a CUDA graph, and returns a function that replays the step in one launch.

The step must use the same memory addresses at each call.
"""

SAME_STEP = 0.01
"""The largest accepted difference between a tensor after a CUDA graph and after the plain PyTorch step.

The difference is divided by the change of the tensor in the step.
"""

ROUNDING = 2.0**-22
"""The largest accepted relative rounding error of a CUDA graph: four float32 rounding errors."""

PLAIN_STEPS = 8
"""The number of plain PyTorch steps before the capture of a CUDA graph. Each number of clients has its own count.

The capture of a graph takes as long as about six plain steps.
"""

WARM_UP_STEPS = 3
"""The number of warm-up steps before a capture. PyTorch's documentation requires them to initialise its libraries."""


class Launcher:
    """Executes optimizer steps for the first clients of a stack, if possible as one launch of a CUDA graph.

    Graphs exist only for a few numbers of clients (``width_for``). A step for another number of clients uses the graph
    for the next larger number, and leaves the surplus clients unchanged. Before the graph for a number of clients is
    captured, plain PyTorch executes ``plain_steps`` steps for this number. If a capture fails, or if the result of a
    graph differs from the result of the plain step, the launcher warns and from then on uses only plain steps.
    """

    def __init__(self, step: StackedStep, capture: Capture | None, plain_steps: int = 0) -> None:
        self._step = step
        self._capture = capture
        self._plain_steps = plain_steps
        self._taken: Counter[int] = Counter()
        self._replays: dict[int, Callable[[], None]] = {}

    @property
    def num_graphs(self) -> int:
        """Return the number of captured graphs."""
        return len(self._replays)

    def __call__(self, active: int) -> None:
        """Execute one step for the first ``active`` clients of the stack, by a CUDA graph if there is one."""
        self._step.active.fill_(active)
        width = width_for(active, self._step.capacity)
        if self._capture is None:
            self._step(active)
        elif width in self._replays:
            self._replays[width]()
        elif self._taken[width] < self._plain_steps:
            self._taken[width] += 1
            self._step(active)
        else:
            self._record(self._capture, width, active)

    def _record(self, capture: Capture, width: int, active: int) -> None:
        """Execute one step by a new CUDA graph and by plain PyTorch. Keep the graph if both results agree.

        The result of the step is always the result by plain PyTorch.
        """
        before = self._copied()
        self._step.active.zero_()  # zero active clients, so that the steps during the capture change no tensor
        try:
            replay = capture(partial(self._step, width))
            self._restore(before, active)
            replay()
            by_graph = self._copied()
            why = ""
        except RuntimeError as error:
            by_graph, why = before, f"{type(error).__name__}: {error}"
        self._restore(before, active)
        self._step(width)
        if why or not _same(before, self._step.state(), by_graph):
            self._capture = None
            self._replays.clear()
            why = why or "its result differs from that of the plain step"
            warnings.warn(f"no CUDA graph: {why}; every operation is launched separately", RuntimeWarning, stacklevel=2)
        else:
            self._replays[width] = replay

    def _copied(self) -> list[torch.Tensor]:
        return [value.clone() for value in self._step.state()]

    def _restore(self, values: list[torch.Tensor], active: int) -> None:
        self._step.active.fill_(active)
        for target, value in zip(self._step.state(), values, strict=True):
            target.copy_(value)


def width_for(active: int, capacity: int) -> int:
    """Return a number of clients, at least ``active``, for which there is a CUDA graph.

    To limit the number of graphs, graphs exist only for ``capacity``, ``capacity`` / 2, ``capacity`` / 4, ... clients
    (rounded up). The result is the smallest of these numbers that is at least ``active``.
    """
    width = capacity
    while width > 1 and (width + 1) // 2 >= active:
        width = (width + 1) // 2
    return width


def capture_on_cuda(step: Callable[[], None]) -> Callable[[], None]:
    """Capture ``step`` in a CUDA graph as PyTorch's notes on CUDA describe; return a function that replays the graph.

    Raises RuntimeError if the capture fails.
    """
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class StackedTrainer:
    """Trains all clients of a round together in stacks.

    ``model``: provides the architecture; the model must draw no random numbers, and must treat every record separately
    (no batch statistics). ``alone``: the trainer for clients whose plans stacked training does not support; by default
    PyTorch's loop. ``graphs``: if True, a GPU executes a step as one CUDA graph. The graph is captured after
    ``plain_steps`` steps of plain PyTorch with the same records, ``Kind`` and number of clients. ``capture``: the
    function that captures a graph. Several threads must not use one trainer at the same time.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision = "float32",
        *,
        alone: Trainer | None = None,
        graphs: bool = True,
        capture: Capture = capture_on_cuda,
        plain_steps: int = PLAIN_STEPS,
    ) -> None:
        self._model = model
        self._alone = alone or Trainer(model, None, precision)
        self._precision = precision
        self._graphs = graphs
        self._capture = capture
        self._plain_steps = plain_steps
        self._sources: list[Source] = []
        self._step: StackedStep | None = None
        self._launcher: Launcher | None = None

    def train(self, jobs: Sequence[LocalJob]) -> list[Trained]:
        """Train the client of each job from ``task.params``. Return one result per job, on the CPU.

        Clients with an equal ``Kind`` form one stack; their learning rates may differ. A client is trained separately
        if stacked training does not support its plan.
        """
        proximal = any(job.plan.proximal_mu for job in jobs)
        groups: dict[Kind | None, list[int]] = {}
        for place, job in enumerate(jobs):
            kind = Kind.of(job, proximal=proximal) if job.asks_for <= TAKES else None
            groups.setdefault(kind, []).append(place)
        results: dict[int, Trained] = {}
        for kind, places in groups.items():
            chosen = [jobs[place] for place in places]
            trained = self._alone.train_all(chosen) if kind is None else self._train_stack(kind, chosen)
            results.update(zip(places, trained, strict=True))
        return [results[place] for place in range(len(jobs))]

    @property
    def num_graphs(self) -> int:
        """Return the number of captured graphs. Each graph executes steps for a different number of clients."""
        return 0 if self._launcher is None else self._launcher.num_graphs

    def _train_stack(self, kind: Kind, jobs: list[LocalJob]) -> list[Trained]:
        by_steps = sorted(range(len(jobs)), key=lambda place: -jobs[place].num_steps)
        ordered = [jobs[place] for place in by_steps]
        if not ordered[0].num_steps:
            untrained = []
            for job in jobs:
                params, sums = job.task.params, self._feature_sums(job, job.task.params)
                untrained.append(Trained(params, job.plan.momentum_buffers or {}, 0, None, sums))
            return untrained
        with arithmetic(ordered[0].records.device, self._precision):
            results = self._train(kind, ordered)
        return [trained for _, trained in sorted(zip(by_steps, results, strict=True), key=lambda pair: pair[0])]

    def _train(self, kind: Kind, jobs: list[LocalJob]) -> list[Trained]:
        step, launch = self._prepared(kind, jobs)
        steps = [job.num_steps for job in jobs]
        schedule = _schedule(jobs, steps, self._sources)
        step.load(jobs)
        for number in range(steps[0]):
            active = sum(count > number for count in steps)
            step.rows[:active] = schedule.rows[number, :active]
            step.weights[:active] = schedule.weights[number, :active]
            step.partners[:active] = schedule.partners[number, :active]
            if len(schedule.moves):
                step.moves[:active] = schedule.moves[number, :active]
            launch(active)
        params, buffers = (_rows(tensors, len(jobs)) for tensors in (step.params, step.buffers))
        losses = step.losses.tolist()
        return [
            Trained(
                params=params[place],
                momentum_buffers=buffers[place] if count or step.kind.warm else {},
                num_steps=count,
                loss=losses[place] / count if count else None,
                feature_sums=self._feature_sums(jobs[place], params[place]),
            )
            for place, count in enumerate(steps)
        ]

    def _feature_sums(self, job: LocalJob, params: Params) -> torch.Tensor | None:
        return feature_sums(self._model, params, *job.records.tensors()) if job.plan.class_features else None

    def _prepared(self, kind: Kind, jobs: list[LocalJob]) -> tuple[StackedStep, Launcher]:
        """Return a ``StackedStep``, which trains the clients of ``jobs``, and the launcher that executes it.

        The step and the launcher of the last call are reused if they fit these jobs. Otherwise, new ones are created.
        """
        sources = list(dict.fromkeys(source for job in jobs for source, _ in job.records.parts))
        step, launcher = self._step, self._launcher
        fits = step is not None and step.kind == kind and len(jobs) <= step.capacity and sources == self._sources
        if step is None or launcher is None or not fits:
            self._step = self._launcher = step = launcher = None  # frees the memory of the old step and launcher
            capture = self._capture if self._graphs and captures_on(jobs[0].records.device) else None
            step = StackedStep(self._model, kind, merged(sources), jobs[0].plan, len(jobs), padded=capture is not None)
            launcher = Launcher(step, capture, self._plain_steps)
            self._step, self._launcher, self._sources = step, launcher, sources
        return step, launcher


def captures_on(device: torch.device) -> bool:
    """Return True if a CUDA graph can capture a step on ``device``: True for GPUs only."""
    return device.type == "cuda"


def _same(before: list[torch.Tensor], by_step: list[torch.Tensor], by_graph: list[torch.Tensor]) -> bool:
    """Return True if the results of plain step and graph are finite, and equal up to rounding.

    ``before``: the tensors before the step. ``by_step``: the tensors after the step by plain PyTorch. ``by_graph``: the
    tensors after the step by the graph.
    """
    return all(
        _norm(end - other) <= SAME_STEP * _norm(end - start) + ROUNDING * _norm(end)
        for start, end, other in zip(before, by_step, by_graph, strict=True)
    )


def _norm(values: torch.Tensor) -> float:
    return float(values.double().norm())


@dataclass(frozen=True)
class _Schedule:
    """The random choices of all clients for all steps.

    ``rows``: (steps, clients, batch), the row indices of the records in one tensor with all clients' training records.
    ``weights``: (steps, clients, batch), 1 / n for the n records of a batch, and 0 for padding. ``partners``: (steps,
    clients), indices of averaged records in the mixing pool (FedMix). ``moves``: (steps, clients, batch, 3), the shifts
    and mirroring of images; empty without augmentation.
    """

    rows: torch.Tensor
    weights: torch.Tensor
    partners: torch.Tensor
    moves: torch.Tensor


def _schedule(jobs: list[LocalJob], steps: list[int], sources: list[Source]) -> _Schedule:
    """Return the random choices of all clients, drawn in the same order as in ``fl_sim.training.loop.train``."""
    size = jobs[0].task.settings.batch_size
    rows = np.zeros((steps[0], len(jobs), size), dtype=np.int64)
    weights = np.zeros(rows.shape, dtype=np.float32)
    partners = np.zeros(rows.shape[:2], dtype=np.int64)
    is_moving = jobs[0].task.settings.augment.moves
    moves = np.zeros((*(rows.shape if is_moving else (0, 0, 0)), 3), dtype=np.int64)
    ends = np.cumsum([0, *map(len, sources)]).tolist()
    first_of = dict(zip(sources, ends, strict=False))
    for place, job in enumerate(jobs):
        own = job.records.rows(first_of)
        draws = Draws.of(job.task, job.plan, len(own), job.generator)
        starts = [(epoch, first) for epoch in range(len(draws.order)) for first in range(0, len(own), size)]
        for step, (epoch, first) in enumerate(starts[: steps[place]]):
            batch = draws.order[epoch, first : first + size]
            # Padding repeats a record of the same client. A record of another client could have an infinite loss: this
            # client may shift the logit of that record's class by -inf.
            rows[step, place] = own[batch[0]]
            rows[step, place, : len(batch)] = own[batch]
            weights[step, place, : len(batch)] = 1 / len(batch)
            if is_moving:
                moves[step, place, : len(batch)] = draws.moves[epoch, first : first + size]
        partners[: len(draws.partners), place] = draws.partners
    device = jobs[0].records.device
    return _Schedule(*(torch.from_numpy(array).to(device) for array in (rows, weights, partners, moves)))


def _rows(stacked: Params, count: int) -> list[Params]:
    """Copy the tensors of the first ``count`` clients to the CPU in one transfer. Return one dictionary per client."""
    if not stacked:
        return [{}] * count
    layout = layout_of({name: value[0] for name, value in stacked.items()})
    flat = torch.cat([value[:count].reshape(count, -1) for value in stacked.values()], 1).to("cpu")
    return [FlatParams(row, layout) for row in flat]
