"""Numbers of runs under one name and in one unit: shares in [0, 1] are percent, all else is as it was."""

import pytest

from fl_sim.report.measures import measures, of_round, percent
from fl_sim.store.run_directory import RoundRecord


@pytest.mark.parametrize(
    ("name", "is_share"),
    [
        ("test_accuracy", True), ("client_worst_tenth", True), ("client_deviation", True), ("macro_f1", True),
        ("f1", True), ("auc", True), ("test_loss", False), ("bytes_up", False), ("measures.client_worst_tenth", True),
    ],
)  # fmt: skip
def test_shares_are_percent_under_a_name_that_says_so(name: str, *, is_share: bool) -> None:
    assert percent(name, 0.25) == ((f"{name}_percent", 25.0) if is_share else (name, 0.25))


def test_a_rounds_worst_tenth_of_clients_is_percent() -> None:
    record = RoundRecord(
        3, 0.5, 0.75, 0.875, None, 2, 0.1, 1.5, client_accuracy=0.375, client_deviation=0.125, client_worst_tenth=0.25
    )
    found = of_round(record)
    shares = {name: value for name, value in found.items() if name.startswith("client_")}
    assert shares == {
        "client_accuracy_percent": 37.5, "client_deviation_percent": 12.5, "client_worst_tenth_percent": 25.0,
    }  # fmt: skip
    assert found["test_loss"] == 0.75


def test_a_single_release_tells_what_the_whole_run_costs_beside_what_it_costs_itself() -> None:
    release = {"unit": "client", "epsilon": 1.0, "delta": 1e-5, "epsilon_whole_run": 3.0, "delta_whole_run": 2e-5}
    assert measures({"privacy": [release]}) == {
        "epsilon.client": 3.0, "delta.client": 2e-5, "epsilon.client.1": 1.0, "delta.client.1": 1e-5,
    }  # fmt: skip
