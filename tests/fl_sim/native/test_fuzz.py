"""Random networks, records and settings: the compiled trainer ends where PyTorch does."""

import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from fl_sim.models import ResidualBlock
from fl_sim.native.compiling import ARCHITECTURES
from fl_sim.native.kernel import Kernel
from fl_sim.params import scale
from fl_sim.types import Trained

FAST, SLOW = range(40), range(40, 1040)


@pytest.fixture(scope="module")
def fuzz(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("native_fuzz")


def numbers_for(kernel: Kernel, numbers: range) -> range:
    """Return the numbers of the networks to try: every eighth where an emulator takes a second for each."""
    return numbers if kernel.lanes in ARCHITECTURES[platform.machine()] else numbers[::8]


def test_random_networks_end_where_pytorch_does(kernel: Kernel, fuzz: ModuleType) -> None:
    assert dict(fuzz.faults(kernel, numbers_for(kernel, FAST))) == {}


@pytest.mark.slow
def test_a_thousand_more_do(kernel: Kernel, fuzz: ModuleType) -> None:
    assert dict(fuzz.faults(kernel, SLOW)) == {}


@pytest.mark.slow
def test_sanitizers_find_nothing(fuzz: ModuleType) -> None:
    """Compiling with them takes a minute and more, which is why there is no fast version."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here")
    assert fuzz.sanitized(0, 100) == 0


def test_the_networks_hold_all_there_is(fuzz: ModuleType) -> None:
    cases = [fuzz.case_of(number) for number in FAST]
    kinds = {type(module) for case in cases for module in case.model.modules()}
    assert kinds >= {
        nn.Conv2d, nn.MaxPool2d, nn.ReLU, nn.GroupNorm, ResidualBlock, nn.AdaptiveAvgPool2d, nn.Linear, nn.Flatten
    }  # fmt: skip
    parts = {part for case in cases for part in case.parts}
    assert parts == {"offset", "proximal", "warm", "naivemix", "fedmix", *fuzz.TERMS}
    assert {len(case.shape) for case in cases} == {1, 3}
    moved = [case.settings.augment for case in cases if case.settings.augment.moves]
    assert any(one.crop and one.flip for one in moved)
    assert max(one.crop for one in moved) == 30
    assert any(case.settings.batch_size > case.count for case in cases)


class _Wrong(Kernel):
    """A trainer that is wrong by a little, or that remembers who was there before."""

    def train(self, stack: Any, lessons: Any) -> list[Trained]:
        return [
            replace(one, params=scale(one.params, 1 + self.factor(place)))
            for place, one in enumerate(super().train(stack, lessons))
        ]

    def factor(self, place: int) -> float:
        del place
        return 1e-4


class _Remembering(_Wrong):
    def factor(self, place: int) -> float:
        return 1e-7 if place == 1 else 0.0


def test_a_trainer_that_is_wrong_is_found(kernel: Kernel, fuzz: ModuleType) -> None:
    """So that no fault found means something."""
    case = fuzz.case_of(1)
    assert fuzz.fault_of(kernel, case) == ""
    assert "from float64's" in fuzz.fault_of(_Wrong(kernel.library, kernel.lanes), case)
    assert (
        fuzz.fault_of(_Remembering(kernel.library, kernel.lanes), case)
        == "a client ends in other bits behind one of NaN"
    )


def test_a_client_of_nan_moves_no_bit_of_the_next(kernel: Kernel, fuzz: ModuleType) -> None:
    """Networks stay in a thread's memory from client to client: nothing in them may reach the next."""
    for number in numbers_for(kernel, range(40, 70)):
        case = fuzz.case_of(number)
        stack = fuzz.describe(case.model, case.shape)
        assert fuzz.leftover(kernel, stack, case) == ""
