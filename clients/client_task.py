"""Client tasks: one class for each kind of request to a client, such as training. All tasks use one type of message."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from flwr.app import RecordDict
from torch import nn

from clients.client_layer import ClientLayer
from fl_sim.engines import remote, wire
from fl_sim.errors import RunError
from fl_sim.kinds import is_own_kind
from fl_sim.local_plan import LocalAlgorithm, LocalPlan
from fl_sim.native.kernel import load_kernel
from fl_sim.own_code import error_context
from fl_sim.params import WriteGuard, check_layout, layout_of
from fl_sim.seeding import rng, seeded_alone
from fl_sim.store.tensors import load_state, read_by_content
from fl_sim.training.courses import StepByStep, follow
from fl_sim.training.evaluation import Scores
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, LocalTrainer, Trainer, Training
from fl_sim.types import LocalSettings, LocalTask, Params, Payloads, Precision, Trained

if TYPE_CHECKING:
    from clients.policy import Policy
    from fl_sim.training.stacked import StackedTrainer


_OWN_TRAINER_LOCK = Lock()  # held while a user-defined trainer runs, because this trainer is possibly not thread-safe


@dataclass(frozen=True)
class OnClient:
    """The records and the trainer that an algorithm may use on its client, such as in ``start``.

    ``records``: the client's training records. ``seed``: the run's seed, for random numbers (``fl_sim.seeding.rng``).
    ``validation``: the client's validation records while the client's own models are measured, otherwise None.
    """

    records: Records
    trainer: Trainer
    seed: int = 0
    validation: Records | None = None

    def scores(self, params: Params) -> Scores:
        """Return the scores of a model on the client's training records. The client must have at least one record."""
        return self.trainer.evaluate(params, *self.records.tensors())


@runtime_checkable
class CustomStart(Protocol):
    """An algorithm whose clients start a round from parameters other than the broadcast ones.

    For example, a client may select one of several models.
    """

    def start(self, task: LocalTask, client: OnClient) -> LocalTask:
        """Return ``task`` with the client's initial parameters of the round. Their names and shapes stay the same."""
        ...


@runtime_checkable
class PredictingStart(Protocol):
    """An algorithm whose method ``start`` predicts on training records. Time forecasts count these predictions."""

    @property
    def start_passes(self) -> int:
        """The number of predictions that one call of ``start`` makes for each training record of the client."""
        ...


@runtime_checkable
class TrainingStart(Protocol):
    """An algorithm whose method ``start`` trains, in minibatch steps. Time forecasts count and time these steps."""

    def start_steps(self, num_examples: int, batch_size: int, starts: float) -> float:
        """Return a lower bound on the number of minibatch steps in a client's first ``starts`` calls of ``start``.

        ``num_examples``: the number of the client's training records.
        """
        ...

    def start_plan(self, params: Params) -> LocalPlan:
        """Return the local plan of a step in ``start``. ``params``: the parameters of the received model."""
        ...


@runtime_checkable
class Resizing(Protocol):
    """The client side of an algorithm whose clients have models of different sizes (server side: ``Sizing``)."""

    def size_in(self, task: LocalTask) -> float:
        """Return the size of the client's model as a fraction of the whole model, in (0, 1]."""
        ...

    def resized(self, model: nn.Module, params: Params, size: float) -> nn.Module:
        """Return ``model`` resized to ``size`` < 1. Its tensors have the shapes in ``params`` and arbitrary values."""
        ...


@dataclass(frozen=True)
class Broadcast:
    """The tensors of a message: the parameters ``params`` (the global model), and further tensors, ``groups``."""

    params: Params
    groups: Payloads

    @cached_property
    def write_guard(self) -> WriteGuard:
        """Return an object that detects writes to the tensors of the broadcast. An algorithm must only read them."""
        groups = {f"the server's {name!r}": one for name, one in self.groups.items()}
        return WriteGuard.of({"the global model": self.params, **groups})


