"""The virtual clock: simulated times of clients, rounds with a deadline, and the order of asynchronous events.

A client's turn is its download of a model, its local steps, and its upload. No time depends on the trained values. So
all events are known before a run, and a resumed run computes the same events again.
"""

import bisect
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fl_sim.devices.settings import Fleet
from fl_sim.seeding import rng
from fl_sim.types import LocalSettings, Traffic

LOOK_AGAIN_SECONDS = 1.0
"""Simulated seconds until the server looks for clients again if no client was available."""


@dataclass(frozen=True, eq=False)
class Clock:
    """The virtual clock. Its times depend only on the settings, not on trained values or real time.

    ``fleet``: the devices of all clients. ``sizes``: the number of training records of each client, shape (clients,).
    ``settings``: the settings of local training. ``traffic``: the bytes to and from a client in a turn. ``seed``: the
    seed of availability and jitter.
    """

    fleet: Fleet
    sizes: NDArray[np.int64]
    settings: LocalSettings
    traffic: Traffic
    seed: int

    def steps(self, client: int) -> int:
        """Return the number of local steps in a turn of ``client``."""
        return self.settings.num_steps(int(self.sizes[client]))

    def seconds(self, client: int, server_round: int, steps: int) -> float:
        """Return the simulated seconds of a turn of ``client`` with ``steps`` steps: download, local steps, upload."""
        fleet = self.fleet
        sending = self.traffic.down / fleet.download[client] + self.traffic.up / fleet.upload[client]
        records = 0
        if size := int(self.sizes[client]):
            passes, rest = divmod(steps, self.settings.num_batches(size))
            records = passes * size + min(rest * self.settings.batch_size, size)
        by_records = records * fleet.record_seconds[client]
        taken = float(sending + steps * fleet.step_seconds[client] + by_records)
        if not fleet.jitter:
            return taken
        return taken * math.exp(fleet.jitter * rng(self.seed, "jitter", client, server_round).standard_normal())

    def steps_within(self, client: int, server_round: int, seconds: float) -> int | None:
        """Return the largest number of steps for which a turn fits into ``seconds``.

        None if the turn is too long even with the fewest steps: one step, or none for a client without records.
        """
        steps = range(min(1, self.steps(client)), self.steps(client) + 1)
        fitting = bisect.bisect_right(steps, seconds, key=lambda some: self.seconds(client, server_round, some))
        return steps[fitting - 1] if fitting else None

    def there(self, look: int) -> NDArray[np.bool_]:
        """Return a mask of the available clients, shape (clients,), when the server looks for the ``look``-th time."""
        availability = self.fleet.availability
        if (availability == 1).all():
            return np.ones(len(availability), bool)
        return rng(self.seed, "availability", look).random(len(availability)) < availability


@dataclass(frozen=True)
class Turnout:
    """The clients of a round with a deadline.

    ``asked``: the available clients of the cohort, in the cohort's order. ``in_time``: those of them that meet the
    deadline. ``most_steps``: {client: number of steps that fit into the deadline}, for clients that shorten their
    training. ``seconds``: the simulated length of the round.
    """

    asked: NDArray[np.int64]
    in_time: NDArray[np.int64]
    most_steps: Mapping[int, int]
    seconds: float

    @property
    def num_late(self) -> int:
        """Return the number of updates that miss the deadline and are lost."""
        return len(self.asked) - len(self.in_time)


