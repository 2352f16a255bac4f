"""What runs and searches take is said before they run, and holds."""

from pathlib import Path
from typing import Any

import pytest

from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.forecast import Estimate
from fl_sim.simulation.rounds import Rounds, procedure_of
from fl_sim.simulation.timing import Stopwatch, Timing
from fl_sim.stages.dafl.stage import SynthesisStage
from fl_sim.tables import forecast as forecasting
from fl_sim.tables.forecast import (
    START_SECONDS,
    Forecast,
    SearchForecast,
    forecast,
    in_time,
    search_forecasts,
    search_in_words,
    seconds_together,
    time_in_words,
)
from fl_sim.tables.plan import TableSettings, plan_table
from fl_sim.tables.tuning import Search, searches_of
from fl_sim.tables.tuning_space import rungs


def left(seconds: float | None, **others: Any) -> Forecast:
    known = {"rounds": 10, "done": 0, "is_finished": False, "has_pool": False, **others}
    return Forecast("run", estimate=Estimate(seconds, None), **known)


@pytest.mark.parametrize(
    ("found", "jobs", "seconds"),
    [
        ([left(10), left(10), left(10)], 1, 30),
        ([left(10), left(10), left(10)], 2, 20),
        ([left(10), left(30), left(10)], 2, 30),
        ([left(10, done=5), left(10, is_finished=True)], 2, 5),
        ([left(10, done=2), left(70, is_finished=True)], 2, 8),
        ([left(10), left(30), left(20)], 3, 30),
        ([left(30), left(10), left(20)], 3, 30),
        ([left(20), left(10), left(30)], 3, 30),
        ([left(30), left(10), left(10), left(15)], 2, 35),
    ],
)
def test_runs_take_turns(found: list[Forecast], jobs: int, seconds: float) -> None:
    assert seconds_together(found, jobs) == START_SECONDS + seconds


def test_nothing_left_takes_no_time_and_what_was_not_timed_is_not_known() -> None:
    assert seconds_together([left(10, is_finished=True)], 2) == 0
    assert seconds_together([left(None)], 2) is None
    assert seconds_together([left(10), left(None)], 2) == START_SECONDS + 10
    assert time_in_words([left(96), left(None), left(1, is_finished=True)], 2) == (
        "3 runs, 1 finished; the remaining rounds take about 2 min with 2 runs in parallel, as estimated from timed "
        "steps (1 of the runs could not be timed, and are not included)"
    )


def test_the_time_is_told_for_one_run_at_a_time_and_what_is_finished_is_not_missing_in_it() -> None:
    assert time_in_words([left(96)], 1) == (
        "1 run, 0 finished; the remaining rounds take about 2 min, as estimated from timed steps"
    )
    assert time_in_words([left(None, is_finished=True), left(6)], 3) == (
        "2 runs, 1 finished; the remaining rounds take about 10 s with 3 runs in parallel, as estimated from "
        "timed steps"
    )


def test_a_time_is_told_in_the_unit_in_which_it_is_a_small_number() -> None:
    seconds = (0.0, 0.4, 99.4, 100.0, 5999.0, 6000.0, 45_000.0)
    assert [in_time(one) for one in seconds] == ["1 s", "1 s", "99 s", "2 min", "100 min", "1.7 h", "12.5 h"]


FAULTY = """
from torch import nn

class Faulty(nn.Linear):
    def forward(self, inputs):
        if len(inputs) > 2:  # which is how many it is tried with as it is made
            raise RuntimeError("no")
        return super().forward(inputs.flatten(1))

def factory(input_shape, num_classes):
    return Faulty(64, num_classes)
"""


