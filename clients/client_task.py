"""What clients are asked: one type of message, one handler, and a ``ClientTask`` for each question."""

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


_ALONE = Lock()  # held while code of the user's own trains: nobody knows that it may run in several threads


@dataclass(frozen=True)
class OnClient:
    """What an algorithm's ``start`` may use on its client."""

    records: Records
    trainer: Trainer

    def scores(self, params: Params) -> Scores:
        """Return how well a model does on the client's training records, of which there must be some."""
        return self.trainer.evaluate(params, *self.records.tensors())


@runtime_checkable
class Starting(Protocol):
    """An algorithm whose clients begin a round with something else than the server's model: one of several, say."""

    def start(self, task: LocalTask, client: OnClient) -> LocalTask:
        """Return ``task`` with what the client begins with; its ``params`` keep their names and shapes."""
        ...


@dataclass(frozen=True)
class Sent:
    """The tensors of a message: what it is about, and the groups that go along."""

    params: Params
    broadcast: Payloads

    @cached_property
    def write_guard(self) -> WriteGuard:
        """Return a note of what they are now, to find out later who wrote to them."""
        groups = {f"the server's {name!r}": one for name, one in self.broadcast.items()}
        return WriteGuard.of({"the global model": self.params, **groups})


@dataclass(frozen=True)
class Client:
    """What a task may use of the client on which it runs.

    ``content``: the message's records. ``policy``: of the node's owner, where there is one. ``ticket``: says that a
    release was paid for at home, where the client's files are elsewhere. ``check``: called now and then by tasks that
    take long; what it raises ends them. ``read``: unpacks the tensors, which the clients of a round may share.
    """

    number: int
    runtime: "ClientRuntime"
    order: wire.TaskConfig
    content: RecordDict
    policy: "Policy | None" = None
    ticket: remote.Ticket | None = None
    check: Callable[[], None] = lambda: None
    read: "Callable[[RecordDict], Sent]" = lambda content: Sent(*wire.read_task(content))

    @property
    def records(self) -> Records:
        """Return the client's own training records."""
        return self.runtime.own_records(self.number)

    @cached_property
    def sent(self) -> "Sent":
        """Return the tensors of the message."""
        return self.read(self.content)

    @property
    def params(self) -> Params:
        """Return the tensors that the question is about, such as the global model."""
        return self.sent.params

    @cached_property
    def state(self) -> Payloads:
        """Return what the client kept of its last round before that of the order."""
        if self.order.state_dir:
            return load_state(self.order.state_dir, self.number, self.order.server_round)
        return wire.kept_in(self.content)

    def model(self) -> Params:
        """Return the model that is the client's: what the message brings, and the parameters that do not travel."""
        params = self.params
        for layer in reversed(self.runtime.layers):
            params = layer.model(params, self.state)
        return params

    def folder(self, name: str = "") -> Path:
        """Return the folder of this run in which the client keeps what must survive until its answer is out."""
        return Path(self.order.state_dir) / name / f"client-{self.number}"


class ClientTask(Protocol):
    """A question to clients: its client half. A stage or an algorithm brings it; training is one that is always there.

    ``reads_records``: whether the answer is made of a client's records without noise of its own, so that a policy
    must allow it. ``reads_state``: whether it looks at ``Client.state``, which then goes to workers that see no disk.
    ``runs_in_threads``: whether several clients may be asked side by side in one process.
    """

    reads_records: ClassVar[bool]
    reads_state: ClassVar[bool]
    runs_in_threads: ClassVar[bool]

    def run(self, client: Client) -> RecordDict:
        """Return the client's answer."""
        ...


@runtime_checkable
class Guarded(Protocol):
    """A task of ours that depends on more than ``reads_records`` for whether a policy allows it."""

    def check(self, client: Client) -> None:
        """Raise RunError where the client's policy, which it has, does not."""
        ...


@runtime_checkable
class Grouped(Protocol):
    """A task that answers for several clients in one computation, which saves time."""

    def run_together(self, clients: Sequence[Client]) -> list[RecordDict | Exception]:
        """Return each client's answer, or what it raised. What a client's ``check`` raises ends all."""
        ...


@dataclass(frozen=True)
class Begun:
    """A release that is paid for at home and not made yet. ``paid``: what ``finish`` needs beside the answer."""

    ticket: remote.Ticket
    paid: Any = field(repr=False)


@runtime_checkable
class PaidAtHome(Protocol):
    """A task whose release is charged where the client's ledger lies, before a worker elsewhere is told to make it."""

    def begin(self, client: Client) -> Begun | RecordDict | None:
        """Pay, and return the ticket; the answer where it is there already; None where nothing is to be paid."""
        ...

    def finish(self, begun: Begun, answer: RecordDict) -> RecordDict:
        """Keep what a worker made with the ticket, and return what goes to the server."""
        ...


@dataclass(frozen=True)
class ClientRuntime:
    """What a worker needs to play any client of an experiment: made once per process and experiment.

    ``records(client, synthetic)`` returns what that client trains on; ``synthetic`` is the path of the pool of
    synthetic records, empty where there is none. ``own_records(client)``: its own alone.
    ``class_counts(client, synthetic)`` says how many of these records are of each class.
    ``trains_on_own(synthetic)`` says whether ``records`` would hold the client's own.
    ``tasks``: by name, what clients may be asked beside training.
    ``local_settings(learning_rate)`` fills in a round's settings.
    ``threads``: torch threads while training; their number changes the last bits of every sum. ``precision``: how
    exactly PyTorch trains. ``graphs``: whether a GPU may be given a step of a stack as one launch.
    ``read_tensors(path)``: what is in a file that an order names.
    ``layers``: the client halves of the layers, from the inside out.
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
        """Seed the process's generators for what a client's turn draws; our own algorithms draw from none of them."""
        if not is_own_kind(self.algorithm):
            return nullcontext()
        return seeded_alone(self.seed, purpose, client, server_round)

    def use_threads(self) -> None:
        """Give PyTorch as many threads as clients of this experiment train with."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    @cached_property
    def trainer(self) -> Trainer:
        """Return what trains this experiment's model: the native trainer, or PyTorch."""
        return Trainer(self.model, load_kernel()[0], self.precision)

    @cached_property
    def own_trainers(self) -> tuple[LocalTrainer, ...]:
        """Return the algorithm's own trainers, which are asked first."""
        if not isinstance(self.algorithm, Training):
            return ()
        return tuple(self.algorithm.trainers(copy.deepcopy(self.model)))

    def prepare(self, jobs: Sequence[LocalJob], *, stacked: bool = False) -> Callable[[], list[Trained]]:
        """Return what trains clients: each by the first trainer that supports its job, the rest of them together."""
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
        """Return what a trainer of the algorithm's own makes of a job, one client at a time."""
        task, name = job.task, f"train of {type(trainer).__name__}"
        with _ALONE, self.drawing("train", task.client, task.server_round), error_context(name):
            trained = trainer.train(job)
        check_layout(f"what {name} returns", trained.params, layout_of(task.params))
        return trained

    @cached_property
    def stacked(self) -> "StackedTrainer":
        """Return what trains many clients of this experiment as one computation."""
        from fl_sim.training.stacked import StackedTrainer  # noqa: PLC0415 (torch.func loads slowly where it is first used)

        return StackedTrainer(self.model, self.precision, alone=self.trainer, graphs=self.graphs)


RuntimeFactory: TypeAlias = Callable[..., ClientRuntime]
"""(experiment as JSON, data root) -> ClientRuntime, expected to remember what it made.

For a node with records of its own there are three more arguments: their name, the client, the facts of its order.
"""
