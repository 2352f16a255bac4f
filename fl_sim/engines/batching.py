"""Batches of messages: how one process answers them, and how one exchange is divided among several workers.

Knows no Ray.
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
"""Answers a batch of messages: a reply for each, an error reply where a client fails. Raises nothing."""

GroupHandler: TypeAlias = Callable[[Sequence[Message], Callable[[], None]], list[Message]]
"""The same for tasks that several clients answer in one computation: it calls its second argument now and then, and
raises what that raises."""

CLIENT_RAISED, WORKER_DIED, TOO_LATE = 1, 2, 3
"""Error codes of the replies that stand for a client that did not answer."""

FIRST_NODE_ID: Final = 1000  # 0 and 1 mean the server

STEPS_AT_A_TIME = 16
"""Minibatch steps in a batch: far more than handing it over costs, far less than a round."""

_FIRST_STEPS = 4  # in the first batch; the next ones have as many more each, until they are ``STEPS_AT_A_TIME``

LEAST_SECONDS, MOST_SECONDS = 0.03, 1.0
"""About how much work a worker is given at a time: more than a call costs (4 ms), less than anyone would wait."""

MAX_DEATHS = 10
"""Workers that may die in one exchange before it is given up: each takes seconds to replace."""

_LOGGER: Final = logging.getLogger("fl_sim")
"""``--debug`` shows what it is told; a private run keeps that from the screen."""

_TINY = 1e-9  # seconds: a step takes longer

Call = TypeVar("Call")


@dataclass(frozen=True)
class ClientBatching:
    """The settings by which several clients are trained at a time.

    ``handler`` is called once in every process and returns the handler of that process. ``steps``: every partition's
    minibatch steps in a round. ``stack``: the number of clients in a batch; with 1, a batch has as many clients as have
    ``STEPS_AT_A_TIME`` steps, or ``least_steps`` where these are more: less work is not worth another thread.
    ``most_clients``: the largest number of clients in a batch, since all of their models are in memory at once.
    """

    handler: Callable[[], BatchHandler]
    steps: Sequence[int] | NDArray[np.int64]
    stack: int = 1
    least_steps: int = 1
    most_clients: int = 1_000_000

    def ordered(self, messages: Sequence[Message]) -> list[Message]:
        """Put clients with the most steps first: neighbours are alike, and no worker is left with a long last one."""
        return sorted(messages, key=self.steps_of, reverse=True)

    def steps_of(self, message: Message) -> int:
        """Return the number of minibatch steps that a message asks for."""
        return int(self.steps[partition_of(message)])

    def batches(self, messages: Sequence[Message], workers: int) -> list[list[Message]]:
        """Divide a round into batches, by nothing but the arguments.

        Towards the end batches shrink, so that no worker is left with a long last one. The first ones are small, too:
        in one process a worker gets ready while the others wait to do so.
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
    """Answers for the clients of one process: training by ``batching`` where it is given, all else one by one."""

    def __init__(self, app: ClientApp, num_clients: int, batching: ClientBatching | None) -> None:
        self._app = app
        self._num_clients = num_clients
        self._batching = batching
        self._handler = batching.handler() if batching else None

    def batches(self, messages: Sequence[Message], workers: int) -> list[list[Message]]:
        """Divide ``messages`` into batches for ``run``."""
        if self._batching is None or set(map(wire.task_of, messages)) != {wire.TRAIN}:
            return [[message] for message in messages]
        return self._batching.batches(messages, workers)

    def run(self, batch: Sequence[Message]) -> list[Message]:
        """Answer a batch, with an error reply for a client that fails."""
        if self._handler is not None and set(map(wire.task_of, batch)) == {wire.TRAIN}:
            return self._handler(batch)
        return [answer(self._app, message, self._num_clients) for message in batch]


