"""Virtual time, worked out by hand; and rounds with a deadline."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_sim.devices.clock import Clock, turnout
from fl_sim.devices.fleet import Fleet
from fl_sim.types import LocalSettings, Traffic

SETTINGS = LocalSettings(0.1, 0.0, 0.0, batch_size=4, epochs=2)


def clock(
    step: list[float], sizes: list[int], record: float = 0.0, availability: float = 1.0, jitter: float = 0.0
) -> Clock:
    """Return the clock of clients with a download of 100 and an upload of 10 bytes a second, 50 bytes each way."""
    ones = np.ones(len(step))
    fleet = Fleet(np.array(step), record * ones, 100 * ones, 10 * ones, availability * ones, jitter)
    return Clock(fleet, np.array(sizes), SETTINGS, Traffic(50, 50), seed=1)


def test_a_turn_is_the_models_way_the_steps_and_the_updates_way() -> None:
    by_steps = clock([0.25, 1.0], [10, 0])
    assert by_steps.steps(0) == 6
    assert by_steps.seconds(0, 1, 6) == pytest.approx(0.5 + 6 * 0.25 + 5)
    assert by_steps.seconds(1, 1, by_steps.steps(1)) == pytest.approx(5.5), "a client without records only answers"


def test_a_smaller_last_batch_takes_less_where_a_device_goes_by_records() -> None:
    by_records = clock([0.0], [10], record=0.1)
    assert [by_records.seconds(0, 1, steps) for steps in (1, 2, 3, 4, 6)] == pytest.approx(
        [5.5 + 0.1 * records for records in (4, 8, 10, 14, 20)]
    )


def test_jitter_and_availability_are_drawn_for_each_turn_and_the_same_again() -> None:
    shaken = clock([1.0] * 200, [10] * 200, availability=0.25, jitter=0.5)
    factors = [shaken.seconds(client, 1, 6) / 11.5 for client in range(200)]
    assert factors == [shaken.seconds(client, 1, 6) / 11.5 for client in range(200)]
    assert factors[0] != shaken.seconds(0, 2, 6) / 11.5
    assert abs(np.log(factors).mean()) < 0.1
    assert np.log(factors).std() == pytest.approx(0.5, abs=0.08)
    assert shaken.there(1).mean() == pytest.approx(0.25, abs=0.08)
    assert (shaken.there(1) == shaken.there(1)).all()
    assert (shaken.there(1) != shaken.there(2)).any()


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    held = turnout(clock([0.1, 0.5], [10, 10]), 1, [0, 1], deadline=0.0, partial=False)
    assert (held.in_time.tolist(), held.num_late, held.seconds) == ([0, 1], 0, pytest.approx(8.5))


def test_who_is_late_is_lost_and_the_round_lasts_to_the_deadline() -> None:
    held = turnout(clock([0.1, 0.5], [10, 10]), 1, [0, 1], deadline=7.0, partial=False)
    assert (held.asked.tolist(), held.in_time.tolist(), held.num_late, held.seconds) == ([0, 1], [0], 1, 7.0)


def test_who_would_be_late_does_the_steps_that_fit_or_is_lost() -> None:
    held = turnout(clock([0.1, 0.5, 2.0], [10, 10, 10]), 1, [0, 1, 2], deadline=7.0, partial=True)
    assert (held.in_time.tolist(), dict(held.most_steps), held.seconds) == ([0, 1], {1: 3}, 7.0)
    all_in_time = turnout(clock([0.1, 0.5], [10, 10]), 1, [0, 1], deadline=7.4, partial=True)
    assert (all_in_time.most_steps, all_in_time.seconds) == ({1: 3}, pytest.approx(7.0))


def test_a_round_without_anybody_lasts_until_the_server_looks_again() -> None:
    rare = clock([0.1] * 2, [10] * 2, availability=1e-3)
    held = turnout(rare, 1, [0, 1], deadline=7.0, partial=False)
    assert (held.asked.tolist(), held.in_time.tolist(), held.num_late, held.seconds) == ([], [], 0, 1.0)


@given(st.floats(1e-3, 3), st.integers(0, 50), st.floats(5, 40), st.floats(0, 0.2), st.floats(0, 1))
def test_the_steps_that_fit_are_the_most_that_do(
    step: float, size: int, deadline: float, record: float, jitter: float
) -> None:
    one = clock([step], [size], record=record, jitter=jitter)
    found, most = one.steps_within(0, 1, deadline), one.steps(0)
    fitting = [steps for steps in range(min(1, most), most + 1) if one.seconds(0, 1, steps) <= deadline]
    assert found == (max(fitting) if fitting else None)


def test_the_model_comes_by_the_download_and_the_update_goes_by_the_upload() -> None:
    """All four numbers differ, so that no two of them can change places."""
    fleet = Fleet(np.zeros(2), np.ones(2), np.array([100.0, 40.0]), np.array([10.0, 5.0]), np.ones(2))
    ways = Clock(fleet, np.array([0, 0]), SETTINGS, Traffic(down=600, up=70), seed=1)
    assert ways.seconds(0, 1, 0) == pytest.approx(600 / 100 + 70 / 10)
    assert ways.seconds(1, 1, 0) == pytest.approx(600 / 40 + 70 / 5)


def test_a_round_lasts_as_long_as_the_slowest_of_several_whoever_is_first_or_last() -> None:
    held = turnout(clock([0.1, 0.5, 0.2], [10, 10, 10]), 1, [0, 1, 2], deadline=0.0, partial=False)
    assert held.seconds == pytest.approx(8.5)


def test_a_device_may_go_by_steps_and_by_records_both() -> None:
    assert clock([0.25], [10], record=0.5).seconds(0, 1, 3) == pytest.approx(5.5 + 3 * 0.25 + 10 * 0.5)


def test_who_is_through_at_the_deadline_itself_is_in_time() -> None:
    """All times are sums of powers of two, which are exact."""
    exact = clock([0.25, 2.0], [10, 10])
    assert exact.steps_within(0, 1, 5.75) == 1
    assert turnout(exact, 1, [0, 1], deadline=7.0, partial=False).in_time.tolist() == [0]


def test_every_client_is_there_as_often_as_it_is_available_itself() -> None:
    mixed = clock([0.1] * 3, [10] * 3)
    mixed = replace(mixed, fleet=replace(mixed.fleet, availability=np.array([1.0, 0.5, 0.1])))
    looks = np.mean([mixed.there(look) for look in range(400)], axis=0)
    assert looks == pytest.approx([1.0, 0.5, 0.1], abs=0.07)
