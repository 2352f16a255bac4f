"""What accuracies over rounds come to, and what it took to get anywhere."""

import pytest

from fl_sim.report.curve import Reached, Spent, area_under, mean_of_last, reached
from fl_sim.store.run_directory import RoundRecord


def _rounds(*accuracies: float | None, seconds: float | None = 2.0, up: int | None = 10) -> list[RoundRecord]:
    return [
        RoundRecord(number, accuracy, 1.0, None, None, 3, 0.1, seconds, bytes_down=5, bytes_up=up)
        for number, accuracy in enumerate(accuracies, 1)
    ]


def test_the_mean_of_the_last_rounds_is_that_of_those_that_were_evaluated():
    assert mean_of_last(_rounds(*[0.0] * 5, *[0.5] * 9, 1.0)) == pytest.approx(0.55)
    assert mean_of_last(_rounds(0.1, 0.2, None, 0.4), 2) == 0.4
    assert mean_of_last(_rounds(None)) is None


def test_the_area_under_a_curve_is_its_mean_height_straight_between_evaluated_rounds():
    assert area_under(_rounds(0.2, 0.4, 0.8)) == pytest.approx((0.3 + 0.6) / 2)
    assert area_under(_rounds(None, 0.2, None, None, 0.8)) == pytest.approx(0.5)
    assert area_under(_rounds(None, 0.7)) == 0.7
    assert area_under(_rounds(None)) is None


def test_what_it_took_counts_all_rounds_up_to_the_first_that_gets_there():
    rounds = _rounds(0.3, None, 0.6, 0.5, 0.9)
    assert reached(rounds, 0.5) == Reached(0.5, 3, 45, 6.0)
    assert reached(rounds, 0.6, Spent(100, 1.5)) == Reached(0.6, 3, 145, 7.5)
    assert reached(rounds, 0.91) is None
    assert reached([], 0.5) is None


def test_what_is_not_known_of_one_round_is_not_known_of_the_sum():
    assert reached([*_rounds(0.1, up=None), *_rounds(0.1, 0.5)[1:]], 0.5) == Reached(0.5, 2, None, 4.0)
    assert reached(_rounds(0.5, seconds=None), 0.5, Spent(None, 3.0)) == Reached(0.5, 1, None, None)
