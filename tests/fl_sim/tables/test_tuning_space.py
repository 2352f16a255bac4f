"""[tune] says how many trials there are, what a dimension may be, and which values a trial draws or is proposed."""

import math
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fl_sim.errors import UserError
from fl_sim.tables.tuning_space import Method, Range, Rung, Tune, ValueList, drawn, proposed, rungs, spaces


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("trials", 1, 10_000), ("rounds", 0, 10**9), ("halving", 2, None), ("seed", 0, None)],
)
def test_numbers_of_a_search_have_limits_that_may_be_taken(name: str, least: int, most: int | None) -> None:
    def tune(value: int) -> Any:
        return getattr(Tune.model_validate({name: value}), name)

    taken = [least, least + 1, *([most - 1, most] if most else [10**12])]
    assert [tune(value) for value in taken] == taken
    for value in (least - 1, *([most + 1] if most else [])):
        with pytest.raises(ValidationError, match=rf"{name}\n.*(greater|less) than or equal"):
            tune(value)


RATE = Range(low=0.001, high=0.1, log=True)
FEDAVG = Method("FedAvg", "fedavg", frozenset())
FEDPROX = Method("FedProx", "fedprox", frozenset())


@given(st.integers(1, 300), st.integers(1, 300), st.integers(2, 5))
def test_a_search_halves_its_trials_and_multiplies_their_rounds(trials: int, rounds: int, halving: int) -> None:
    steps = rungs(trials, rounds, halving)
    assert (steps[0].trials, steps[-1].rounds) == (trials, rounds)
    for before, after in pairwise(steps):
        assert after.trials == before.trials // halving >= 1
        assert after.rounds // halving == before.rounds >= 1
    assert steps[-1].trials <= halving or steps[0].rounds < halving  # it goes on as long as it can


def test_the_rungs_of_sixteen_trials_cost_about_the_same() -> None:
    steps = rungs(16, 20, 2)
    assert steps == (Rung(16, 2), Rung(8, 5), Rung(4, 10), Rung(2, 20))
    assert sum(step.trials * step.rounds for step in steps) == 32 + 40 + 40 + 40


def test_methods_share_the_draws_of_shared_knobs_whatever_other_knobs_they_have() -> None:
    rates = {"local.learning_rate": {"low": 0.001, "high": 0.1}}
    tune = Tune(space=rates, spaces={"fedprox": {"algorithm.mu": [0, 1]}})
    found = spaces(tune, [FEDAVG, FEDPROX], ())
    alone = spaces(Tune(space=rates), [FEDAVG], ())
    for trial in range(20):
        ours, theirs = drawn(found["FedAvg"], 7, trial), drawn(found["FedProx"], 7, trial)
        assert ours == {"local.learning_rate": theirs["local.learning_rate"]} == drawn(alone["FedAvg"], 7, trial)


def test_another_seed_draws_other_values() -> None:
    for dimension in (RATE, Range(low=1, high=10**6), ValueList(tuple(range(20)))):
        first, again, other = ([dimension.drawn(seed, "key", trial) for trial in range(9)] for seed in (0, 0, 1))
        assert first == again != other
        assert first != [dimension.drawn(0, "other key", trial) for trial in range(9)]


def test_every_value_of_a_list_is_tried_as_often_as_any_other() -> None:
    values = [ValueList(("a", "b", "c")).drawn(3, "key", trial) for trial in range(12)]
    assert Counter(values) == {"a": 4, "b": 4, "c": 4}
    assert [values[turn : turn + 3] for turn in (0, 3, 6, 9)] != [values[:3]] * 4


@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e6), st.booleans(), st.integers(0, 10**6))
def test_draws_stay_in_their_range_and_are_short_enough_to_be_typed(
    low: float, factor: float, log: Any, trial: int
) -> None:
    value = Range(low=low, high=low * factor, log=log).drawn(0, "key", trial)
    assert low <= value <= low * factor
    assert value in {low, low * factor} or value == float(f"{value:.3g}")


def test_whole_ends_make_whole_numbers_and_reach_both_ends() -> None:
    assert {Range(low=1, high=3).drawn(0, "key", trial) for trial in range(50)} == {1, 2, 3}
    assert all(isinstance(Range(low=1, high=64, log=True).drawn(0, "key", trial), int) for trial in range(9))
    for low, high in ((1.0, 3.0), (1, 3.0), (1.0, 3)):
        assert isinstance(Range(low=low, high=high).drawn(0, "key", 0), float)


def test_a_value_is_rounded_to_three_digits_and_stays_between_the_ends_which_both_show_what_may_be_taken() -> None:
    narrow = Range(low=0.12349, high=0.9876)
    assert [narrow.rounded(number) for number in (0.1234901, 0.45678, 0.98759)] == [0.12349, 0.457, 0.9876]
    assert narrow.extremes() == (0.12349, 0.9876)


def test_a_logarithmic_range_has_as_much_below_its_geometric_middle_as_above() -> None:
    below = sum(RATE.drawn(0, "key", trial) < math.sqrt(0.001 * 0.1) for trial in range(1000))
    assert 450 < below < 550


@pytest.mark.parametrize(
    ("dimension", "at_end", "inside"),
    [
        (RATE, [0.001, 0.0015, 0.07, 0.1], [0.0016, 0.01, 0.06]),
        (Range(low=0, high=10), [0, 1, 9, 10], [2, 5, 8]),
        (ValueList((1, 0.001, 0.1)), [1, 0.001], [0.1]),
        (ValueList((1, 2)), [], [1, 2]),
        (ValueList(("adam", "sgd", "adamw")), [], ["adam", "adamw"]),
        (ValueList((1, 2, 3, "auto")), [], [1, 3]),
        (ValueList((5, 2, 7, True)), [], [2, 7]),
    ],
)
def test_a_value_at_an_end_of_what_could_be_drawn_is_noticed(
    dimension: Any, at_end: list[Any], inside: list[Any]
) -> None:
    assert all(dimension.is_at_end(value) for value in at_end)
    assert not any(dimension.is_at_end(value) for value in inside)


