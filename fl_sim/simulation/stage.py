"""Base classes of stages and procedures.

A stage is code that runs before the first round or after the last round, such as the making of synthetic records. The
class of a stage also gives the stage's warnings, result fields and privacy costs. A settings class names its stage in
the attribute ``stage``, as "module:Class". A user-defined settings class may name a stage, too. Other code uses only
the methods of ``Stage``, and so works with every stage. A procedure executes the whole run of an algorithm, in rounds
or without rounds.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeVar

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import nn

from clients.client_layer import ClientLayer
from clients.client_task import ClientRuntime, ClientTask
from fl_sim.engines.grid import LocalGrid
from fl_sim.engines.wire import TaskConfig
from fl_sim.errors import Diverged, RunError, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.experiment.node_job import public_facts
from fl_sim.kinds import hides_clients, is_none, is_own_kind, path_in
from fl_sim.local_plan import LocalPlan
from fl_sim.own_code import error_context, load_object
from fl_sim.params import is_finite, layers_after, placed
from fl_sim.seeding import process_kept, rng, seed_process
from fl_sim.simulation.client_runtime import local_settings, read_pool, sizes_trained_on
from fl_sim.simulation.measuring import Measuring
from fl_sim.simulation.run_log import Observer, RunLog, is_json
from fl_sim.store import run_directory
from fl_sim.store.files import user_folder
from fl_sim.training.loop import resident
from fl_sim.training.own_metrics import OwnMetrics, checked_metrics
from fl_sim.training.trainer import LocalJob
from fl_sim.types import LocalTask, Params, Payloads, ServerState, Traffic
from strategies.algorithm import Algorithm, Sharing, reported_by
from strategies.answers import Asking, ask_everybody, find_population
from strategies.flower import FederatedStrategy
from strategies.layer import layer_kinds, name_of

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment
    from fl_sim.simulation.timing import Work

Answer = TypeVar("Answer")

RESULT: Final = frozenset({
    "status", "algorithm", "titles", "data", "data_note", "features", "image_shape", "partition", "clients",
    "is_private", "records", "model", "evaluated_model", "num_parameters", "seed", "engine", "trainer", "precision",
    "rounds", "final_accuracy", "best_accuracy", "best_round", "best_chosen_on", "validation",
    "measures", "bytes", "error", "diverged", "privacy", "stopped", "stopped_by_observer", "warnings", "chain",
    "identity", "seconds", "versions",
})  # fmt: skip
"""The field names that every ``result.json`` uses. A stage may not use them for its own fields (``Stage.facts``)."""

VALIDATION_ACCURACY: Final = "validation_accuracy"
"""The name of a stage's measure that replaces the validation accuracy of the server's model (``Stage.validates``)."""

_SHARES: Final = "fl_sim.stages.shares:Shares"  # the stage of all algorithms with the interface Sharing


@dataclass(frozen=True)
class Run:
    """The objects of a run that a stage's methods can use. Only the method ``ask`` sends messages to clients."""

    job: Job
    strategy: FederatedStrategy
    grid: Grid
    out: Path
    log: RunLog
    own_metrics: Mapping[str, OwnMetrics] = field(default_factory=dict)

    @cached_property
    def measuring(self) -> Measuring:
        """Return the evaluator of this run, with its test and validation records in memory."""
        return Measuring.of(self.job, self.own_metrics)

    def model(self) -> Params:
        """Return all tensors of the model that is evaluated after a round. Personal tensors have initial values."""
        server = self.strategy.server
        params = reported_by(self.strategy.algorithm, server)
        for half in reversed(self.strategy.on_clients):
            params = half.model(params, {})
        return replace(server, params=params).model

    @property
    def order(self) -> TaskConfig:
        """Return the task configuration that all messages of the run share, such as the experiment and paths."""
        return self.strategy.order

    def ask(
        self,
        task: str,
        read: Callable[[RecordDict], Answer],
        *,
        quoted: bool,
        params: Params | None = None,
        broadcast: Payloads | None = None,
        order: TaskConfig | None = None,
        server: ServerState | None = None,
    ) -> list[Answer]:
        """Send the task named ``task`` to every client; return the list of answers, in the order of clients.

        ``read``: a function that checks and converts one answer. ``params`` and ``broadcast``: the tensors that are
        sent. ``quoted``: True if an error message may quote a client's message. It must be False if answers are
        private. ``order``: the task configuration of the messages; None for ``self.order``. ``server``: a server state,
        or None. With a server state, each client receives the tensors that it would receive in a round with this state.
        Raises RunError, with the ID of the first client without a valid answer.
        """
        timeout = self.job.experiment.round_timeout
        if not self.strategy.population.nodes:
            self.strategy.population = find_population(self.grid, self.strategy.num_clients, timeout)
        order, clients = replace(order or self.order, task=task), range(self.strategy.num_clients)
        contents = {} if server is None else self.strategy.contents(order, server, clients)
        asking = Asking(order, timeout, quoted, params, broadcast or {}, contents)
        return ask_everybody(self.grid, self.strategy.population, asking, read)


