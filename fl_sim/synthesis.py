"""DA-FL's pool of synthetic records: made once for all runs that would make the same.

Where a pool lies: $FL_SIM_POOLS, else the user's cache. A folder is named by everything that determines the pool, so
runs that differ in the algorithm or the rounds share one - and one release of every client.
"""

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid

from clients.dafl import DaFl
from fl_sim.data import load
from fl_sim.experiment import Experiment
from fl_sim.locks import alone_in
from fl_sim.report.rundir import write_text
from fl_sim.site import read_pool, to_bytes
from fl_sim.store import save_by_content
from fl_sim.types import RunError, UserError
from strategies.flower import FederatedStrategy, synthesize_before_training

_FACTS = "pool.json"
_FORMAT = 1


@dataclass(frozen=True)
class ClientPart:
    """One client's part of a pool: released values and public facts only."""

    counts: tuple[int, ...]
    refused: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class Pool:
    """A pool as the server holds it. ``content``: safetensors, uint8 images and int64 labels, sorted by client."""

    path: Path
    parts: tuple[ClientPart, ...]
    seconds: float
    reused: bool

    @property
    def num_synthetic(self) -> int:
        """Return the number of records."""
        return sum(sum(part.counts) for part in self.parts)


def da_fl(experiment: Experiment) -> DaFl:
    """Return the settings of an experiment that has such a pool."""
    assert isinstance(experiment.preprocess, DaFl)
    return experiment.preprocess


def prepare_pool(
    experiment: Experiment, strategy: FederatedStrategy, grid: Grid, out: Path, data_root: Path | None
) -> Pool:
    """Return the experiment's pool, from an earlier run where there is one, and put a copy into the run directory.

    Raises RunError where a client fails, or where the main task would have nothing to train on.
    """
    folder = pools_root() / pool_key(experiment, data_root)
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        if not (folder / _FACTS).exists():
            start = time.perf_counter()
            order = replace(strategy.order, state_dir=str(folder / "clients"))
            dataset = load(experiment.data, data_root)
            answers = synthesize_before_training(
                strategy, grid, order, dataset.train, dataset.num_classes, experiment.round_timeout
            )
            _store(folder, answers, time.perf_counter() - start)
            reused = False
        else:
            reused = True
        pool = _load(folder, reused=reused)
    if not pool.num_synthetic and da_fl(experiment).train_on == "synthetic":
        raise RunError(f"no client released a synthetic record: {pool.parts[0].refused}")
    copy = out.absolute() / pool.path.name
    copy.write_bytes(pool.path.read_bytes())
    return replace(pool, path=copy)


def pools_root() -> Path:
    """Return where pools are kept: $FL_SIM_POOLS, else the user's cache."""
    named = os.environ.get("FL_SIM_POOLS")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(named) if named else Path(cache) / "fl-sim" / "pools").expanduser().absolute()


def pool_key(experiment: Experiment, data_root: Path | None) -> str:
    """Return the name of the experiment's pool: a digest of all that determines it."""
    settings = experiment.model_dump(mode="json", include={"partition", "clients", "seed", "preprocess"})
    for afterwards in ("train_on", "server_epochs"):
        del settings["preprocess"][afterwards]
    digest = hashlib.sha256(
        json.dumps([_FORMAT, settings, _fingerprint(experiment.data, data_root)], sort_keys=True).encode()
    )
    return f"{experiment.data.partition(':')[0]}-{digest.hexdigest()[:20]}"


def summary(pool: Pool, experiment: Experiment) -> dict[str, object]:
    """Return what ``result.json`` says about how the pool came about."""
    settings = da_fl(experiment)
    return {
        "kind": settings.kind,
        "generator": settings.generator.kind,
        "gamma": settings.gamma,
        "train_on": settings.train_on,
        "server_epochs": settings.server_epochs,
        "num_synthetic": pool.num_synthetic,
        "clients": [asdict(part) | {"facts": part.facts or None} for part in pool.parts],
        "pool": pool.path.name,
        "seconds": pool.seconds,
        "reused": pool.reused,
    }


def warnings_of(pool: Pool) -> list[str]:
    """Say which clients released nothing, and why."""
    refused = [(client, part.refused) for client, part in enumerate(pool.parts) if part.refused]
    if not refused:
        return []
    client, reason = refused[0]
    return [f"{len(refused)} of {len(pool.parts)} clients released no synthetic records; client {client}: {reason}"]


def _store(folder: Path, answers: list[tuple[torch.Tensor, str]], seconds: float) -> None:
    said = [json.loads(text) for _, text in answers]
    inputs = torch.cat([to_bytes(records) for records, _ in answers])
    labels = torch.cat(
        [torch.repeat_interleave(torch.arange(len(one["counts"])), torch.tensor(one["counts"])) for one in said]
    )
    if len(inputs) != len(labels):
        raise RunError(f"clients sent {len(inputs)} synthetic records with {len(labels)} labels")
    path = save_by_content(folder, "synthetic", {"inputs": inputs.contiguous(), "labels": labels})
    write_text(folder / _FACTS, json.dumps({"pool": path.name, "seconds": seconds, "clients": said}))


def _load(folder: Path, *, reused: bool) -> Pool:
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    path = folder / facts["pool"]
    parts = tuple(ClientPart(tuple(one["counts"]), one["refused"], one["facts"]) for one in facts["clients"])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""
    if digest not in path.name or len(read_pool(path)) != sum(sum(part.counts) for part in parts):
        raise UserError(f"the pool in {folder} is damaged: delete that folder, and it is made again (a second release)")
    return Pool(path, parts, facts["seconds"], reused)


@lru_cache(maxsize=8)
def _fingerprint(data: str, data_root: Path | None) -> str:
    train = load(data, data_root).train
    digest = hashlib.sha256(np.ascontiguousarray(train.inputs).data)
    digest.update(np.ascontiguousarray(train.labels).data)
    return digest.hexdigest()
