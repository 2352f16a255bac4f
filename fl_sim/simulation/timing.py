"""The amounts of computation of a run (``Work``), and the timing of small parts of a run on public test records."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from fl_sim.errors import in_a_line
from fl_sim.experiment.job import Job
from fl_sim.mistakes import shortened
from fl_sim.seeding import torch_kept
from fl_sim.simulation.client_runtime import fixed_threads
from fl_sim.types import Examples

Ready = Callable[[int, int], Callable[[], object]]
"""A function that prepares one turn of a computation, such as one client's local training (see ``Work``).

Its arguments are the number of records in a piece, such as a minibatch step, and the number of pieces in the turn. The
function loads the input and returns the turn as a second function, so that loading is not timed.
"""


@dataclass(frozen=True)
class Work:
    """One kind of computation in a run, such as local training, for the time forecast.

    A turn is one call of the computation. A turn consists of equal pieces. Example: a turn is a client's local
    training, and a piece is a minibatch step. ``turns``: the number of turns in the run. ``pieces``: the number of
    pieces in the run. ``what``: a description of a piece. ``kind``: a key; computations with the same key have pieces
    that take equally long. ``ready``: a function that loads the input of a turn and returns the turn as a function;
    None if the computation is not timed. ``records``: the number of records in a piece. ``most``: the largest number of
    pieces in a timed turn. ``at_once``: the number of parallel turns. ``makes``: the name of the result on disk, if
    several runs share it; else empty. ``threads``: the number of torch threads. ``clock``: the clock for timing; by
    default the CPU time of this thread, because other programs do not change it.
    """

    what: str
    kind: str = ""
    turns: float = 0.0
    pieces: float = 0.0
    ready: Ready | None = None
    records: int = 1
    most: int = 1
    at_once: float = 1.0
    makes: str = ""
    threads: int = 1
    clock: Callable[[], float] = time.thread_time


def public_records(job: Job, count: int) -> Examples:
    """Return ``count`` public test records. If the test set has fewer records, its records are repeated."""
    test = job.dataset.test
    return test.take(np.arange(count) % len(test))


Say: TypeAlias = Callable[[str], object]
Clock: TypeAlias = Callable[[], float]

MEASURING_SECONDS: Final = 12.0
"""The time budget, in seconds, of all timings of ``fl-sim plan``."""

_FEWEST: Final = 2
"""The number of records of the first timed piece (step). BatchNorm needs two."""
_GROWTH: Final = 8
"""The usual upper limit of the factor by which the number of records grows from one timing to the next."""
_LEAST_GROWTH: Final = 1.5
"""The smallest factor by which the number of records grows. If too little time is left for it, the timing ends."""
_FLAT: Final = 1.5
"""A piece is fast if its seconds are less than this factor times the seconds of the previous, smaller piece.

After a fast piece, the number of records may grow by the factor _GROWTH**2.
"""
_CHEAP: Final = 0.25
"""A whole piece is timed next if its expected seconds are less than this share of the remaining time."""
_LONG_ENOUGH: Final = 0.05
"""A computation that takes fewer seconds than this is timed several times."""
_MOST_TIMES: Final = 5
_SHARES: Final = (1.0, 1.0, 4.0, math.inf)
"""The time limit of each computation in the first, second, third and fourth pass over the unfinished computations.

