"""The virtual clock, and the order of events where clients work at their own pace."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fl_sim.devices.clock import Clock, Schedule, ServerStep, turnout
from fl_sim.devices.settings import Fleet
from fl_sim.types import Load, LocalSettings, Traffic

SETTINGS = LocalSettings(0.1, 0.0, 0.0, batch_size=4, epochs=2)


def clock(
    step: list[float], sizes: list[int], record: float = 0.0, availability: float = 1.0, jitter: float = 0.0
) -> Clock:
    """Return the clock of clients with a download of 100 and an upload of 10 bytes a second, 50 bytes each way."""
    ones = np.ones(len(step))
    fleet = Fleet(np.array(step), record * ones, 100 * ones, 10 * ones, availability * ones, jitter)
    return Clock(fleet, np.array(sizes), SETTINGS, lambda _: Load(Traffic(50, 50)), seed=1)


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
    assert shaken.available(1).mean() == pytest.approx(0.25, abs=0.08)
    assert (shaken.available(1) == shaken.available(1)).all()
    assert (shaken.available(1) != shaken.available(2)).any()


def test_half_the_work_takes_half_the_time_of_records_and_all_of_the_time_of_steps() -> None:
    whole = clock([0.25], [10], record=0.5)
    half = replace(whole, load_of=lambda _: Load(Traffic(50, 50), 0.5))
    assert whole.seconds(0, 1, 3) - half.seconds(0, 1, 3) == pytest.approx(10 * 0.5 / 2)


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    held = turnout(clock([0.1, 0.5], [10, 10]), 1, [0, 1], deadline=0.0, partial=False)
    assert (held.in_time.tolist(), held.num_late, held.seconds) == ([0, 1], 0, pytest.approx(8.5))


def test_who_is_late_is_lost_and_the_round_lasts_to_the_deadline() -> None:
    held = turnout(clock([0.1, 0.5], [10, 10]), 1, [0, 1], deadline=7.0, partial=False)
    assert (held.available.tolist(), held.in_time.tolist(), held.num_late, held.seconds) == ([0, 1], [0], 1, 7.0)


def test_who_would_be_late_does_the_steps_that_fit_or_is_lost() -> None:
    held = turnout(clock([0.1, 0.5, 2.0], [10, 10, 10]), 1, [0, 1, 2], deadline=7.0, partial=True)
    assert (held.in_time.tolist(), dict(held.most_steps), held.seconds) == ([0, 1], {1: 3}, 7.0)
    all_in_time = turnout(clock([0.1, 0.5], [10, 10]), 1, [0, 1], deadline=7.4, partial=True)
    assert (all_in_time.most_steps, all_in_time.seconds) == ({1: 3}, pytest.approx(7.0))


def test_a_round_without_anybody_lasts_until_the_server_looks_again() -> None:
    rare = clock([0.1] * 2, [10] * 2, availability=1e-3)
    held = turnout(rare, 1, [0, 1], deadline=7.0, partial=False)
    assert (held.available.tolist(), held.in_time.tolist(), held.num_late, held.seconds) == ([], [], 0, 1.0)


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
    ways = Clock(fleet, np.array([0, 0]), SETTINGS, lambda _: Load(Traffic(down=600, up=70)), seed=1)
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
    looks = np.mean([mixed.available(look) for look in range(400)], axis=0)
    assert looks == pytest.approx([1.0, 0.5, 0.1], abs=0.07)


def clock_without_sending(speeds: list[float], availability: float = 1.0, jitter: float = 0.0) -> Clock:
    count = len(speeds)
    fast = np.full(count, np.inf)
    fleet = Fleet(np.array(speeds), np.zeros(count), fast, fast, np.full(count, availability), jitter)
    settings = LocalSettings(0.1, 0.0, 0.0, batch_size=10, epochs=1)
    return Clock(fleet, np.full(count, 10), settings, lambda _: Load(Traffic(8, 8)), seed=3)


def schedule(speeds: list[float], concurrency: int, buffer: int, **others: float) -> Schedule:
    order = np.random.default_rng(len(speeds))
    orders = [order.permutation(len(speeds)).tolist() for _ in range(60)]
    return Schedule(clock_without_sending(speeds, **others), lambda number: orders[number], concurrency, buffer)


def test_a_hand_made_federation_has_the_events_of_the_paper_by_hand() -> None:
    """Client 0 takes 1 s, client 1 takes 3 s; both work at once, and every update is a step."""
    events = Schedule(clock_without_sending([1.0, 3.0]), lambda number: range(2), concurrency=2, buffer=1)
    steps = [events.next_step() for _ in range(5)]
    assert [[turn.client for turn in step.arrived] for step in steps] == [[0], [0], [0], [1], [0]]
    assert [step.seconds for step in steps] == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert [step.staleness(step.arrived[0]) for step in steps] == [0, 0, 0, 3, 0]


def test_who_ends_at_the_same_time_ends_in_the_order_of_clients_before_anybody_starts() -> None:
    events = Schedule(clock_without_sending([1.0] * 4), lambda number: [3, 2, 1, 0], concurrency=2, buffer=1)
    first, second, third = (events.next_step() for _ in range(3))
    assert [step.arrived[0].client for step in (first, second, third)] == [2, 3, 2]
    assert [step.num_started for step in (first, second, third)] == [2, 0, 2]
    assert second.seconds == 0


SPEEDS = st.lists(st.sampled_from([0.5, 1.0, 1.5, 7.0]), min_size=1, max_size=9)


@given(SPEEDS, st.integers(1, 12), st.integers(1, 9), st.sampled_from([1.0, 0.3]), st.sampled_from([0.0, 0.5]))
def test_time_is_monotone_and_everybody_is_in_one_place(
    speeds: list[float], concurrency: int, buffer: int, availability: float, jitter: float
) -> None:
    buffer = min(buffer, len(speeds))
    events = schedule(speeds, concurrency, buffer, availability=availability, jitter=jitter)
    ended, now, seen = [], 0.0, set()
    for number in range(1, 31):
        step = events.next_step()
        assert step.number == number
        assert len(step.arrived) == buffer
        assert step.seconds >= 0
        now += step.seconds
        assert now == pytest.approx(events.now)
        assert len(events.in_flight) <= concurrency
        flying = [turn.client for turn in events.in_flight]
        assert len(set(flying)) == len(flying)
        for turn in step.arrived:
            assert turn.ends <= events.now
            assert 0 <= step.staleness(turn) < number
            assert (turn.client, turn.server_round) not in seen, "trained twice from the same model"
            seen.add((turn.client, turn.server_round))
        ended += [turn.ends for turn in step.arrived]
    assert ended == sorted(ended)


@given(SPEEDS, st.integers(1, 12), st.integers(1, 9), st.integers(0, 20))
def test_events_are_found_again_after_a_stop(speeds: list[float], concurrency: int, buffer: int, stop: int) -> None:
    def events() -> Schedule:
        return schedule(speeds, concurrency, min(buffer, len(speeds)), availability=0.5, jitter=0.2)

    one, other = events(), events()
    straight = [one.next_step() for _ in range(stop + 5)]
    for _ in range(stop):
        other.next_step()
    went_on: list[ServerStep] = [other.next_step() for _ in range(5)]
    assert went_on == straight[stop:]


@given(st.integers(1, 9), st.integers(1, 9))
def test_equal_speeds_and_a_buffer_of_all_who_work_make_rounds(clients: int, cohort: int) -> None:
    cohort = min(clients, cohort)
    events = schedule([2.0] * clients, cohort, cohort)
    for number in range(1, 12):
        step = events.next_step()
        assert {turn.client for turn in step.arrived} == set(list(events.order_of(number))[:cohort])
        assert (step.seconds, step.num_started) == (2.0, cohort)
        assert not events.in_flight
        assert all(step.staleness(turn) == 0 for turn in step.arrived)


def test_the_server_looks_again_where_nobody_is_there() -> None:
    events = schedule([1.0], concurrency=1, buffer=1, availability=0.2)
    seconds = [events.next_step().seconds for _ in range(50)]
    waits = [second - 1 for second in seconds]
    assert all(wait >= 0 and wait == int(wait) for wait in waits)
    assert 100 < sum(waits) < 400, "four looks in vain on average"


def test_turns_in_flight_are_told_in_the_order_in_which_they_end() -> None:
    events = Schedule(
        clock_without_sending([9.0, 7.0, 5.0, 1.0, 6.0, 8.0]), lambda number: range(6), concurrency=6, buffer=1
    )
    assert [turn.client for turn in events.next_step().arrived] == [3]
    assert [turn.client for turn in events.in_flight] == [2, 4, 1, 5, 0]


class Attended(Clock):
    """Clients 0 and 1 are not there when the server looks for the first time."""

    def available(self, attempt: int) -> NDArray[np.bool_]:
        return np.arange(len(self.sizes)) >= (2 if attempt == 1 else 0)


def test_who_was_not_there_is_asked_first_when_the_server_looks_again_in_the_order_of_asking() -> None:
    usual = clock_without_sending([1.0] * 4)
    attended = Attended(usual.fleet, usual.sizes, usual.settings, usual.load_of, usual.seed)
    events = Schedule(attended, lambda number: [1, 0, 2, 3], concurrency=1, buffer=3)
    step = events.next_step()
    assert [turn.client for turn in step.arrived] == [2, 1, 0]
    assert step.num_started == 3


def test_nobody_is_started_beyond_the_room_there_is() -> None:
    events = schedule([1.0, 2.0, 3.0, 4.0], concurrency=2, buffer=1)
    started = list(itertools.accumulate(events.next_step().num_started for _ in range(40)))
    assert all(one - number <= 2 for number, one in enumerate(started, 1))
