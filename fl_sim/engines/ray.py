"""The engine that spreads a round's clients over Ray actors, on this machine or on a Ray cluster."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp

from fl_sim.engines import wire
from fl_sim.engines.apart import Apart, Desk, Parcel
from fl_sim.engines.grid import LocalGrid, Progress
from fl_sim.engines.pieces import Together
from fl_sim.engines.ray_start import (
    ENVIRONMENT,
    RayResources,
    check_head,
    head_address,
    import_path,
    last_line,
    start_or_join,
    stop_or_leave,
)
from fl_sim.engines.work import Work
from fl_sim.store.files import read_whole

# isort: split
import ray  # after ray_start, which sets what Ray reads when it is imported
from ray.exceptions import RayActorError, RayError

from fl_sim.engines.ray_actor import Actor

ASK_SECONDS = 1.0
"""How long an actor that is past the deadline has to say how far it came."""

LOOK_SECONDS = 1.0
"""How often a grid that waits for actors looks whether Ray itself still lives."""


class RayGrid(LocalGrid):
    """Actors that take a batch of messages per call; a free actor takes the next batch.

    Nothing of a client lives in an actor: any of them plays any client, twice if need be. An actor that dies is
    replaced and its messages are sent again, one by one; one that is busy past the deadline is killed. ``app_factory``
    is called once in every actor and must be importable there. ``together``, if given, trains several of an actor's
    clients at a time, and says which. ``apart``: for actors that see no disk of this process. Raises UserError where
    Ray cannot be joined or has no room.
    """

    def __init__(
        self,
        app_factory: Callable[..., ClientApp],
        num_clients: int,
        resources: RayResources,
        on_reply: Progress | None = None,
        together: Together | None = None,
        apart: Apart | None = None,
    ) -> None:
        super().__init__(num_clients, on_reply)
        self._apart = apart
        self._resources = resources
        self._together = together
        self._is_ours = not ray.is_initialized()
        self._joined = bool(resources.address) or not self._is_ours
        self._actor_arguments = (app_factory, num_clients, resources.threads, together)
        self._idle: list[Any] = []
        self._step_seconds = math.inf
        try:
            self._num_actors = start_or_join(resources, num_clients)
            self._head = head_address()
            self._goods = ray.put(apart.goods) if apart else None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the actors, and leave or stop Ray where this engine joined or started it."""
        for actor in self._idle if self._joined else []:
            _kill(actor)
        self._idle = []
        if self._is_ours:
            stop_or_leave()

    def _exchange(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        work = self._work(messages)
        busy: dict[Any, Any] = {}  # call -> actor
        post = _Post(self._apart.desk if self._apart else None)
        check_head(self._head)
        while len(self._idle) < min(self._num_actors, len(messages)):
            self._idle.append(self._new_actor())
        try:
            while work.waiting or work.running:
                while self._idle and work.waiting:
                    self._hand_out(work, post, busy)
                left = deadline - time.monotonic()
                if left <= 0:
                    said = {call: self._kept(work.running[call], replies) for call, replies in _progress(busy).items()}
                    work.too_late(said, timeout or 0.0)
                    break
                done, _ = ray.wait(list(busy), timeout=min(left, LOOK_SECONDS))
                for call in done:
                    self._collect(work, call, busy.pop(call))
                if not done:
                    check_head(self._head)
        finally:
            for actor in busy.values():  # left by a deadline or by Ctrl-C; the next exchange starts others
                _kill(actor)
        return [work.replies[message.metadata.message_id] for message in messages]

    def _hand_out(self, work: Work[Any], post: "_Post", busy: dict[Any, Any]) -> None:
        batch = work.take(self._num_actors, self._step_seconds)
        letters = [letter for message in batch if (letter := post.letter(message))]
        work.keep(post.answered)
        if letters:
            actor = self._idle.pop()  # the one that was busy last: it is warm
            call = actor.answer.remote(letters, post.files)
            work.running[call], busy[call] = batch, actor

    def _work(self, messages: Sequence[Message]) -> Work[Any]:
        together = self._together
        if together is None or any(message.metadata.message_type != wire.TRAIN for message in messages):
            return Work(deque(messages))
        return Work(
            deque(together.ordered(messages)), lambda message: max(1, together.steps_of(message)), together.stack
        )

    def _collect(self, work: Work[Any], call: Any, actor: Any) -> None:
        steps = sum(map(work.steps, work.running[call]))
        try:
            replies, seconds = ray.get(call)
        except RayError as error:
            _kill(actor)
            if isinstance(error, RayActorError) and error.actor_init_failed:
                work.no_worker_starts(call, last_line(error))
            else:
                died = "the worker died (out of memory?)"
                work.worker_died(call, died if isinstance(error, RayActorError) else last_line(error))
            if work.waiting:
                self._idle.append(self._new_actor())
        else:
            work.answered(call, self._kept(work.running[call], replies))
            self._idle.append(actor)
            self._step_seconds = seconds / steps
            self._on_reply(len(work.replies))

    def _new_actor(self) -> Any:
        options: dict[str, Any] = {"num_cpus": self._resources.cpus, "num_gpus": self._resources.gpus}
        if self._joined:
            options["runtime_env"] = {"env_vars": {**ENVIRONMENT, "PYTHONPATH": import_path()}}
        # The second thread lets an actor say how far it came while a client hangs.
        remote: Any = ray.remote
        actor_class = remote(concurrency_groups={"progress": 1}, max_restarts=0)(Actor)
        return actor_class.options(**options).remote(*self._actor_arguments, self._goods)

    def _kept(self, messages: Sequence[Message], replies: Sequence[Message]) -> list[Message]:
        """Return what goes to the server, after what clients keep was written where it is theirs to write it."""
        if self._apart is None:
            return list(replies)
        of = {message.metadata.message_id: message for message in messages}
        return [self._apart.desk.after(of[reply.metadata.reply_to_message_id], reply) for reply in replies]


class _Post:
    """Sends the model that all messages of a round share to Ray once, not once per batch; and files once as well."""

    def __init__(self, desk: Desk | None) -> None:
        self._desk = desk
        self._sent: dict[int, Any] = {}
        self.files: dict[str, Any] = {}
        self.answered: list[Message] = []

    def letter(self, message: Message) -> tuple[Any, Any, Any] | None:
        """Return (the message's metadata, a reference to its content, what is its client's own).

        None where there is nothing to do for a worker: then the answer is among ``answered``.
        """
        parcel = self._desk.before(message) if self._desk else Parcel(message.content)
        if isinstance(parcel, Message):
            self.answered.append(parcel)
            return None
        content = parcel.content
        if id(content) not in self._sent:
            self._sent[id(content)] = (ray.put(content), content)  # held: another object could have its id
        for name, path in parcel.files.items():
            if name not in self.files:
                self.files[name] = ray.put(read_whole(path))
        return message.metadata, self._sent[id(content)][0], parcel.own


def _progress(busy: dict[Any, Any]) -> dict[Any, list[Message]]:
    """Ask busy actors how far they came; those that do not say are left out."""
    asked = {actor.replies_so_far.remote(): call for call, actor in busy.items()}
    heard, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ASK_SECONDS)
    progress = {}
    for question in heard:
        with suppress(RayError):
            progress[asked[question]] = ray.get(question)
    return progress


def _kill(actor: Any) -> None:
    with suppress(RayError):
        ray.kill(actor)
