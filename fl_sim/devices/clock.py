"""The virtual clock: the time of a client's turn, rounds with a deadline, and the order of events without rounds.

Nothing in it depends on what is trained, so all of it is known beforehand, and after a stop it is found again.
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
"""Seconds until the server looks again for clients where none was available."""


@dataclass(frozen=True, eq=False)
class Clock:
    """Virtual time, a function of the settings alone: it depends on no training and on no real clock.

    ``sizes``: training records of each client, (clients,). ``settings``: of local training. ``traffic``: the bytes to
    and from a client in a turn. ``seed``: of availability and jitter.
    """

    fleet: Fleet
    sizes: NDArray[np.int64]
    settings: LocalSettings
    traffic: Traffic
    seed: int

    def steps(self, client: int) -> int:
        """Return the number of steps in a turn of ``client``."""
        return self.settings.num_steps(int(self.sizes[client]))

    def seconds(self, client: int, server_round: int, steps: int) -> float:
        """Return the seconds of its turn in a round with ``steps`` steps: download, steps, upload."""
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
        """Return the number of steps that fit into ``seconds``, None where not even one step and the sending fit."""
        steps = range(min(1, self.steps(client)), self.steps(client) + 1)
        fitting = bisect.bisect_right(steps, seconds, key=lambda some: self.seconds(client, server_round, some))
        return steps[fitting - 1] if fitting else None

    def there(self, look: int) -> NDArray[np.bool_]:
        """Return a mask of the available clients when the server looks for the ``look``-th time, (clients,)."""
        availability = self.fleet.availability
        if (availability == 1).all():
            return np.ones(len(availability), bool)
        return rng(self.seed, "availability", look).random(len(availability)) < availability


@dataclass(frozen=True)
class Turnout:
    """The clients of a round with a deadline.

    ``asked``: the available clients of the cohort, ascending. ``in_time``: those of them that meet the deadline.
    ``most_steps``: {client: number of steps it has time for}, of those without time for all of their steps.
    ``seconds``: the length of the round.
    """

    asked: NDArray[np.int64]
    in_time: NDArray[np.int64]
    most_steps: Mapping[int, int]
    seconds: float

    @property
    def num_late(self) -> int:
        """Return the number of lost updates."""
        return len(self.asked) - len(self.in_time)


def turnout(clock: Clock, server_round: int, cohort: Sequence[int], *, deadline: float, partial: bool) -> Turnout:
    """Return the turnout of a round's ``cohort`` within ``deadline`` seconds (0: no deadline).

    ``partial``: True if a late client takes as many steps as it has time for instead, at least one. A round with a lost
    update lasts to the deadline, another as long as its slowest client, and one without clients until the server looks
    again.
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
    """A client's turn, which ends at a virtual time; equal ends are in the order of clients.

    ``server_round``: the next step of the server at its start; the turn trains the model of the step before.
    """

    ends: float
    client: int
    server_round: int


@dataclass(frozen=True)
class ServerStep:
    """One step of the server, with the turns that it merges, in the order of their arrival.

    ``num_started``: turns that have started since the step before. ``seconds``: since the step before.
    """

    number: int
    arrived: tuple[ClientTurn, ...]
    num_started: int
    seconds: float

    def staleness(self, turn: ClientTurn) -> int:
        """Return the number of steps of the server since ``turn`` started, without this one."""
        return self.number - turn.server_round


@dataclass
class Schedule:
    """Events in the order of (time, client).

    ``order_of(server_round)``: all clients in the order in which the server asks them before that step.
    ``concurrency``: the number of parallel turns. ``buffer``: the number of turns in a step of the server, at most the
    number of clients.

    A client whose turn has ended makes room for another, at once and with the model that the server has then; it has
    a turn itself once more when its turn comes in the order, but no two from the same model, which would be the same.
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
        """Return the turns that have not ended, the first to end first."""
        return sorted(self._flying)

    def next_step(self) -> ServerStep:
        """Advance to the server's next step."""
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
        """Start turns of clients up to ``concurrency``; return the number of new turns."""
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
