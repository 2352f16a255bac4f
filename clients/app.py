"""The Flower ClientApp: it reads a message, runs the message's task on the client's records, and sends an answer.

By default, a client's records are a shard of the server's data set. A node is a machine with one client. The owner of a
node may give the node its own data set: ``--node-config 'data="npz:/data/ours.npz" state="/var/lib/fl-sim"'``. The
client then trains on all training records of its own data set. It stores its client state in the folder ``state``. The
server learns neither of the two paths.
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

from clients.client_task import Broadcast, Client, ClientTask, Grouped, RuntimeFactory, prepared
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
"""The allowed form of the run's name in a message. A name with other characters could be a path to another folder."""

_PATH: Final = re.compile(r"""(?:[A-Za-z]:)?[/\\~][^\s'",;()]*""")


def build_client_app(runtime_of: RuntimeFactory, signer: remote.Signer | None = None) -> ClientApp:
    """Return the ClientApp that all engines use: in this process, in Ray actors and on Flower's own runtime.

    ``signer``: the object that verifies tickets. A ticket is a signed proof that a task's privacy cost is in the
    client's privacy ledger. The driver, the process that started this worker, signs it. If ``signer`` is None, messages
    with tickets are refused.
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
    """Return the client task, such as training, that the server requests from ``client``.

    The function also sets PyTorch's number of threads for this task.

    Raises RunError if the experiment does not have this task, or if the client's policy forbids the task.
    """
    name, tasks = client.config.task, {wire.TRAIN: Train(), **client.runtime.tasks}
    if name not in tasks:
        raise RunError(
            f"the server asks for the task {in_a_line(shortened(name))!r}, and this experiment has only the tasks "
            f"{', '.join(tasks)}: make sure that the server runs the same version of fl-sim"
        )
    task = tasks[name]
    if client.policy and type(task) is Train:
        task.check(client)
    # the policy treats every user-defined task as one that reads records: ``reads_records = False`` may be wrong
    elif client.policy:
        client.policy.check_training(own_records=task.reads_records or is_own_kind(task))
    client.runtime.use_threads()
    return task


def train_together(
    runtime_of: RuntimeFactory, signer: remote.Signer | None = None, *, stacked: bool = False
) -> BatchHandler:
    """Return a function that trains several clients in one call of the compiled trainer.

    The compiled trainer is C++ code. ``signer``: the object that verifies the signed proofs of charged privacy costs
    (tickets), as in ``build_client_app``. ``stacked``: train the clients as one PyTorch computation instead. If the
    joint training fails, the function trains each client separately. So only the failing client gets an error. Several
    threads may call the function. Compiled code runs in all threads at once. A lock lets only one thread at a time run
    the function's Python code. Without this lock, threads would wait for Python's global lock at every PyTorch
    operation. The waiting would take a seventh of the time of a round of 100 small clients.
    """
    reader, in_python = _Reader(runtime_of, signer), Lock()

    def trained(messages: Sequence[Message]) -> list[Message]:
        with in_python:
            jobs = [TrainingJob.of(reader.client(message, partition_of(message))) for message in messages]
            train = prepared([(one.client.runtime, each) for one in jobs for each in one.jobs], stacked=stacked)
        results = iter(train())
        with in_python:
            replies = [
                Message(job.finished([next(results) for _ in job.jobs]), reply_to=message)
                for job, message in zip(jobs, messages, strict=True)
            ]
            for job in {id(job.guards[0]): job for job in jobs}.values():
                # check that no client wrote to the broadcast tensors: one check for all clients with the same tensors
                job.check_bits()
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
    """Return a function that executes a task of type ``Grouped`` for several clients in one computation."""
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
    """The settings of a node's owner: ``data``, the node's own data set, and ``state``, the folder of client states."""

    data: str
    state: Path

    def config(self, config: wire.TaskConfig) -> wire.TaskConfig:
        """Return the configuration of a task, in which this node's state folder replaces the server's paths.

        Each run has a subfolder with the run's name. Raises RunError if the name contains characters other than
        letters, digits, _ and -. Such a name could be a path to another folder.
        """
        if not _RUN.fullmatch(config.run):
            raise RunError(
                "the run's name has characters other than letters, digits, _ and -, and could be a path out of this "
                "node's folder: make sure that the server runs the same version of fl-sim"
            )
        return replace(config, data_root="", state_dir=str(self.state / config.run))


def client_of(context: Context) -> int:
    """Return the ID of a node's client, which is the value ``partition-id`` of the node's configuration."""
    return int(str(context.node_config["partition-id"]))


def owner_of(context: Context) -> Owner | None:
    """Return the owner's settings from the node's configuration; None if the node does not have its own data set."""
    data, state = (str(context.node_config.get(name, "")) for name in ("data", "state"))
    if not data:
        return None
    default = user_folder("FL_SIM_STATES", "XDG_STATE_HOME", "~/.local/state", "states")
    return Owner(data, (Path(state).expanduser().absolute() if state else default) / f"client-{client_of(context)}")


def discreet(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Handle a message, and remove paths and records from error messages to the server.

    The function is a Flower mod (middleware): it wraps the handling of every message. A node (a machine with one
    client) may have its own data set. In this case, paths and records are removed from the node's error messages; the
    node's log contains the full error. A node without its own data set sends its error messages unchanged.
    """
    if owner_of(context) is None:
        return call_next(message, context)
    try:
        return call_next(message, context)
    except Exception as error:
        logging.getLogger("fl_sim").exception("this node could not execute the server's task")
        return failure(message, CLIENT_RAISED, _without_paths(error, context))