@dataclass(frozen=True)
class Client:
    """A client, the message that it received, and everything that the message's task needs.

    ``content``: the content of the message, as a Flower ``RecordDict``. ``policy``: the privacy limits that the
    client's owner has set, or None. ``ticket``: a proof that the privacy cost of the task is already in the client's
    privacy ledger. A worker that cannot access the client's files needs this proof. ``check``: a function that long
    tasks call repeatedly. It raises an exception to abort the task. ``read``: a function that unpacks the tensors of a
    message. The clients of a round may share the unpacked tensors.
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
        return self.runtime.own_records(self.number, self.config.server_round)

    @cached_property
    def broadcast(self) -> "Broadcast":
        """Return the tensors of the message, unpacked by ``read``."""
        return self.read(self.content)

    @property
    def params(self) -> Params:
        """Return the parameters of the message, such as the global model."""
        return self.broadcast.params

    @cached_property
    def state(self) -> Payloads:
        """Return the client state after the client's last round.

        The client state comes from the disk, or from the message if there is no folder for client states.
        """
        if self.config.state_dir:
            return load_state(self.config.state_dir, self.number, self.config.server_round)
        return wire.state_in(self.content)

    @property
    def run(self) -> str:
        """The random name of the run. A resumed run keeps its name; two runs never have the same name."""
        return self.config.run

    @property
    def has_disk(self) -> bool:
        """Return True if this process can write the client's files: its state, and its privacy ledger."""
        return bool(self.config.state_dir)

    @property
    def ledger(self) -> Path:
        """Return the path of the client's privacy ledger, for a client whose owner has set no policy."""
        return self.runtime.ledger(self.number)

    def model(self) -> Params:
        """Return the client's model: the parameters of the message, and personal parameters from the client state."""
        params = self.params
        for layer in reversed(self.runtime.layers):
            params = layer.model(params, self.state)
        return params

    def folder(self, name: str = "") -> Path:
        """Return the folder ``name``/client-NUMBER of this run, for the client's private files.

        An example of such a file is the noise key: the secret seed of the noise on the client's private results.
        """
        return Path(self.config.state_dir) / name / f"client-{self.number}"


class ClientTask(Protocol):
    """A kind of request that a client can answer. Every experiment has the task of training.

    Stages (code before or after the rounds) and algorithms may add tasks.

    ``reads_records``: True if the answer depends on the client's records and the task adds no noise. A client's policy
    must allow such a task. ``reads_state``: True if the task uses ``Client.state`` (tensors from the client's last
    round). The client state is then sent to workers without access to the disk. ``runs_in_threads``: True if several
    clients may run the task at the same time in threads of one process.
    """

    reads_records: ClassVar[bool]
    reads_state: ClassVar[bool]
    runs_in_threads: ClassVar[bool]

    def run(self, client: Client) -> RecordDict:
        """Execute the task on the client, and return the client's answer to the server."""
        ...


@runtime_checkable
class Grouped(Protocol):
    """A task that computes several clients' answers in one computation to save time, such as DA-FL's generators."""

    def run_together(self, clients: Sequence[Client]) -> list[RecordDict | Exception]:
        """Return for each client its answer, or the exception that ended its task.

        If the function ``check`` of a client raises an exception, the computation ends for all clients.
        """
        ...


@dataclass(frozen=True)
class Begun:
    """A private result that is not computed yet. Its privacy cost is already in the client's privacy ledger.

    ``ticket``: the proof that the cost is in the privacy ledger. It is sent to the worker. ``paid``: the values that
    the task's ``finish`` needs later, such as the privacy ledger's receipt (its proof that the cost is written).
    """

    ticket: remote.Ticket
    paid: Any = field(repr=False)


@runtime_checkable
class PaidAtHome(Protocol):
    """A task with a differentially private answer.

    Before a worker computes the answer, the driver (the process that started the worker) writes the privacy cost into
    the client's privacy ledger. A worker on another machine cannot access this ledger. It receives a ticket, the
    driver's proof that the cost is in the ledger.
    """

    def begin(self, client: Client) -> Begun | RecordDict | None:
        """Write the privacy cost of the answer into the client's privacy ledger.

        Return a ``Begun`` with the ticket for the worker. If the answer exists already, return the answer instead. If
        the answer has no privacy cost, return None.
        """
        ...

    def finish(self, begun: Begun, answer: RecordDict) -> RecordDict:
        """Store the worker's answer, and return it for the server. A repeated request gets the stored answer."""
        ...


class RecordsOf(Protocol):
    """The type of a function that returns the training records of a client in a round."""

    def __call__(self, client: int, synthetic: str, server_round: int = 1, /) -> Records:
        """Return the training records of ``client``.

        ``synthetic``: the path of the pool of synthetic records; empty without a pool.
        """


class OwnRecordsOf(Protocol):
    """The type of a function that returns a client's own training records in a round."""

    def __call__(self, client: int, server_round: int = 1, /) -> Records:
        """Return the client's own training records, without synthetic records."""


