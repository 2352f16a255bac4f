"""Client tasks: one type of message, one handler, and a ``ClientTask`` for each kind of request to a client."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from flwr.app import RecordDict
from torch import nn

from clients.client_layer import ClientLayer
from fl_sim.engines import remote, wire
from fl_sim.kinds import is_own_kind
from fl_sim.local_plan import LocalAlgorithm
from fl_sim.native.kernel import load_kernel
from fl_sim.own_code import error_context
from fl_sim.params import WriteGuard, check_layout, layout_of
from fl_sim.seeding import seeded_alone
from fl_sim.store.tensors import load_state, read_by_content
from fl_sim.training.evaluation import Scores
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, LocalTrainer, Trainer, Training
from fl_sim.types import LocalSettings, LocalTask, Params, Payloads, Precision, Trained

if TYPE_CHECKING:
    from clients.policy import Policy
    from fl_sim.training.stacked import StackedTrainer


_ALONE = Lock()  # held while code of the user's own trains, which may not be thread-safe


@dataclass(frozen=True)
class OnClient:
    """The records and the trainer that an algorithm's ``start`` may use on its client."""

    records: Records
    trainer: Trainer

    def scores(self, params: Params) -> Scores:
        """Return the scores of a model on the client's training records, of which there must be some."""
        return self.trainer.evaluate(params, *self.records.tensors())


@runtime_checkable
class CustomStart(Protocol):
    """An algorithm whose clients begin a round with another model than the server's, such as one of several."""

    def start(self, task: LocalTask, client: OnClient) -> LocalTask:
        """Return ``task`` with the client's first parameters, whose names and shapes stay the same."""
        ...


@dataclass(frozen=True)
class Broadcast:
    """The tensors of a message: parameters, such as the global model, and the groups beside them."""

    params: Params
    groups: Payloads

    @cached_property
    def write_guard(self) -> WriteGuard:
        """Return a guard that notices writes to these tensors."""
        groups = {f"the server's {name!r}": one for name, one in self.groups.items()}
        return WriteGuard.of({"the global model": self.params, **groups})


@dataclass(frozen=True)
class Client:
    """The client on which a task runs.

    ``content``: the message's records. ``policy``: of the node's owner, if any. ``ticket``: proof that a release was
    paid for at home, if the client's files are elsewhere. ``check``: called now and then by tasks that take long; its
    error ends them. ``read``: unpacks the tensors, which the clients of a round may share.
    """

    number: int
    runtime: "ClientRuntime"
    config: wire.TaskConfig
    content: RecordDict
    policy: "Policy | None" = None
    ticket: remote.Ticket | None = None
    check: Callable[[], None] = lambda: None
    read: "Callable[[RecordDict], Broadcast]" = lambda content: Broadcast(*wire.read_task(content))

    @property
    def records(self) -> Records:
        """Return the client's own training records."""
        return self.runtime.own_records(self.number)

    @cached_property
    def broadcast(self) -> "Broadcast":
        """Return the tensors of the message."""
        return self.read(self.content)

    @property
    def params(self) -> Params:
        """Return the parameters of the message, such as the global model."""
        return self.broadcast.params

    @cached_property
    def state(self) -> Payloads:
        """Return the client state of the client's last round before this one."""
        if self.config.state_dir:
            return load_state(self.config.state_dir, self.number, self.config.server_round)
        return wire.state_in(self.content)

    def model(self) -> Params:
        """Return the client's own model: the parameters of the message, and those that do not travel."""
        params = self.params
        for layer in reversed(self.runtime.layers):
            params = layer.model(params, self.state)
        return params

    def folder(self, name: str = "") -> Path:
        """Return the folder of this run for the client's files that must survive until its answer is out."""
        return Path(self.config.state_dir) / name / f"client-{self.number}"


class ClientTask(Protocol):
    """The client half of a request to clients. Training is always one; a stage or an algorithm may bring others.

    ``reads_records``: True if the answer is made of a client's records without noise of its own, so that a policy must
    allow it. ``reads_state``: True if it uses ``Client.state``, which is then sent to workers without access to the
    disk. ``runs_in_threads``: True if several clients may run side by side in one process.
    """

    reads_records: ClassVar[bool]
    reads_state: ClassVar[bool]
    runs_in_threads: ClassVar[bool]

    def run(self, client: Client) -> RecordDict:
        """Return the client's answer."""
        ...


@runtime_checkable
class Grouped(Protocol):
    """A task that computes the answers of several clients together, which saves time."""

    def run_together(self, clients: Sequence[Client]) -> list[RecordDict | Exception]:
        """Return each client's answer or error. An error of a client's ``check`` ends all."""
        ...


@dataclass(frozen=True)
class Begun:
    """A release that is paid for at home and not made yet. ``paid``: the argument of ``finish`` beside the answer."""

    ticket: remote.Ticket
    paid: Any = field(repr=False)


