"""The engine that spreads a round's clients over Ray actors, on this machine or on a Ray cluster."""

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
from fl_sim.engines.actor_pool import LOOK_SECONDS, Crew, Worker, pickled, sources_of
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
from fl_sim.engines.remote import Apart, Desk, Envelopes, Parcel, encrypted_bytes
from fl_sim.store.files import read_whole

# isort: split
import ray  # after ray_start, which sets what Ray reads when it is imported
from ray.exceptions import RayActorError, RayError

MOST_WITH_A_CALL = 2**20
"""Bytes up to which what messages share goes with a worker's first call of a round, not through the nodes' stores: that
takes 9 ms. Each worker of a node gets it."""

ASK_SECONDS = 1.0
"""How long an actor that is past the deadline has to say how far it came."""


class RayGrid(LocalGrid):
    """Actors that take a batch of messages per call; a free actor takes the next batch, and small ones are sent ahead.

    Nothing of a client lives in an actor: any of them plays any client, twice if need be. An actor that dies is
    replaced and its messages are sent again, one by one; one that is busy past the deadline is killed. ``app_factory``
    is called once in every actor and must be importable there. ``together``, if given, trains several of an actor's
    clients at a time, and says which. ``apart``: for nodes that see no disk of this process, and come and go; ``say``
    tells the user of them. Raises UserError where Ray cannot be joined or has no room.
    """

    def __init__(
        self,
        app_factory: Callable[..., ClientApp],
        num_clients: int,
        resources: RayResources,
        on_reply: Progress | None = None,
        together: ClientBatching | None = None,
        apart: Apart | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(num_clients, on_reply)
        reuse_freed_memory()
        self._apart = apart
        self._together = together
        self._is_ours = not ray.is_initialized()
        self._envelopes = Envelopes.closed() if apart else Envelopes()
        self._files: dict[str, Any] = {}
        self._numbers = count()
        modules = apart.modules if apart else ()
        try:
            most = min(start_or_join(resources, num_clients), num_clients)
            self._head, self._node = head_address(), node_address()
            factories = pickled((app_factory, num_clients, resources.threads, together))
            arguments = [self._sent((sources_of(modules), factories)), self._sent(apart.goods) if apart else None]
        except BaseException:
            self._leave()
            raise
        key = self._envelopes.key
        is_own = self._is_ours and not resources.address
        self._crew = Crew(resources, key, arguments, most, modules, is_own, apart is not None, say)

    def close(self) -> None:
        """Kill the actors, and leave or stop Ray where this engine joined or started it."""
        if not self._crew.is_own:
            self._crew.close()
        self._leave()

    def _leave(self) -> None:
        if self._is_ours:
            stop_or_leave()

    def _exchange(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        try:
            return self._exchanged(messages, timeout)
        except (OSError, RayError):
            check_node(self._node)
            raise

    def _exchanged(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        work, crew = self._work(messages), self._crew
        post = _Post(self._sent, self._shared, self._files, self._apart.desk if self._apart else None)
        check_head(self._head)
        try:
            while work.waiting or work.running:
                for call in crew.look(len(messages)):
                    work.node_lost(call)
                self._hand_out(work, post)
                left = deadline - time.monotonic()
                if left <= 0:
                    crew.check_somebody()
                    self._give_up_late(work, timeout or 0.0)
                    break
                if calls := [*crew.calls, *crew.starting]:
                    self._wait(work, calls, min(left, LOOK_SECONDS))
                elif work.waiting:
                    crew.wait_for_nodes()
        finally:
            crew.end_busy()  # left by a deadline or by Ctrl-C; the next exchange starts others
        return [work.replies[message.metadata.message_id] for message in messages]

    def _hand_out(self, work: Exchange[Any], post: "_Post") -> None:
        """Give every idle worker what it should have now, the fastest first, and then everybody its next."""
        for take, calls in ((work.take, 0), (work.take_ahead, 1)):
            for worker in sorted(self._crew.entered, key=lambda one: one.step_seconds):
                others = [one.step_seconds for one in self._crew.entered if one is not worker]
                while len(worker.calls) == calls and (batch := take(worker.step_seconds, others)):
                    letters = [letter for message in batch if (letter := post.letter(message))]
                    work.add(post.answered)
                    if letters:
                        contents = worker.lacks({number: post.contents[number] for _, number, _ in letters})
                        call = worker.actor.answer.remote(self._envelopes.close(letters), contents, self._files)
                        worker.calls.append(call)
                        work.begin(call, batch)

    def _wait(self, work: Exchange[Any], calls: list[Any], seconds: float) -> None:
        done, _ = ray.wait(calls, timeout=seconds)
        for call in done:
            if call in work.running:
                self._collect(work, call)
            elif (why := self._crew.arrived(call)) and self._apart is None:
                work.give_up(why)
        if not done:
            check_head(self._head)

    def _work(self, messages: Sequence[Message]) -> Exchange[Any]:
        together = self._together
        if together is None or any(wire.task_of(message) != wire.TRAIN for message in messages):
            return Exchange(deque(messages))
        return Exchange(
            deque(together.ordered(messages)), lambda message: max(1, together.steps_of(message)), together.stack
        )

    def _collect(self, work: Exchange[Any], call: Any) -> None:
        """Take the answer of a call that is done, and before it what its worker had to answer first."""
        worker = self._crew.calls[call]
        while call in worker.calls:
            first = worker.calls[0]
            steps = sum(map(work.steps, work.running[first]))
            try:
                replies, seconds = self._envelopes.open(ray.get(first))
            except RayError as error:
                self._lost(work, worker, error)
                return
            worker.calls.remove(first)
            work.answered(first, self._kept(work.running[first], replies))
            worker.took(seconds, steps)
            self._on_reply(len(work.replies))

    def _lost(self, work: Exchange[Any], worker: Worker, error: RayError) -> None:
        """Decide what becomes of what a worker had that died: only what it was doing can be to blame."""
        others = self._crew.lost_with(worker)
        first, *later = worker.calls
        for call in (first, *later, *others) if others is not None else later:
            work.node_lost(call)
        if others is None:
            died = "the worker died (out of memory?)"
            work.worker_died(first, died if isinstance(error, RayActorError) else last_line(error))

    def _sent(self, value: Any) -> Any:
        return ray.put(self._envelopes.close(value))

    def _shared(self, content: RecordDict) -> tuple[int, Any]:
        """Return the number of a content that messages share, and how calls have it: closed itself, or a reference."""
        closed = self._envelopes.close(content)
        is_small = self._apart is not None and encrypted_bytes(closed) <= MOST_WITH_A_CALL
        return next(self._numbers), closed if is_small else ray.put(closed)

    def _give_up_late(self, work: Exchange[Any], timeout: float) -> None:
        """Give up what is unfinished after ``timeout`` seconds."""
        calls = list(self._crew.calls)
        for call in ray.wait(calls, num_returns=len(calls), timeout=0)[0] if calls else []:
            if call in work.running:
                self._collect(work, call)
        progress = self._progress(work)
        for call in [call for worker in self._crew.entered for call in worker.calls[1:]]:
            work.node_lost(call)
        work.too_late(progress, timeout)

    def _progress(self, work: Exchange[Any]) -> dict[Any, list[Message]]:
        """Ask busy workers how far they came; those that do not say are left out."""
        busy = [worker for worker in self._crew.entered if worker.calls]
        asked = {worker.actor.replies_so_far.remote(): worker.calls[0] for worker in busy}
        heard, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ASK_SECONDS) if asked else ([], [])
        progress = {}
        for question in heard:
            with suppress(RayError):
                call, replies = asked[question], self._envelopes.open(ray.get(question))
                batch = work.running[call]  # its worker may have begun the next one
                ids = {message.metadata.message_id for message in batch}
                own = [reply for reply in replies if reply.metadata.reply_to_message_id in ids]
                progress[call] = self._kept(batch, own)
        return progress

    def _kept(self, messages: Sequence[Message], replies: Sequence[Message]) -> list[Message]:
        """Return what goes to the server, after what clients keep was written where it is theirs to write it."""
        if self._apart is None:
            return list(replies)
        of = {message.metadata.message_id: message for message in messages}
        return [self._apart.desk.after(of[reply.metadata.reply_to_message_id], reply) for reply in replies]


class _Post:
    """Closes the model that all messages of a round share once, not once per batch; and sends files once a run.

    ``send`` returns a reference, ``share`` the number of a content and how calls have it. ``files``: references by
    name, of which more are added.
    """

    def __init__(
        self,
        send: Callable[[Any], Any],
        share: Callable[[RecordDict], tuple[int, Any]],
        files: dict[str, Any],
        desk: Desk | None,
    ) -> None:
        self._send, self._share, self._files, self._desk = send, share, files, desk
        self._known: dict[int, tuple[int, RecordDict]] = {}
        self.contents: dict[int, Any] = {}
        self.answered: list[Message] = []

    def letter(self, message: Message) -> tuple[Any, int, Any] | None:
        """Return (the message's metadata, its content's number in ``contents``, what is its client's own).

        None where there is nothing to do for a worker: then the answer is among ``answered``.
        """
        parcel = self._desk.before(message) if self._desk else Parcel(message.content)
        if isinstance(parcel, Message):
            self.answered.append(parcel)
            return None
        content = parcel.content
        if id(content) not in self._known:
            number, sent = self._share(content)
            self._known[id(content)] = number, content  # held: another object could have its id
            self.contents[number] = sent
        for name, path in parcel.files.items():
            if name not in self._files:
                self._files[name] = self._send(read_whole(path))
        return message.metadata, self._known[id(content)][0], parcel.own
