"""Flower Grids of our own: what both engines share, and the engine that runs every client in this process."""

import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from queue import SimpleQueue
from threading import Event

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

# A Grid of one's own needs both, and Flower exports neither publicly: messages cannot be made before a task identity is
# set, and Grid.run has this type. tests/fl_sim/engines/test_inprocess.py fails when a new Flower moves them.
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fl_sim.engines import wire
from fl_sim.errors import RunError, UserError

CLIENT_RAISED, WORKER_DIED, TOO_LATE = 1, 2, 3
"""Error codes of the replies that stand for a client that did not answer."""

Progress = Callable[[int], None]
"""Called with the number of replies of the current exchange so far."""

Play = Callable[[Sequence[Message]], list[Message]]
"""Answers messages as one piece of work: a reply for each, an error reply where a client fails; never raises."""

Release = Callable[[Sequence[Message], Callable[[], None]], list[Message]]
"""The same for clients that release synthetic records, which takes long: calls its second argument at every step, and
raises nothing but what that raises."""

STEPS_AT_A_TIME = 16
"""Minibatch steps in a piece of work: far more than handing it over costs, far less than a round."""

_FIRST_NODE_ID = 1000  # 0 and 1 mean the server


@dataclass(frozen=True)
class Together:
    """How a round's clients are trained several at a time.

    ``player`` is called once in every process. ``steps``: every partition's minibatch steps in a round. ``stack``: how
    many clients make a piece of work; with 1 it is as many as have ``STEPS_AT_A_TIME`` steps.
    """

    player: Callable[[], Play]
    steps: Sequence[int]
    stack: int = 1

    def ordered(self, messages: Sequence[Message]) -> list[Message]:
        """Put clients with the most steps first: neighbours are alike, and no worker is left with a long last one."""
        return sorted(messages, key=lambda message: -self.steps_of(message))

    def steps_of(self, message: Message) -> int:
        """Return the minibatch steps that a message asks for."""
        return self.steps[partition_of(message)]

    def pieces(self, messages: Sequence[Message], workers: int) -> list[list[Message]]:
        """Cut a round into pieces of work; how depends on the arguments alone.

        Towards the end pieces shrink, so that no worker is left with a long last one.
        """
        ordered = self.ordered(messages)
        if self.stack > 1:
            return [ordered[first : first + self.stack] for first in range(0, len(ordered), self.stack)]
        pieces: list[list[Message]] = []
        left, room = sum(map(self.steps_of, ordered)), 0.0
        for message in ordered:
            steps = self.steps_of(message)
            if steps > room or not pieces:
                pieces.append([])
                room = min(STEPS_AT_A_TIME, left / (2 * workers)) if workers > 1 else STEPS_AT_A_TIME
            pieces[-1].append(message)
            room, left = room - steps, left - steps
        return pieces


@dataclass(frozen=True)
class Generators:
    """How clients' generators are trained: by ``threads`` threads, each several clients' as one computation."""

    release: Release
    threads: int

    _LEAST, _MOST = 3, 10  # a third of a lone client's step is Python, for which threads wait; ten share all there is

    def pieces(self, messages: Sequence[Message]) -> list[list[Message]]:
        """Cut an exchange into one piece of work for every thread, or more."""
        size = min(max(-(-len(messages) // self.threads), self._LEAST), self._MOST)
        return [list(messages[first : first + size]) for first in range(0, len(messages), size)]


class Clients:
    """Plays the clients of one process: training several at a time where ``together`` is given, else one by one."""

    def __init__(self, app: ClientApp, num_clients: int, together: Together | None) -> None:
        self._app = app
        self._num_clients = num_clients
        self._together = together
        self._play = together.player() if together else None

    def pieces(self, messages: Sequence[Message], workers: int) -> list[list[Message]]:
        """Cut ``messages`` into what ``play`` takes."""
        if self._together is None or not all(map(_trains, messages)):
            return [[message] for message in messages]
        return self._together.pieces(messages, workers)

    def play(self, piece: Sequence[Message]) -> list[Message]:
        """Answer a piece of work, with an error reply for a client that fails."""
        if self._play is not None and all(map(_trains, piece)):
            return self._play(piece)
        return [answer(self._app, message, self._num_clients) for message in piece]


def _trains(message: Message) -> bool:
    return message.metadata.message_type == wire.TRAIN


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

    ``workers`` threads train clients side by side, which pays where training lets go of Python's lock; whatever else is
    asked of clients is answered one after another. ``together``, if given, trains several clients at a time; stacks one
    after another. ``generators``, if given, has threads of its own release synthetic records. A client that hangs
    cannot be interrupted from within its own process; ``timeout`` is looked at between pieces of work.
    """

    def __init__(
        self,
        app: ClientApp,
        num_clients: int,
        on_reply: Progress | None = None,
        *,
        workers: int = 1,
        together: Together | None = None,
        generators: Generators | None = None,
    ) -> None:
        super().__init__(num_clients, on_reply)
        self._clients = Clients(app, num_clients, together)
        self._is_stacked = together is not None and together.stack > 1
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, "client") if workers > 1 else None
        self._generators = generators
        self._generator_pool = ThreadPoolExecutor(generators.threads, "generators") if generators else None

    def close(self) -> None:
        """End the threads."""
        for pool in (self._pool, self._generator_pool):
            if pool is not None:
                pool.shutdown()

    def _exchange(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        kinds = {message.metadata.message_type for message in messages}
        parallel = kinds == {wire.VOTE} or (kinds == {wire.TRAIN} and not self._is_stacked)  # a stack takes the model
        play: Play = self._clients.play
        pieces, pool = self._clients.pieces(messages, self._workers), self._pool if parallel else None
        workers, stopped = self._workers, Event()
        if self._generators is not None and kinds == {wire.SYNTHESIZE}:
            pieces, play = self._generators.pieces(messages), partial(_stoppable, self._generators.release, stopped)
            workers, pool = self._generators.threads, self._generator_pool
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


def answer(app: ClientApp, message: Message, num_clients: int) -> Message:
    """Return what ``app`` replies, or an error reply that says what it raised."""
    try:
        return app(message, node_context(message.metadata.dst_node_id, num_clients))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a user's model or data raises becomes a reply that names it)
        return raised(message, error)


def raised(message: Message, error: BaseException) -> Message:
    """Return the reply of a client that raised ``error``."""
    said = str(error) if isinstance(error, RunError | UserError) else f"{type(error).__name__}: {error}"
    return failure(message, CLIENT_RAISED, said)


def _out_of_time(message: Message, timeout: float | None) -> Message:
    return failure(message, TOO_LATE, f"no answer within {timeout or 0:g} s: its turn did not come")


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
