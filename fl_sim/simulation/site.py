"""What a worker needs to play any client of an experiment: its records, the pool's, and what it shares."""

import json
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from clients.app import Site, Synthetic
from clients.dafl.settings import DaFl
from clients.forest import RandomForest
from clients.teacher import forest_votes, network_votes
from fl_sim import models
from fl_sim.data import load
from fl_sim.experiment.experiment import (
    Experiment,
    InProcess,
    Local,
    build_model,
    client_shards,
    device_of,
    precision_of,
    public_split,
)
from fl_sim.seeding import rng
from fl_sim.training.loop import resident, stays_bytes, to_tensors
from fl_sim.training.records import Records, Source
from fl_sim.training.trainer import Trainer
from fl_sim.types import Dataset, Examples, LocalSettings
from partitions import FeatureNoise
from strategies.algorithm import Sharing
from strategies.fedavg import FedAvg
from strategies.pate.settings import Pate

if TYPE_CHECKING:
    from clients.dafl.share import Share
    from clients.policy import Policy

KEEP_BYTES = 256 * 2**20
"""Training sets whose float32 form is no larger stay in memory as such, one copy in each process."""

KEEP_ON_GPU = 0.25
"""Training sets that take up no larger a part of a GPU's memory stay there, as bytes if they are images."""


@lru_cache(maxsize=2)
def site_of(experiment_json: str, data_root: str) -> Site:
    """Return what a worker needs to play any client of the experiment; made once per process."""
    experiment = Experiment.model_validate_json(experiment_json)
    root = Path(data_root) if data_root else None
    dataset = load(experiment.data, root)
    device = device_of(experiment)
    shards = client_shards(experiment, root)
    own: Callable[[int], Records] = partial(_own_records, experiment, dataset, shards, device)
    if _num_bytes(experiment, dataset, device) <= _room(device):
        own = _in_memory(experiment, dataset, shards, device)

    @lru_cache(maxsize=1)
    def pool(path: str) -> Records:
        images = read_pool(Path(path))
        if _is_noisy(experiment):  # the clients' own are no bytes, and one stack holds both
            inputs, labels = to_tensors(images, dataset)
            return Records.of(inputs.to(device), labels.to(device))
        return resident(images, dataset, device).whole()

    return Site(
        algorithm=FedAvg() if isinstance(experiment.algorithm, Pate) else experiment.algorithm,
        model=build_model(experiment, dataset).to(device),
        records=partial(_records, experiment, own, pool),
        trains_on_own=partial(_trains_on_own, experiment),
        synthesize=partial(_synthesize, experiment, dataset, own, root),
        share=partial(_share, experiment, dataset.num_classes),
        local_settings=partial(local_settings, experiment.local),
        num_clients=experiment.num_clients,
        seed=experiment.seed,
        threads=experiment.engine.threads,
        precision=precision_of(experiment, device),
        graphs=not isinstance(experiment.engine, InProcess) or experiment.engine.graphs,
        vote=partial(_vote, experiment, dataset, own, root) if isinstance(experiment.algorithm, Pate) else None,
    )


def local_settings(local: Local, learning_rate: float) -> LocalSettings:
    """Return a round's settings for clients, with the schedule already in ``learning_rate``."""
    return LocalSettings(learning_rate, local.momentum, local.weight_decay, local.batch_size, local.epochs)


def read_pool(path: Path) -> Examples:
    """Read a pool of synthetic records: uint8 images and their labels."""
    tensors = load_file(path)
    return Examples(tensors["inputs"].numpy(), tensors["labels"].numpy())


def to_generator(inputs: torch.Tensor, dataset: Dataset) -> torch.Tensor:
    """Return normalised images as generators see them, in [-1, 1], by the data set's public constants."""
    mean, std = _constants(dataset, inputs.ndim)
    return (2 * (inputs * std + mean) - 1).clamp(-1, 1)


def to_bytes(images: torch.Tensor) -> torch.Tensor:
    """Return images in [-1, 1] as uint8 in 0..255, the form in which a pool is kept."""
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _own_records(
    experiment: Experiment, dataset: Dataset, shards: Sequence[NDArray[np.int64]], device: torch.device, client: int
) -> Records:
    examples = dataset.train.take(shards[client])
    if not _is_noisy(experiment):
        return resident(examples, dataset, device).whole()
    inputs, labels = to_tensors(examples, dataset)
    return Records.of(_as_seen_by(client, inputs, dataset, experiment).to(device), labels.to(device))


def _in_memory(
    experiment: Experiment, dataset: Dataset, shards: Sequence[NDArray[np.int64]], device: torch.device
) -> Callable[[int], Records]:
    """Return ``_own_records`` out of one array with everybody's records, client by client."""
    ends = np.cumsum([len(shard) for shard in shards]).tolist()
    parts = [range(end - len(shard), end) for shard, end in zip(shards, ends, strict=True)]
    everybody = dataset.train.take(np.concatenate(shards))
    if _is_noisy(experiment):
        inputs, labels = to_tensors(everybody, dataset)
        for client, part in enumerate(parts):
            own = inputs[part.start : part.stop]
            own.copy_(_as_seen_by(client, own, dataset, experiment))
        source = Source(inputs.to(device), labels.to(device))
    else:
        source = resident(everybody, dataset, device)
    return lambda client: Records(((source, parts[client]),))


