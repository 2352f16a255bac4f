"""The base class of all engines, a subclass of Flower's Grid; and the engine that runs all clients in this process."""

import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from queue import SimpleQueue
from threading import Event
from typing import TypeAlias

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

# A subclass of Flower's Grid needs these two private classes, and Flower has no public import of them.
# TaskIdentity must be set before Flower creates a message. Run is the type of the attribute Grid.run.
# The tests in tests/fl_sim/engines/test_grid.py fail if Flower moves these classes.
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fl_sim.engines import wire
from fl_sim.engines.batching import (
    FIRST_NODE_ID,
    TOO_LATE,
    BatchHandler,
    BatchRunner,
    ClientBatching,
    GroupHandler,
    failure,
)

Progress: TypeAlias = Callable[[int], None]
"""A callback that receives the number of replies of the current exchange so far."""


class LocalGrid(Grid):
    """A Grid with one node for each client: node ``1000 + i`` is client i, which Flower calls partition i.

    Subclasses implement ``_exchange``, which answers all messages of one exchange. ``quiet``: a function that returns a
    context manager, which hides the output of clients. Subclasses that execute clients in this process use this context
    manager.
    """

    def __init__(self, num_clients: int, on_reply: Progress | None = None) -> None:
        self.num_clients = num_clients
        self._on_reply = on_reply or (lambda _: None)
        self._inbox: dict[str, Message] = {}
        self.quiet: Callable[[], AbstractContextManager[None]] = nullcontext
        self._run = Run.create_empty(1)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run: Run) -> None:
        """Store ``run``, Flower's description of the run. Flower's class Grid requires this method."""
        self._run = run

    @property
    def run(self) -> Run:
        """Return Flower's description of the run (``Run``)."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a new message, as ``Message(...)`` does. Flower's class Grid requires this method."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> range:
        """Return the node IDs in the order of their client IDs."""
        return range(FIRST_NODE_ID, FIRST_NODE_ID + self.num_clients)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer ``messages`` at once, keep the replies for ``pull_messages``, and return the message ids."""
        replies = self.send_and_receive(messages)
        self._inbox.update({reply.metadata.reply_to_message_id: reply for reply in replies})
        return [reply.metadata.reply_to_message_id for reply in replies]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the available replies to the messages with the IDs ``message_ids``, and remove these replies."""
        return [self._inbox.pop(message_id) for message_id in message_ids if message_id in self._inbox]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and return one reply per message: an error reply if there is no answer after ``timeout`` s."""
        sent = list(messages)
        for message in sent:
            # Flower's own grids set the ID of a message with the same code
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
        return self._exchange(sent, timeout)

    def close(self) -> None:
        """Release the resources of the engine."""

    def _exchange(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        """Return one reply per message, in any order. A client that exceeds ``timeout`` seconds gets an error reply."""
        raise NotImplementedError


@dataclass(frozen=True)
class Groups:
    """The settings of client tasks (outside of rounds) in which several clients are computed as one batch.

    ``tasks``: the names of these tasks. ``handler``: the function that answers the messages of a batch. ``threads``:
    the number of threads that are reserved for these tasks.
    """

    tasks: frozenset[str]
    handler: GroupHandler
    threads: int

    # With fewer than 3 clients in a batch, Python's overhead takes a third of the time of a training step.
    # More than 10 clients in a batch save no further time.
    _LEAST, _MOST = 3, 10

    def batches(self, messages: Sequence[Message]) -> list[list[Message]]:
        """Divide the messages into batches of 3 to 10 clients, if possible at least one batch per thread."""
        size = min(max(-(-len(messages) // self.threads), self._LEAST), self._MOST)
        return [list(messages[first : first + size]) for first in range(0, len(messages), size)]


class InProcessGrid(LocalGrid):
    """An engine that runs all clients in this process: it has no start-up time, and a debugger can step into clients.

    ``workers`` threads train clients in parallel, which is faster if training releases Python's global lock. Tasks
    other than training run one after another, except the tasks in ``in_threads``. ``batching``, if given, trains
    several clients in one batch. If a batch is computed as one stack, batches run one after another. ``groups``: the
    tasks in which several clients are computed at once; these tasks have separate threads. A client that hangs
    cannot be interrupted, because it runs in this process: ``timeout`` is checked between batches only.
    """

    def __init__(
        self,
        app: ClientApp,
        num_clients: int,
        on_reply: Progress | None = None,
        *,
        workers: int = 1,
        batching: ClientBatching | None = None,
        groups: Groups | None = None,
        in_threads: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(num_clients, on_reply)
        self._runner = BatchRunner(app, num_clients, batching)
        self._is_stacked = batching is not None and batching.stack > 1
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, "client") if workers > 1 else None
        self._in_threads = in_threads
        self._groups = groups
        self._group_pool = ThreadPoolExecutor(groups.threads, "groups") if groups else None

    def close(self) -> None:
        """Shut down the thread pools."""
        for pool in (self._pool, self._group_pool):
            if pool is not None:
                pool.shutdown()

    def _exchange(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        tasks = set(map(wire.task_of, messages))
        stopped, handler, workers = Event(), self._runner.run, self._workers
        if self._groups is not None and tasks <= self._groups.tasks:
            batches, handler = self._groups.batches(messages), partial(_stoppable, self._groups.handler, stopped)
            workers, pool = self._groups.threads, self._group_pool
        else:
            batches = self._runner.batches(messages, workers)
            # All threads share one model, so two stacks (clients that are trained as one computation) cannot run in
            # parallel.
            is_parallel = tasks <= self._in_threads or (tasks == {wire.TRAIN} and not self._is_stacked)
            pool = self._pool if is_parallel and len(batches) > 1 else None
        waiting, replies = deque(batches), dict[str, Message]()

        def take() -> list[Message] | None:
            """Remove and return the next batch; None if no batch is left or the deadline has passed.

            Several threads may call this function at the same time.
            """
            try:
                return waiting.popleft() if time.monotonic() < deadline else None
            except IndexError:
                return None

        try:
            with self.quiet():
                answers = _side_by_side(pool, workers, handler, take) if pool else map(handler, iter(take, None))
                for reply in chain.from_iterable(answers):
                    replies[reply.metadata.reply_to_message_id] = reply
                    self._on_reply(len(replies))
        finally:
            waiting.clear()  # after Ctrl-C, threads finish the batch that they compute, and begin no further batch
            stopped.set()
        late = f"no answer within {timeout or 0:g} s: the client was not started in that time"
        return [replies.get(sent.metadata.message_id) or failure(sent, TOO_LATE, late) for sent in messages]


def _side_by_side(
    pool: ThreadPoolExecutor, workers: int, handler: BatchHandler, take: Callable[[], list[Message] | None]
) -> Iterator[list[Message]]:
    """Yield the replies of each batch as soon as a thread of the pool has answered the batch.

    ``take``: a function that returns the next batch, or None at the end.
    """
    done: SimpleQueue[list[Message] | None] = SimpleQueue()

    def work() -> None:
        try:
            for batch in iter(take, None):
                done.put(handler(batch))
        finally:
            done.put(None)

    running = [pool.submit(work) for _ in range(workers)]
    for _ in running:
        yield from iter(done.get, None)
    for thread in running:
        thread.result()


def _stoppable(handler: GroupHandler, stopped: Event, messages: Sequence[Message]) -> list[Message]:
    def check() -> None:
        if stopped.is_set():
            raise KeyboardInterrupt

    return handler(messages, check)
