"""Batches of messages: a runner that answers batches in one process, and the distribution of batches to workers.

In an exchange, the server sends messages to clients and collects all replies. This file does not import Ray.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final, Generic, TypeAlias, TypeVar

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fl_sim.engines import wire
from fl_sim.errors import RunError, UserError
from fl_sim.own_code import with_place

BatchHandler: TypeAlias = Callable[[Sequence[Message]], list[Message]]
"""A function that returns one reply for each message of a batch. If a client fails, its reply contains the error."""

GroupHandler: TypeAlias = Callable[[Sequence[Message], Callable[[], None]], list[Message]]
"""A ``BatchHandler`` for tasks that several clients answer in one computation. The handler calls its second argument, a
function, from time to time. If that function raises an exception, the handler stops the computation.
"""

CLIENT_RAISED, WORKER_DIED, TOO_LATE = 1, 2, 3
"""The codes of error replies: the client raised an error, its worker died, or the client exceeded the timeout."""

FIRST_NODE_ID: Final = 1000  # Flower's node IDs 0 and 1 mean the server

STEPS_AT_A_TIME = 16
"""The number of minibatch steps in a batch of messages. Such a batch takes far longer than its fixed overhead."""

_FIRST_STEPS = 4  # minibatch steps in a round's first batch; each later batch has 4 more, up to ``STEPS_AT_A_TIME``

LEAST_SECONDS, MOST_SECONDS = 0.03, 1.0
"""Bounds in seconds of the estimated duration of a batch of messages. The fixed time for a call is only 4 ms."""

MAX_DEATHS = 10
"""The number of dead workers after which the engine stops an exchange of messages. A worker needs seconds to start."""

_LOGGER: Final = logging.getLogger("fl_sim")
"""The logger for tracebacks of failed clients: ``--debug`` shows them, except in a private run."""

_TINY = 1e-9  # the smallest seconds per step in computations, to avoid a division by zero

Call = TypeVar("Call")


@dataclass(frozen=True)
class ClientBatching:
    """The settings for training several clients in one batch.

    ``handler``: a function that is called once in every process. It returns the batch handler: the function that trains
    the clients of a batch in that process. ``steps``: each client's number of minibatch steps in a round; the client ID
    is the index. ``stack``: the number of clients that are trained as one computation. If it is above 1, each batch is
    one such stack. If it is 1, clients are added to a batch until the sum of their minibatch steps is at least
    ``STEPS_AT_A_TIME`` and at least ``least_steps``. With fewer than ``least_steps`` steps, sending a separate batch
    takes longer than it saves.
    ``most_clients``: the largest number of clients in a batch. This number limits the use of memory: the models of all
    clients of a batch are in memory at once.
    """

    handler: Callable[[], BatchHandler]
    steps: Sequence[int] | NDArray[np.int64]
    stack: int = 1
    least_steps: int = 1
    most_clients: int = 1_000_000

    def ordered(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in descending order of their clients' minibatch steps.

        In this order, the clients of a batch have similar numbers of steps, and no long training begins at the end of a
        round.
        """
        return sorted(messages, key=self.steps_of, reverse=True)

    def steps_of(self, message: Message) -> int:
        """Return the number of minibatch steps of the client that a message is addressed to."""
        return int(self.steps[partition_of(message)])

    def batches(self, messages: Sequence[Message], workers: int) -> list[list[Message]]:
        """Return the messages of a round divided into batches for ``workers`` workers; the result is deterministic.

        The last batches are small, so that all workers finish at about the same time. The first batches are small, too:
        in one process, workers prepare batches one after another, and small batches let each worker start early.
        """
        ordered = self.ordered(messages)
        if self.stack > 1:
            return [ordered[first : first + self.stack] for first in range(0, len(ordered), self.stack)]
        batches: list[list[Message]] = []
        left, room = sum(map(self.steps_of, ordered)), 0.0
        for message in ordered:
            steps = self.steps_of(message)
            if steps > room or not batches or len(batches[-1]) >= self.most_clients:
                batches.append([])
                grown = min(STEPS_AT_A_TIME, _FIRST_STEPS * len(batches))
                share = min(grown, left / (2 * workers)) if workers > 1 else STEPS_AT_A_TIME
                room = max(share, self.least_steps)
            batches[-1].append(message)
            room, left = room - steps, left - steps
        return batches


class BatchRunner:
    """A runner that answers all messages to the clients of one process.

    If ``batching`` is given, its batch handler trains several clients at once. The Flower app ``app`` answers all other
    messages, one by one.
    """

    def __init__(self, app: ClientApp, num_clients: int, batching: ClientBatching | None) -> None:
        self._app = app
        self._num_clients = num_clients
        self._batching = batching
        self._handler = batching.handler() if batching else None

    def batches(self, messages: Sequence[Message], workers: int) -> list[list[Message]]:
        """Return ``messages`` divided into batches for the method ``run``."""
        if self._batching is None or set(map(wire.task_of, messages)) != {wire.TRAIN}:
            return [[message] for message in messages]
        return self._batching.batches(messages, workers)

    def run(self, batch: Sequence[Message]) -> list[Message]:
        """Return one reply for each message of a batch; an error reply for a client that fails."""
        if self._handler is not None and set(map(wire.task_of, batch)) == {wire.TRAIN}:
            return self._handler(batch)
        return [answer(self._app, message, self._num_clients) for message in batch]


