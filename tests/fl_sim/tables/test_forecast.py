"""How long many runs take side by side."""

from typing import Any

import pytest

from fl_sim.simulation.estimate import Estimate
from fl_sim.tables.forecast import START_SECONDS, Forecast, seconds_together


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
    ],
)
def test_runs_take_turns(found: list[Forecast], jobs: int, seconds: float) -> None:
    assert seconds_together(found, jobs) == START_SECONDS + seconds


def test_nothing_left_takes_no_time_and_what_was_not_timed_is_not_known() -> None:
    assert seconds_together([left(10, is_finished=True)], 2) == 0
    assert seconds_together([left(10), left(None)], 2) is None
