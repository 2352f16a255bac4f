"""Who knows which feature: the counts only go down."""

from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


def test_no_more_files_know_a_feature_that_is_not_theirs(load_benchmark) -> None:
    house = load_benchmark("house")
    found = {feature: len(files) for feature, files in house.foreign(PROJECT).items()}
    most = {"DA-FL": 1, "Global DP": 5, "compression": 1, "CCVR": 1, "private start": 0, "devices": 0,
            "BatchNorm": 0, "PATE": 1, "TSTR": 0, "attacks": 0}  # fmt: skip
    assert {feature: count for feature, count in found.items() if count > most[feature]} == {}


def test_general_code_asks_for_no_concrete_kind(load_benchmark) -> None:
    house = load_benchmark("house")
    assert house.asked_by_kind(PROJECT) == []


@pytest.mark.parametrize(
    ("text", "pairs", "asked"),
    [
        ("import numpy\n", 0, 0),
        ("from strategies.global_dp import GlobalDP\n", 1, 0),
        ("from strategies.global_dp import GlobalDP\n\n\ndef f(x):\n    return isinstance(x, GlobalDP | int)\n", 1, 1),
        ("import clients.dafl.settings\n", 1, 0),
    ],
)
def test_a_module_that_knows_a_feature_is_counted(
    load_benchmark, tmp_path: Path, text: str, pairs: int, asked: int
) -> None:
    house = load_benchmark("house")
    for package in house.TOPS:
        (tmp_path / package).mkdir()
    (tmp_path / "fl_sim" / "new.py").write_text(text)
    assert sum(map(len, house.foreign(tmp_path).values())) == pairs
    assert len(house.asked_by_kind(tmp_path)) == asked
    assert house.size(tmp_path)[0] == 1
