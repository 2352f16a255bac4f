"""The searches of a table and their trials, which are checked before the first one runs."""

from typing import Any

import pytest

from fl_sim.errors import UserError
from fl_sim.tables import tuning_trials
from fl_sim.tables.plan import TableSettings, plan_table, table_settings
from fl_sim.tables.tuning_space import Rung, Tune, drawn
from fl_sim.tables.tuning_trials import Search, Trial, experiment_of, proposed_trial, searches_of, turns

RATES = {"low": 0.001, "high": 1.0, "log": True}


def settings(*, grid: dict[str, Any] | None = None, base: dict[str, Any] | None = None, **tuning: Any) -> TableSettings:
    table = {
        "base": {"model": "logistic", "rounds": 8, "clients": 4, **(base or {})},
        "grid": {"algorithm": ["fedavg"], **(grid or {})}, "centralized": False,
        "tune": {"trials": 8, "space": {"local.learning_rate": RATES}, **tuning},
    }  # fmt: skip
    return table_settings(table, [], "the test")


def searches(chosen: TableSettings) -> tuple[Search, ...]:
    return searches_of(chosen, plan_table(chosen), None)


def test_a_row_is_searched_for_in_each_column_on_its_first_seed_with_the_rounds_of_its_cell() -> None:
    grid = {"partition": ["iid", "label-2"], "seed": [3, 1, 2], "rounds": [8, 4]}
    found = searches(settings(grid=grid))
    assert [(*one.place, one.cell.seed, one.rungs[-1]) for one in found] == [
        (f"FedAvg, rounds={rounds}", column, 3, Rung(2, rounds))
        for rounds in (8, 4)
        for column in ("digits iid", "digits 2-Label")
    ]
    assert {one.rungs[-1] for one in searches(settings(grid=grid, rounds=16))} == {Rung(2, 16)}


@pytest.mark.parametrize(("trials", "first"), [(1, 1), (2, 1), (3, 1), (7, 1), (8, 2), (11, 2), (16, 4), (100, 25)])
def test_optuna_is_asked_for_one_trial_after_another_once_a_quarter_was_drawn(trials: int, first: int) -> None:
    together = turns(Tune(trials=trials, search="optuna"))
    assert together == [range(first), *(range(number, number + 1) for number in range(first, trials))]
    assert turns(Tune(trials=trials)) == [range(trials)]


def test_trials_count_from_one_and_are_drawn_by_their_numbers_unless_optuna_proposes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = settings(search="optuna", seed=5)
    assert chosen.tune is not None
    (search,) = searches(settings())
    monkeypatch.setattr(tuning_trials, "proposed", lambda space, tried, seed: {"asked": (len(tried), seed)})
    trials = [proposed_trial(search, chosen.tune, number, ()) for number in range(8)]
    assert [trial.number for trial in trials] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [trial.values for trial in trials[:2]] == [drawn(search.space, 5, number) for number in (0, 1)]
    assert [trial.values for trial in trials[2:]] == [{"asked": (0, 5)}] * 6


def test_a_trial_has_the_rounds_of_its_rung_and_is_judged_as_the_search_says_whatever_its_cell_says() -> None:
    grid = {"evaluate_every": [4, 2], "evaluate.validation": [0.3], "evaluate.patience": [3]}
    chosen = settings(grid=grid, base={"evaluate": {"target_accuracy": 0.5}}, validation=0.2)
    for search in searches(chosen):
        made = experiment_of(chosen, Trial(search, 1, {"local.learning_rate": 0.25, "local.epochs": 3}), 5)
        assert (made.rounds, made.local.learning_rate, made.local.epochs, made.evaluate_every) == (5, 0.25, 3, 1)
        judged = made.evaluate
        assert (judged.validation, judged.test, judged.patience, judged.target_accuracy) == (0.2, "never", 0, 0)


@pytest.mark.parametrize(("low", "high", "refused"), [(0.5, 1.0, "1"), (-0.5, 0.5, "-0.5"), (-0.5, 1.0, "-0.5|1")])
def test_both_ends_of_a_range_are_tried_before_the_first_trial(low: float, high: float, refused: str) -> None:
    with pytest.raises(UserError, match=rf"local.momentum = ({refused})"):
        searches(settings(space={"local.momentum": {"low": low, "high": high}}))
    searches(settings(space={"local.momentum": {"low": 0.0, "high": 0.5}}))


@pytest.mark.parametrize("order", [1, -1])
def test_one_row_under_privacy_is_enough_to_ask_for_public_records(order: int) -> None:
    private = {"algorithm": "fedavg", "aggregator": "global-dp", "sampler": "poisson:0.5"}
    chosen = settings(grid={"algorithm": ["scaffold", private][::order]})
    with pytest.raises(UserError, match=r"row FedAvg, .*global-dp.* promises privacy"):
        searches(chosen)
    assert len(searches(settings(grid={"algorithm": ["scaffold"]}))) == 1


def test_own_test_records_are_public_where_a_private_trial_is_judged_by_them_and_public_ones_are_not_the_users() -> (
    None
):
    private = {"aggregator": "global-dp", "sampler": "poisson:0.5"}
    for data, base, public in (
        ("npz:public.npz", private, True), ("mnist", private, False), ("npz:public.npz", {}, False),
        ("mnist", {}, False),
    ):  # fmt: skip
        chosen = settings(base=base, data=data)
        search = Search(plan_table(chosen).cells[0], {}, ())
        assert experiment_of(chosen, Trial(search, 1, {}), 5).evaluate.test_is_public is public


def test_what_a_row_sets_beside_the_defaults_is_not_searched_for_and_its_defaults_are() -> None:
    for algorithm, key in (("fedprox:2", "algorithm.mu"), ({"kind": "fedprox", "mu": 0.5}, "algorithm.mu")):
        with pytest.raises(UserError, match=f"sets algorithm.* and tune searches for {key}"):
            searches(settings(grid={"algorithm": [algorithm]}, space={key: [0.1, 1.0]}))
    (search,) = searches(settings(grid={"algorithm": ["fedprox"]}, space={"algorithm.mu": [0.1, 1.0]}))
    assert [*search.space] == ["algorithm.mu"]
