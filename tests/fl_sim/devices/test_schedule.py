"""The order of events where clients work at their own pace."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fl_sim.devices.clock import Clock
from fl_sim.devices.fleet import Fleet
from fl_sim.devices.schedule import Schedule, ServerStep
from fl_sim.types import LocalSettings, Traffic

SETTINGS = LocalSettings(0.1, 0.0, 0.0, batch_size=10, epochs=1)


def clock(speeds: list[float], availability: float = 1.0, jitter: float = 0.0) -> Clock:
    count = len(speeds)
    fast = np.full(count, np.inf)
    fleet = Fleet(np.array(speeds), np.zeros(count), fast, fast, np.full(count, availability), jitter)
    return Clock(fleet, np.full(count, 10), SETTINGS, Traffic(8, 8), seed=3)


def schedule(speeds: list[float], concurrency: int, buffer: int, **others: float) -> Schedule:
    order = np.random.default_rng(len(speeds))
    orders = [order.permutation(len(speeds)).tolist() for _ in range(60)]
    return Schedule(clock(speeds, **others), lambda number: orders[number], concurrency, buffer)


def test_a_hand_made_federation_has_the_events_of_the_paper_by_hand() -> None:
    """Client 0 takes 1 s, client 1 takes 3 s; both work at once, and every update is a step."""
    events = Schedule(clock([1.0, 3.0]), lambda number: range(2), concurrency=2, buffer=1)
    steps = [events.next_step() for _ in range(5)]
    assert [[turn.client for turn in step.arrived] for step in steps] == [[0], [0], [0], [1], [0]]
    assert [step.seconds for step in steps] == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert [step.staleness(step.arrived[0]) for step in steps] == [0, 0, 0, 3, 0]


def test_who_ends_at_the_same_time_ends_in_the_order_of_clients_before_anybody_starts() -> None:
    events = Schedule(clock([1.0] * 4), lambda number: [3, 2, 1, 0], concurrency=2, buffer=1)
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
    events = Schedule(clock([9.0, 7.0, 5.0, 1.0, 6.0, 8.0]), lambda number: range(6), concurrency=6, buffer=1)
    assert [turn.client for turn in events.next_step().arrived] == [3]
    assert [turn.client for turn in events.in_flight] == [2, 4, 1, 5, 0]


class Attended(Clock):
    """Clients 0 and 1 are not there when the server looks for the first time."""

    def there(self, look: int) -> NDArray[np.bool_]:
        return np.arange(len(self.sizes)) >= (2 if look == 1 else 0)


def test_who_was_not_there_is_asked_first_when_the_server_looks_again_in_the_order_of_asking() -> None:
    usual = clock([1.0] * 4)
    attended = Attended(usual.fleet, usual.sizes, usual.settings, usual.traffic, usual.seed)
    events = Schedule(attended, lambda number: [1, 0, 2, 3], concurrency=1, buffer=3)
    step = events.next_step()
    assert [turn.client for turn in step.arrived] == [2, 1, 0]
    assert step.num_started == 3


def test_nobody_is_started_beyond_the_room_there_is() -> None:
    events = schedule([1.0, 2.0, 3.0, 4.0], concurrency=2, buffer=1)
    started = list(itertools.accumulate(events.next_step().num_started for _ in range(40)))
    assert all(one - number <= 2 for number, one in enumerate(started, 1))
