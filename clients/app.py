"""The Flower ClientApp: reads a message, runs its task on the client's own records, answers.

A node whose owner has records of its own (``--node-config 'data="npz:/data/ours.npz" state="/var/lib/fl-sim"'``) trains
on all training records of that data set, which nobody else reads, instead of a shard of the server's. Its client state
lies on its own disk. The server learns neither path.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.client_task import Broadcast, Client, ClientTask, Grouped, RuntimeFactory
from clients.train import Train, TrainingJob
from fl_sim.engines import remote, wire
from fl_sim.engines.arrays import reuse_freed_memory
from fl_sim.engines.batching import CLIENT_RAISED, BatchHandler, GroupHandler, failure, partition_of, raised
from fl_sim.errors import RunError, UserError, in_a_line
from fl_sim.kinds import is_own_kind
from fl_sim.mistakes import shortened
from fl_sim.store.files import user_folder

if TYPE_CHECKING:
    from clients.policy import Policy

_RUN: Final = re.compile(r"\w[\w-]{0,99}", re.ASCII)
"""The form of a run's name in a task: never a path out of the owner's folder."""

_PLACE: Final = re.compile(r"""(?:[A-Za-z]:)?[/\\~][^\s'",;()]*""")


def build_client_app(runtime_of: RuntimeFactory, signer: remote.Signer | None = None) -> ClientApp:
    """Return the ClientApp of every engine: in this process, in Ray actors or on Flower's own runtime.

    ``signer``: of the run whose driver started this worker and charges the clients' ledgers itself.
    """
    reuse_freed_memory()
    app = ClientApp(mods=[discreet])
    reader = _Reader(runtime_of, signer)

    @app.query()
    def who(message: Message, context: Context) -> Message:
        return Message(wire.who_content(client_of(context)), reply_to=message)

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        client = reader.client(message, client_of(context), owner_of(context), _policy(context))
        return Message(task_of(client).run(client), reply_to=message)

    return app


def task_of(client: Client) -> ClientTask:
    """Return a client's task. Raises RunError if the experiment has no such task, or a policy forbids it."""
    name, tasks = client.config.task, {wire.TRAIN: Train(), **client.runtime.tasks}
    if name not in tasks:
        raise RunError(
            f"the server asks for {in_a_line(shortened(name))!r}, and this experiment asks clients for "
            f"{', '.join(tasks)} alone: see that the server runs the same version of fl-sim"
        )
    task = tasks[name]
    if client.policy and type(task) is Train:
        task.check(client)
    elif client.policy:  # a policy trusts no foreign code about the contents of an answer
        client.policy.check_training(own_records=task.reads_records or is_own_kind(task))
    client.runtime.use_threads()
    return task


def train_together(runtime_of: RuntimeFactory, *, stacked: bool = False) -> BatchHandler:
    """Return a function that trains several clients in one call of the compiled trainer, or as one computation.

    If it fails, each client is trained by itself, so that the failing client is known and the others are answered.
    May be called from several threads. Compiled code runs in all of them at once, and Python in one at a time, by a
    lock of its own: Python's lock would pass from thread to thread at every operation of PyTorch, each time with a
    wait, a seventh of a round of 100 small clients in all.
    """
    reader, in_python = _Reader(runtime_of), Lock()

    def trained(messages: Sequence[Message]) -> list[Message]:
        with in_python:
            jobs = [TrainingJob.of(reader.client(message, partition_of(message))) for message in messages]
            train = jobs[0].client.runtime.prepare([one.job for one in jobs], stacked=stacked)
        results = train()
        with in_python:
            turns = zip(jobs, results, messages, strict=True)
            replies = [Message(job.finished(result), reply_to=message) for job, result, message in turns]
            jobs[-1].check_bits()  # of the broadcast, which all of them share
            return replies

    def play(messages: Sequence[Message]) -> list[Message]:
        try:
            return trained(messages)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (as in fl_sim.engines.batching.answer)
            if len(messages) == 1:
                return [raised(messages[0], error)]
            return [reply for message in messages for reply in play([message])]

    return play


def answer_together(runtime_of: RuntimeFactory) -> GroupHandler:
    """Return a function that answers a ``Grouped`` task of several clients in one computation."""
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


@dataclass(frozen=True)
class Owner:
    """A node's own data set, as in ``data=NAME``, and its folder for client states."""

    data: str
    state: Path

    def config(self, config: wire.TaskConfig) -> wire.TaskConfig:
        """Return the configuration of a task with this node's folder, one for every run, in place of the server's.

        Raises RunError if the run has no plain name, which would lead out of the folder.
        """
        if not _RUN.fullmatch(config.run):
            raise RunError(
                "the server calls its run something else than letters, digits, _ and -, which would lead out of this "
                "node's folder: see that the server runs the same version of fl-sim"
            )
        return replace(config, data_root="", state_dir=str(self.state / config.run))


def client_of(context: Context) -> int:
    """Return the client number of a node."""
    return int(str(context.node_config["partition-id"]))


def owner_of(context: Context) -> Owner | None:
    """Return the owner of a node whose configuration has ``data``, else None."""
    data, state = (str(context.node_config.get(name, "")) for name in ("data", "state"))
    if not data:
        return None
    default = user_folder("FL_SIM_STATES", "XDG_STATE_HOME", "~/.local/state", "states")
    return Owner(data, (Path(state).expanduser().absolute() if state else default) / f"client-{client_of(context)}")


def discreet(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Answer for a node with an owner so that no error contains its paths or its records; others as they are."""
    if owner_of(context) is None:
        return call_next(message, context)
    try:
        return call_next(message, context)
    except Exception as error:
        logging.getLogger("fl_sim").exception("this node could not do what it was asked")
        return failure(message, CLIENT_RAISED, _without_places(error, context))


class _Reader:
    """Reads messages to clients. The broadcast, which all messages of a round share, is unpacked once."""

    def __init__(self, runtime_of: RuntimeFactory, signer: remote.Signer | None = None) -> None:
        self._runtime_of = runtime_of
        self._signer = signer
        self._last: tuple[RecordDict, Broadcast] | None = None
        self._one_at_a_time = Lock()  # an engine may call from several threads

    def __reduce__(self) -> tuple[type["_Reader"], tuple[RuntimeFactory]]:
        """Let Flower's simulation send the app to its actors, without the lock and the last broadcast.

        And without a signer: no driver of ours started these actors.
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
        """Return the client of a message. Raises RunError for a ticket that is not accepted here."""
        config, ticket = wire.read_task_config(message.content), None
        own: tuple[str | int, ...] = ()
        if owner:
            config = owner.config(config)
            own = (owner.data, number, config.facts)
        if remote.has_ticket(message.content):
            # Only a worker that the run's own driver started takes one, and it has neither a policy nor an owner.
            if self._signer is None or policy is not None or owner is not None:
                raise RunError(remote.NO_TICKET)
            ticket = self._signer.read(config.task, number, message.content)
        with self._one_at_a_time:
            runtime = self._runtime_of(config.experiment, config.data_root, *own)
            runtime.trainer  # noqa: B018 (made once)
        return Client(number, runtime, config, message.content, policy, ticket, check, self._broadcast)

    def _broadcast(self, content: RecordDict) -> Broadcast:
        with self._one_at_a_time:
            if self._last is None or not wire.is_same_round(self._last[0], content):
                self._last = (content, Broadcast(*wire.read_task(content)))
            return self._last[1]


def _policy(context: Context) -> "Policy | None":
    """Return the policy of the node's owner, if its configuration names one: policy="/path/of/policy.toml"."""
    path = str(context.node_config.get("policy", ""))
    if not path:
        return None
    from clients.policy import read_policy  # noqa: PLC0415 (the accountants load slowly, and simulations have none)

    return read_policy(Path(path))


def _without_places(error: Exception, context: Context) -> str:
    """Return the text of an error of ours, without paths and values of the node's configuration; else its type."""
    if not isinstance(error, RunError | UserError):
        return f"{type(error).__name__}, whose words may quote records; they are in the log of the node"
    said = str(error)
    for value in sorted(map(str, context.node_config.values()), key=len, reverse=True):
        said = said.replace(value, "...") if len(value) > len("mnist") else said
    return _PLACE.sub("...", said)
