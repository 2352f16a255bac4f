"""Who knows which feature: the counts only go down."""

from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


def test_no_more_files_know_a_feature_that_is_not_theirs(load_benchmark) -> None:
    house = load_benchmark("house")
    found = {feature: len(files) for feature, files in house.foreign(PROJECT).items()}
    most = {"DA-FL": 5, "Global DP": 7, "compression": 11, "CCVR": 2, "private start": 1, "devices": 4,
            "BatchNorm": 9, "PATE": 2, "TSTR": 2, "attacks": 5}  # fmt: skip
    assert {feature: count for feature, count in found.items() if count > most[feature]} == {}


def test_general_code_asks_no_more_often_for_a_concrete_kind(load_benchmark) -> None:
    house = load_benchmark("house")
    assert len(house.asked_by_kind(PROJECT)) <= 9


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
