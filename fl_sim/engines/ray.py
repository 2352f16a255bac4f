"""The engine that distributes the clients of a round over Ray actors, on this machine or on a Ray cluster."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from fl_sim.engines import wire
from fl_sim.engines.actor_pool import LOOK_SECONDS, ActorPool, Worker, pickled, sources_of
from fl_sim.engines.arrays import reuse_freed_memory
from fl_sim.engines.batching import ClientBatching, Exchange
from fl_sim.engines.grid import LocalGrid, Progress
from fl_sim.engines.ray_start import (
    RayResources,
    check_head,
    check_node,
    head_address,
    last_line,
    node_address,
    start_or_join,
    stop_or_leave,
)
from fl_sim.engines.remote import DriverStore, Encryption, Parcel, RemoteWorkers, encrypted_bytes
from fl_sim.store.files import read_whole

# isort: split
# ray must be imported after ray_start, because ray_start sets environment variables that Ray reads at its import
import ray
from ray.exceptions import RayActorError, RayError

MOST_WITH_A_CALL = 2**20
"""The size in bytes up to which a shared message content is sent inside a worker's first call of a round. Larger
contents go through Ray's object store. The store takes 9 ms, but sends a content once per node, not once per worker.
"""

ASK_SECONDS = 1.0
"""Seconds that an actor has to report its replies so far, after the deadline of a round."""


class RayGrid(LocalGrid):
    """An engine whose Ray actors answer batches of messages: each idle actor gets the next batch.

    If batches are short, an actor also gets one batch in advance. Actors hold no client state, so any actor can run any
    client, even twice. A dead actor is replaced, and its messages are sent again, one by one. An actor that is busy
    after the deadline is killed. ``app_factory`` is called once in every actor and must be importable there.
    ``batching``, if given, decides which clients an actor trains in one call. ``remote``: the settings for nodes that
    do not share a disk with this process, and that may join and leave. ``say``: a function that prints messages about
    nodes. Raises UserError if Ray cannot be joined or has no resources for an actor.
    """

    def __init__(
        self,
        app_factory: Callable[..., ClientApp],
        num_clients: int,
        resources: RayResources,
        on_reply: Progress | None = None,
        batching: ClientBatching | None = None,
        remote: RemoteWorkers | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(num_clients, on_reply)
        reuse_freed_memory()
        self._remote = remote
        self._batching = batching
        self._is_ours = not ray.is_initialized()
        self._encryption = Encryption.with_new_key() if remote else Encryption()
        self._files: dict[str, Any] = {}
        self._numbers = count()
        modules = remote.modules if remote else ()
        try:
            most = min(start_or_join(resources, num_clients), num_clients)
            self._head, self._node = head_address(), node_address()
            factories = pickled((app_factory, num_clients, resources.threads, batching))
            arguments = [self._put((sources_of(modules), factories)), self._put(remote.setup) if remote else None]
        except BaseException:
            if self._is_ours:
                stop_or_leave()
            raise
        is_own = self._is_ours and not resources.address
        self._pool = ActorPool(
            resources, self._encryption.key, arguments, most, modules, is_own, remote is not None, say
        )

    def close(self) -> None:
        """Kill the actors; then stop Ray if this engine started Ray, or disconnect if this engine joined a cluster."""
        if not self._pool.is_own:
            self._pool.close()
        if self._is_ours:
            stop_or_leave()

    def _exchange(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        batching, pool = self._batching, self._pool
        exchange: Exchange[Any] = Exchange(deque(messages))
        if batching is not None and set(map(wire.task_of, messages)) == {wire.TRAIN}:
            ordered, stack = deque(batching.ordered(messages)), batching.stack
            exchange = Exchange(ordered, lambda message: max(1, batching.steps_of(message)), stack)
        outbox = _Outbox(self._put, self._share, self._files, self._remote.store if self._remote else None)
        try:
            check_head(self._head)
            try:
                while exchange.waiting or exchange.running:
                    for call in pool.update(len(messages)):
                        exchange.node_lost(call)
                    self._hand_out(exchange, outbox)
                    left = deadline - time.monotonic()
                    if left <= 0:
                        pool.check_has_workers()
                        self._give_up_late(exchange, timeout or 0.0)
                        break
                    if calls := [*pool.calls, *pool.starting]:
                        self._wait(exchange, calls, min(left, LOOK_SECONDS))
                    elif exchange.waiting:
                        check_node(self._node)  # this process reaches other nodes through the node on this machine
                        pool.wait_for_nodes()
            finally:
                # end the workers that are still busy after a deadline or Ctrl-C; the next exchange starts new workers
                pool.end_busy()
        except (OSError, RayError):
            check_node(self._node)
            raise
        return [exchange.replies[message.metadata.message_id] for message in messages]

    def _hand_out(self, exchange: Exchange[Any], outbox: "_Outbox") -> None:
        """Send a batch to every idle worker, fastest worker first; if batches are short, also a second batch."""
        for take, calls in ((exchange.take, 0), (exchange.take_ahead, 1)):
            for worker in sorted(self._pool.ready, key=lambda one: one.step_seconds):
                others = [one.step_seconds for one in self._pool.ready if one is not worker]
                while len(worker.calls) == calls and (batch := take(worker.step_seconds, others)):
                    requests = [request for message in batch if (request := outbox.request(message))]
                    exchange.add(outbox.answered)
                    if requests:
                        contents = worker.lacks({number: outbox.contents[number] for _, number, _ in requests})
                        encrypted = self._encryption.encrypt(requests)
                        call = worker.actor.answer.remote(encrypted, contents, self._files)
                        worker.calls.append(call)
                        exchange.begin(call, batch)

    def _wait(self, exchange: Exchange[Any], calls: list[Any], seconds: float) -> None:
        done, _ = ray.wait(calls, timeout=seconds)
        for call in done:
            if call in exchange.running:
                self._collect(exchange, call)
            elif (why := self._pool.started(call)) and self._remote is None:
                exchange.give_up(why)
        if not done:
            check_head(self._head)

    def _collect(self, exchange: Exchange[Any], call: Any) -> None:
        """Store the replies of the finished call ``call``; first store the replies of the worker's earlier calls."""
        worker = self._pool.calls[call]
        while call in worker.calls:
            first = worker.calls[0]
            steps = sum(map(exchange.steps, exchange.running[first]))
            try:
                replies, seconds = self._encryption.decrypt(ray.get(first))
            except RayError as error:
                self._lost(exchange, worker, error)
                return
            worker.calls.remove(first)
            exchange.answered(first, self._stored(exchange.running[first], replies))
            worker.took(seconds, steps)
            self._on_reply(len(exchange.replies))

    def _lost(self, exchange: Exchange[Any], worker: Worker, error: RayError) -> None:
        """Schedule the unfinished calls of a dead worker again.

        A worker executes its calls in order, so only the first unfinished call can have killed the worker.
        """
        others = self._pool.remove_dead(worker)
        first, *later = worker.calls
        for call in (first, *later, *others) if others is not None else later:
            exchange.node_lost(call)
        if others is None:
            died = "the worker died (out of memory?)"
            exchange.worker_died(first, died if isinstance(error, RayActorError) else last_line(error))

    def _put(self, value: Any) -> Any:
        return ray.put(self._encryption.encrypt(value))

    def _share(self, content: RecordDict) -> tuple[int, Any]:
        """Encrypt a content that several messages share. Return the content's new ID, and the value for actors.

        If the content is small and nodes are other machines, this value is the encrypted content. Otherwise the value
        is a Ray reference to the encrypted content.
        """
        encrypted = self._encryption.encrypt(content)
        is_small = self._remote is not None and encrypted_bytes(encrypted) <= MOST_WITH_A_CALL
        return next(self._numbers), encrypted if is_small else ray.put(encrypted)

    def _give_up_late(self, exchange: Exchange[Any], timeout: float) -> None:
        """Give an error reply to each message that is unfinished after ``timeout`` seconds."""
        calls = list(self._pool.calls)
        for call in ray.wait(calls, num_returns=len(calls), timeout=0)[0] if calls else []:
            if call in exchange.running:
                self._collect(exchange, call)
        progress = self._progress(exchange)
        for call in [call for worker in self._pool.ready for call in worker.calls[1:]]:
            exchange.node_lost(call)
        exchange.too_late(progress, timeout)

    def _progress(self, exchange: Exchange[Any]) -> dict[Any, list[Message]]:
        """Return {call: its finished replies} of all busy workers. Workers that do not answer are left out."""
        busy = [worker for worker in self._pool.ready if worker.calls]
        asked = {worker.actor.replies_so_far.remote(): worker.calls[0] for worker in busy}
        heard, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ASK_SECONDS) if asked else ([], [])
        progress = {}
        for question in heard:
            with suppress(RayError):
                call, replies = asked[question], self._encryption.decrypt(ray.get(question))
                batch = exchange.running[call]  # leave out replies of the worker's next call, which may have begun
                ids = {message.metadata.message_id for message in batch}
                own = [reply for reply in replies if reply.metadata.reply_to_message_id in ids]
                progress[call] = self._stored(batch, own)
        return progress

    def _stored(self, messages: Sequence[Message], replies: Sequence[Message]) -> list[Message]:
        """Return the replies for the server.

        If this process (the driver) keeps the client states, the new states are first removed from the replies and
        stored.
        """
        if self._remote is None:
            return list(replies)
        of = {message.metadata.message_id: message for message in messages}
        return [self._remote.store.after(of[reply.metadata.reply_to_message_id], reply) for reply in replies]


