"""The fuzzer of data files, for a few seconds, and that it sees what goes wrong."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fl_sim.errors import UserError
from fl_sim.types import Dataset, Examples


@pytest.fixture(scope="module")
def fuzz(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("fuzz_files")


def test_damaged_files_are_loaded_whole_or_refused_in_one_line(fuzz: ModuleType, tmp_path: Path) -> None:
    outcomes, trouble = fuzz.fuzz(150, 3, tmp_path)

    assert trouble == []
    assert outcomes["loaded"] >= 5
    assert outcomes["refused"] >= 60


def test_sound_files_are_loaded(fuzz: ModuleType, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()

    assert {fuzz.try_out(read, outcomes) for read in fuzz.write_samples(tmp_path).values()} == {""}
    assert set(outcomes) == {"loaded"}


def test_tracebacks_long_refusals_and_broken_promises_are_seen(fuzz: ModuleType) -> None:
    def refuse() -> Dataset:
        raise UserError("a\nb")

    def fall() -> Dataset:
        raise KeyError("x")

    def lie() -> Dataset:
        part = Examples(np.full((2, 1), np.nan, np.float32), np.zeros(2, np.int64))
        return Dataset("lie", part, part, 1, (0.0,), (1.0,))

    troubles = [fuzz.try_out(read, Counter()) for read in (refuse, fall, lie)]

    assert [trouble.split(":")[0] for trouble in troubles][::2] == [
        "a refusal of several lines",
        "a feature is not finite",
    ]
    assert "KeyError" in troubles[1]