def _num_bytes(experiment: Experiment, dataset: Dataset, device: torch.device) -> int:
    """Return how much memory the training set takes in the form in which it would stay there."""
    as_bytes = stays_bytes(dataset.train, device) and not _is_noisy(experiment)
    return (1 if as_bytes else 4) * dataset.train.inputs.size


def _room(device: torch.device) -> float:
    """Return how much memory the training set may take, in bytes."""
    if device.type == "cpu":
        return KEEP_BYTES
    return KEEP_ON_GPU * torch.cuda.get_device_properties(device).total_memory


def _records(
    experiment: Experiment, own: Callable[[int], Records], pool: Callable[[str], Records], client: int, synthetic: str
) -> Records:
    if not synthetic:
        return own(client)
    return own(client) + pool(synthetic) if _trains_on_own(experiment, synthetic) else pool(synthetic)


def _trains_on_own(experiment: Experiment, synthetic: str) -> bool:
    preprocess = experiment.preprocess
    return not (synthetic and isinstance(preprocess, DaFl) and preprocess.train_on == "synthetic")


def _synthesize(
    experiment: Experiment,
    dataset: Dataset,
    own: Callable[[int], Records],
    root: Path | None,
    clients: Sequence[tuple[int, Path]],
    check: Callable[[], None],
    policy: "Policy | None" = None,
) -> list[Synthetic | Exception]:
    from clients.dafl.generator import PrivateRecords  # noqa: PLC0415 (the accountants load slowly)
    from clients.dafl.share import Client, make_shares  # noqa: PLC0415
    from fl_sim.simulation.client_ledgers import ledger_path  # noqa: PLC0415

    assert isinstance(experiment.preprocess, DaFl)
    releasing = []
    for client, folder in clients:
        inputs, labels = (tensor.cpu() for tensor in own(client).tensors())
        private = PrivateRecords(to_generator(inputs, dataset), labels, dataset.num_classes)
        ledger = ledger_path(experiment, root, client)
        if policy:  # what is private stays where the client wants it, not where the server says
            release = experiment.preprocess.release_of(client, experiment.seed)
            folder = policy.home / f"{ledger.parent.parent.name}-{ledger.parent.name}-{release}"  # noqa: PLW2901
        releasing.append(Client(client, private, folder, ledger, policy))
    shares = make_shares(
        experiment.preprocess, releasing, seed=experiment.seed, public_records=len(dataset.train), check=check
    )
    return [share if isinstance(share, Exception) else _said(share) for share in shares]


def _said(share: "Share") -> Synthetic:
    receipt = share.receipt and share.receipt.to_json()
    said = {"counts": share.counts.tolist(), "refused": share.refused, "facts": share.facts, "receipt": receipt}
    return share.inputs, json.dumps(said)


def _vote(
    experiment: Experiment,
    dataset: Dataset,
    own: Callable[[int], Records],
    data_root: Path | None,
    trainer: Trainer,
    client: int,
) -> NDArray[np.int64]:
    assert isinstance(experiment.algorithm, Pate)
    pool = _public_pool(experiment, data_root)
    teachers, seed = experiment.algorithm.teachers, experiment.seed
    if isinstance(teachers, RandomForest):
        return forest_votes(teachers, own(client), pool, client=client, seed=seed)
    settings = local_settings(experiment.local, experiment.local.learning_rate)
    build = partial(models.build, experiment.model, dataset.input_shape, dataset.num_classes)
    return network_votes(trainer, build, settings, own(client), pool, client=client, seed=seed)


@lru_cache(maxsize=1)
def _public_pool(experiment: Experiment, data_root: Path | None) -> torch.Tensor:
    inputs, _ = to_tensors(public_split(experiment, data_root).pool, load(experiment.data, data_root))
    return inputs.to(device_of(experiment))


def _share(
    experiment: Experiment, num_classes: int, inputs: torch.Tensor, labels: torch.Tensor, client: int
) -> dict[str, torch.Tensor]:
    assert isinstance(experiment.algorithm, Sharing)
    return experiment.algorithm.share(inputs.cpu(), labels.cpu(), num_classes, rng(experiment.seed, "share", client))


def _constants(dataset: Dataset, ndim: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (1, -1) + (1,) * (ndim - 2)
    return torch.tensor(dataset.mean).reshape(shape), torch.tensor(dataset.std).reshape(shape)


def _is_noisy(experiment: Experiment) -> bool:
    """Say whether clients see their records with noise on them, which are bytes no more."""
    return isinstance(experiment.partition, FeatureNoise) and experiment.num_clients > 1


def _as_seen_by(client: int, inputs: torch.Tensor, dataset: Dataset, experiment: Experiment) -> torch.Tensor:
    if not _is_noisy(experiment):
        return inputs
    assert isinstance(experiment.partition, FeatureNoise)
    variance = experiment.partition.noise_variance(client, experiment.clients)
    noise = rng(experiment.seed, "feature-noise", client).standard_normal(inputs.shape, dtype=np.float32)
    _, std = _constants(dataset, inputs.ndim)
    return inputs + torch.from_numpy(noise) * math.sqrt(variance) / std