def test_an_upper_bound_is_tuned_in_what_it_has_a_place_for() -> None:
    tune = Tune(space={"local.learning_rate": [0.1], "sampler.cohort_size": [2]})
    bound = Method("Centralized", "centralized", frozenset(), is_bound=True)
    assert list(spaces(tune, [bound], {"sampler"})["Centralized"]) == ["local.learning_rate"]
    assert spaces(Tune(space={"sampler.cohort_size": [2]}), [bound], {"sampler"}) == {"Centralized": {}}


def test_of_one_knob_the_space_of_the_row_goes_over_that_of_its_kind_and_this_over_the_shared_one() -> None:
    key = "algorithm.mu"
    tune = Tune(space={key: [1]}, spaces={"fedprox": {key: [2]}, "Mine": {key: [3]}})
    found = spaces(tune, [FEDAVG, FEDPROX, Method("Mine", "fedprox", frozenset())], ())
    assert [found[row][key].extremes() for row in ("FedAvg", "FedProx", "Mine")] == [(1,), (2,), (3,)]


def test_a_partial_search_leaves_rows_without_a_space_as_they_are() -> None:
    found = spaces(Tune(partial=True, spaces={"fedprox": {"algorithm.mu": [1]}}), [FEDAVG, FEDPROX], ())
    assert {row: list(space) for row, space in found.items()} == {"FedAvg": [], "FedProx": ["algorithm.mu"]}


def test_a_row_may_have_a_space_by_its_name_over_that_of_its_kind() -> None:
    tune = Tune(spaces={"fedprox": {"algorithm.mu": [1]}, "DA-FL + FedProx": {"preprocess.gamma": [0.1]}})
    found = spaces(tune, [FEDPROX, Method("DA-FL + FedProx", "fedprox", frozenset())], ())
    assert {row: list(space) for row, space in found.items()} == {
        "FedProx": ["algorithm.mu"],
        "DA-FL + FedProx": ["algorithm.mu", "preprocess.gamma"],
    }


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, "row FedAvg has no setting to search for"),
        ({"a": []}, r"tune.space.a = []: give a list of one or more values, or a range"),
        ({"a": 3}, "tune.space.a = 3: give a list"),
        ({"a": {"low": 2, "high": 2}}, "low = 2 must be below high = 2"),
        ({"a": {"low": 0, "high": 2, "log": True}}, "log = true needs low above 0"),
        ({"a": {"low": "1", "high": 2}}, "tune.space.a.low = '1': must be a number"),
        ({"a": {"high": 2}}, "tune.space.a.low = {'high': 2}: field required"),
        ({"a": {"low": 2}}, "tune.space.a.high = {'low': 2}: field required"),
        ({"a": {"low": 1, "hgih": 2}}, "unknown key 'tune.space.a.hgih' (did you mean 'high'?)"),
        ({"local": {"learning_rate": {"lo": 1}}}, "tune.space.local.learning_rate.lo = 1: give a list"),
        ({"data": ["mnist"]}, "data cannot be tuned"),
        ({"rounds": [1]}, "rounds cannot be tuned"),
        ({"evaluate.validation": [0.1]}, "evaluate.validation cannot be tuned"),
        ({"algorithm": ["fedprox"]}, "the rows of the table are algorithms"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused_in_words(space: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        spaces(Tune(space=space), [FEDAVG], ())


def test_a_space_for_no_method_of_the_table_is_refused_with_a_guess() -> None:
    with pytest.raises(UserError, match=r"tune.spaces.fedprx: .* no such method.*'fedprox'.*fedavg, FedAvg, fedprox"):
        spaces(Tune(spaces={"fedprx": {"algorithm.mu": [1]}}), [FEDAVG, FEDPROX], ())
    with pytest.raises(UserError, match=r"tune\.spaces\.fedprox is empty"):
        spaces(Tune(spaces={"fedprox": {}}), [FEDPROX], ())


@pytest.mark.parametrize(
    ("spanned", "key"), [("algorithm.mu", "algorithm.mu"), ("local", "local.epochs"), ("local.schedule.every", "local")]
)
def test_what_the_grid_varies_is_not_tuned_as_well(spanned: str, key: str) -> None:
    method = Method("FedProx", "fedprox", frozenset({spanned}))
    with pytest.raises(
        UserError, match=f"row FedProx sets {spanned} in the grid, but tune also searches for values of {key}"
    ):
        spaces(Tune(space={key: [1]}), [method], ())
    assert spaces(Tune(space={"algorithm.music": [1]}), [method], ())


def test_proposals_of_a_logarithmic_range_are_short_and_spread_over_its_decades_and_differ_from_seed_to_seed() -> None:
    pytest.importorskip("optuna")
    space = {
        "rate": Range(low=0.001, high=1.0, log=True),
        "even": Range(low=0.001, high=1.0),
        "kind": ValueList((1, 2)),
    }
    tried = [({"rate": 0.03, "even": 0.5, "kind": 1}, 0.5)]
    found = [proposed(space, tried, seed) for seed in range(40)]
    assert found[:3] == [proposed(space, tried, seed) for seed in range(3)]
    assert all(one[key] == float(f"{one[key]:.3g}") for one in found for key in ("rate", "even"))
    assert sum(one["rate"] < 0.03 for one in found) >= 12
    assert sum(one["even"] < 0.03 for one in found) <= 6
    assert len({one["even"] for one in found}) >= 35