def turnout(clock: Clock, server_round: int, cohort: Sequence[int], *, deadline: float, partial: bool) -> Turnout:
    """Return the clients of ``cohort`` that finish a round within ``deadline`` simulated seconds (0: no deadline).

    ``partial``: True if a client without time for all of its steps takes fewer steps, at least one. A round with a lost
    update lasts until the deadline; any other round lasts as long as its slowest client; a round without available
    clients lasts ``LOOK_AGAIN_SECONDS``.
    """
    there = clock.there(server_round)
    asked = [int(client) for client in cohort if there[client]]
    most_steps: dict[int, int] = {}
    ends: dict[int, float] = {}
    for client in asked:
        steps = clock.steps(client)
        seconds = clock.seconds(client, server_round, steps)
        if deadline and seconds > deadline:
            fitting = clock.steps_within(client, server_round, deadline) if partial else None
            if fitting is None:
                continue
            most_steps[client] = fitting
            seconds = clock.seconds(client, server_round, fitting)
        ends[client] = seconds
    lasts = deadline if len(ends) < len(asked) else max(ends.values(), default=LOOK_AGAIN_SECONDS)
    return Turnout(np.array(asked, np.int64), np.array(list(ends), np.int64), most_steps, lasts)


@dataclass(frozen=True, order=True)
class ClientTurn:
    """A client's turn: download, local training and upload. Turns are ordered by their end, then by client.

    ``ends``: the virtual time of its end. ``server_round``: the number of the server's next step when the turn starts;
    the client trains the model of the step before.
    """

    ends: float
    client: int
    server_round: int


@dataclass(frozen=True)
class ServerStep:
    """One step of the server. ``arrived``: the turns whose updates it merges, in the order of their arrival.

    ``num_started``: the number of turns that have started since the step before. ``seconds``: the simulated seconds
    since the step before.
    """

    number: int
    arrived: tuple[ClientTurn, ...]
    num_started: int
    seconds: float

    def staleness(self, turn: ClientTurn) -> int:
        """Return the number of server steps since ``turn`` started, this step excluded."""
        return self.number - turn.server_round


@dataclass
class Schedule:
    """The simulated events of asynchronous training, in the order of (time, client).

    ``order_of(server_round)``: all clients in the order in which the server asks them before that server step.
    ``concurrency``: the number of parallel turns. ``buffer``: the number of turns that one server step merges, at most
    the number of clients.

    When a client's turn ends, another client starts at once, with the server's model of that time. A client starts its
    next turn when its place in the order comes. It never trains the same model twice, because the updates would be
    equal.
    """

    clock: Clock
    order_of: Callable[[int], Iterable[int]]
    concurrency: int
    buffer: int
    now: float = 0.0
    steps: int = 0
    _flying: list[ClientTurn] = field(default_factory=list)
    _away: set[int] = field(default_factory=set)
    _unasked: deque[int] = field(default_factory=deque)
    _looks: int = 0

    @property
    def in_flight(self) -> list[ClientTurn]:
        """Return the turns that have not ended yet, in the order of their ends."""
        return sorted(self._flying)

    def next_step(self) -> ServerStep:
        """Advance the virtual time to the server's next step; return that step."""
        number, before, arrived, started = self.steps + 1, self.now, list[ClientTurn](), 0
        self._unasked = deque(self.order_of(number))
        while len(arrived) < self.buffer:
            # All that end at the same time end before anybody starts: who starts is not decided by their order.
            if not self._flying or self._flying[0].ends > self.now:
                started += self._start(number)
            if self._flying:
                turn = heapq.heappop(self._flying)
                self._away.remove(turn.client)
                self.now = turn.ends
                arrived.append(turn)
            else:
                self.now += LOOK_AGAIN_SECONDS
        self.steps = number
        return ServerStep(number, tuple(arrived), started, self.now - before)

    def _start(self, number: int) -> int:
        """Start turns of available clients until ``concurrency`` turns run; return the number of new turns."""
        if len(self._flying) >= self.concurrency:
            return 0
        self._looks += 1
        there, passed_over, before = self.clock.there(self._looks), list[int](), len(self._flying)
        while self._unasked and len(self._flying) < self.concurrency:
            client = self._unasked.popleft()
            if client in self._away or not there[client]:
                passed_over.append(client)
                continue
            seconds = self.clock.seconds(client, number, self.clock.steps(client))
            heapq.heappush(self._flying, ClientTurn(self.now + seconds, client, number))
            self._away.add(client)
        self._unasked.extendleft(reversed(passed_over))
        return len(self._flying) - before
