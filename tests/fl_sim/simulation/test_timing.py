"""Work is timed within a budget, each kind once, and what did not fit is said: no second passes, the clock is ours."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from fl_sim.simulation.timing import NO_TIME, Stopwatch, Timing, Work


@dataclass
class Clock:
    """A clock that stands still but for the work that is done."""

    now: float = 0.0
    turns: list[tuple[str, int, int]] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def work(
        self, kind: str, record: float, *, turn: float = 0.0, records: int = 64, most: int = 8, pieces: float = 100.0
    ) -> Work:
        """Return work of which a piece takes ``record`` seconds a record, and every turn ``turn`` more."""

        def ready(size: int, several: int) -> Callable[[], object]:
            def work() -> None:
                self.turns.append((kind, size, several))
                self.now += turn + record * size * several

            return work

        return Work(kind, kind, 10.0, pieces, ready, records, most, clock=self)


def timed(clock: Clock, *works: Work, budget: float = 12.0) -> Stopwatch:
    watch = Stopwatch(budget, clock=clock)
    watch.time_all(works)
    return watch


def test_a_piece_and_a_turns_own_time_are_told_apart() -> None:
    clock = Clock()
    work = clock.work("step", 1e-5, turn=2e-4)
    watch = timed(clock, work)
    assert watch.timing(work) == Timing(pytest.approx(2e-4), pytest.approx(64e-5))
    assert watch.seconds(work) == pytest.approx(10 * 2e-4 + 100 * 64e-5)


def test_each_kind_of_work_is_timed_once_however_many_runs_share_it() -> None:
    clock = Clock()
    watch = Stopwatch(12.0, clock=clock)
    alike, other = [clock.work("step", 1e-4) for _ in range(50)], clock.work("release", 1e-3)
    watch.time_all([*alike, other])
    done = len(clock.turns)
    assert [kind for kind, *_ in clock.turns] == sorted((kind for kind, *_ in clock.turns), reverse=True)
    watch.time_all([*alike, other])  # as a table does for its searches, and then for its cells
    assert len(clock.turns) == done


@pytest.mark.parametrize("record", [0.01, 0.1, 1.0, 5.0])
def test_the_budget_holds_for_a_network_however_slow_it_is(record: float) -> None:
    """What a few records take says how long a piece would: none is begun that has no place."""
    clock = Clock()
    slow, quick = clock.work("slow", record), clock.work("quick", 1e-5)
    watch = timed(clock, slow, quick)
    assert clock.now <= max(12.0, 2 * 2 * record)  # the first piece, of two records, is begun whatever it takes
    largest = max(size for kind, size, _ in clock.turns if kind == "slow")
    assert watch.timing(slow).at_least == (largest < 64)
    assert (largest < 64) == (record > 0.01)
    assert watch.timing(slow).turn + watch.timing(slow).piece == pytest.approx(record * largest)
    assert watch.timing(quick).piece == pytest.approx(64e-5)


def test_a_piece_that_needs_more_than_its_share_has_what_others_leave() -> None:
    clock = Clock()
    slow, others = clock.work("slow", 0.04), [clock.work(f"quick {number}", 1e-5) for number in range(9)]
    watch = timed(clock, slow, *others)  # 2.56 s and twice as much where a tenth of 12 s is its share
    assert not watch.timing(slow).at_least
    assert clock.now < 12


def test_a_step_that_cannot_be_told_from_the_start_of_its_turn_is_a_lower_bound() -> None:
    """As of a generator that starts in a second, with steps of 1 ms: a second a step would be a silent overestimate."""
    clock = Clock()
    work = clock.work("step", 0.0, turn=1.0, most=400)
    watch = timed(clock, work, budget=2.5)
    assert watch.timing(work) == Timing(1.0, 0.0, at_least=True)


def test_a_piece_that_takes_less_than_its_records_say_is_timed_as_a_whole() -> None:
    """As a generator's step does, whose batch is smaller than the records of a client."""
    clock = Clock()
    base = clock.work("step", 0.0, records=6000, most=1)

    def ready(size: int, _: int) -> Callable[[], object]:
        def work() -> None:
            clock.now += 0.002 * min(size, 256)

        return work

    work = Work("step", "step", 10.0, 10.0, ready, base.records, clock=clock)
    watch = timed(clock, work)
    assert watch.timing(work) == Timing(piece=pytest.approx(0.512))


def test_what_found_no_time_or_failed_is_said_and_what_cannot_be_timed_is_not_tried() -> None:
    clock = Clock()

    def broken(*_: int) -> Callable[[], object]:
        raise ValueError("no such layer")

    late, failing, never = (
        clock.work("late", 1.0),
        Work("broken", "broken", 1.0, 1.0, broken, clock=clock),
        Work("never"),
    )
    watch = timed(clock, clock.work("first", 20.0), late, failing, never, budget=3.0)
    assert watch.timing(late) == NO_TIME
    assert watch.timing(never).why_not
    assert watch.seconds(late) == watch.seconds(failing) == watch.seconds(never) == 0
    watch.time_all([failing])
    assert "no such layer" in timed(Clock(), failing).timing(failing).why_not
    assert {what for what, _ in watch.told} == {"first", "late", "broken"}


def test_an_interrupt_goes_through() -> None:
    def interrupted(*_: int) -> Callable[[], object]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        timed(Clock(), Work("step", "step", 1.0, 1.0, interrupted))