class _Reader:
    """Unpacks the server's messages to clients. Equal tensors of one round are unpacked only once."""

    def __init__(self, runtime_of: RuntimeFactory, signer: remote.Signer | None = None) -> None:
        self._runtime_of = runtime_of
        self._signer = signer
        self._last: tuple[RecordDict, Broadcast] | None = None
        self._one_at_a_time = Lock()  # an engine may call this reader from several threads

    def __reduce__(self) -> tuple[type["_Reader"], tuple[RuntimeFactory]]:
        """Return the values to pickle. Flower's simulation pickles the app to send it to its actors.

        The lock, the last broadcast and the signer are left out. The signer verifies tickets, the proofs of charged
        privacy costs. Only workers that fl-sim's driver started accept tickets. Flower starts the actors, so they need
        no signer.
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
        """Return the client that receives ``message``, with everything that the message's task needs.

        Raises RunError if the message has a ticket that this worker cannot accept. A ticket proves that the privacy
        cost of the task is already in the client's privacy ledger.
        """
        config, ticket = wire.read_task_config(message.content), None
        own: tuple[str | int, ...] = ()
        if owner:
            config = owner.config(config)
            own = (owner.data, number, config.facts)
        if remote.has_ticket(message.content):
            # Only a worker that the run's driver started accepts tickets. Such a worker has no owner and no policy.
            if self._signer is None or policy is not None or owner is not None:
                raise RunError(remote.NO_TICKET)
            ticket = self._signer.read(config.task, number, message.content)
        with self._one_at_a_time:
            runtime = self._runtime_of(config.experiment, config.data_root, *own).of_client(number)
            runtime.trainer  # noqa: B018 (this access builds the trainer while the lock is held)
        return Client(number, runtime, config, message.content, policy, ticket, check, self._broadcast)

    def _broadcast(self, content: RecordDict) -> Broadcast:
        with self._one_at_a_time:
            if self._last is None or not wire.is_same_round(self._last[0], content):
                self._last = (content, Broadcast(*wire.read_task(content)))
            return self._last[1]


def _policy(context: Context) -> "Policy | None":
    """Return the policy of the node's owner, or None if the node's configuration has no policy="/path/policy.toml"."""
    path = str(context.node_config.get("policy", ""))
    if not path:
        return None
    from clients.policy import read_policy  # noqa: PLC0415 (it loads slowly, and simulations have no policy)

    return read_policy(Path(path))


def _without_paths(error: Exception, context: Context) -> str:
    """Return an error message for the server that contains no paths and no values of the node's configuration.

    From messages of RunError and UserError, paths and values are removed. For other errors, the message contains only
    the type of the error, because the original message may quote records.
    """
    if not isinstance(error, RunError | UserError):
        return f"{type(error).__name__}; the full message, which may quote records, is in the log of the node"
    said = str(error)
    for value in sorted(map(str, context.node_config.values()), key=len, reverse=True):
        said = said.replace(value, "...") if len(value) > len("mnist") else said
    return _PATH.sub("...", said)
