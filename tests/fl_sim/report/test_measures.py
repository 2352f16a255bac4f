"""Numbers have one name and one unit everywhere, what an accuracy took counts every round, and intervals hold."""

import numpy as np
import pytest
import scipy.stats

from fl_sim.report.measures import (
    ENOUGH,
    Reached,
    Spent,
    area_under,
    difference,
    mean_of_last,
    measures,
    of_round,
    percent,
    reached,
)
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


def pairs(count: int) -> list[tuple[float, float]]:
    rng = np.random.default_rng(3)
    return [(80 + one, 79.0 + other) for one, other in rng.gamma(2.0, size=(count, 2)).tolist()]


def test_the_interval_of_few_seeds_is_students_t_of_the_paired_differences() -> None:
    some = pairs(5)
    found = difference(some)
    assert found is not None
    tested = scipy.stats.ttest_rel(*np.transpose(some)).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((tested.low, tested.high))
    assert (found.seeds, found.method) == (5, "t")


def test_the_interval_of_many_seeds_is_the_bca_bootstrap_and_the_same_each_time() -> None:
    some = pairs(ENOUGH)
    found, again = difference(some), difference(some)
    assert found is not None
    assert found == again
    apart = np.subtract(*np.transpose(some))
    theirs = scipy.stats.bootstrap((apart,), np.mean, method="BCa", rng=np.random.default_rng(0)).confidence_interval
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.03)
    assert found.method == "bootstrap"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_three_pairs_have_no_interval(count: int) -> None:
    assert difference(pairs(count)) is None


def test_equal_differences_are_significant_unless_they_are_none() -> None:
    ahead, level = difference([(0.5, 0.25)] * 3), difference([(0.1, 0.1)] * 30)
    assert ahead is not None
    assert level is not None
    assert (ahead.low, ahead.high, ahead.is_significant) == (0.25, 0.25, True)
    assert not level.is_significant


def test_a_row_behind_is_as_significant_as_one_ahead_and_an_interval_around_0_is_not() -> None:
    behind, around = difference([(0.25, 0.5)] * 3), difference([(0.0, 1.0), (1.0, 0.0), (0.5, 0.4)])
    assert behind is not None
    assert around is not None
    assert (behind.low, behind.high, behind.is_significant) == (-0.25, -0.25, True)
    assert around.low < 0 < around.high
    assert not around.is_significant


def test_the_bootstrap_of_skewed_differences_is_accelerated_as_scipys_is() -> None:
    """Without acceleration the upper end is 9 % lower, with twice as much 12 % higher."""
    apart = np.exp(2.2 * np.random.default_rng(1).standard_normal(25))
    found = difference([(one, 0.0) for one in apart.tolist()])
    assert found is not None
    draws = np.random.default_rng(2)
    theirs = scipy.stats.bootstrap((apart,), np.mean, method="BCa", n_resamples=100_000, rng=draws).confidence_interval
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=0.03)
