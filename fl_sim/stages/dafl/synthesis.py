"""DA-FL's pool of synthetic records: made once for all runs that would make the same.

Where a pool lies: $FL_SIM_POOLS, else the user's cache. A folder is named by everything that determines the pool, so
runs that differ in the algorithm or the rounds share one - and one release of every client.
"""

import hashlib
import json
import math
import time
from dataclasses import asdict, replace

import numpy as np
import torch

from fl_sim.data import fingerprint, version_of
from fl_sim.engines import arrays, wire
from fl_sim.engines.wire import TaskConfig
from fl_sim.errors import RunError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.identity import code_in
from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of, replaces_records
from fl_sim.simulation.client_runtime import read_pool
from fl_sim.simulation.pools import pools_root
from fl_sim.simulation.stage import Run
from fl_sim.stages.dafl.client import SYNTHESIZE
from fl_sim.stages.dafl.pool import FACTS, Pool, da_fl, load, store
from fl_sim.store.files import folder_lock, write_whole
from fl_sim.types import Traffic

_FORMAT = 2
_FEW = 20  # classes that a warning lists


def prepare_pool(run: Run) -> Pool:
    """Return the job's pool, from an earlier run where there is one, and put a copy into the run directory.

    Raises RunError where a client fails, or where the main task would have nothing to train on.
    """
    job = run.job
    folder = pools_root() / pool_key(job)
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder):
        reused = (folder / FACTS).exists()
        if not reused:
            start = time.perf_counter()
            answers = ask_clients(run, replace(run.order, state_dir=str(folder / "clients")))
            store(folder, answers, job, time.perf_counter() - start)
        pool = load(folder, job, reused=reused)
    if not pool.num_synthetic and replaces_records(job.experiment.preprocess):
        raise RunError(f"no client released a synthetic record: {pool.parts[0].refused}")
    copy = run.out.absolute() / pool.path.name
    write_whole(copy, pool.path.read_bytes())
    return replace(pool, path=copy)


def ask_clients(run: Run, order: TaskConfig) -> list[tuple[torch.Tensor, str]]:
    """Have every client release synthetic records; return, by client, (records, what it says of them).

    Nobody releases more of one class than all clients hold, or records of another shape.
    """
    records, num_classes = run.job.dataset.train, run.job.dataset.num_classes
    return run.ask(
        SYNTHESIZE,
        lambda one: wire.read_synthetic(one, records.inputs.shape[1:], num_classes, num_classes * len(records)),
        quoted=False,
        order=order,
    )


def is_made(job: Job) -> bool:
    """Say whether an earlier run has left the job's pool."""
    return (pools_root() / pool_key(job) / FACTS).exists()


def pool_key(job: Job) -> str:
    """Return the name of the job's pool: a digest of all that determines it."""
    experiment = job.experiment
    settings = experiment.chosen("partition", "clients", "seed", "partition_seed", "preprocess")
    for afterwards in ("train_on", "server_epochs"):
        del settings["preprocess"][afterwards]
    determining = [_FORMAT, settings, fingerprint(experiment.data, job.root)]
    determining += code_in(settings)
    if features := version_of(experiment.features):
        determining.append(features)
    if job.dataset.columns:
        determining.append([asdict(column) for column in job.dataset.columns])
    digest = hashlib.sha256(json.dumps(determining, sort_keys=True).encode())
    return f"{experiment.data.partition(':')[0]}-{digest.hexdigest()[:20]}"


def summary(pool: Pool, experiment: Experiment) -> dict[str, object]:
    """Return what ``result.json`` says about how the pool came about."""
    settings = da_fl(experiment)
    return {
        "kind": settings.kind,
        "generator": kind_of(settings.generator),
        "gamma": settings.gamma,
        "train_on": settings.train_on,
        "server_epochs": settings.server_epochs,
        "num_synthetic": pool.num_synthetic,
        "clients": [
            {"counts": part.counts, "refused": part.refused, "facts": part.facts or None} for part in pool.parts
        ],
        "trainer": pool.trainer or None,
        "pool": pool.path.name,
        "seconds": pool.seconds,
        "reused": pool.reused,
    }


def traffic_of(pool: Pool, input_shape: tuple[int, ...]) -> Traffic:
    """Return what the release takes: every client's records, as it sends them, and the whole pool to each client.

    In a simulation the pool lies on a disk that all clients see, and is read there. What is told follows from the
    counts that clients release.
    """
    released = [torch.empty(sum(part.counts), *input_shape) for part in pool.parts]
    up = sum(arrays.num_bytes(wire.synthetic_content(records, "")) for records in released)
    whole = read_pool(pool.path)
    return Traffic((whole.inputs.nbytes + whole.labels.nbytes) * len(pool.parts), up)


def warnings_of(pool: Pool, job: Job) -> list[str]:
    """Say which clients released nothing, and of which classes the pool holds nothing, and what helps.

    All of it is released: no client's records are looked at.
    """
    return [*filter(None, (_of_refusals(pool, job), _of_absent_classes(pool, job)))]


def _of_refusals(pool: Pool, job: Job) -> str:
    refused = [(client, part.refused) for client, part in enumerate(pool.parts) if part.refused]
    if not refused:
        return ""
    client, reason = refused[0]
    paid = bool(pool.parts[client].facts)  # for labels, of which none was picked
    cure = _cure(job) if paid else "take a larger preprocess.epsilon, or fewer clients"
    return (
        f"{len(refused)} of {len(pool.parts)} clients released no synthetic records; client {client}: {reason}; {cure}"
    )


def _of_absent_classes(pool: Pool, job: Job) -> str:
    counts = np.sum([part.counts for part in pool.parts], axis=0)
    absent = np.flatnonzero(counts == 0).tolist()
    if not absent or not pool.num_synthetic:
        return ""
    names = ", ".join(map(str, absent[:_FEW])) + (", ..." if len(absent) > _FEW else "")
    alone = da_fl(job.experiment).train_on == "synthetic"
    effect = "models, which train on it alone, never see them" if alone else "it teaches nothing of them"
    return (
        f"the pool of {pool.num_synthetic:,} synthetic records has none of {len(absent)} of {len(counts)} classes "
        f"({names}): {effect}; {_cure(job)}"
    )


def _cure(job: Job) -> str:
    """Say how many records of a class a client must hold for it to be picked, which public numbers alone decide."""
    settings = da_fl(job.experiment)
    gamma = max(settings.client_gammas, default=settings.gamma)
    if math.isinf(settings.epsilon) or not gamma:
        return "take a larger preprocess.gamma"
    largest = settings.labels.largest_count(gamma, len(job.dataset.train))
    needed = settings.labels.threshold(gamma, largest) / gamma
    return (
        f"a class is picked of which a client holds about {needed:,.0f} records or more (preprocess.labels.epsilon="
        f"{settings.labels.epsilon:g}, gamma={gamma:g}): take a larger preprocess.labels.epsilon, "
        "or fewer clients"
    )