@dataclass
class Exchange(Generic[Call]):
    """The state of one exchange: the messages of the server to clients, distributed to workers, and all replies so far.

    ``fresh``: the messages that no worker has received yet. ``running``: the batch of every unfinished call; ``begin``
    adds a batch and counts its steps. ``steps``: a function that returns the number of minibatch steps that the answer
    to a message takes, at least 1. ``stack``: if above 1, every batch has ``stack`` messages in the given order. The
    batches are then always the same. That is necessary, because the rounding of a client's update depends on which
    clients are in its batch.

    If a worker dies, its whole batch is lost. The messages of that batch are sent once more, each in a separate batch,
    to find the client that kills its worker. A client may safely answer a message twice: client states are stored with
    their round, so the second execution starts from the same state.
    """

    fresh: deque[Message]
    steps: Callable[[Message], int] = lambda _: 1
    stack: int = 1
    running: dict[Call, list[Message]] = field(default_factory=dict)
    replies: dict[str, Message] = field(default_factory=dict)
    _again: deque[list[Message]] = field(default_factory=deque)
    _suspects: deque[Message] = field(default_factory=deque)
    _tried: set[str] = field(default_factory=set)
    _deaths: int = 0
    _left: int = field(init=False)
    _under_way: int = 0

    def __post_init__(self) -> None:
        """Add up the minibatch steps of all messages in ``fresh``. Each later call uses this sum."""
        self._left = sum(map(self.steps, self.fresh))

    @property
    def waiting(self) -> int:
        """The number of messages that no worker has received or that must be sent again."""
        return len(self.fresh) + len(self._suspects) + sum(map(len, self._again))

    def take(self, step_seconds: float, others: Sequence[float] = ()) -> list[Message]:
        """Remove and return the next batch for one worker; an empty list if the worker should get none.

        ``step_seconds``: this worker's estimated seconds per step. ``others``: the estimated seconds per step of all
        other workers; infinity for a worker of unknown speed. Batches shrink towards the end, so that all workers
        finish at about the same time. Faster workers get larger batches. A slow worker gets no batch if the other
        workers would finish all messages sooner without the slow worker.
        """
        if self._again:
            return self._again.popleft()
        if self._suspects:
            return [self._suspects.popleft()]
        if not self.fresh:
            return []
        first = self._least()
        if self._is_too_slow(first * step_seconds, first, others):
            return []
        if self.stack > 1:
            return [self._next() for _ in range(min(self.stack, len(self.fresh)))]
        known = [1 / max(seconds, _TINY) for seconds in (step_seconds, *others) if seconds < math.inf]
        typical = sum(known) / len(known) if known else 1.0  # a worker of unknown speed is assumed to have this speed
        speeds = [1 / max(one, _TINY) if one < math.inf else typical for one in (step_seconds, *others)]
        share = speeds[0] / sum(speeds)
        guided, fair = math.ceil(self._left * share / 2), math.ceil((self._left + self._under_way) * share)
        least, most = (max(1, int(bound / max(step_seconds, 1e-6))) for bound in (LEAST_SECONDS, MOST_SECONDS))
        batch = [self._next()]
        room = min(max(least, guided), fair, most) - self.steps(batch[0])
        while self.fresh and self.steps(self.fresh[0]) <= room:
            batch.append(self._next())
            room -= self.steps(batch[-1])
        return batch

    def take_ahead(self, step_seconds: float, others: Sequence[float]) -> list[Message]:
        """Remove and return one further batch for a busy worker, to be computed right after its present batch.

        The result is empty if this batch would take longer than ``LEAST_SECONDS``. The first free worker should get
        such a batch.
        """
        if self._again or self._suspects or not self.fresh or self._least() * step_seconds > LEAST_SECONDS:
            return []
        return self.take(step_seconds, others)

    def _least(self) -> int:
        """Return the number of minibatch steps of the smallest next batch: one message, or ``stack`` messages."""
        return sum(map(self.steps, islice(self.fresh, self.stack)))

    def _next(self) -> Message:
        message = self.fresh.popleft()
        self._left -= self.steps(message)
        return message

    def _is_too_slow(self, mine: float, first: int, others: Sequence[float]) -> bool:
        """Return True if the other workers would finish all messages before this worker finishes one batch.

        Such a worker gets no batch. ``mine``: this worker's seconds for the batch. ``first``: the number of steps in
        the batch. ``others``: seconds per step of the other workers. The progress of running batches is unknown, so all
        steps of these batches count as unfinished.
        """
        known = [seconds for seconds in others if seconds < math.inf]
        if not known or mine == math.inf:
            return False
        together = sum(1 / seconds for seconds in known)
        return mine > (self._left + self._under_way) / together + first * min(known)

    def begin(self, call: Call, batch: list[Message]) -> None:
        """Store ``batch``, which a worker now answers in the call ``call``, and count the batch's minibatch steps."""
        self.running[call] = batch
        self._under_way += sum(map(self.steps, batch))

    def answered(self, call: Call, replies: Sequence[Message]) -> None:
        """Store the replies of a finished call."""
        self._end(call)
        self.add(replies)

    def add(self, replies: Sequence[Message]) -> None:
        """Store replies that arrive before their call has ended, or that needed no worker."""
        self.replies.update({reply.metadata.reply_to_message_id: reply for reply in replies})

    def worker_died(self, call: Call, reason: str) -> None:
        """Schedule the messages of a dead worker's batch again, each in a separate batch.

        Batches of one message show which client kills its worker. A message is sent at most twice: if a second worker
        dies, the message gets an error reply with ``reason``. After ``MAX_DEATHS`` dead workers, all waiting messages
        get an error reply.
        """
        self._deaths += 1
        for message in self._end(call):
            if message.metadata.message_id in self._tried:
                self._fail([message], WORKER_DIED, f"{reason} while client {partition_of(message)} trained")
            else:
                self._tried.add(message.metadata.message_id)
                self._suspects.append(message)
        if self._deaths >= MAX_DEATHS:
            self.give_up(f"not tried again: {self._deaths} workers died in this round")

    def node_lost(self, call: Call) -> None:
        """Schedule the whole batch of ``call`` again, because no client caused the loss of the worker's node."""
        self._again.append(self._end(call))

    def give_up(self, reason: str, code: int = WORKER_DIED) -> None:
        """Answer every message that still waits for a worker with an error reply (``code``, ``reason``)."""
        self._fail([*chain.from_iterable(self._again), *self._suspects, *self.fresh], code, reason)
        self._again.clear()
        self._suspects.clear()
        self.fresh.clear()
        self._left = 0

    def too_late(self, progress: dict[Call, list[Message]], timeout: float) -> None:
        """Give an error reply to each message that is unfinished after ``timeout`` seconds.

        For a client that hangs, the error says whether the client was training or its worker was stuck. For a client
        that waited for a hanging client, the error has the ID of the hanging client. ``progress``: the replies so far,
        for every running call whose worker still responds.
        """
        late, hanging = f"no answer within {timeout:g} s", []
        for call, batch in self.running.items():
            ids = {message.metadata.message_id for message in batch}
            self.add([reply for reply in progress.get(call, []) if reply.metadata.reply_to_message_id in ids])
            unfinished = [message for message in batch if message.metadata.message_id not in self.replies]
            if unfinished:
                hanging.append(f"client {partition_of(unfinished[0])}")
                state = "it was still training" if call in progress else "its worker is stuck, or was still starting"
                self._fail(unfinished[:1], TOO_LATE, f"{late}: {state}")
                self._fail(unfinished[1:], TOO_LATE, f"{late}: it waited for {hanging[-1]}, which did not finish")
        self.give_up(f"{late}: it waited for {' and '.join(hanging) or 'others'}, which did not finish", TOO_LATE)

    def _end(self, call: Call) -> list[Message]:
        batch = self.running.pop(call)
        self._under_way -= sum(map(self.steps, batch))
        return batch

    def _fail(self, messages: Sequence[Message], code: int, reason: str) -> None:
        self.add([failure(message, code, reason) for message in messages])