@pytest.mark.parametrize("own", [True, False])
def test_a_model_that_fails_is_not_timed_and_one_that_might_end_the_process_is_not_tried_by_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, own: bool
) -> None:
    (tmp_path / f"faulty_{own}.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    watch = Stopwatch()
    runs = {name: Experiment(model=name) for name in (f"faulty_{own}:factory", "logistic")}
    faulty, fine = forecast(runs, tmp_path, None, watch, timed_own_models=own)
    assert faulty.seconds_left is None
    assert fine.seconds_left is not None
    failed = [timing.why_not for _, timing in watch.told if timing.why_not]
    assert failed == (["it failed: no"] * 2 if own else [])
    assert (
        faulty.estimate.left_out
        == (
            "a step of faulty_True:factory on digits (plain, 64 records)",
            "measuring faulty_True:factory on a record of digits",
        )
        if own
        else True
    )


def test_synthetic_records_are_timed_once_for_all_splits_budgets_and_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[tuple[float, float]] = []

    def release(stage: SynthesisStage, *_: int) -> Any:
        timed.append((stage.settings.gamma, stage.settings.epsilon))
        return lambda: None

    monkeypatch.setattr(SynthesisStage, "_release", release)
    monkeypatch.setattr(Stopwatch, "timing", lambda _, work: Timing(piece=10.0 if work.makes else 0.0))

    def cell(seed: int, **preprocess: Any) -> Experiment:
        settings = {"kind": "da-fl", "generator": "mean-embedding", **preprocess}
        return experiment_from({"model": "logistic", "engine": "inprocess", "seed": seed, "preprocess": settings})

    alike = {"a": cell(0), "b": cell(1), "c": cell(0, epsilon=1), "d": cell(0, train_on="synthetic")}
    runs = {**alike, "more": cell(0, gamma=0.5), "none": experiment_from({})}
    found = forecast(runs, tmp_path, None, Stopwatch())
    assert list(dict.fromkeys(timed)) == [(0.05, 10.0), (0.5, 10.0)]
    made = {one.name: one.estimate.synthetic_seconds > 40 for one in found}
    assert made == {"a": True, "b": True, "c": True, "d": False, "more": True, "none": False}, "d has the pool of a"


def test_runs_whose_steps_are_alike_share_one_timing_and_are_told_in_the_order_they_came(tmp_path: Path) -> None:
    """FedAvg and those that differ from it at the server alone take the same steps, whatever the split and the rate."""
    alike: dict[str, Any] = {"model": "logistic", "engine": "inprocess"}
    changes: list[dict[str, Any]] = [
        {}, {"seed": 3}, {"algorithm": "fedadam"}, {"partition": "iid"}, {"local": {"learning_rate": 0.5}},
    ]  # fmt: skip
    runs = {f"{number}": experiment_from({**alike, **one}) for number, one in enumerate(changes)}
    runs["other"] = experiment_from({**alike, "algorithm": "scaffold"})
    watch = Stopwatch()
    assert [one.name for one in forecast(runs, tmp_path, None, watch)] == list(runs)
    assert [what for what, _ in watch.told] == [
        "a step of logistic on digits (plain, 64 records)", "measuring logistic on a record of digits",
        "a step of logistic on digits (scaffold, 64 records)",
    ]  # fmt: skip


def test_what_a_slow_network_leaves_untimed_is_a_lower_bound_by_name(tmp_path: Path) -> None:
    """The clock moves by a minute whenever it is looked at: no piece of work fits."""
    ticks = iter(range(0, 10**9, 60))
    watch = Stopwatch(12.0, clock=lambda: float(next(ticks)))
    runs = {"one": experiment_from({"model": "logistic", "engine": "inprocess"})}
    [found] = forecast(runs, tmp_path, None, watch)
    assert found.estimate.at_least or found.estimate.seconds is None
    assert set(found.estimate.left_out) == {
        "a step of logistic on digits (plain, 64 records)",
        "measuring logistic on a record of digits",
    }


def test_a_message_is_made_once_for_runs_that_differ_in_split_and_seeds_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    traffic = Rounds.traffic
    monkeypatch.setattr(
        Rounds, "traffic", lambda self: made.append(self.job.experiment.algorithm.kind) or traffic(self)
    )
    runs = {
        f"{number}": experiment_from({"model": "logistic", **one})
        for number, one in enumerate([{}, {"seed": 3, "partition": "iid"}, {"algorithm": "scaffold"}, {"rounds": 3}])
    }
    found = forecast(runs, tmp_path, None, None, billed=lambda: True)
    assert made == ["fedavg", "scaffold", "fedavg"]
    assert [one.estimate.traffic for one in found] == [
        procedure_of(job_of(one)).traffic()["rounds"] for one in runs.values()
    ]


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
    monkeypatch.setattr(forecasting, "rounds_done", lambda path: 2)
    assert [(one.done, one.seconds_left) for one in forecasts(searched)] == [(8, 12.0), (8, 24.0)]
    monkeypatch.setattr(forecasting, "rounds_done", lambda path: 5)
    assert [(one.done, one.seconds_left) for one in forecasts(searched)] == [(14, 0.0), (14, 0.0)]


def search(trials: int, rounds: int, done: int, seconds: float | None) -> SearchForecast:
    cell: Any = None
    return SearchForecast(Search(cell, {}, rungs(trials, 8, 2)), rounds, done, seconds)


def test_what_searches_take_is_told_of_all_of_them_together() -> None:
    some = [search(4, 1000, 30, 600.0), search(8, 500, 70, 1200.0), search(16, 700, 0, 0.0)]
    told = "28 trials with 2,200 rounds in total, 100 of them done"
    assert search_in_words(some, 2) == (
        f"3 searches for settings, one per row and column: {told}; the remaining rounds take about 15 min with "
        "2 runs in parallel"
    )
    assert search_in_words([*some[:2], search(16, 700, 0, None)], 2) == (
        f"3 searches for settings, one per row and column: {told}"
    )
    assert search_in_words(some[:1], 1) == (
        "1 search for settings, one per row and column: 4 trials with 1,000 rounds in total, 30 of them done; the "
        "remaining rounds take about 10 min"
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
    monkeypatch.setattr(forecasting, "rounds_done", lambda path: read.append(path.name) or 0)
    forecasts(searched, local={"schedule": "cosine"})
    assert len(read) == len(set(read)) == 8
    assert {name[-9:] for name in read} == {"-2-rounds"}