The unit is an equal share of the remaining time.
"""


@dataclass(frozen=True)
class Timing:
    """The measured seconds of a computation, such as local training: ``turn`` per call and ``piece`` per step.

    ``at_least``: True if the seconds are only a lower bound: they were measured for a smaller step, because a whole
    step would have exceeded the time budget. ``why_not``: the reason if there is no timing; else empty.
    """

    turn: float = 0.0
    piece: float = 0.0
    at_least: bool = False
    why_not: str = ""


NO_TIME: Final = Timing(why_not="the time budget was spent before its timing")


class Stopwatch:
    """A stopwatch that times each kind of computation, such as local training, once for all runs that contain it.

    ``budget``: the largest time, in seconds of ``clock``, for one call of ``time_all``.
    """

    def __init__(self, budget: float = MEASURING_SECONDS, *, clock: Clock = time.monotonic) -> None:
        self.budget, self.clock = budget, clock
        self.timings: dict[str, Timing] = {}
        self._what: dict[str, str] = {}

    def time_all(self, works: Iterable[Work], say: Say = lambda _: None) -> None:
        """Time each new kind of computation in ``works``, such as local training, until the time budget is spent.

        ``say``: a function that receives a description of each computation before its timing. Each computation first
        gets an equal share of the remaining time. In later passes, the unfinished computations get larger shares.
        """
        new = {work.kind: work for work in works if work.ready and work.kind not in self.timings}
        self._what |= {work.kind: work.what for work in new.values()}
        deadline = self.clock() + self.budget
        waiting = [_GrowingTiming(work, self.clock) for work in new.values()]
        with torch_kept():
            for shares in _SHARES:
                for place, one in enumerate(waiting):
                    left = deadline - self.clock()
                    if left > 0:
                        say(f"timing {one.work.what}")
                    one.go_on(left * min(1.0, shares / (len(waiting) - place)))
                    self.timings[one.work.kind] = one.found
                waiting = [one for one in waiting if one.found == NO_TIME or one.found.at_least]

    @property
    def told(self) -> tuple[tuple[str, Timing], ...]:
        """Return (description, timing) for each kind of computation that ``time_all`` received."""
        return tuple((what, self.timings[kind]) for kind, what in self._what.items())

    def timing(self, work: Work) -> Timing:
        """Return the timing of the computation ``work``, or a ``Timing`` with the reason for no timing."""
        return self.timings.get(work.kind, NO_TIME) if work.ready else Timing(why_not="it cannot be timed beforehand")

    def seconds(self, work: Work) -> float:
        """Return the approximate seconds of the computation ``work``, from its timing; 0 if it was not timed."""
        timing = self.timing(work)
        return (work.turns * timing.turn + work.pieces * timing.piece) / work.at_once


class _GrowingTiming:
    """Times one kind of computation within a time budget, on more and more records.

    A piece is one step, such as a minibatch step. A turn is one call of several steps. The first timed piece has few
    records, so that slow computations do not exceed the time budget. Later pieces have more records, up to those in a
    whole piece. After that, a turn of several whole pieces is timed. ``_size``: the number of records of the largest
    piece so far. ``_waited`` and ``_waited_before``: the wall-clock seconds of the last piece and of the piece before.
    ``_least``: a lower bound of the seconds of a piece in a turn of several pieces.
    """

    def __init__(self, work: Work, clock: Clock) -> None:
        self.work, self.found = work, NO_TIME
        self._clock, self._size, self._waited, self._waited_before, self._least = clock, 0, 0.0, 0.0, 0.0

    def go_on(self, seconds: float) -> None:
        """Time single steps with more and more records, for at most about ``seconds`` seconds.

        The time of the next step is estimated from the time of the last step. If the estimate exceeds the remaining
        time, this method returns.
        """
        deadline = self._clock() + seconds
        try:
            with fixed_threads(self.work.threads):
                while self._size < self.work.records:
                    if not (size := self._next(deadline - self._clock())):
                        return
                    taken, self._size = self._timed(size, 1, deadline), size
                    if self.work.most == 1:
                        self.found = Timing(piece=taken, at_least=size < self.work.records)
                    # a step with fewer records than usual gives a lower bound of a usual step's time
                    else:
                        self._least = max(self._least, self._least_of_a_piece(size, taken, deadline))
                        self.found = Timing(taken - self._least, self._least, at_least=True)
                if self.work.most > 1:
                    self._time_several(deadline)
        except Exception as error:  # noqa: BLE001 (the forecast goes on; the run itself will raise the error)
            self.found = Timing(why_not=f"it failed: {in_a_line(shortened(str(error) or type(error).__name__))}")

    def _next(self, left: float) -> int:
        """Return the number of records of the next timed step; 0 if it would not fit into the ``left`` seconds."""
        records = self.work.records
        if not self._size:
            return min(_FEWEST, records) if left > 0 else 0
        if self._waited * records / self._size <= _CHEAP * left:
            return records
        # It is assumed that the time of a step grows at most in proportion to its number of records.
        growth = min(_GROWTH, left / max(self._waited, 1e-9))
        if self._waited < _FLAT * self._waited_before and 2 * _FLAT * self._waited < left:
            growth = _GROWTH**2
        return min(records, int(growth * self._size)) if growth >= _LEAST_GROWTH else 0

    def _least_of_a_piece(self, size: int, one: float, deadline: float) -> float:
        """Return a lower bound of the seconds of a usual step in a call of several steps; 0 if it was not measured.

        The result is the time of a call of two steps minus the time of a call of one step. ``size``: the number of
        records of a step, smaller than usual. ``one``: the seconds of a call of one step.
        """
        waited = self._waited, self._waited_before
        if size == self.work.records or 2 * self._waited > _CHEAP * (deadline - self._clock()):
            return 0.0
        two = self._timed(size, 2, deadline)
        self._waited, self._waited_before = waited
        return min(one, max(0.0, two - one))

    def _time_several(self, deadline: float) -> None:
        """Time one call of several steps, to separate the fixed seconds of a call from the seconds per step.

        Nothing is timed if the time until ``deadline`` is too short.
        """
        one, affordable = self.found.turn + self.found.piece, (deadline - self._clock()) / max(self._waited, 1e-9)
        if affordable < 2:
            return
        pieces = max(2, int(min(self.work.most, _CHEAP * affordable)))
        several = self._timed(self.work.records, pieces, deadline)
        piece = (several - one) / (pieces - 1)
        # If the fixed time of a call is too short to be measured, it is set to 0.
        self.found = Timing(one - piece, piece) if 0 < piece < one else Timing(0.0, several / pieces)

    def _timed(self, size: int, pieces: int, deadline: float) -> float:
        """Return the seconds of one call of ``pieces`` steps, each of ``size`` records.

        The result is the minimum over several calls, because the first call fills caches.
        """
        assert self.work.ready is not None
        turn, taken, waited = self.work.ready(size, pieces), list[float](), list[float]()
        is_on_the_way = bool(self._size) and size < self.work.records
        while len(taken) < _MOST_TIMES:
            before, start = self._clock(), self.work.clock()
            turn()
            taken.append(self.work.clock() - start)
            waited.append(self._clock() - before)
            is_long = sum(taken) > _LONG_ENOUGH and len(taken) > 1
            if is_on_the_way or is_long or before + 2 * waited[-1] > deadline:
                break
        self._waited_before, self._waited = self._waited, min(waited)
        return min(taken)