class ClassCountsOf(Protocol):
    """The type of a function that counts a client's training records of each class in a round."""

    def __call__(self, client: int, synthetic: str, server_round: int = 1, /) -> tuple[int, ...]:
        """Return the number of training records of each class. The training records are those of ``RecordsOf``."""


@dataclass(frozen=True)
class ClientRuntime:
    """Everything that a worker (a thread or process) needs to execute any client of an experiment.

    A client runtime is built once per process and experiment.

    ``records(client, synthetic, server_round)``: the training records of a client in a round; ``synthetic`` is the path
    of the pool of synthetic records, or empty if there is no pool. Tasks before round 1 use the records of round 1.
    ``own_records(client, server_round)``: the client's own records only. ``class_counts(client, synthetic,
    server_round)``: the number of the client's training records in each class. ``trains_on_own(synthetic)``: True if
    ``records`` contains the client's own records. ``tasks``: the tasks other than training, by name.
    ``local_settings(learning_rate)``: the settings of local training in a round. ``threads``: the number of PyTorch
    threads. (This number affects the rounding of sums.) ``precision``: the number format of PyTorch's training.
    ``graphs``: True if a GPU may run one step of many clients as a single CUDA graph. ``read_tensors(path)``: the
    tensors in a file that a task names. ``ledger(client)``: the privacy ledger of a client without a policy.
    ``initial``: the initial model of the run. ``layers``: the client halves of the layers, such as compression,
    innermost first. ``by_architecture``: if clients have different architectures, one client runtime for each of the n
    architectures; client i uses runtime i mod n.
    """

    algorithm: LocalAlgorithm
    model: nn.Module
    records: "RecordsOf"
    own_records: "OwnRecordsOf"
    local_settings: Callable[[float], LocalSettings]
    num_clients: int
    seed: int
    tasks: Mapping[str, ClientTask] = field(default_factory=dict)
    threads: int = 1
    precision: Precision = "float32"
    graphs: bool = True
    layers: tuple[ClientLayer, ...] = ()
    by_architecture: tuple["ClientRuntime", ...] = ()
    trains_on_own: Callable[[str], bool] = lambda _: True
    class_counts: "ClassCountsOf" = lambda *_: ()
    read_tensors: Callable[[str], Params] = read_by_content
    initial: Params = field(default_factory=dict)
    ledger: Callable[[int], Path] = lambda _: Path()

    def drawing(self, purpose: str, client: int, server_round: int) -> AbstractContextManager[None]:
        """Return a context that seeds the global random generators of the process for a user-defined algorithm.

        For fl-sim's algorithms the context does nothing, because they do not use the global generators.
        """
        if not is_own_kind(self.algorithm):
            return nullcontext()
        return seeded_alone(self.seed, purpose, client, server_round)

    def use_threads(self) -> None:
        """Set PyTorch's number of threads to the setting ``threads`` of this client runtime."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    @cached_property
    def trainer(self) -> Trainer:
        """Return the trainer of this experiment's model: the compiled C++ trainer, or PyTorch."""
        return Trainer(self.model, load_kernel()[0], self.precision)

    def of_client(self, number: int) -> "ClientRuntime":
        """Return the client runtime for client ``number``. Clients may have models of different architectures."""
        return self.by_architecture[number % len(self.by_architecture)] if self.by_architecture else self

    def sized(self, task: LocalTask) -> "ClientRuntime":
        """Return the client runtime for the size of the client's model: ``self`` for a model of full size."""
        algorithm = self.algorithm
        if not isinstance(algorithm, Resizing) or (size := algorithm.size_in(task)) == 1:
            return self
        if size not in self._smaller:
            self._smaller[size] = replace(self, model=algorithm.resized(self.model, task.params, size))
        return self._smaller[size]

    @cached_property
    def _smaller(self) -> dict[float, "ClientRuntime"]:
        """The client runtimes for smaller models, by size."""
        return {}

    @cached_property
    def own_trainers(self) -> tuple[LocalTrainer, ...]:
        """Return the trainers that the algorithm itself defines.

        A job is the trainer's input for one model of one client. If none of these trainers supports a job, ``trainer``
        executes the job.
        """
        if not isinstance(self.algorithm, Training):
            return ()
        return tuple(self.algorithm.trainers(copy.deepcopy(self.model)))

    def prepare(self, jobs: Sequence[LocalJob], *, stacked: bool = False) -> Callable[[], list[Trained]]:
        """Return a function that trains the clients of ``jobs``, and returns one result per job in the same order.

        The first of ``own_trainers`` that supports a job executes this job. ``trainer`` executes all other jobs
        together. ``stacked``: train all clients as one computation, if the algorithm defines no trainers. If local
        plans have phases (``Phase``), all jobs are trained phase by phase. If the algorithm defines its own local steps
        (``StepByStep``), all jobs are trained step by step.
        """
        return prepared([(self, job) for job in jobs], stacked=stacked)

    def prepare_equal(self, jobs: Sequence[LocalJob], *, stacked: bool) -> Callable[[], list[Trained]]:
        """Return the training function of ``prepare``, for jobs whose models have the size of this runtime's model."""
        if isinstance(algorithm := self.algorithm, StepByStep):
            if others := [name for name in ("trainers", "further") if hasattr(algorithm, name)]:
                raise RunError(
                    f"algorithm {type(algorithm).__name__} has the methods course and {others[0]}, and only course "
                    "would be called: leave one of them out"
                )
            return lambda: follow(algorithm, jobs, lambda steps: self._prepare(steps, stacked=stacked)())
        if not any(job.plan.phases for job in jobs):
            return self._prepare(jobs, stacked=stacked)
        train_first = self._prepare([job.in_phase(0) for job in jobs], stacked=stacked)

        def train_phases() -> list[Trained]:
            results = train_first()
            for phase in range(1, max(len(job.plan.phases) for job in jobs)):
                places = [place for place, job in enumerate(jobs) if phase < len(job.plan.phases)]
                later = [self._phase_of(jobs[place], phase, results[place]) for place in places]
                for place, result in zip(places, self._prepare(later, stacked=stacked)(), strict=True):
                    results[place] = results[place].followed_by(result)
            return results

        return train_phases

    def _phase_of(self, job: LocalJob, phase: int, before: Trained) -> LocalJob:
        task = replace(job.task, params=before.params, statistics=before.statistics)
        batches = rng(self.seed, "batches", task.client, task.server_round, phase)
        return replace(job, task=task, generator=batches).in_phase(phase)

    def _prepare(self, jobs: Sequence[LocalJob], *, stacked: bool) -> Callable[[], list[Trained]]:
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
        task, name = job.task, f"train of {type(trainer).__name__}"
        with _OWN_TRAINER_LOCK, self.drawing("train", task.client, task.server_round), error_context(name):
            trained = trainer.train(job)
        check_layout(f"the parameters that {name} returns", trained.params, layout_of(task.params))
        return trained

    @cached_property
    def stacked(self) -> "StackedTrainer":
        """Return the trainer that trains many clients of this experiment as one computation."""
        from fl_sim.training.stacked import StackedTrainer  # noqa: PLC0415 (torch.func loads slowly where it is first used)

        return StackedTrainer(self.model, self.precision, alone=self.trainer, graphs=self.graphs)


