"""Flower Grids of our own: what both engines share, and the engine that runs every client in this process."""

import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

# A Grid of one's own needs both, and Flower exports neither publicly: messages cannot be made before a task identity is
# set, and Grid.run has this type. tests/fl_sim/test_engine.py fails when a new Flower moves them.
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fl_sim import wire

CLIENT_RAISED, WORKER_DIED, TOO_LATE = 1, 2, 3
"""Error codes of the replies that stand for a client that did not answer."""

Progress = Callable[[int], None]
"""Called with the number of replies of the current exchange so far."""

Together = Callable[[Sequence[tuple[int, Message]]], Iterator[tuple[int, Message | Exception]]]
"""Plays (client, message) of a round as few computations: yields (place, reply or what the client raised)."""

_FIRST_NODE_ID = 1000  # 0 and 1 mean the server


class LocalGrid(Grid):
    """A Grid whose nodes are partitions: node ``1000 + i`` holds partition i.

    Subclasses answer a whole exchange at once in ``_exchange``.
    """

    def __init__(self, num_clients: int, on_reply: Progress | None = None) -> None:
        self.num_clients = num_clients
        self._on_reply = on_reply or (lambda _: None)
        self._inbox: dict[str, Message] = {}
        self._run = Run.create_empty(1)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run: Run) -> None:
        """Take over Flower's description of a run."""
        self._run = run

    @property
    def run(self) -> Run:
        """Return Flower's description of the run."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Make a message, as ``Message(...)`` does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids in the order of their partitions."""
        return range(_FIRST_NODE_ID, _FIRST_NODE_ID + self.num_clients)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer ``messages`` at once and keep the replies for ``pull_messages``."""
        replies = self.send_and_receive(messages)
        self._inbox.update({reply.metadata.reply_to_message_id: reply for reply in replies})
        return [reply.metadata.reply_to_message_id for reply in replies]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Hand over the replies to ``message_ids`` that are there."""
        return [self._inbox.pop(message_id) for message_id in message_ids if message_id in self._inbox]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Return one reply per message; an error reply where a client gave none within ``timeout`` seconds."""
        sent = list(messages)
        for message in sent:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex  # as Flower's own grids do
        return self._exchange(sent, timeout)

    def close(self) -> None:
        """Give back what the engine holds."""

    def _exchange(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        raise NotImplementedError


class InProcessGrid(LocalGrid):
    """All clients in this process: no start-up, and a debugger sees everything.

    ``workers`` threads train clients side by side, which pays where training lets go of Python's lock; ``together``, if
    given, trains all of a round's clients instead. Whatever else is asked of clients is answered one after another. A
    client that hangs cannot be interrupted from within its own process; ``timeout`` is looked at between clients.
    """

    def __init__(
        self,
        app: ClientApp,
        num_clients: int,
        on_reply: Progress | None = None,
        *,
        workers: int = 1,
        together: Together | None = None,
    ) -> None:
        super().__init__(num_clients, on_reply)
        self._together = together
        self._app = app
        self._pool = ThreadPoolExecutor(workers, "client") if workers > 1 else None

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _exchange(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout

        def answered(message: Message) -> Message:
            if time.monotonic() >= deadline:
                return _out_of_time(message, timeout)
            return answer(self._app, message, self.num_clients)

        training = all(message.metadata.message_type == wire.TRAIN for message in messages)
        if self._together is not None and training:
            return self._as_one(self._together, messages, deadline, timeout)
        voting = all(message.metadata.message_type == wire.VOTE for message in messages)
        if self._pool is not None and (training or voting):
            return self._side_by_side(self._pool, answered, messages)
        replies = []
        for message in messages:
            replies.append(answered(message))
            self._on_reply(len(replies))
        return replies

    def _as_one(
        self, together: Together, messages: Sequence[Message], deadline: float, timeout: float | None
    ) -> list[Message]:
        replies = {}
        for place, answered in together([(partition_of(message), message) for message in messages]):
            replies[place] = answered if isinstance(answered, Message) else raised(messages[place], answered)
            self._on_reply(len(replies))
            if time.monotonic() >= deadline:
                break
        return [
            replies[place] if place in replies else _out_of_time(message, timeout)
            for place, message in enumerate(messages)
        ]

    def _side_by_side(
        self, pool: ThreadPoolExecutor, answered: Callable[[Message], Message], messages: Sequence[Message]
    ) -> list[Message]:
        running = [pool.submit(answered, message) for message in messages]
        try:
            for count, _ in enumerate(as_completed(running), start=1):
                self._on_reply(count)
        finally:
            for left in running:  # by Ctrl-C: those that have begun finish, the others do not begin
                left.cancel()
        return [done.result() for done in running]


def answer(app: ClientApp, message: Message, num_clients: int) -> Message:
    """Return what ``app`` replies, or an error reply that says what it raised."""
    try:
        return app(message, node_context(message.metadata.dst_node_id, num_clients))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a user's model or data raises becomes a reply that names it)
        return raised(message, error)


def raised(message: Message, error: BaseException) -> Message:
    """Return the reply of a client that raised ``error``."""
    return failure(message, CLIENT_RAISED, f"{type(error).__name__}: {error}")


def _out_of_time(message: Message, timeout: float | None) -> Message:
    return failure(message, TOO_LATE, f"no answer within {timeout or 0:g} s: its turn did not come")


def failure(message: Message, code: int, reason: str) -> Message:
    """Return the reply that stands for a client that did not answer."""
    return Message(Error(code, reason), reply_to=message)


def node_context(node_id: int, num_clients: int) -> Context:
    """Return a node's context. It carries no state: what clients keep lives in fl_sim.store."""
    config: dict[str, bool | float | int | str] = {
        "partition-id": node_id - _FIRST_NODE_ID,
        "num-partitions": num_clients,
    }
    return Context(run_id=1, node_id=node_id, node_config=config, state=RecordDict(), run_config={})


def partition_of(message: Message) -> int:
    """Return the partition a message is addressed to."""
    return message.metadata.dst_node_id - _FIRST_NODE_ID