@runtime_checkable
class PaidAtHome(Protocol):
    """A task whose release is charged where the client's ledger lies, before a worker elsewhere makes it."""

    def begin(self, client: Client) -> Begun | RecordDict | None:
        """Pay, and return the ticket; the answer if it exists already; None if nothing is to be paid."""
        ...

    def finish(self, begun: Begun, answer: RecordDict) -> RecordDict:
        """Store the answer of the worker that had the ticket, and return the answer to the server."""
        ...


@dataclass(frozen=True)
class ClientRuntime:
    """Everything that a worker needs to execute any client of an experiment, made once per process and experiment.

    ``records(client, synthetic)``: the client's records to train on; ``synthetic`` is the path of the pool of synthetic
    records, empty if there is none. ``own_records(client)``: its own records alone. ``class_counts(client,
    synthetic)``: the number of these records in each class. ``trains_on_own(synthetic)``: True if ``records`` contains
    the client's own. ``tasks``: the tasks beside training, by name. ``local_settings(learning_rate)``: the settings of
    a round. ``threads``: torch threads while training; their number changes the last bits of every sum. ``precision``:
    of PyTorch's training. ``graphs``: True if a GPU may run a step of a stack as one launch. ``read_tensors(path)``:
    the tensors in a file that a task names. ``layers``: the client halves of the layers, from the inside out.
    """

    algorithm: LocalAlgorithm
    model: nn.Module
    records: Callable[[int, str], Records]
    own_records: Callable[[int], Records]
    local_settings: Callable[[float], LocalSettings]
    num_clients: int
    seed: int
    tasks: Mapping[str, ClientTask] = field(default_factory=dict)
    threads: int = 1
    precision: Precision = "float32"
    graphs: bool = True
    layers: tuple[ClientLayer, ...] = ()
    trains_on_own: Callable[[str], bool] = lambda _: True
    class_counts: Callable[[int, str], tuple[int, ...]] = lambda *_: ()
    read_tensors: Callable[[str], Params] = read_by_content

    def drawing(self, purpose: str, client: int, server_round: int) -> AbstractContextManager[None]:
        """Seed the process's generators for a method of a user's algorithm. Our own algorithms do not use them."""
        if not is_own_kind(self.algorithm):
            return nullcontext()
        return seeded_alone(self.seed, purpose, client, server_round)

    def use_threads(self) -> None:
        """Set the number of PyTorch's threads to that of this experiment."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    @cached_property
    def trainer(self) -> Trainer:
        """Return the trainer of this experiment's model: the native trainer, or PyTorch."""
        return Trainer(self.model, load_kernel()[0], self.precision)

    @cached_property
    def own_trainers(self) -> tuple[LocalTrainer, ...]:
        """Return the algorithm's own trainers, which come first."""
        if not isinstance(self.algorithm, Training):
            return ()
        return tuple(self.algorithm.trainers(copy.deepcopy(self.model)))

    def prepare(self, jobs: Sequence[LocalJob], *, stacked: bool = False) -> Callable[[], list[Trained]]:
        """Return a function that trains clients: each by the first trainer that supports its job, the rest together."""
        if not self.own_trainers:
            return partial(self.stacked.train, jobs) if stacked else self.trainer.prepare(jobs)
        chosen = [next((one for one in self.own_trainers if one.supports(job)), None) for job in jobs]
        rest = [job for job, own in zip(jobs, chosen, strict=True) if own is None]
        train_rest = self.trainer.prepare(rest) if rest else list

        def train() -> list[Trained]:
            found = iter(train_rest())
            return [
                next(found) if own is None else self._trained_by(own, job)
                for job, own in zip(jobs, chosen, strict=True)
            ]

        return train

    def _trained_by(self, trainer: LocalTrainer, job: LocalJob) -> Trained:
        """Train one client by a trainer of the algorithm's own, one client at a time."""
        task, name = job.task, f"train of {type(trainer).__name__}"
        with _ALONE, self.drawing("train", task.client, task.server_round), error_context(name):
            trained = trainer.train(job)
        check_layout(f"what {name} returns", trained.params, layout_of(task.params))
        return trained

    @cached_property
    def stacked(self) -> "StackedTrainer":
        """Return the trainer of many clients of this experiment as one computation."""
        from fl_sim.training.stacked import StackedTrainer  # noqa: PLC0415 (torch.func loads slowly where it is first used)

        return StackedTrainer(self.model, self.precision, alone=self.trainer, graphs=self.graphs)


RuntimeFactory: TypeAlias = Callable[..., ClientRuntime]
"""(experiment as JSON, data root) -> ClientRuntime, expected to cache its results.

For a node with records of its own there are three more arguments: their name, the client, the facts of its task.
"""
