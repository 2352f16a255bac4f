"""Steps as one launch: taken for the next larger number of clients, and only where they do what the step does."""

from collections.abc import Callable

import pytest
import torch

from fl_sim.training.cuda_graphs import Launcher, width_for


class Counting:
    """A stand-in for StackedStep: clients that are still training move by one, and by a half the next time."""

    capacity = 10

    def __init__(self) -> None:
        self.active = torch.zeros((), dtype=torch.int64)
        self.weights = torch.zeros(self.capacity)
        self.buffers = torch.zeros(self.capacity)
        self.widths: list[int] = []

    def __call__(self, width: int) -> None:
        self.widths.append(width)
        live = torch.arange(width) < self.active
        self.buffers[:width] = torch.where(live, self.buffers[:width] / 2 + 1, self.buffers[:width])
        self.weights[:width] += torch.where(live, self.buffers[:width], 0.0)

    def state(self) -> list[torch.Tensor]:
        return [self.weights, self.buffers]


def expected(*steps: int) -> list[torch.Tensor]:
    """Return the state after steps of so many clients each."""
    counting = Counting()
    for active in steps:
        counting.active.fill_(active)
        counting(active)
    return counting.state()


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def test_widths_halve_from_the_capacity_and_hold_whoever_still_trains() -> None:
    assert [width_for(active, 100) for active in (100, 51, 50, 26, 25, 13, 7, 4, 2, 1)] == [
        100, 100, 50, 50, 25, 13, 7, 4, 2, 1,
    ]  # fmt: skip
    for capacity in range(1, 40):
        widths = {width_for(active, capacity) for active in range(1, capacity + 1)}
        assert all(active <= width_for(active, capacity) <= capacity for active in range(1, capacity + 1))
        assert len(widths) <= capacity.bit_length() + 1


def test_a_step_is_captured_once_for_each_width_and_nobody_moves_meanwhile() -> None:
    step, captured = Counting(), []

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        for _ in range(3):
            call()
        captured.append(step.widths[-1])
        return call

    launch = Launcher(step, capture)  # type: ignore[arg-type]
    steps = (9, 10, 7, 4, 3, 5, 1)
    for active in steps:
        launch(active)
    assert captured == [10, 5, 3, 1]
    assert same(step.state(), expected(*steps))


def test_a_launch_is_made_after_so_many_plain_steps_of_its_width() -> None:
    step, captured = Counting(), []

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        captured.append(len(step.widths))
        return call

    launch = Launcher(step, capture, plain_steps=2)  # type: ignore[arg-type]
    for active in (10, 4, 10, 4, 10):
        launch(active)
    assert step.widths[:4] == [10, 4, 10, 4]
    assert (captured, launch.num_graphs) == ([4], 1)
    assert same(step.state(), expected(10, 4, 10, 4, 10))


def test_without_capture_a_step_is_taken_with_as_many_as_still_train() -> None:
    step = Counting()
    launch = Launcher(step, None)  # type: ignore[arg-type]
    for active in (9, 3):
        launch(active)
    assert step.widths == [9, 3]
    assert same(step.state(), expected(9, 3))


def test_where_nothing_can_be_captured_steps_go_on_and_say_so() -> None:
    step = Counting()

    def broken(call: Callable[[], None]) -> Callable[[], None]:
        call()
        raise RuntimeError("operation not permitted when stream is capturing")

    launch = Launcher(step, broken)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="no CUDA graph: RuntimeError: operation not permitted"):
        launch(6)
    launch(6)  # and not again
    launch(2)
    assert same(step.state(), expected(6, 6, 2))


@pytest.mark.parametrize("wrong", [lambda step: None, lambda step: step(9), lambda step: step.weights.fill_(torch.nan)])
def test_a_launch_that_does_something_else_is_not_used(wrong: Callable[[Counting], object]) -> None:
    step = Counting()
    launch = Launcher(step, lambda call: lambda: void(wrong(step)))  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="it does not do what the step does"):
        launch(10)
    launch(10)
    assert same(step.state(), expected(10, 10))


def void(value: object) -> None:
    """Drop a value."""


def test_a_launch_is_wrong_however_little_what_is_wrong_weighs() -> None:
    step = Counting()
    step.weights.fill_(1e4)  # whose rounding is more than all that happens to the buffers
    launch = Launcher(step, lambda call: lambda: void(step.weights[:10].add_(1)))  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="it does not do what the step does"):
        launch(10)
