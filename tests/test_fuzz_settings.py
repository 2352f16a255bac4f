"""The fuzzer of settings, for a few seconds: settings are taken or refused in a short line, and it sees what is not."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def fuzz(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("fuzz_settings")


def test_settings_are_taken_or_refused_in_one_short_line(fuzz: ModuleType, tmp_path: Path) -> None:
    tally = fuzz.Tally()

    taken = [one for table in fuzz.cases(160, seed=7) if (one := fuzz.try_out(table, tally)) is not None]
    for number, experiment in enumerate([one for one in taken if fuzz.is_small(one)][:3]):
        fuzz.try_run(experiment, tmp_path / str(number), tally)

    assert tally.trouble == []
    assert tally.outcomes["taken"] >= 10
    assert tally.outcomes["refused"] >= 40


def test_tracebacks_and_long_refusals_are_seen(fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = fuzz.Tally()

    def refuse(table: dict[str, object]) -> None:
        raise fuzz.UserError("a\nb")

    def fall(table: dict[str, object]) -> None:
        raise KeyError("x")

    for wrong in (refuse, fall):
        monkeypatch.setattr(fuzz, "experiment_from", wrong)
        fuzz.try_out({}, tally)

    assert [line.split(":")[0] for line in tally.trouble] == ["a refusal of 3 characters, 'a\\nb'", "KeyError"]
