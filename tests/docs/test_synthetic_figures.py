"""The figures of the page on synthetic records, and of PATE's other tables, are those of the gallery."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
KINDS = {"linear": "'discriminant'", "quadratic": "'quadratic-discriminant'"}


def _cells(table: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = json.loads((DOCS / "results" / table / "table.json").read_text("utf-8"))["cells"]
    return [cell for cell in found if cell["mean"] is not None]


def _mean(column: str, epsilon: int, *parts: str) -> str:
    (cell,) = (
        one
        for one in _cells("synthetic")
        if one["column"] == column
        and f"(epsilon={epsilon}," in one["row"]
        and all(part in one["row"] for part in parts)
    )
    assert len(cell["values"]) == 3
    return f"{cell['mean']:.1f}"


@pytest.mark.parametrize("data", ["MNIST", "Fashion-MNIST", "CIFAR-10"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_discriminants_are_told_as_the_leaderboard_has_them(data: str, kind: str) -> None:
    columns = [f"{data} {split}" for split in ("1-Label", "2-Label", "Dir(0.05)", "iid")]
    told = [" / ".join(_mean(column, epsilon, KINDS[kind]) for epsilon in (10, 1)) for column in columns]
    assert f"| {data}, {kind} | {' | '.join(told)} |" in (DOCS / "synthetic.md").read_text("utf-8")


@pytest.mark.parametrize("parts", [("generator=mean-embedding (warp=1)",), ("generator=dp-cgan",)], ids=str)
@pytest.mark.parametrize("epsilon", [10, 1])
def test_images_are_told_as_the_leaderboard_has_them(parts: tuple[str, ...], epsilon: int) -> None:
    told = [_mean(f"{data} 1-Label", epsilon, *parts) for data in ("MNIST", "Fashion-MNIST", "CIFAR-10")]
    assert " / ".join(told) in " ".join((DOCS / "synthetic.md").read_text("utf-8").split())


@pytest.mark.parametrize("mechanism", ["LNMax", "GNMax", "Confident-GNMax"])
def test_the_students_of_each_labelling_are_told_as_they_are(mechanism: str) -> None:
    names = {"LNMax": "PATE (queries=100, public", "GNMax": "mechanism=gnmax", "Confident-GNMax": "mechanism=confident"}
    values = [value for cell in _cells("pate-mnist") if names[mechanism] in cell["row"] for value in cell["values"]]
    assert len(values) == 3
    (line,) = (
        one for one in (DOCS / "tutorials/pate.md").read_text("utf-8").splitlines() if one.startswith(f"| {mechanism}")
    )
    assert f"| {', '.join(f'{value:.1f}' for value in values)} % |" in line


def test_forests_on_adult_are_told_as_they_are() -> None:
    (cell,) = (one for one in _cells("pate-tables") if one["column"] == "Adult iid")
    assert f"reach {cell['mean']:.1f} %" in " ".join((DOCS / "tutorials/pate.md").read_text("utf-8").split())


RELEASES = {"DP-SGD": "FedAvgM", "synthetic": "quadratic-discriminant", "both": "DA-FL (epsilon="}
BUDGETS = {10: ("epsilon=10", "epsilon=6.5"), 3: ("epsilon=3", "epsilon=2)")}


def _private(table: str, kind: str, epsilon: int) -> float:
    whole, half = BUDGETS[epsilon]
    is_both = kind == "both"
    rows = [
        cell
        for cell in _cells(table)
        if cell["column"] == "CIFAR-10 1-Label"
        and ("train_on=own," in cell["row"]) == is_both
        and RELEASES[kind] in cell["row"]
        and (half if is_both else whole) in cell["row"]
    ]
    (cell,) = rows
    assert len(cell["values"]) == 3
    return float(cell["mean"])


@pytest.mark.parametrize("epsilon", BUDGETS)
@pytest.mark.parametrize("kind", RELEASES)
def test_every_private_release_gains_by_roots_of_mirrored_features_as_the_leaderboard_says(
    kind: str, epsilon: int
) -> None:
    assert "All six gain on CIFAR-10 by roots of mirrored features" in (DOCS / "results/README.md").read_text("utf-8")
    assert _private("private-beside-roots", kind, epsilon) > _private("private-beside", kind, epsilon)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("DP-SGD", "DP-SGD"),
        ("synthetic", "synthetic records alone, quadratic discriminant"),
        ("both", "DP-SGD after a start on synthetic records"),
    ],
)
def test_synthetic_records_and_dp_sgd_on_roots_are_told_as_they_are(kind: str, row: str) -> None:
    values = " | ".join(f"{_private('private-beside-roots', kind, epsilon):.1f}" for epsilon in BUDGETS)
    assert f"\n| {row} | {values} |\n" in (DOCS / "synthetic.md").read_text("utf-8")
