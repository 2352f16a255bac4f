"""Stages: work before the first round or after the last, with all that a run says and pays for it, in one place.

A settings class names its stage as ``stage = "module:Class"``; a user's own class may do the same. General code calls
the methods of ``Stage`` and knows no stage by name.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from clients.client_task import ClientTask
from fl_sim.engines.grid import LocalGrid
from fl_sim.engines.wire import TaskConfig
from fl_sim.errors import Diverged, RunError, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job, public_facts
from fl_sim.kinds import hides_clients, is_own_kind, path_in
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
from fl_sim.training.trainer import LocalJob
from fl_sim.types import LocalTask, Params, Payloads, ServerState, Traffic, Trained
from strategies.algorithm import Algorithm, Sharing
from strategies.answers import Asking, ask_everybody, find_population
from strategies.flower import FederatedStrategy
from strategies.layer import client_layers, layer_kinds, name_of

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment
    from fl_sim.simulation.timing import Work

Answer = TypeVar("Answer")

RESULT: Final = frozenset({
    "status", "algorithm", "titles", "data", "data_note", "features", "image_shape", "partition", "clients",
    "is_private", "records", "model", "evaluated_model", "num_parameters", "seed", "engine", "trainer", "precision",
    "rounds", "final_accuracy", "best_accuracy", "best_round", "best_chosen_on", "validation",
    "measures", "bytes", "error", "diverged", "privacy", "stopped", "warnings", "chain", "identity", "seconds",
    "versions",
})  # fmt: skip
"""What ``result.json`` says of every run, so that no stage may call a fact like that."""

_SHARES: Final = "fl_sim.stages.shares:Shares"  # of every algorithm that shares, ours or not


@dataclass(frozen=True)
class Run:
    """A run as its stages see it: the server's side, from which ``ask`` is the only way to a client."""

    job: Job
    strategy: FederatedStrategy
    grid: Grid
    out: Path
    log: RunLog

    @cached_property
    def measuring(self) -> Measuring:
        """Return what models are measured on."""
        return Measuring.of(self.job)

    @property
    def order(self) -> TaskConfig:
        """Return what every message of the run says."""
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
    ) -> list[Answer]:
        """Ask every client for ``task``; return what ``read`` makes of their answers, by client.

        ``params`` and ``broadcast``: what the question is about. ``quoted``: whether an error may say what a client
        said; not where that is private. ``order``: in place of the run's. Raises RunError that names the first client
        without a good answer.
        """
        timeout = self.job.experiment.round_timeout
        if not self.strategy.population.nodes:
            self.strategy.population = find_population(self.grid, self.strategy.num_clients, timeout)
        asking = Asking(replace(order or self.order, task=task), timeout, quoted, params, broadcast or {})
        return ask_everybody(self.grid, self.strategy.population, asking, read)


