"""The order of events where clients work at their own pace: who starts when, from which model, and arrives when.

Nothing in it depends on what is trained, so it is known beforehand, and after a stop it is found again.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fl_sim.devices.clock import LOOK_AGAIN_SECONDS, Clock


@dataclass(frozen=True, order=True)
class Turn:
    """A client's turn, which ends at a virtual time; equal ends are in the order of clients.

    ``server_round``: the server's step that is next when it starts; it trains the model of the one before.
    """

    ends: float
    client: int
    server_round: int


@dataclass(frozen=True)
class ServerStep:
    """One step of the server: whose turns it merges, in the order of their arrival.

    ``num_started``: how many turns have started since the step before. ``seconds``: how long ago that was.
    """

    number: int
    arrived: tuple[Turn, ...]
    num_started: int
    seconds: float

    def staleness(self, turn: Turn) -> int:
        """Return how many steps the server has made since ``turn`` started, without this one."""
        return self.number - turn.server_round


@dataclass
class Schedule:
    """Events in the order of (time, client).

    ``order_of(server_round)``: all clients in the order in which the server asks them before that step.
    ``concurrency``: how many have a turn at once. ``buffer``: of how many turns the server makes a step, at most the
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
    _flying: list[Turn] = field(default_factory=list)
    _away: set[int] = field(default_factory=set)
    _unasked: deque[int] = field(default_factory=deque)
    _looks: int = 0

    @property
    def in_flight(self) -> list[Turn]:
        """Return the turns that have not ended, the first to end first."""
        return sorted(self._flying)

    def next_step(self) -> ServerStep:
        """Go on until the server makes its next step."""
        number, before, arrived, started = self.steps + 1, self.now, list[Turn](), 0
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
        """Have clients begin their turns while there is room; return how many do."""
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
            heapq.heappush(self._flying, Turn(self.now + seconds, client, number))
            self._away.add(client)
        self._unasked.extendleft(reversed(passed_over))
        return len(self._flying) - before