def answer(app: ClientApp, message: Message, num_clients: int) -> Message:
    """Return the reply of ``app`` to a message, or an error reply with the text of the error that ``app`` raised."""
    try:
        return app(message, node_context(message.metadata.dst_node_id, num_clients))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (every error of a user's model or data becomes an error reply)
        return raised(message, error)


def raised(message: Message, error: BaseException) -> Message:
    """Return an error reply for a client that raised ``error``, and log the traceback."""
    _LOGGER.debug("a client failed; its traceback:", exc_info=error)
    text = str(error) if isinstance(error, RunError | UserError) else with_place(error)
    return failure(message, CLIENT_RAISED, text)


def failure(message: Message, code: int, reason: str) -> Message:
    """Return an error reply for a client that did not answer."""
    return Message(Error(code, reason), reply_to=message)


def node_context(node_id: int, num_clients: int) -> Context:
    """Return the Flower context of a node. The context has no state: client states are in fl_sim.store.tensors."""
    config: dict[str, bool | float | int | str] = {
        "partition-id": node_id - FIRST_NODE_ID,
        "num-partitions": num_clients,
    }
    return Context(run_id=1, node_id=node_id, node_config=config, state=RecordDict(), run_config={})


def partition_of(message: Message) -> int:
    """Return the ID of the client (Flower: partition ID) that a message is addressed to."""
    return message.metadata.dst_node_id - FIRST_NODE_ID
