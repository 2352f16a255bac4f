"""What clients are asked: one type of message, one handler, and a ``ClientTask`` for each question."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from flwr.app import RecordDict
from torch import nn

from fl_sim.engines import wire
from fl_sim.kinds import is_own_kind
from fl_sim.local_plan import LocalAlgorithm
from fl_sim.native.kernel import load_kernel
from fl_sim.packed import Packing
from fl_sim.seeding import seeded_alone
from fl_sim.store.tensors import read_by_content
from fl_sim.training.records import Records
from fl_sim.training.trainer import Trainer
from fl_sim.types import LocalSettings, Params, Precision

if TYPE_CHECKING:
    from clients.policy import Policy
    from fl_sim.training.stacked import StackedTrainer


@dataclass(frozen=True)
class Client:
    """What a task may use of the client on which it runs.

    ``content``: the message's records. ``policy``: of the node's owner, where there is one. ``ticket``: says that a
    release was paid for at home, where the client's files are elsewhere. ``check``: called now and then by tasks that
    take long; what it raises ends them.
    """

    number: int
    site: "Site"
    order: wire.Order
    content: RecordDict
    policy: "Policy | None" = None
    ticket: wire.Ticket | None = None
    check: Callable[[], None] = lambda: None

    @property
    def records(self) -> Records:
        """Return the client's own training records."""
        return self.site.own_records(self.number)

    @cached_property
    def params(self) -> Params:
        """Return the tensors that the question is about, such as the global model."""
        return wire.read_task(self.content)[0]

    def folder(self, name: str = "") -> Path:
        """Return the folder of this run in which the client keeps what must survive until its answer is out."""
        return Path(self.order.state_dir) / name / f"client-{self.number}"


class ClientTask(Protocol):
    """A question to clients: its client half. A stage or an algorithm brings it; training is one that is always there.

    ``reads_records``: whether the answer is made of a client's records without noise of its own, so that a policy
    must allow it. ``runs_in_threads``: whether several clients may be asked side by side in one process.
    """

    reads_records: ClassVar[bool]
    runs_in_threads: ClassVar[bool]

    def run(self, client: Client) -> RecordDict:
        """Return the client's answer."""
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

    ticket: wire.Ticket
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
class Site:
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
    ``packing``: how what clients send is compressed, if it is.
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
    packing: Packing | None = None
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
    def stacked(self) -> "StackedTrainer":
        """Return what trains many clients of this experiment as one computation."""
        from fl_sim.training.stacked import StackedTrainer  # noqa: PLC0415 (torch.func loads slowly where it is first used)

        return StackedTrainer(self.model, self.precision, alone=self.trainer, graphs=self.graphs)


SiteFactory: TypeAlias = Callable[..., Site]
"""(experiment as JSON, data root) -> Site, expected to remember what it made.

For a node with records of its own there are three more arguments: their name, the client, the facts of its order.
"""
