"""How long many runs take side by side."""

from pathlib import Path
from typing import Any

import pytest

from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.simulation.estimate import Estimate
from fl_sim.simulation.pace import pace_of
from fl_sim.stages.dafl.stage import Synthesis
from fl_sim.tables import forecast as forecasting
from fl_sim.tables.forecast import START_SECONDS, Forecast, forecast, in_time, seconds_together, time_in_words


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
        "3 runs, 1 finished; the rest takes about 2 min with 2 side by side, by steps that were timed just now (1 of "
        "them were not, and come on top)"
    )


def test_the_time_is_told_for_one_run_at_a_time_and_what_is_finished_is_not_missing_in_it() -> None:
    assert time_in_words([left(96)], 1) == (
        "1 run, 0 finished; the rest takes about 2 min, by steps that were timed just now"
    )
    assert time_in_words([left(None, is_finished=True), left(6)], 3) == (
        "2 runs, 1 finished; the rest takes about 10 s with 3 side by side, by steps that were timed just now"
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
    timed: list[str] = []
    monkeypatch.setattr(forecasting, "pace_of", lambda job: timed.append(job.experiment.model) or pace_of(job))
    runs = {name: Experiment(model=name) for name in (f"faulty_{own}:factory", "logistic")}
    faulty, fine = forecast(runs, tmp_path, None, {}, timed_own_models=own)
    assert faulty.seconds_left is None
    assert fine.seconds_left is not None
    assert timed == (list(runs) if own else ["logistic"])


def test_synthetic_records_are_timed_once_for_all_splits_budgets_and_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []
    monkeypatch.setattr(Synthesis, "seconds", lambda stage: timed.append(stage.settings) or 100.0)

    def cell(seed: int, **preprocess: Any) -> Experiment:
        settings = {"kind": "da-fl", "generator": "mean-embedding", **preprocess}
        return experiment_from({"model": "logistic", "engine": "inprocess", "seed": seed, "preprocess": settings})

    alike = {"a": cell(0), "b": cell(1), "c": cell(0, epsilon=1), "d": cell(0, train_on="synthetic")}
    found = forecast({**alike, "more": cell(0, gamma=0.5), "none": experiment_from({})}, tmp_path, None, {})
    assert [(settings.gamma, settings.epsilon) for settings in timed] == [(0.05, 10.0), (0.5, 10.0)]
    made = {one.name: (one.estimate.seconds or 0) > 40 for one in found}
    assert made == {"a": True, "b": True, "c": True, "d": False, "more": True, "none": False}, "d has the pool of a"
