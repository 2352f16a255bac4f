"""A step over fixed buffers as one launch: CUDA graphs, each checked against the step itself before it is used."""

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from fl_sim.training.stacked_step import StackedStep

Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Turns what reads and writes the same memory at each call into one launch that does the same."""

SAME_STEP = 0.01
"""How far a graph may end from the step that it stands for, as a share of how far that moves the clients."""

ROUNDING = 2.0**-22
"""What is rounding, as a share of the numbers themselves: four times what one float32 operation rounds by."""

PLAIN_STEPS = 8
"""Steps with one number of clients before a graph is made for it: making one costs about as much as six plain steps."""

WARM_UP_STEPS = 3
"""Steps before a capture, in which libraries set themselves up, as PyTorch's documentation has it."""


class Launcher:
    """Takes steps with the first clients of a stack, as one launch for each of a few numbers of clients.

    A step with fewer clients takes the launch of the next larger number, and the surplus stays as it is. A launch is
    made for a number of clients once there were ``plain_steps`` steps with it. Where a graph cannot be made, or does
    something else than the step, there is a warning, and no more graphs.
    """

    def __init__(self, step: StackedStep, capture: Capture | None, plain_steps: int = 0) -> None:
        self._step = step
        self._capture = capture
        self._plain_steps = plain_steps
        self._taken: Counter[int] = Counter()
        self._replays: dict[int, Callable[[], None]] = {}

    @property
    def num_graphs(self) -> int:
        """Return how many graphs there are."""
        return len(self._replays)

    def __call__(self, active: int) -> None:
        """Take a step with the first ``active`` clients."""
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
        """Take this step both ways, and keep the graph if it is right."""
        before = self._copied()
        self._step.active.zero_()  # whatever capturing runs, nobody moves
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
            why = why or "it does not do what the step does"
            warnings.warn(f"no CUDA graph: {why}; every operation is launched by itself", RuntimeWarning, stacklevel=2)
        else:
            self._replays[width] = replay

    def _copied(self) -> list[torch.Tensor]:
        return [value.clone() for value in self._step.state()]

    def _restore(self, values: list[torch.Tensor], active: int) -> None:
        self._step.active.fill_(active)
        for target, value in zip(self._step.state(), values, strict=True):
            target.copy_(value)


def width_for(active: int, capacity: int) -> int:
    """Return the least of ``capacity``, its half, its quarter, ... (rounded up) that is at least ``active``."""
    width = capacity
    while width > 1 and (width + 1) // 2 >= active:
        width = (width + 1) // 2
    return width


def capture_on_cuda(step: Callable[[], None]) -> Callable[[], None]:
    """Capture ``step`` in a CUDA graph, by the book of PyTorch's notes on CUDA. Raises RuntimeError where it fails."""
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


def _same(before: list[torch.Tensor], by_step: list[torch.Tensor], by_graph: list[torch.Tensor]) -> bool:
    """Say whether each tensor ends in the same place, but for rounding; False where numbers are not finite."""
    return all(
        _norm(end - other) <= SAME_STEP * _norm(end - start) + ROUNDING * _norm(end)
        for start, end, other in zip(before, by_step, by_graph, strict=True)
    )


def _norm(values: torch.Tensor) -> float:
    return float(values.double().norm())
