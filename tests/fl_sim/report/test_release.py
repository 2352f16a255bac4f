"""What is said of several runs' epsilons is the largest of each row, whichever run has it."""

import itertools

import pytest

from fl_sim.report.captions import privacy_notes
from fl_sim.report.files import PrivacyStatement


def release(
    epsilon: float | None, *, whole: tuple[float, float] | None = None, unit: str = "record"
) -> PrivacyStatement:
    more = {} if whole is None else {"epsilon_whole_run": whole[0], "delta_whole_run": whole[1]}
    return PrivacyStatement(unit=unit, epsilon=epsilon, delta=1e-5, covers="all", **more)


@pytest.mark.parametrize("epsilons", list(itertools.permutations([1.0, 3.0, 2.0])))
def test_a_rows_epsilon_is_the_largest_of_its_runs_in_any_order(epsilons: tuple[float, ...]) -> None:
    line, *_ = privacy_notes({"A": [[release(one)] for one in epsilons], "B": [[release(0.5)]]})
    assert "A epsilon 3, B epsilon 0.5." in line


@pytest.mark.parametrize("order", [1, -1])
def test_what_the_whole_run_costs_is_said_and_is_the_largest_too(order: int) -> None:
    runs = [[release(1.0, whole=(40.0, 2e-5))], [release(2.0, whole=(50.0, 3e-5))], [release(1.5)]][::order]
    line, *_ = privacy_notes({"A": runs})
    assert "A epsilon 2 (the whole run 50 at delta 3e-05)." in line


def test_a_tables_entry_is_what_the_whole_run_costs() -> None:
    assert release(2.911, whole=(49.13, 2e-5)).in_short == "epsilon 49.2 per record"
    assert release(2.911).in_short == "epsilon 2.92 per record"
    assert release(None, unit="client").in_short == "none per client"