class Stage:
    """One feature's work before or after the rounds. A method that a stage does not need stays as it is here.

    One object is made for each run, and may keep in itself what ``facts`` and ``statements`` tell later.
    """

    def __init__(self, job: Job) -> None:
        self.job = job

    def tasks(self) -> Mapping[str, ClientTask]:
        """Return what clients are asked for, by name: the stage's client half."""
        return {}

    def preparing(self, log: RunLog) -> str:
        """Say what clients do before the first round that takes time; empty for nothing."""
        del log
        return ""

    def before(self, run: Run) -> None:
        """Do the work before the first round; called again, and to find it done, by a run that goes on."""

    def after(self, run: Run) -> None:
        """Do the work after the last round."""

    def num_pooled(self) -> int:
        """Return about how many records the stage gives to all clients to train on."""
        return 0

    def trains_model(self) -> bool:
        """Say whether the stage trains the server's model, for which it needs the whole of it."""
        return False

    def num_server_steps(self) -> int:
        """Return how many minibatch steps the server takes by itself before the first round."""
        return 0

    def work(self) -> "Sequence[Work]":
        """Return what takes time in the stage beside the server's steps: what is timed, and what cannot be."""
        return ()

    def key(self) -> str:
        """Return the name of what is made once for all runs that need the same; empty where nothing is."""
        return ""

    def is_made(self) -> bool:
        """Say whether an earlier run has left what ``key`` names."""
        return False

    def traffic(self, params: Params) -> Mapping[str, Traffic]:
        """Return the bytes of arrays to and from all clients, by what they are; ``params``: a model like the run's."""
        del params
        return {}

    def payments(self) -> "Iterable[Payment]":
        """Return what the stage's own releases will cost."""
        return ()

    def warnings(self) -> list[str]:
        """Return what a user must know before anything is asked of clients."""
        return []

    def facts(self) -> Mapping[str, Any]:
        """Return what ``result.json`` says of the stage, by names that nothing else there has."""
        return {}

    def statements(self, others: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Return the privacy statements of a run: ``others``, and the stage's own."""
        return list(others)


def done(stage: Stage, run: Run, method: Literal["before", "after"]) -> None:
    """Have a stage do its work, and check what it says of it. Raises RunError that names a stage of the user's own."""
    with error_context(f"{method} of {type(stage).__name__}") if is_own_kind(stage) else nullcontext():
        stage.before(run) if method == "before" else stage.after(run)
    said: dict[str, str] = dict.fromkeys(RESULT, "the result itself")
    for one in run.log.stages:
        name = type(one).__name__
        with error_context(f"facts of {name}"):
            facts = one.facts()
        if twice := sorted(said.keys() & facts.keys()):
            raise RunError(f"facts of {name} say {twice[0]!r}, as {said[twice[0]]} does: give it another name")
        said |= dict.fromkeys(facts, name)
        if is_own_kind(one) and not is_json(facts):
            raise RunError(f"facts of {name} gave {facts!r}; wanted is a dict of JSON values by name")


def stages_of(job: Job) -> tuple[Stage, ...]:
    """Return the stages of a run of ``job``, in their order."""
    return tuple(load_object(path, "stage")(job) for path in stage_paths(job.experiment))


def stage_paths(experiment: Experiment) -> list[str]:
    """Return the import paths of an experiment's stages, in their order: before the rounds, in them, after them."""
    parts: tuple[object, ...] = (experiment.preprocess, experiment.algorithm, experiment.calibrate)
    named = [(path_in(type(part), "stage"), _SHARES if isinstance(part, Sharing) else "") for part in parts]
    return [path for both in named for path in both if path]


def tasks_of(job: Job) -> dict[str, ClientTask]:
    """Return what clients of ``job`` may be asked beside training, by name. Raises UserError for a name used twice."""
    tasks: dict[str, ClientTask] = {}
    for stage in stages_of(job):
        if twice := tasks.keys() & stage.tasks().keys():
            raise UserError(
                f"{type(stage).__name__} asks clients for {min(twice)!r}, as another stage of the run does: give its "
                "task another name"
            )
        tasks.update(stage.tasks())
    return tasks


MOST_HELD = 10**9
"""The most records that a node may say it holds, where these may be its own."""


def order_of(job: Job, grid: Grid, out: Path) -> TaskConfig:
    """Return what every message of a run says. On Flower's own runtime nodes may have records of their own."""
    elsewhere = not isinstance(grid, LocalGrid)
    return TaskConfig(
        experiment=job.experiment.model_dump_json(),
        server_round=0,
        learning_rate=0.0,
        data_root=str(job.root.absolute()) if job.root else "",
        state_dir=str(out.absolute() / run_directory.STATE),
        run=run_directory.run_name(out) if elsewhere else "",
        facts=json.dumps(public_facts(job.dataset)) if elsewhere else "",
    )


def prepared_strategy(
    job: Job, algorithm: Algorithm, grid: Grid, out: Path, log: RunLog, observer: Observer
) -> FederatedStrategy:
    """Return what ``federated_strategy`` does, and tell what there is to warn of before the first round begins."""
    said = len(log.warnings)
    strategy = federated_strategy(job, algorithm, grid, out, log)
    for warning in log.warnings[said:]:
        observer.preparing(warning)
    return strategy


def federated_strategy(job: Job, algorithm: Algorithm, grid: Grid, out: Path, log: RunLog) -> FederatedStrategy:
    """Return the job's Strategy, after whatever its clients share before the first round."""
    experiment = job.experiment
    order = order_of(job, grid, out)
    strategy = FederatedStrategy(
        algorithm,
        experiment.aggregator,
        experiment.sampler,
        log.server,
        order,
        experiment.num_clients,
        experiment.seed,
        sampling_seed=experiment.sampling_seed,
        on_clients=client_layers(experiment, algorithm, job.model),
    )
    for kind in layer_kinds(experiment):
        if layer := kind.of(experiment, out, log.layer_states.get(name_of(kind), {})):
            strategy.wrap(layer)
    log.layer = strategy.layer
    start = time.perf_counter()
    held = len(job.dataset.train) if isinstance(grid, LocalGrid) else MOST_HELD
    log.stages = stages = stages_of(job)
    for stage in stages:
        strategy.most_examples = held + log.num_pooled
        done(stage, Run(job, strategy, grid, out, log), "before")
    strategy.most_examples = held + log.num_pooled
    strategy.holders = _holders(job, log)
    log.preprocess_seconds = time.perf_counter() - start
    return strategy


def _holders(job: Job, log: RunLog) -> NDArray[np.bool_] | None:
    """Return which clients hold records to train on, (clients,); None where all do, or all are to count."""
    holders: NDArray[np.bool_] = sizes_trained_on(job, log.num_pooled) > 0
    without = int((~holders).sum())
    if not without or hides_clients(job.experiment.aggregator):
        return None
    if not log.counts_holders:
        log.warnings.append(
            f"this run began with a version that counted the {without:,} clients without records where an algorithm "
            "divides by the number of clients (SCAFFOLD, FedDyn, FedSpeed), and goes on like this: run it from the "
            "beginning by --again for the figures of this version"
        )
        return None
    return holders


def start_from(path: Path, epochs: int, job: Job, strategy: FederatedStrategy, log: RunLog) -> None:
    """Let the server train the first model for so many ``epochs`` on the pool in ``path``."""
    trained = _trained_on_pool(job, path, epochs, log.server)
    layers = layers_after(trained, [name for name in log.server.layers if name in log.server.params])
    log.server = strategy.server = replace(strategy.algorithm.init(trained.params), layers=layers)


def _trained_on_pool(job: Job, pool: Path, server_epochs: int, server: ServerState) -> Trained:
    """Return the model after the server's own epochs on the pool: post-processing, so it costs no privacy."""
    seed = job.experiment.seed
    records = resident(read_pool(pool), job.dataset, job.device)
    settings = replace(local_settings(job, job.experiment.local.learning_rate), epochs=server_epochs, steps=0)
    params, statistics = placed(server.params, server.layers)
    task = LocalTask(0, 0, 1, len(records), settings, params, statistics=statistics)
    seeded = partial(seed_process, seed, "server epochs")
    local_job = LocalJob(task, LocalPlan(), records.whole(), rng(seed, "server epochs"), seeded)
    with process_kept():
        trained = job.trainer.train(local_job)
    if not is_finite({"params": trained.params}):
        raise Diverged("training diverged on the synthetic records; try a smaller local.learning_rate")
    return trained


def pools_root() -> Path:
    """Return where pools are kept: $FL_SIM_POOLS, else the user's cache."""
    return user_folder("FL_SIM_POOLS", "XDG_CACHE_HOME", "~/.cache", "pools")