class Stage:
    """The base class of all stages: code that runs before the first round or after the last round.

    A subclass overrides only the methods that it needs. Each run makes one object of the class. The object may store
    values for later calls of ``facts`` and ``statements``.
    """

    titles: ClassVar[Mapping[str, str]] = {}
    """{name of a measure in ``table.csv``: its title}. ``fl-sim table`` writes a further table for each such measure.

    One ``*`` in a name stands for any text, such as the name of a source: ``personal.by_source.*.own_accuracy_percent``
    gives a further table with a column for each source. A name may also denote a list in ``result.json`` with one
    number in [0, 1] for each client, such as ``personal.by_client.own``. The title then describes one number of the
    list. The report plots this list against the same list of the runs with local training only.
    """

    def __init__(self, job: Job) -> None:
        self.job = job

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if a run of ``experiment`` executes this stage."""
        del experiment
        return True

    @classmethod
    def compared(cls, alone: Mapping[str, Any], result: Mapping[str, Any]) -> Mapping[str, float]:
        """Return measures that compare a run with purely local training, {name in ``table.csv``: number}.

        ``result``: the content of the run's ``result.json``. ``alone``: the content of ``result.json`` of another run
        with the same partition, in which every client trains a separate model.
        """
        del alone, result
        return {}

    def tasks(self) -> Mapping[str, ClientTask]:
        """Return the client tasks of the stage, {name: task}. A client task is the code that runs on clients."""
        return {}

    def preparing(self, log: RunLog) -> str:
        """Return the line that is shown while clients compute before the first round; empty if they compute nothing."""
        del log
        return ""

    def before(self, run: Run) -> None:
        """Execute the stage before the first round.

        A resumed run calls this method again. The stage must then use the result that it stored in the first call.
        """

    def measured(self, run: Run, server_round: int, *, is_last: bool) -> Mapping[str, float]:
        """Return further measures of the models after a round, {name: number}; empty in most rounds.

        ``is_last``: True after the last planned round. It may be False after the last round of a run that ends early.
        """
        del run, server_round, is_last
        return {}

    def validates(self) -> bool:
        """Return True if the method ``measured`` returns the validation accuracy, as ``VALIDATION_ACCURACY``."""
        return False

    def after(self, run: Run) -> None:
        """Execute the stage after the last round."""

    def by_client(self) -> Mapping[str, NDArray[Any]]:
        """Return columns for ``clients.csv``, {name: one number for each client}; NaN is written as an empty cell."""
        return {}

    def num_pooled(self) -> int:
        """Return the approximate number of records that the stage adds to the training records of every client."""
        return 0

    def trains_model(self) -> bool:
        """Return True if the stage trains the model at the server. The run then cannot have personal parameters."""
        return False

    def num_server_steps(self) -> int:
        """Return the number of minibatch steps for which the server trains the model before the first round."""
        return 0

    def work(self) -> "Sequence[Work]":
        """Return the stage's computation, for the time forecast, without the steps in ``num_server_steps``."""
        return ()

    def key(self) -> str:
        """Return the name of the stage's result on disk that several runs share; empty without such a result."""
        return ""

    def is_made(self) -> bool:
        """Return True if the stage's shared result (see ``key``) exists on this machine already."""
        return False

    def traffic(self, params: Params) -> Mapping[str, Traffic]:
        """Return the forecast of bytes to and from all clients, {purpose: bytes}.

        ``params``: a model with the same names and shapes as the run's model.
        """
        del params
        return {}

    def payments(self) -> "Iterable[Payment]":
        """Return the privacy costs of the outputs that the stage itself publishes, such as synthetic records."""
        return ()

    def warnings(self) -> list[str]:
        """Return the warnings that are shown to the user before any message is sent to a client."""
        return []

    def facts(self) -> Mapping[str, Any]:
        """Return the fields that the stage adds to ``result.json``. No other field may have the same name.

        If a field is a dictionary, two of its keys have a special meaning. ``in_words``: a text that ``fl-sim run``
        prints at the end. ``by_client``: {name: list of one number in [0, 1] for each client}. In a list, None stands
        for an unknown number.
        """
        return {}

    def statements(self, others: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Return all privacy statements of the run: ``others``, which this stage may change, and its own statements.

        ``others``: the privacy statements of the rounds and of earlier stages.
        """
        return list(others)


@dataclass(frozen=True)
class Procedure(ABC):
    """The base class of all procedures. A procedure executes the whole run of an algorithm.

    The methods of this base class are for algorithms without rounds, whose clients train no model.
    """

    job: Job
    has_rounds: ClassVar[bool] = False
    """True if the procedure has rounds. An observer may then end the run after a round, and compute its own metrics."""

    @abstractmethod
    def run(self, grid: Grid, out: Path, log: RunLog, observer: Observer) -> None:
        """Execute all parts of the run that ``log`` does not contain yet. Raises RunError if the run cannot go on."""

    @abstractmethod
    def runtime(self) -> ClientRuntime:
        """Return the client runtime of a worker."""

    @abstractmethod
    def work(self) -> "Sequence[Work]":
        """Return the amounts of computation of the whole run, such as local training, for the time forecast."""

    @abstractmethod
    def traffic(self) -> dict[str, Traffic]:
        """Return the bytes of arrays to and from all clients, {purpose: bytes}.

        Key ``rounds``: the total bytes of all rounds. Each other key is a forecast of bytes that are sent once, before
        the first round or after the last round.
        """

    @property
    def by_architecture(self) -> "tuple[Procedure, ...]":
        """One procedure per architecture of the clients' models; for one architecture, it is ``self``."""
        return (self,)

    def payments(self) -> "tuple[Payment, ...] | None":
        """Return the planned costs of the published outputs; None if the costs depend on private votes (PATE)."""
        return ()

    def typical_plan(self) -> LocalPlan:
        """Return a typical local plan (changes to plain SGD), to find the trainers that support the algorithm."""
        return LocalPlan()

    def model(self) -> nn.Module:
        """Return the model, with its initial weights. A finished run saves the trained weights of this model."""
        return self.job.whole_model()

    def beginning(self) -> ServerState:
        """Return the server state before the first round."""
        return ServerState({})

    def kept_by_clients(self, server: ServerState) -> Payloads:
        """Return names, shapes and types of the tensors in a client state. ``server``: the first server state."""
        del server
        return {}

    def warnings(self, log: RunLog) -> list[str]:
        """Return the warnings to the user before the run."""
        del log
        return []


def run_stage(stage: Stage, run: Run, method: Literal["before", "after"]) -> None:
    """Call ``stage.before`` or ``stage.after``, then check the result fields (``facts``) of all stages.

    Raises RunError if two stages use the same field name, or if fields are no JSON values. If the user's own stage
    raises an error, the new error message contains the name of its class.
    """
    with error_context(f"{method} of {type(stage).__name__}") if is_own_kind(stage) else nullcontext():
        stage.before(run) if method == "before" else stage.after(run)
    said: dict[str, str] = dict.fromkeys(RESULT, "the result itself")
    for one in run.log.stages:
        name = type(one).__name__
        with error_context(f"facts of {name}"):
            facts = one.facts()
        if twice := sorted(said.keys() & facts.keys()):
            raise RunError(
                f"facts of {name} returned the field {twice[0]!r}, which {said[twice[0]]} has, too: rename the field"
            )
        said |= dict.fromkeys(facts, name)
        if is_own_kind(one) and not is_json(facts):
            raise RunError(f"facts of {name} returned {facts!r}: return a dict from field names to JSON values")


def measured_by_stages(run: Run, server_round: int, *, is_last: bool) -> dict[str, float]:
    """Return the measures of all stages after a round, {name: number}.

    If the user's own stage raises an error, the new error message contains the name of its class. Raises RunError for a
    value that is not a finite number, for a name that another stage uses, and for the name of a standard field of
    ``rounds.jsonl``. Only stages that validate (``Stage.validates``) may use the name ``VALIDATION_ACCURACY``.
    """
    found: dict[str, float] = {}
    for stage in run.log.stages:
        assert isinstance(stage, Stage)
        what = f"measured of {type(stage).__name__}"
        with error_context(what) if is_own_kind(stage) else nullcontext():
            returned = dict(stage.measured(run, server_round, is_last=is_last))
        validated = returned.pop(VALIDATION_ACCURACY, None) if stage.validates() else None
        numbers = checked_metrics(returned, what, server_round)
        numbers |= {} if validated is None else {VALIDATION_ACCURACY: validated}
        if twice := sorted(numbers.keys() & found.keys()):
            raise RunError(f"{what} returned {twice[0]!r}, as another stage did: give the measure another name")
        found |= numbers
    return found


def stages_of(job: Job) -> tuple[Stage, ...]:
    """Return the stages of a run of ``job``, in the order of their settings."""
    return tuple(kind(job) for kind in stage_kinds(job.experiment) if kind.applies(job.experiment))


def stage_kinds(experiment: Experiment) -> list[type[Stage]]:
    """Return the classes of all stages that the settings of ``experiment`` name, including stages that do not apply."""
    parts: tuple[object, ...] = (
        experiment.preprocess, experiment.algorithm, experiment.local.privacy, experiment.aggregator,
        experiment.attack, experiment.calibrate, experiment.evaluate, experiment.sampler,
    )  # fmt: skip
    named = [(path_in(type(part), "stage"), _SHARES if isinstance(part, Sharing) else "") for part in parts]
    return [load_object(path, "stage") for both in named for path in both if path]


def titles_of(experiments: Iterable[Experiment]) -> dict[str, str]:
    """Return the titles (names for tables) of the measures of all stages of ``experiments``. See ``Stage.titles``."""
    kinds = [kind for one in experiments for kind in stage_kinds(one) if kind.applies(one)]
    return {name: title for kind in kinds for name, title in kind.titles.items()}


def tasks_of(job: Job) -> dict[str, ClientTask]:
    """Return the client tasks of all stages of ``job``, {name: task}.

    Raises UserError if two tasks have the same name.
    """
    tasks: dict[str, ClientTask] = {}
    for stage in stages_of(job):
        if twice := tasks.keys() & stage.tasks().keys():
            raise UserError(
                f"{type(stage).__name__} has a client task {min(twice)!r}, and so has another stage of the run: "
                "rename the task"
            )
        tasks.update(stage.tasks())
    return tasks


MOST_HELD = 10**9
"""The largest number of records that a node of Flower's own runtime may report."""


def order_of(job: Job, grid: Grid, out: Path) -> TaskConfig:
    """Return the task configuration that all messages of a run share, such as the experiment and paths.

    On Flower's own runtime, a node may have its own data set. There the configuration also contains the run's name and
    the public facts of the experiment's data set. With private local training, it always contains the run's name.
    """
    elsewhere = not isinstance(grid, LocalGrid)
    return TaskConfig(
        experiment=job.experiment.model_dump_json(),
        server_round=0,
        learning_rate=0.0,
        data_root=str(job.root.absolute()) if job.root else "",
        state_dir=str(out.absolute() / run_directory.STATE),
        run=run_directory.run_name(out) if elsewhere or not is_none(job.experiment.local.privacy) else "",
        facts=json.dumps(public_facts(job.dataset)) if elsewhere else "",
    )


def prepared_strategy(
    job: Job,
    algorithm: Algorithm,
    on_clients: tuple[ClientLayer, ...],
    grid: Grid,
    out: Path,
    log: RunLog,
    observer: Observer,
) -> FederatedStrategy:
    """Call ``before`` of all stages; return the strategy of the job, which executes rounds.

    ``on_clients``: the client-side objects of the layers, such as Global DP or compression. ``observer`` receives the
    new warnings of the stages.
    """
    experiment, num_warnings, start = job.experiment, len(log.warnings), time.perf_counter()
    strategy = FederatedStrategy(
        algorithm,
        experiment.aggregator,
        experiment.sampler,
        log.server,
        order_of(job, grid, out),
        experiment.num_clients,
        experiment.seed,
        sampling_seed=experiment.sampling_seed,
        on_clients=on_clients,
        members=job.members if experiment.num_members < experiment.num_clients else None,
    )
    for kind in layer_kinds(experiment):
        if layer := kind.of(experiment, out, log.layer_states.get(name_of(kind), {})):
            strategy.wrap(layer)
    log.layer = strategy.layer
    held = len(job.dataset.train) if isinstance(grid, LocalGrid) else MOST_HELD
    log.stages = stages = stages_of(job)
    for stage in stages:
        strategy.most_examples = held + log.num_pooled
        run_stage(stage, Run(job, strategy, grid, out, log), "before")
    strategy.most_examples = held + log.num_pooled
    strategy.holders = holders_in(job, log, 1)
    log.preprocess_seconds = time.perf_counter() - start
    for warning in log.warnings[num_warnings:]:
        observer.preparing(warning)
    return strategy


def holders_in(job: Job, log: RunLog, server_round: int) -> NDArray[np.bool_] | None:
    """Return a boolean mask, shape (clients,): True for clients with training records in a round.

    Some algorithms divide by the number of clients, and count only the clients in this mask. The result is None if
    these algorithms count all clients. There are three reasons for None: all clients have records, the aggregator keeps
    the cohort secret, or an older version of fl-sim began the run. If shards depend on the round, the result is never
    None.
    """
    holders: NDArray[np.bool_] = sizes_trained_on(job, log.num_pooled, server_round) > 0
    if job.moving is not None:
        return holders
    without = int((~holders).sum())
    if not without or hides_clients(job.experiment.aggregator):
        return None
    if not log.counts_holders:
        log.warnings.append(
            "an older version began this run. Wherever an algorithm divides by the number of clients, this run still "
            f"counts the {without:,} clients without records: repeat the run by --again for the results of this version"
        )
        return None
    return holders


def start_from(run: Run, pool: Path, epochs: int) -> None:
    """Train the initial model at the server for ``epochs`` epochs on the synthetic records in the file ``pool``.

    The training reads only synthetic records that clients have already sent. So it has no further privacy cost. Raises
    Diverged if a trained parameter is not finite.
    """
    job, log, seed = run.job, run.log, run.job.experiment.seed
    records = resident(read_pool(pool), job.dataset, job.device)
    settings = replace(local_settings(job, job.experiment.local.learning_rate), epochs=epochs, steps=0)
    params, statistics = placed(log.server.params, log.server.layers)
    task = LocalTask(0, 0, 1, len(records), settings, params, statistics=statistics)
    seeded = partial(seed_process, seed, "server epochs")
    with process_kept():
        trained = job.trainer.train(LocalJob(task, LocalPlan(), records.whole(), rng(seed, "server epochs"), seeded))
    if not is_finite({"params": trained.params}):
        raise Diverged("training diverged on the synthetic records; try a smaller local.learning_rate")
    layers = layers_after(trained, [name for name in log.server.layers if name in log.server.params])
    log.server = run.strategy.server = replace(run.strategy.algorithm.init(trained.params), layers=layers)


def pools_root() -> Path:
    """Return the folder of all pools of synthetic records: $FL_SIM_POOLS, else a folder in the user's cache."""
    return user_folder("FL_SIM_POOLS", "XDG_CACHE_HOME", "~/.cache", "pools")
