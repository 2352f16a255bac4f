"""The engine that runs every client in this process."""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from queue import SimpleQueue
from threading import Event

from flwr.app import Message
from flwr.clientapp import ClientApp

from fl_sim.engines import wire
from fl_sim.engines.grid import TOO_LATE, LocalGrid, Progress, failure
from fl_sim.engines.pieces import Clients, Play, Release, Together


@dataclass(frozen=True)
class Groups:
    """How ``tasks`` are answered: by ``threads`` threads, each for several clients in one computation."""

    tasks: frozenset[str]
    release: Release
    threads: int

    _LEAST, _MOST = 3, 10  # below 3 clients Python's overhead is a third of a step; above 10 there is no further gain

    def pieces(self, messages: Sequence[Message]) -> list[list[Message]]:
        """Cut an exchange into one piece of work for every thread, or more."""
        size = min(max(-(-len(messages) // self.threads), self._LEAST), self._MOST)
        return [list(messages[first : first + size]) for first in range(0, len(messages), size)]


class InProcessGrid(LocalGrid):
    """All clients in this process: no start-up, and a debugger sees everything.

    ``workers`` threads train clients side by side, which pays where training lets go of Python's lock; whatever else is
    asked of clients is answered one after another, but for the tasks ``in_threads``. ``together``, if given, trains
    several clients at a time; stacks one after another. ``groups``, if given, has threads of its own. A client that
    hangs cannot be interrupted from within its own process; ``timeout`` is looked at between pieces of work.
    """

    def __init__(
        self,
        app: ClientApp,
        num_clients: int,
        on_reply: Progress | None = None,
        *,
        workers: int = 1,
        together: Together | None = None,
        groups: Groups | None = None,
        in_threads: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(num_clients, on_reply)
        self._clients = Clients(app, num_clients, together)
        self._is_stacked = together is not None and together.stack > 1
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, "client") if workers > 1 else None
        self._in_threads = in_threads
        self._groups = groups
        self._group_pool = ThreadPoolExecutor(groups.threads, "groups") if groups else None

    def close(self) -> None:
        """End the threads."""
        for pool in (self._pool, self._group_pool):
            if pool is not None:
                pool.shutdown()

    def _exchange(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        with self.quiet():
            return self._exchanged(messages, timeout)

    def _exchanged(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        tasks = set(map(wire.task_of, messages))
        trains = tasks == {wire.TRAIN} and not self._is_stacked  # a stack takes the model
        parallel = trains or tasks <= self._in_threads
        play: Play = self._clients.play
        pieces, pool = self._clients.pieces(messages, self._workers), self._pool if parallel else None
        pool = pool if len(pieces) > 1 else None
        workers, stopped = self._workers, Event()
        if self._groups is not None and tasks <= self._groups.tasks:
            pieces, play = self._groups.pieces(messages), partial(_stoppable, self._groups.release, stopped)
            workers, pool = self._groups.threads, self._group_pool
        waiting = _Waiting(pieces, deadline)
        played = _side_by_side(pool, workers, play, waiting) if pool else map(play, waiting)
        replies: dict[str, Message] = {}
        try:
            for reply in chain.from_iterable(played):
                replies[reply.metadata.reply_to_message_id] = reply
                self._on_reply(len(replies))
        finally:
            waiting.clear()  # by Ctrl-C: threads finish what they have begun, and begin no more
            stopped.set()
        return [replies.get(sent.metadata.message_id) or _out_of_time(sent, timeout) for sent in messages]


class _Waiting(Iterator[list[Message]]):
    """The pieces of work that nobody has taken yet; any number of threads may take. None is left when time is up."""

    def __init__(self, pieces: Iterable[list[Message]], deadline: float) -> None:
        self._pieces = deque(pieces)
        self._deadline = deadline

    def __next__(self) -> list[Message]:
        if time.monotonic() >= self._deadline:
            raise StopIteration
        try:
            return self._pieces.popleft()
        except IndexError:
            raise StopIteration from None

    def clear(self) -> None:
        """Hand out no more."""
        self._pieces.clear()


def _side_by_side(pool: ThreadPoolExecutor, workers: int, play: Play, waiting: _Waiting) -> Iterator[list[Message]]:
    """Have threads play until nothing waits; yields replies as they come."""
    done: SimpleQueue[list[Message] | None] = SimpleQueue()

    def work() -> None:
        try:
            for piece in waiting:
                done.put(play(piece))
        finally:
            done.put(None)

    running = [pool.submit(work) for _ in range(workers)]
    for _ in running:
        yield from iter(done.get, None)
    for thread in running:
        thread.result()


def _stoppable(release: Release, stopped: Event, messages: Sequence[Message]) -> list[Message]:
    def check() -> None:
        if stopped.is_set():
            raise KeyboardInterrupt

    return release(messages, check)


def _out_of_time(message: Message, timeout: float | None) -> Message:
    return failure(message, TOO_LATE, f"no answer within {timeout or 0:g} s: its turn did not come")
