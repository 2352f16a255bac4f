"""Before the first round: the experiment's Strategy, and what clients share or release beforehand."""

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fl_sim.engines.grid import LocalGrid
from fl_sim.engines.wire import TaskConfig
from fl_sim.errors import Diverged
from fl_sim.experiment.job import Job, public_facts
from fl_sim.kinds import hides_clients
from fl_sim.local_plan import LocalPlan
from fl_sim.params import is_finite, layers_after, placed
from fl_sim.seeding import process_kept, rng, seed_process
from fl_sim.simulation.client_runtime import local_settings, read_pool, sizes_trained_on
from fl_sim.simulation.run_log import Observer, RunLog
from fl_sim.simulation.stage import Run, done, stages_of
from fl_sim.store import run_directory
from fl_sim.training.loop import resident
from fl_sim.training.trainer import LocalJob
from fl_sim.types import LocalTask, ServerState, Trained
from strategies.algorithm import Algorithm
from strategies.flower import FederatedStrategy
from strategies.layer import client_layers, layer_kinds, name_of

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
