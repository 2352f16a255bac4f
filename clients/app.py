"""The Flower ClientApp: reads a message, trains on the client's own records, answers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.client_task import Client, ClientRuntime, ClientTask, Grouped, Guarded, RuntimeFactory, Sent
from clients.owner import Owner, client_of, discreet, owner_of
from clients.train import Train, Turn
from fl_sim.engines import remote, wire
from fl_sim.engines.arrays import reuse_freed_memory
from fl_sim.engines.batching import BatchHandler, GroupHandler, partition_of, raised
from fl_sim.errors import RunError, in_a_line
from fl_sim.kinds import is_own_kind
from fl_sim.mistakes import shortened

if TYPE_CHECKING:
    from clients.policy import Policy


def build_client_app(runtime_of: RuntimeFactory, signer: remote.Signer | None = None) -> ClientApp:
    """Return the ClientApp that every engine runs, in this process, in Ray actors or on Flower's own runtime.

    ``signer``: of the run whose driver started this worker, where its clients' ledgers are the driver's affair.
    """
    reuse_freed_memory()
    app = ClientApp(mods=[discreet])
    reader = _Reader(runtime_of, signer)

    @app.query()
    def who(message: Message, context: Context) -> Message:
        return Message(wire.who_content(client_of(context)), reply_to=message)

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        asked = reader.client(message, client_of(context), owner_of(context), _policy(context))
        return Message(task_of(asked).run(asked), reply_to=message)

    return app


def task_of(client: Client) -> ClientTask:
    """Return what a client is asked. Raises RunError for what the experiment does not ask, or a policy forbids."""
    name, tasks = client.order.task, {wire.TRAIN: Train(), **client.runtime.tasks}
    if name not in tasks:
        raise RunError(
            f"the order asks for {in_a_line(shortened(name))!r}, and this experiment asks clients for "
            f"{', '.join(tasks)} alone: see that the server runs the same version of fl-sim"
        )
    task = tasks[name]
    if client.policy and isinstance(task, Guarded) and not is_own_kind(task):
        task.check(client)
    elif client.policy:  # which does not take foreign code's word for what an answer is made of
        client.policy.check_training(own_records=task.reads_records or is_own_kind(task))
    client.runtime.use_threads()
    return task


def train_together(runtime_of: RuntimeFactory, *, stacked: bool = False) -> BatchHandler:
    """Return what trains the clients of several messages in one call of the compiled trainer, or as one computation.

    Where something fails, the clients are played again, each by itself, so that the one to blame is known and the
    others are answered. May be called from several threads. Compiled code runs in all of them at once, and Python in
    one at a time, by a lock of their own: Python's own would pass from thread to thread at every operation of PyTorch,
    each time with a wait, a seventh of a round of 100 small clients in all.
    """
    reader, in_python = _Reader(runtime_of), Lock()

    def trained(messages: Sequence[Message]) -> list[Message]:
        with in_python:
            turns = [Turn.of(reader.client(message, partition_of(message))) for message in messages]
            train = turns[0].client.runtime.prepare([turn.job for turn in turns], stacked=stacked)
        results = train()
        with in_python:
            answers = [turn.finished(result) for turn, result in zip(turns, results, strict=True)]
            turns[-1].check_bits()  # of what all of them were sent
            return [Message(one, reply_to=message) for one, message in zip(answers, messages, strict=True)]

    def play(messages: Sequence[Message]) -> list[Message]:
        try:
            return trained(messages)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (as in fl_sim.engines.batching.answer)
            if len(messages) == 1:
                return [raised(messages[0], error)]
            return [reply for message in messages for reply in play([message])]

    return play


def answer_together(runtime_of: RuntimeFactory) -> GroupHandler:
    """Return what has several clients answer a task that is ``Grouped``, in one computation."""
    reader = _Reader(runtime_of)

    def release(messages: Sequence[Message], check: Callable[[], None]) -> list[Message]:
        replies: Sequence[RecordDict | BaseException]
        try:
            clients = [reader.client(message, partition_of(message), check=check) for message in messages]
            task = task_of(clients[0])
            assert isinstance(task, Grouped)
            replies = task.run_together(clients)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (as in fl_sim.engines.batching.answer)
            replies = [error] * len(messages)
        return [
            Message(reply, reply_to=message) if isinstance(reply, RecordDict) else raised(message, reply)
            for message, reply in zip(messages, replies, strict=True)
        ]

    return release


class _Reader:
    """Reads messages to clients; what all messages of a round share is unpacked once."""

    def __init__(self, runtime_of: RuntimeFactory, signer: remote.Signer | None = None) -> None:
        self._runtime_of = runtime_of
        self._signer = signer
        self._last: tuple[RecordDict, Sent] | None = None
        self._one_at_a_time = Lock()  # an engine may call from several threads

    def __reduce__(self) -> tuple[type["_Reader"], tuple[RuntimeFactory]]:
        """Let Flower's simulation send the app to its actors: there it starts with a lock of its own, and unread.

        And without a signer: no driver of ours started these.
        """
        return _Reader, (self._runtime_of,)

    def client(
        self,
        message: Message,
        number: int,
        owner: Owner | None = None,
        policy: "Policy | None" = None,
        check: Callable[[], None] = lambda: None,
    ) -> Client:
        """Return the client that a message asks for something. Raises RunError for a ticket that is no reason."""
        order = wire.read_task_config(message.content)
        if owner:
            order = owner.order(order)
        ticket = self._ticket(message, order.task, number, policy or owner)
        runtime = self._runtime(order, number, owner)
        return Client(number, runtime, order, message.content, policy, ticket, check, self._sent)

    def _ticket(self, message: Message, task: str, client: int, guard: "Policy | Owner | None") -> remote.Ticket | None:
        """Return the ticket of a message, if it has one. Raises RunError where a ticket is no reason to release.

        That is so everywhere but in a worker that the run's own driver started, where there is no ``guard``.
        """
        if not remote.has_ticket(message.content):
            return None
        if self._signer is None or guard is not None:
            raise RunError(remote.NO_TICKET)
        return self._signer.read(task, client, message.content)

    def _runtime(self, order: wire.TaskConfig, client: int, owner: Owner | None) -> ClientRuntime:
        own = (owner.data, client, order.facts) if owner else ()
        with self._one_at_a_time:
            runtime = self._runtime_of(order.experiment, order.data_root, *own)
            runtime.trainer  # noqa: B018 (made once)
        return runtime

    def _sent(self, content: RecordDict) -> Sent:
        with self._one_at_a_time:
            if self._last is None or not wire.is_same_round(self._last[0], content):
                self._last = (content, Sent(*wire.read_task(content)))
            return self._last[1]


def _policy(context: Context) -> "Policy | None":
    """Return the policy of the node's owner, where its configuration names one: policy="/path/of/policy.toml"."""
    path = str(context.node_config.get("policy", ""))
    if not path:
        return None
    from clients.policy import read_policy  # noqa: PLC0415 (the accountants load slowly, and simulations have none)

    return read_policy(Path(path))
