"""The engine that spreads a round's clients over Ray actors, on this machine or on a Ray cluster."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from fl_sim.engines import wire
from fl_sim.engines.apart import Apart, Desk, Parcel
from fl_sim.engines.arrays import reuse_freed_memory
from fl_sim.engines.envelope import Envelopes
from fl_sim.engines.grid import LocalGrid, Progress
from fl_sim.engines.pieces import Together
from fl_sim.engines.ray_crew import LOOK_SECONDS, Crew, Worker, pickled, sources_of
from fl_sim.engines.ray_start import (
    RayResources,
    check_head,
    head_address,
    last_line,
    start_or_join,
    stop_or_leave,
)
from fl_sim.engines.work import Work
from fl_sim.store.files import read_whole

# isort: split
import ray  # after ray_start, which sets what Ray reads when it is imported
from ray.exceptions import RayActorError, RayError

ASK_SECONDS = 1.0
"""How long an actor that is past the deadline has to say how far it came."""


class RayGrid(LocalGrid):
    """Actors that take a batch of messages per call; a free actor takes the next batch.

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
        together: Together | None = None,
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
        modules = apart.modules if apart else ()
        try:
            most = min(start_or_join(resources, num_clients), num_clients)
            self._head = head_address()
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
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        work, crew = self._work(messages), self._crew
        post = _Post(self._sent, self._files, self._apart.desk if self._apart else None)
        check_head(self._head)
        try:
            while work.waiting or work.running:
                for call in crew.look(len(messages)):
                    work.node_lost(call)
                self._hand_out(work, post)
                left = deadline - time.monotonic()
                if left <= 0:
                    crew.check_somebody()
                    work.too_late(self._progress(work), timeout or 0.0)
                    break
                if calls := [*crew.busy, *crew.starting]:
                    self._wait(work, calls, min(left, LOOK_SECONDS))
                elif work.waiting:
                    crew.wait_for_nodes()
        finally:
            crew.end_busy()  # left by a deadline or by Ctrl-C; the next exchange starts others
        return [work.replies[message.metadata.message_id] for message in messages]

    def _hand_out(self, work: Work[Any], post: "_Post") -> None:
        """Give every idle worker what it should have now, the fastest first."""
        crew = self._crew
        for worker in sorted(crew.idle, key=lambda one: one.step_seconds):
            others = [one.step_seconds for one in (*crew.idle, *crew.busy.values()) if one is not worker]
            while batch := work.take(worker.step_seconds, others) if work.waiting else []:
                letters = [letter for message in batch if (letter := post.letter(message))]
                work.keep(post.answered)
                if letters:
                    call = worker.actor.answer.remote(self._envelopes.close(letters), post.contents, self._files)
                    crew.idle.remove(worker)
                    work.running[call], crew.busy[call] = batch, worker
                    break

    def _wait(self, work: Work[Any], calls: list[Any], seconds: float) -> None:
        done, _ = ray.wait(calls, timeout=seconds)
        for call in done:
            if call in self._crew.busy:
                self._collect(work, call, self._crew.busy.pop(call))
            elif (why := self._crew.arrived(call)) and self._apart is None:
                work.give_up(why)
        if not done:
            check_head(self._head)

    def _work(self, messages: Sequence[Message]) -> Work[Any]:
        together = self._together
        if together is None or any(message.metadata.message_type != wire.TRAIN for message in messages):
            return Work(deque(messages))
        return Work(
            deque(together.ordered(messages)), lambda message: max(1, together.steps_of(message)), together.stack
        )

    def _collect(self, work: Work[Any], call: Any, worker: Worker) -> None:
        steps = sum(map(work.steps, work.running[call]))
        try:
            replies, seconds = self._envelopes.open(ray.get(call))
        except RayError as error:
            others = self._crew.lost_with(worker)
            if others is not None:
                for lost in (call, *others):
                    work.node_lost(lost)
                return
            died = "the worker died (out of memory?)"
            work.worker_died(call, died if isinstance(error, RayActorError) else last_line(error))
        else:
            work.answered(call, self._kept(work.running[call], replies))
            worker.took(seconds, steps)
            self._crew.idle.append(worker)
            self._on_reply(len(work.replies))

    def _sent(self, value: Any) -> Any:
        return ray.put(self._envelopes.close(value))

    def _progress(self, work: Work[Any]) -> dict[Any, list[Message]]:
        """Ask busy workers how far they came; those that do not say are left out."""
        asked = {worker.actor.replies_so_far.remote(): call for call, worker in self._crew.busy.items()}
        heard, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ASK_SECONDS) if asked else ([], [])
        progress = {}
        for question in heard:
            with suppress(RayError):
                call = asked[question]
                progress[call] = self._kept(work.running[call], self._envelopes.open(ray.get(question)))
        return progress

    def _kept(self, messages: Sequence[Message], replies: Sequence[Message]) -> list[Message]:
        """Return what goes to the server, after what clients keep was written where it is theirs to write it."""
        if self._apart is None:
            return list(replies)
        of = {message.metadata.message_id: message for message in messages}
        return [self._apart.desk.after(of[reply.metadata.reply_to_message_id], reply) for reply in replies]


class _Post:
    """Sends the model that all messages of a round share to Ray once, not once per batch; and files once a run.

    ``send`` returns a reference. ``files``: references by name, of which more are added.
    """

    def __init__(self, send: Callable[[Any], Any], files: dict[str, Any], desk: Desk | None) -> None:
        self._send, self._files, self._desk = send, files, desk
        self._places: dict[int, tuple[int, RecordDict]] = {}
        self.contents: list[Any] = []
        self.answered: list[Message] = []

    def letter(self, message: Message) -> tuple[Any, int, Any] | None:
        """Return (the message's metadata, its content's place among ``contents``, what is its client's own).

        None where there is nothing to do for a worker: then the answer is among ``answered``.
        """
        parcel = self._desk.before(message) if self._desk else Parcel(message.content)
        if isinstance(parcel, Message):
            self.answered.append(parcel)
            return None
        content = parcel.content
        if id(content) not in self._places:
            self._places[id(content)] = len(self.contents), content  # held: another object could have its id
            self.contents.append(self._send(content))
        for name, path in parcel.files.items():
            if name not in self._files:
                self._files[name] = self._send(read_whole(path))
        return message.metadata, self._places[id(content)][0], parcel.own