def prepared(jobs: Sequence[tuple[ClientRuntime, LocalJob]], *, stacked: bool = False) -> Callable[[], list[Trained]]:
    """Return a function that trains the clients of ``jobs`` and returns the results.

    Each element of ``jobs`` is a pair: a client runtime, and a job (the trainer's input).

    Jobs with the same size and architecture of the model are trained together. The groups of jobs are trained one after
    another.
    """
    runtimes = [runtime.sized(job.task) for runtime, job in jobs]
    places = {id(one): [place for place, other in enumerate(runtimes) if other is one] for one in runtimes}
    if len(places) == 1:
        return runtimes[0].prepare_equal([job for _, job in jobs], stacked=stacked)
    trainings = [
        (mine, runtimes[mine[0]].prepare_equal([jobs[place][1] for place in mine], stacked=stacked))
        for mine in places.values()
    ]

    def train_all() -> list[Trained]:
        found = {place: one for mine, train in trainings for place, one in zip(mine, train(), strict=True)}
        return [found[place] for place in range(len(jobs))]

    return train_all


RuntimeFactory: TypeAlias = Callable[..., ClientRuntime]
"""A function (experiment as JSON, data root) -> ClientRuntime. The function is expected to cache its results.

For a node with its own records, the function takes three more arguments. These arguments are the name of the node's
data set, the client ID, and public facts about the server's records, as JSON.
"""