@dataclass
class Exchange(Generic[Call]):
    """The messages of one exchange over several workers, and the replies so far.

    ``running``: the batch of every call under way. ``begin`` puts it there, and counts its steps.
    ``steps``: how much work a message is, at least 1. ``stack`` above 1: batches are so many messages, in their order,
    whoever takes them when: what is trained together decides the last bits.

    A worker that dies takes all of its batch with it. Those messages are tried once more, each alone, so that the one
    that kills its worker is known; clients may be run twice, since client states are keyed by round.
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
        """Add up the steps of ``fresh``, once: with many clients that takes too long to be done at every call."""
        self._left = sum(map(self.steps, self.fresh))

    @property
    def waiting(self) -> int:
        """The number of messages that no worker has."""
        return len(self.fresh) + len(self._suspects) + sum(map(len, self._again))

    def take(self, step_seconds: float, others: Sequence[float] = ()) -> list[Message]:
        """Take the next batch: ever smaller ones towards the end, so that no worker is left with a long last one.

        At the end that is a worker's fair part of all that is not answered yet, which others may have begun.
        ``step_seconds``: about how long a step takes this worker, ``others``: all other workers, infinite where nothing
        is known yet. Faster ones take more, and a slow one nothing where the others would have done all sooner.
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
        typical = sum(known) / len(known) if known else 1.0  # a worker of unknown speed counts as an average one
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
        """Take the batch after a worker's present one: it begins while the answer to that is on its way.

        Nothing where a client takes longer than that is worth: then whoever is free first is to have it.
        """
        if self._again or self._suspects or not self.fresh or self._least() * step_seconds > LEAST_SECONDS:
            return []
        return self.take(step_seconds, others)

    def _least(self) -> int:
        """Return the steps of the smallest batch that can be taken now: a message, or a stack of them."""
        return sum(map(self.steps, islice(self.fresh, self.stack)))

    def _next(self) -> Message:
        message = self.fresh.popleft()
        self._left -= self.steps(message)
        return message

    def _is_too_slow(self, mine: float, first: int, others: Sequence[float]) -> bool:
        """Return True if the others finish everything before a worker that takes ``mine`` seconds for a part.

        ``first``: the steps of that part. What runs now counts as if it had just begun.
        """
        known = [seconds for seconds in others if seconds < math.inf]
        if not known or mine == math.inf:
            return False
        together = sum(1 / seconds for seconds in known)
        return mine > (self._left + self._under_way) / together + first * min(known)

    def begin(self, call: Call, batch: list[Message]) -> None:
        """Note that a worker was given a batch."""
        self.running[call] = batch
        self._under_way += sum(map(self.steps, batch))

    def answered(self, call: Call, replies: Sequence[Message]) -> None:
        """Add the replies of a call that came back."""
        self._end(call)
        self.add(replies)

    def add(self, replies: Sequence[Message]) -> None:
        """Add replies to messages that no worker was needed for, or that are part of an unfinished call."""
        self.replies.update({reply.metadata.reply_to_message_id: reply for reply in replies})

    def worker_died(self, call: Call, reason: str) -> None:
        """Decide what becomes of a dead worker's batch; ``reason`` is for those whose second worker it was."""
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
        """Take back the batch of a worker that went with its node, as it was: no client is to blame."""
        self._again.append(self._end(call))

    def give_up(self, reason: str, code: int = WORKER_DIED) -> None:
        """Give up all messages that no worker has: no client is to blame where no worker can start."""
        self._fail([*chain.from_iterable(self._again), *self._suspects, *self.fresh], code, reason)
        self._again.clear()
        self._suspects.clear()
        self.fresh.clear()
        self._left = 0

    def too_late(self, progress: dict[Call, list[Message]], timeout: float) -> None:
        """Give up what is unfinished after ``timeout`` s, and say who hangs and who waited for whom.

        ``progress``: for every running call whose worker still answers, its replies so far.
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
                self._fail(unfinished[1:], TOO_LATE, f"{late}: it waited behind {hanging[-1]}")
        self.give_up(f"{late}: it waited behind {' and '.join(hanging) or 'others'}", TOO_LATE)

    def _end(self, call: Call) -> list[Message]:
        batch = self.running.pop(call)
        self._under_way -= sum(map(self.steps, batch))
        return batch

    def _fail(self, messages: Sequence[Message], code: int, reason: str) -> None:
        self.add([failure(message, code, reason) for message in messages])


def answer(app: ClientApp, message: Message, num_clients: int) -> Message:
    """Return the reply of ``app``, or an error reply with the text of the error that it raised."""
    try:
        return app(message, node_context(message.metadata.dst_node_id, num_clients))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a user's model or data raises becomes a reply that names it)
        return raised(message, error)


def raised(message: Message, error: BaseException) -> Message:
    """Return the reply of a client that raised ``error``."""
    _LOGGER.debug("a client failed; its traceback:", exc_info=error)
    text = str(error) if isinstance(error, RunError | UserError) else with_place(error)
    return failure(message, CLIENT_RAISED, text)


def failure(message: Message, code: int, reason: str) -> Message:
    """Return the reply that stands for a client that did not answer."""
    return Message(Error(code, reason), reply_to=message)


def node_context(node_id: int, num_clients: int) -> Context:
    """Return a node's context. It carries no state: client states lie in fl_sim.store.tensors."""
    config: dict[str, bool | float | int | str] = {
        "partition-id": node_id - FIRST_NODE_ID,
        "num-partitions": num_clients,
    }
    return Context(run_id=1, node_id=node_id, node_config=config, state=RecordDict(), run_config={})


def partition_of(message: Message) -> int:
    """Return the partition a message is addressed to."""
    return message.metadata.dst_node_id - FIRST_NODE_ID
