"""The mutation harness: its lists fit the code; what tests see is killed, what they do not see survives."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def mutants(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("mutants")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A project of one function, and a test that looks at its sign alone."""
    project = tmp_path / "project"
    (project / "fl_sim").mkdir(parents=True)
    (project / "tests").mkdir()
    (project / "fl_sim" / "__init__.py").touch()
    (project / "fl_sim" / "sums.py").write_text("def total(a, b):\n    return a + b\n", encoding="utf-8")
    test = "from fl_sim.sums import total\n\n\ndef test_total():\n    assert total(2, 1) > 0\n"
    (project / "tests" / "test_sums.py").write_text(test, encoding="utf-8")
    return project


def test_lists_fit_the_code_and_cover_every_layer(mutants: ModuleType) -> None:
    listed = mutants.read_mutants()

    assert mutants.problems(listed) == []
    assert len(listed) >= 20
    assert {mutant.file.split("/")[0] for mutant in listed} >= {"fl_sim", "strategies", "partitions"}


def test_seen_change_is_killed_unseen_one_survives_and_the_copy_is_as_before(mutants: ModuleType, tiny: Path) -> None:
    def mutant(new: str) -> object:
        return mutants.Mutant("tiny", new, "fl_sim/sums.py", "a + b", new, ("tests/test_sums.py",))

    seen, unseen = mutants.judge([mutant("b - a - 5"), mutant("a - b")], tiny)

    assert (seen.outcome, unseen.outcome) == ("killed", "survived")
    assert "a + b" in (tiny / "fl_sim" / "sums.py").read_text(encoding="utf-8")


def test_tests_that_do_not_run_kill_nothing(mutants: ModuleType, tiny: Path) -> None:
    (tiny / "tests" / "test_sums.py").write_text("", encoding="utf-8")

    [outcome] = mutants.judge([mutants.Mutant("tiny", "x", "fl_sim/sums.py", "+", "-", ("tests/test_sums.py",))], tiny)

    assert outcome.outcome not in {"killed", "survived"}


def test_stale_lists_are_named(mutants: ModuleType, tiny: Path) -> None:
    stale = mutants.Mutant("tiny", "gone", "fl_sim/sums.py", "a * b", "a / b", ("tests/test_none.py",))

    lost = "tiny: gone: its text occurs 0 times in fl_sim/sums.py, not once"
    untested = "tiny: gone: there is no tests/test_none.py"
    assert mutants.problems([stale], tiny) == [lost, untested]
    assert mutants.problems([stale, stale], tiny)[0] == "tiny: two mutants are called 'gone'"
