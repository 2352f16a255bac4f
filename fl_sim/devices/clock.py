"""The virtual clock: simulates the start and end times of clients, rounds with a deadline, and asynchronous training.

A client's turn is one download of a model, local training, and one upload. Its duration depends on the device, the
number of records and the settings. The duration never depends on trained values, so a resumed run computes the same
times again.
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
from fl_sim.types import Load, LocalSettings

LOOK_AGAIN_SECONDS = 1.0
"""If no client is available, the server waits for this number of simulated seconds and looks for clients again."""


@dataclass(frozen=True, eq=False)
class Clock:
    """Computes the simulated seconds of clients' turns. The seconds do not depend on trained values or on real time.

    ``fleet``: the devices of all clients. ``sizes``: the number of training records of each client, shape (clients,).
    ``settings``: the settings of local training, such as epochs. ``load_of``: a function that takes a client ID, and
    returns the load of one turn of this client: the bytes of its messages, and a factor by which its computing time is
    multiplied (below 1 for a smaller model). ``seed``: the seed of the random availability and jitter.
    """

    fleet: Fleet
    sizes: NDArray[np.int64]
    settings: LocalSettings
    load_of: Callable[[int], Load]
    seed: int

    def steps(self, client: int) -> int:
        """Return the number of local steps of ``client`` in one turn."""
        return self.settings.num_steps(int(self.sizes[client]))

    def seconds(self, client: int, server_round: int, steps: int) -> float:
        """Return the simulated seconds that ``client`` needs for download, ``steps`` local steps and upload.

        The duration is multiplied by a random factor (jitter). ``server_round`` determines this factor.
        """
        fleet, (traffic, work) = self.fleet, self.load_of(client)
        sending = traffic.down / fleet.download[client] + traffic.up / fleet.upload[client]
        records = 0
        if size := int(self.sizes[client]):
            passes, rest = divmod(steps, self.settings.num_batches(size))
            records = passes * size + min(rest * self.settings.batch_size, size)
        by_records = records * work * fleet.record_seconds[client]
        taken = float(sending + steps * fleet.step_seconds[client] + by_records)
        return taken * self._jitter(client, server_round)

    def _jitter(self, client: int, server_round: int) -> float:
        if not (jitter := self.fleet.jitter):
            return 1.0
        return math.exp(jitter * rng(self.seed, "jitter", client, server_round).standard_normal())

    def asking_seconds(self, client: int, server_round: int) -> float:
        """Return the simulated seconds in which ``client`` downloads the model and evaluates it on its own records.

        Some samplers ask clients for the loss of the model. The evaluation of a record takes a third of the time of
        its training, because evaluation is only a forward pass.
        """
        fleet, (traffic, work), size = self.fleet, self.load_of(client), int(self.sizes[client])
        taken = float(traffic.down / fleet.download[client] + size * work * fleet.record_seconds[client] / 3)
        return taken * self._jitter(client, server_round)

    def steps_within(self, client: int, server_round: int, seconds: float) -> int | None:
        """Return the number of local steps of ``client`` that fit into ``seconds``, including download and upload.

        Return None if the time is too short for one step. A client without records makes no step: the result is 0 if
        ``seconds`` are enough for download and upload.
        """
        steps = range(min(1, self.steps(client)), self.steps(client) + 1)
        fitting = bisect.bisect_right(steps, seconds, key=lambda some: self.seconds(client, server_round, some))
        return steps[fitting - 1] if fitting else None

    def available(self, attempt: int) -> NDArray[np.bool_]:
        """Draw at random the clients that are available now. Return a mask, shape (clients,).

        The server makes a new draw each time that it looks for clients. ``attempt``: the number of this draw; it
        determines the random numbers.
        """
        availability = self.fleet.availability
        if (availability == 1).all():
            return np.ones(len(availability), bool)
        return rng(self.seed, "availability", attempt).random(len(availability)) < availability


@dataclass(frozen=True)
class Turnout:
    """The clients that take part in a round with a deadline. All arrays list the clients in the order of the cohort.

    ``available``: the clients of the cohort that are available. ``in_time``: the available clients that meet the
    deadline. ``most_steps``: {client: number of local steps}, only for the clients that train fewer steps to meet the
    deadline. ``seconds``: the simulated duration of the round.
    """

    available: NDArray[np.int64]
    in_time: NDArray[np.int64]
    most_steps: Mapping[int, int]
    seconds: float

    @property
    def num_late(self) -> int:
        """Return the number of updates that miss the deadline and are lost."""
        return len(self.available) - len(self.in_time)


def turnout(clock: Clock, server_round: int, cohort: Sequence[int], *, deadline: float, partial: bool) -> Turnout:
    """Return the clients of ``cohort`` that finish the round within ``deadline`` simulated seconds (0: no deadline).

    ``partial``: True if a slow client may train fewer steps, at least one, to meet the deadline. A round with a late
    client lasts until the deadline; any other round lasts as long as its slowest client. A round without available
    clients lasts ``LOOK_AGAIN_SECONDS``, a constant.
    """
    is_available = clock.available(server_round)
    available = [int(client) for client in cohort if is_available[client]]
    most_steps: dict[int, int] = {}
    ends: dict[int, float] = {}
    for client in available:
        steps = clock.steps(client)
        seconds = clock.seconds(client, server_round, steps)
        if deadline and seconds > deadline:
            fitting = clock.steps_within(client, server_round, deadline) if partial else None
            if fitting is None:
                continue
            most_steps[client] = fitting
            seconds = clock.seconds(client, server_round, fitting)
        ends[client] = seconds
    lasts = deadline if len(ends) < len(available) else max(ends.values(), default=LOOK_AGAIN_SECONDS)
    return Turnout(np.array(available, np.int64), np.array(list(ends), np.int64), most_steps, lasts)


@dataclass(frozen=True, order=True)
class ClientTurn:
    """One turn of a client in asynchronous training: download, local training and upload.

    Turns are sorted by ``ends``, then by ``client``. ``ends``: the simulated time at which the turn ends.
    ``server_round``: the number of the next server step after the download. For example, in a turn with
    ``server_round`` 3 the client trains the model that server step 2 made.
    """

    ends: float
    client: int
    server_round: int


@dataclass(frozen=True)
class ServerStep:
    """One step of the server in asynchronous training. The server merges the updates of several clients into the model.

    ``number``: the number of the step, counted from 1. ``arrived``: the clients' turns whose updates are merged, in the
    order of arrival. ``num_started``: the number of turns that started since the previous step. ``seconds``: the
    simulated seconds since the previous step.
    """

    number: int
    arrived: tuple[ClientTurn, ...]
    num_started: int
    seconds: float

    def staleness(self, turn: ClientTurn) -> int:
        """Return the staleness of a turn's update: the number of server steps from the turn's download to this step."""
        return self.number - turn.server_round


@dataclass
class Schedule:
    """Simulates asynchronous training.

    The schedule determines when clients start and finish, and which updates each server step merges. ``order_of``: a
    function that takes the number of a server step, and returns the order in which the server asks clients to train
    before this step. ``concurrency``: the number of clients that train at the same time. ``buffer``: the number of
    updates that one server step merges, at most the number of clients. ``now``: the simulated time. ``steps``: the
    number of server steps so far.

    When a client finishes, the next available client in the order of ``order_of`` starts at once with the current
    global model. No client trains the same global model twice, because it would send the same update twice.
    """

    clock: Clock
    order_of: Callable[[int], Iterable[int]]
    concurrency: int
    buffer: int
    now: float = 0.0
    steps: int = 0
    _running: list[ClientTurn] = field(default_factory=list)
    _busy: set[int] = field(default_factory=set)
    _candidates: deque[int] = field(default_factory=deque)
    _num_attempts: int = 0

    @property
    def in_flight(self) -> list[ClientTurn]:
        """Return the turns that have started but not ended, in the order of their ends."""
        return sorted(self._running)

    def next_step(self) -> ServerStep:
        """Simulate the clients' starts and ends until ``buffer`` updates have arrived. Return this server step."""
        number, before, arrived, started = self.steps + 1, self.now, list[ClientTurn](), 0
        self._candidates = deque(self.order_of(number))
        while len(arrived) < self.buffer:
            # If several turns end at the same time, new turns start only after all of them are processed. So the order
            # in which they are processed has no effect on the new turns.
            if not self._running or self._running[0].ends > self.now:
                started += self._start(number)
            if self._running:
                turn = heapq.heappop(self._running)
                self._busy.remove(turn.client)
                self.now = turn.ends
                arrived.append(turn)
            else:
                self.now += LOOK_AGAIN_SECONDS
        self.steps = number
        return ServerStep(number, tuple(arrived), started, self.now - before)

    def _start(self, number: int) -> int:
        """Start turns of available clients until ``concurrency`` clients train; return the number of new turns.

        ``number``: the number of the next server step.
        """
        if len(self._running) >= self.concurrency:
            return 0
        self._num_attempts += 1
        available, skipped, before = self.clock.available(self._num_attempts), list[int](), len(self._running)
        while self._candidates and len(self._running) < self.concurrency:
            client = self._candidates.popleft()
            if client in self._busy or not available[client]:
                skipped.append(client)
                continue
            seconds = self.clock.seconds(client, number, self.clock.steps(client))
            heapq.heappush(self._running, ClientTurn(self.now + seconds, client, number))
            self._busy.add(client)
        self._candidates.extendleft(reversed(skipped))
        return len(self._running) - before
