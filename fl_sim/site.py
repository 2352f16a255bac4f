"""What a worker needs to play any client of an experiment: its records, the pool's, and what it shares."""

import json
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from clients.app import Site
from clients.dafl import DaFl
from clients.forest import RandomForest
from clients.teacher import forest_votes, network_votes
from fl_sim import models
from fl_sim.cohort import Trainer
from fl_sim.data import load
from fl_sim.experiment import Experiment, Local, build_model, client_shards, device_of, public_split
from fl_sim.learning import to_tensors
from fl_sim.seeding import rng
from fl_sim.types import Dataset, Examples, LocalSettings
from partitions import FeatureNoise
from strategies.algorithm import Sharing
from strategies.fedavg import FedAvg
from strategies.pate_settings import Pate

KEEP_BYTES = 256 * 2**20
"""Training sets whose float32 form is no larger stay in memory as such, one copy in each process."""


Tensors: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@lru_cache(maxsize=2)
def site_of(experiment_json: str, data_root: str) -> Site:
    """Return what a worker needs to play any client of the experiment; made once per process."""
    experiment = Experiment.model_validate_json(experiment_json)
    root = Path(data_root) if data_root else None
    dataset = load(experiment.data, root)
    device = device_of(experiment)
    shards = client_shards(experiment, root)
    own: Callable[[int], Tensors] = partial(_own_records, experiment, dataset, shards, device)
    if 4 * dataset.train.inputs.size <= KEEP_BYTES:
        own = _in_memory(experiment, dataset, shards, device)

    @lru_cache(maxsize=1)
    def pool(path: str) -> Tensors:
        inputs, labels = to_tensors(read_pool(Path(path)), dataset)
        return inputs.to(device), labels.to(device)

    return Site(
        algorithm=FedAvg() if isinstance(experiment.algorithm, Pate) else experiment.algorithm,
        model=build_model(experiment, dataset).to(device),
        records=partial(_records, experiment, own, pool),
        synthesize=partial(_synthesize, experiment, dataset, own),
        share=partial(_share, experiment, dataset.num_classes),
        local_settings=partial(local_settings, experiment.local),
        num_clients=experiment.num_clients,
        seed=experiment.seed,
        threads=experiment.engine.threads,
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
) -> Tensors:
    inputs, labels = to_tensors(dataset.train.take(shards[client]), dataset)
    return _as_seen_by(client, inputs, dataset, experiment).to(device), labels.to(device)


def _in_memory(
    experiment: Experiment, dataset: Dataset, shards: Sequence[NDArray[np.int64]], device: torch.device
) -> Callable[[int], Tensors]:
    """Return ``_own_records`` out of one array with everybody's records, client by client."""
    ends = np.cumsum([len(shard) for shard in shards]).tolist()
    parts = [slice(end - len(shard), end) for shard, end in zip(shards, ends, strict=True)]
    inputs, labels = to_tensors(dataset.train.take(np.concatenate(shards)), dataset)
    if isinstance(experiment.partition, FeatureNoise):
        for client, part in enumerate(parts):
            inputs[part] = _as_seen_by(client, inputs[part], dataset, experiment)
    inputs, labels = inputs.to(device), labels.to(device)
    return lambda client: (inputs[parts[client]], labels[parts[client]])


def _records(
    experiment: Experiment, own: Callable[[int], Tensors], pool: Callable[[str], Tensors], client: int, synthetic: str
) -> Tensors:
    if not synthetic:
        return own(client)
    if isinstance(experiment.preprocess, DaFl) and experiment.preprocess.train_on == "synthetic":
        return pool(synthetic)
    (inputs, labels), (more_inputs, more_labels) = own(client), pool(synthetic)
    return torch.cat([inputs, more_inputs]), torch.cat([labels, more_labels])


def _synthesize(
    experiment: Experiment, dataset: Dataset, own: Callable[[int], Tensors], client: int, folder: Path
) -> tuple[torch.Tensor, str]:
    from clients.generation import PrivateRecords  # noqa: PLC0415 (the accountants load slowly)
    from clients.share import make_share  # noqa: PLC0415

    assert isinstance(experiment.preprocess, DaFl)
    inputs, labels = (tensor.cpu() for tensor in own(client))
    private = PrivateRecords(to_generator(inputs, dataset), labels, dataset.num_classes)
    share = make_share(
        experiment.preprocess, private, client, folder, seed=experiment.seed, public_records=len(dataset.train)
    )
    said = {"counts": share.counts.tolist(), "refused": share.refused, "facts": share.facts}
    return share.inputs, json.dumps(said)


def _vote(
    experiment: Experiment,
    dataset: Dataset,
    own: Callable[[int], Tensors],
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
    return experiment.algorithm.share(inputs, labels, num_classes, rng(experiment.seed, "share", client))


def _constants(dataset: Dataset, ndim: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (1, -1) + (1,) * (ndim - 2)
    return torch.tensor(dataset.mean).reshape(shape), torch.tensor(dataset.std).reshape(shape)


def _as_seen_by(client: int, inputs: torch.Tensor, dataset: Dataset, experiment: Experiment) -> torch.Tensor:
    if not isinstance(experiment.partition, FeatureNoise) or experiment.num_clients == 1:
        return inputs
    variance = experiment.partition.noise_variance(client, experiment.clients)
    noise = rng(experiment.seed, "feature-noise", client).standard_normal(inputs.shape, dtype=np.float32)
    _, std = _constants(dataset, inputs.ndim)
    return inputs + torch.from_numpy(noise) * math.sqrt(variance) / std
