"""A Flower Grid of our own, of which both engines are made: how nodes are called, and replies of those that fail."""

import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeAlias

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

# A Grid of one's own needs both, and Flower exports neither publicly: messages cannot be made before a task identity is
# set, and Grid.run has this type. tests/fl_sim/engines/test_inprocess.py fails when a new Flower moves them.
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fl_sim.errors import RunError, UserError
from fl_sim.own_code import with_place

CLIENT_RAISED, WORKER_DIED, TOO_LATE = 1, 2, 3
"""Error codes of the replies that stand for a client that did not answer."""

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of replies of the current exchange so far."""

_FIRST_NODE_ID: Final = 1000  # 0 and 1 mean the server


class LocalGrid(Grid):
    """A Grid whose nodes are partitions: node ``1000 + i`` holds partition i.

    Subclasses answer a whole exchange at once in ``_exchange``; those that play clients in this process do it within
    ``quiet``, which keeps from the screen what clients print.
    """

    def __init__(self, num_clients: int, on_reply: Progress | None = None) -> None:
        self.num_clients = num_clients
        self._on_reply = on_reply or (lambda _: None)
        self._inbox: dict[str, Message] = {}
        self.quiet: Callable[[], AbstractContextManager[None]] = nullcontext
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

    def get_node_ids(self) -> range:
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
        """Return one reply per message, in whatever order; an error reply where ``timeout`` seconds were not enough."""
        raise NotImplementedError


def answer(app: ClientApp, message: Message, num_clients: int) -> Message:
    """Return what ``app`` replies, or an error reply that says what it raised."""
    try:
        return app(message, node_context(message.metadata.dst_node_id, num_clients))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a user's model or data raises becomes a reply that names it)
        return raised(message, error)


def raised(message: Message, error: BaseException) -> Message:
    """Return the reply of a client that raised ``error``."""
    said = str(error) if isinstance(error, RunError | UserError) else with_place(error)
    return failure(message, CLIENT_RAISED, said)


def failure(message: Message, code: int, reason: str) -> Message:
    """Return the reply that stands for a client that did not answer."""
    return Message(Error(code, reason), reply_to=message)


def node_context(node_id: int, num_clients: int) -> Context:
    """Return a node's context. It carries no state: what clients keep lives in fl_sim.store.tensors."""
    config: dict[str, bool | float | int | str] = {
        "partition-id": node_id - _FIRST_NODE_ID,
        "num-partitions": num_clients,
    }
    return Context(run_id=1, node_id=node_id, node_config=config, state=RecordDict(), run_config={})


def partition_of(message: Message) -> int:
    """Return the partition a message is addressed to."""
    return message.metadata.dst_node_id - _FIRST_NODE_ID
