"""The figures on DP-SGD without a trusted server are those of the gallery."""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
EPSILONS = (3, 10)
COLUMNS = ("CIFAR-10", "Fashion-MNIST")


def mean_of(table: str, column: str, epsilon: int, clients: str = "") -> float:
    cells = json.loads((DOCS / "results" / table / "table.json").read_text("utf-8"))["cells"]
    (cell,) = (
        one
        for one in cells
        if one["column"] == column and clients in one["row"] and re.search(rf"epsilon={epsilon}\b", one["row"])
    )
    assert len(cell["values"]) == 3
    return float(cell["mean"])


def one_client(data: str, epsilon: int) -> float:
    if data == "CIFAR-10":
        return mean_of("private-roots", "CIFAR-10 iid", epsilon, "clients=1,")
    return mean_of("private-central", f"{data} iid", epsilon)


def trusting_nobody(data: str, epsilon: int) -> float:
    if data == "CIFAR-10":
        return mean_of("private-roots", "CIFAR-10 1-Label", epsilon, "clients=10,")
    return mean_of("private-silos", f"{data} 1-Label", epsilon)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("data", COLUMNS)
@pytest.mark.parametrize("split", ["1-Label", "iid"])
def test_ten_clients_are_within_a_point_of_one_with_all_records(data: str, split: str, epsilon: int) -> None:
    ours = mean_of("private-no-server", f"{data} {split}", epsilon)
    assert abs(ours - one_client(data, epsilon)) < 1
    assert ours > trusting_nobody(data, epsilon) + 0.7


def test_the_page_tells_them_as_they_are() -> None:
    page = (DOCS / "privacy/distributed-dp.md").read_text("utf-8")
    rows = {
        "one client with all records, `local.privacy=dp-sgd`": [one_client(data, 3) for data in COLUMNS],
        "ten clients of one class each, `distributed-dp-sgd`": [
            mean_of("private-no-server", f"{data} 1-Label", 3) for data in COLUMNS
        ],
        "ten clients of one class each, `local.privacy=dp-sgd`": [trusting_nobody(data, 3) for data in COLUMNS],
    }
    for name, values in rows.items():
        assert f"\n| {name} | {' | '.join(f'{value:.1f}' for value in values)} |\n" in page


def test_the_leaderboard_tells_them_as_they_are() -> None:
    text = " ".join((DOCS / "results/README.md").read_text("utf-8").split())
    accuracy = mean_of("private-no-server", "CIFAR-10 1-Label", 3)
    assert f"clients that trust secure aggregation have {accuracy:.1f} at epsilon 3" in text
