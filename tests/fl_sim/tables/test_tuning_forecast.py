"""What a search takes: rounds, trials and seconds of searches that all differ."""

from pathlib import Path
from typing import Any

import pytest

from fl_sim.simulation.estimate import Estimate
from fl_sim.tables import tuning_forecast
from fl_sim.tables.forecast import Forecast
from fl_sim.tables.plan import TableSettings, plan_table
from fl_sim.tables.tuning_forecast import SearchForecast, search_forecasts, search_in_words
from fl_sim.tables.tuning_space import rungs
from fl_sim.tables.tuning_trials import Search, searches_of


@pytest.fixture
def searched() -> TableSettings:
    """Two methods with a search each."""
    table = {
        "base": {"model": "logistic", "rounds": 5, "partition": "label-2", "clients": 4},
        "grid": {"algorithm": ["fedavg", "scaffold"]}, "centralized": False,
        "tune": {"trials": 4, "space": {"local.learning_rate": {"low": 0.001, "high": 1.0, "log": True}}},
    }  # fmt: skip
    return TableSettings.model_validate(table)


def forecasts(settings: TableSettings, **changes: Any) -> list[SearchForecast]:
    """Return what the searches take where FedAvg's own run takes 10 s and SCAFFOLD's 20 s, the bound's 40 s."""
    settings = settings.model_copy(update={"base": {**settings.base, **changes}})
    plan = plan_table(settings)
    seconds = {cell.name: {"FedAvg": 10.0, "SCAFFOLD": 20.0, "Centralized": 40.0}[cell.row] for cell in plan.cells}
    runs = [
        Forecast(name, 5, 0, is_finished=False, estimate=Estimate(each, None), has_pool=False)
        for name, each in seconds.items()
    ]
    return search_forecasts(settings, searches_of(settings, plan, None), Path("nowhere"), None, runs)


def test_each_search_takes_the_time_of_its_own_runs_rounds_that_are_not_done(
    searched: TableSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four trials of 2 rounds; two of them go on to 5, or begin anew where they depend on the number of rounds."""
    assert [(one.rounds, one.done, one.seconds_left) for one in forecasts(searched)] == [(14, 0, 28.0), (14, 0, 56.0)]
    anew = forecasts(searched, local={"schedule": "cosine"})
    assert [(one.rounds, one.seconds_left) for one in anew] == [(18, 36.0), (18, 72.0)]
    monkeypatch.setattr(tuning_forecast, "rounds_done", lambda path: 2)
    assert [(one.done, one.seconds_left) for one in forecasts(searched)] == [(8, 12.0), (8, 24.0)]
    monkeypatch.setattr(tuning_forecast, "rounds_done", lambda path: 5)
    assert [(one.done, one.seconds_left) for one in forecasts(searched)] == [(14, 0.0), (14, 0.0)]


def search(trials: int, rounds: int, done: int, seconds: float | None) -> SearchForecast:
    cell: Any = None
    return SearchForecast(Search(cell, {}, rungs(trials, 8, 2)), rounds, done, seconds)


def test_what_searches_take_is_told_of_all_of_them_together() -> None:
    some = [search(4, 1000, 30, 600.0), search(8, 500, 70, 1200.0), search(16, 700, 0, 0.0)]
    told = "28 trials with 2,200 rounds together, 100 of them done"
    assert search_in_words(some, 2) == (
        f"3 searches for settings, one a row and column: {told}; the rest takes about 15 min with 2 side by side"
    )
    assert search_in_words([*some[:2], search(16, 700, 0, None)], 2) == (
        f"3 searches for settings, one a row and column: {told}"
    )
    assert search_in_words(some[:1], 1) == (
        "1 search for settings, one a row and column: 4 trials with 1,000 rounds together, 30 of them done; the rest "
        "takes about 10 min"
    )


def test_trials_that_go_on_twice_train_each_round_once(searched: TableSettings) -> None:
    """Eight trials of 2 rounds, four of them go on to 4 and two of these to 9, or begin anew."""
    assert searched.tune is not None
    climbing = searched.model_copy(update={"tune": searched.tune.model_copy(update={"trials": 8, "rounds": 9})})
    assert [one.rounds for one in forecasts(climbing)] == [8 * 2 + 4 * 2 + 2 * 5] * 2
    anew = forecasts(climbing, local={"schedule": "cosine"})
    assert [one.rounds for one in anew] == [8 * 2 + 4 * 4 + 2 * 9] * 2


def test_searches_with_the_same_trials_take_their_time_once(searched: TableSettings) -> None:
    """The upper bound is the same run in both columns, whatever their splits are."""
    grid = {"algorithm": ["fedavg"], "partition": ["label-1", "label-2"]}
    found = forecasts(searched.model_copy(update={"grid": grid, "centralized": True}))
    assert {one.search.place for one in found} == {
        ("FedAvg", "digits 1-Label"), ("FedAvg", "digits 2-Label"), ("Centralized", "digits 1-Label"),
    }  # fmt: skip


def test_what_is_done_is_read_where_the_shortest_trials_run(
    searched: TableSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(tuning_forecast, "rounds_done", lambda path: read.append(path.name) or 0)
    forecasts(searched, local={"schedule": "cosine"})
    assert len(read) == len(set(read)) == 8
    assert {name[-9:] for name in read} == {"-2-rounds"}