class _Outbox:
    """Prepares messages for workers: encrypts shared message contents once per round, and files once per run.

    ``put``: a function that encrypts a value and returns a Ray reference to it. ``share``: the method
    ``RayGrid._share``. ``files``: {name of a file: Ray reference to its content}; new files are added to this
    dictionary.
    """

    def __init__(
        self,
        put: Callable[[Any], Any],
        share: Callable[[RecordDict], tuple[int, Any]],
        files: dict[str, Any],
        store: DriverStore | None,
    ) -> None:
        self._put, self._share, self._files, self._store = put, share, files, store
        self._known: dict[int, tuple[int, RecordDict]] = {}
        self.contents: dict[int, Any] = {}
        self.answered: list[Message] = []

    def request(self, message: Message) -> tuple[Any, int, Any] | None:
        """Prepare a message: return its metadata, the ID of its content, and the Flower records for this client only.

        The content itself is stored in the dictionary ``contents`` under this ID. If the message needs no worker, the
        method returns None and adds the answer to the list ``answered``.
        """
        parcel = self._store.before(message) if self._store else Parcel(message.content)
        if isinstance(parcel, Message):
            self.answered.append(parcel)
            return None
        content = parcel.content
        if id(content) not in self._known:
            number, sent = self._share(content)
            # the reference to ``content`` keeps it in memory, so that no other object gets the same id
            self._known[id(content)] = number, content
            self.contents[number] = sent
        for name, path in parcel.files.items():
            if name not in self._files:
                self._files[name] = self._put(read_whole(path))
        return message.metadata, self._known[id(content)][0], parcel.own
