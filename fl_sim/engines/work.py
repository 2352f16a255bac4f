"""One exchange over several workers: what waits, what runs where, what is answered. Knows no Ray."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Generic, TypeVar

from flwr.app import Message

from fl_sim.engines.grid import TOO_LATE, WORKER_DIED, failure, partition_of

LEAST_SECONDS, MOST_SECONDS = 0.03, 1.0
"""About how much work a worker is given at a time: more than a call costs (4 ms), less than anyone would wait."""

MAX_DEATHS = 10
"""Workers that may die in one exchange before it is given up: each takes seconds to replace."""

_TINY = 1e-9  # seconds: a step takes longer

Call = TypeVar("Call")


@dataclass
class Work(Generic[Call]):
    """The messages of one exchange. ``replies``: what is answered.

    ``running``: the batch of every call under way. ``begin`` puts it there, and counts its steps.
    ``steps``: how much work a message is, at least 1. ``stack`` above 1: batches are so many messages, in their order,
    whoever takes them when: what is trained together decides the last bits.

    A worker that dies takes all of its batch with it. Those messages are tried once more, each alone, so that the one
    that kills its worker is known; clients may be run twice, since all they keep is keyed by round.
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
        """Return how many messages no worker has."""
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
            return [self._next() for _ in self._stacked()]
        share = _share(step_seconds, others)
        guided, fair = math.ceil(self._left * share / 2), math.ceil((self._left + self._under_way) * share)
        least, most = (max(1, int(bound / max(step_seconds, 1e-6))) for bound in (LEAST_SECONDS, MOST_SECONDS))
        batch = [self._next()]
        room = min(max(least, guided), fair, most) - self.steps(batch[0])
        while self.fresh and self.steps(self.fresh[0]) <= room:
            batch.append(self._next())
            room -= self.steps(batch[-1])
        return batch

    def take_ahead(self, step_seconds: float, others: Sequence[float]) -> list[Message]:
        """Take the batch after the one that a worker has: it begins while the answer to that is on its way.

        Nothing where a client takes longer than that is worth: then whoever is free first is to have it.
        """
        if self._again or self._suspects or not self.fresh or self._least() * step_seconds > LEAST_SECONDS:
            return []
        return self.take(step_seconds, others)

    def _least(self) -> int:
        """Return the steps of the smallest batch that can be taken now: a message, or a stack of them."""
        return self.steps(self.fresh[0]) if self.stack == 1 else sum(map(self.steps, self._stacked()))

    def _next(self) -> Message:
        message = self.fresh.popleft()
        self._left -= self.steps(message)
        return message

    def _stacked(self) -> list[Message]:
        return list(islice(self.fresh, self.stack))

    def _is_too_slow(self, mine: float, first: int, others: Sequence[float]) -> bool:
        """Say whether the others are done with all there is before a worker is that takes ``mine`` seconds for a part.

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
        """Keep the replies of a call that came back."""
        self._end(call)
        self.keep(replies)

    def keep(self, replies: Sequence[Message]) -> None:
        """Keep replies to messages that no worker was needed for, or has answered of a longer call."""
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
            self._fail(self._drain(), WORKER_DIED, f"not tried again: {self._deaths} workers died in this round")

    def node_lost(self, call: Call) -> None:
        """Take back what a worker had that went with its node, as it was: it is no client's fault."""
        self._again.append(self._end(call))

    def give_up(self, reason: str) -> None:
        """Give up all messages that no worker has: it is no client's fault where none can start."""
        self._fail(self._drain(), WORKER_DIED, reason)

    def too_late(self, progress: dict[Call, list[Message]], timeout: float) -> None:
        """Give up what is unfinished after ``timeout`` s, and say who hangs and who waited for whom.

        ``progress``: for every running call whose worker still speaks, its replies so far.
        """
        late, hanging = f"no answer within {timeout:g} s", []
        for call, batch in self.running.items():
            ids = {message.metadata.message_id for message in batch}
            self.keep([reply for reply in progress.get(call, []) if reply.metadata.reply_to_message_id in ids])
            unfinished = [message for message in batch if message.metadata.message_id not in self.replies]
            if unfinished:
                hanging.append(f"client {partition_of(unfinished[0])}")
                state = "it was still training" if call in progress else "its worker is stuck, or was still starting"
                self._fail(unfinished[:1], TOO_LATE, f"{late}: {state}")
                self._fail(unfinished[1:], TOO_LATE, f"{late}: it waited behind {hanging[-1]}")
        self._fail(self._drain(), TOO_LATE, f"{late}: it waited behind {' and '.join(hanging) or 'others'}")

    def _end(self, call: Call) -> list[Message]:
        batch = self.running.pop(call)
        self._under_way -= sum(map(self.steps, batch))
        return batch

    def _fail(self, messages: Sequence[Message], code: int, reason: str) -> None:
        self.keep([failure(message, code, reason) for message in messages])

    def _drain(self) -> list[Message]:
        messages = [*chain.from_iterable(self._again), *self._suspects, *self.fresh]
        self._again.clear()
        self._suspects.clear()
        self.fresh.clear()
        self._left = 0
        return messages


def _share(step_seconds: float, others: Sequence[float]) -> float:
    """Return a worker's part of what all workers do in a second; of whom nothing is known is as fast as the others."""
    known = [1 / max(seconds, _TINY) for seconds in (step_seconds, *others) if seconds < math.inf]
    typical = sum(known) / len(known) if known else 1.0
    speeds = [1 / max(one, _TINY) if one < math.inf else typical for one in (step_seconds, *others)]
    return speeds[0] / sum(speeds)
