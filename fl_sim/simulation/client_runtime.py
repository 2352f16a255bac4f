"""The client runtime: everything that a worker needs to execute any client of a job.

This module also decides how many clients a worker executes at the same time.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from threadpoolctl import threadpool_limits

from clients.client_layer import ClientLayer
from clients.client_task import ClientRuntime, ClientTask, Resizing
from fl_sim.data.dataset import machine_bytes
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.groups import Auto, Engine, InProcess, Ray
from fl_sim.experiment.job import Job
from fl_sim.kinds import hides_clients, kind_of, replaces_records
from fl_sim.local_plan import LocalAlgorithm
from fl_sim.models import products
from fl_sim.params import detached, trainable
from fl_sim.seeding import rng
from fl_sim.training.loop import resident, stays_bytes, to_tensors
from fl_sim.training.records import Records, Scale, Source
from fl_sim.types import Augment, Dataset, Examples, Load, LocalSettings, Params
from partitions import EvaluationSkew, FeatureSkew, Parts, RecordSkew
from strategies.layer import Tamper, Workload, layer_kinds

if TYPE_CHECKING:
    from strategies.flower import FederatedStrategy

PADDING = 4
"""Pixels of padding on every side of a training image, before a random crop is cut out, as in He et al. 2016."""

KEEP_BYTES = 256 * 2**20
"""A training set of at most this many bytes stays in memory, on every machine. Each process has its own copy."""

KEEP_IN_MEMORY = 1 / 3
"""A larger training set stays in memory if one copy per processor takes, in total, at most this share of the memory."""

KEEP_ON_GPU = 0.25
"""A training set stays on the GPU if it takes at most this share of the GPU's memory. Images stay uint8 there."""


def runtime_for(
    job: Job, algorithm: LocalAlgorithm, tasks: Mapping[str, ClientTask], layers: tuple[ClientLayer, ...] = ()
) -> ClientRuntime:
    """Return the client runtime of ``job``, whose clients train by ``algorithm``.

    ``tasks``: the client tasks apart from training, {name: task}. ``layers``: the client-side objects of the layers. A
    layer is an addition to rounds, such as Global DP or compression.
    """
    experiment = job.experiment
    tampers = _tampers(job)
    held = _held(job, {client: tamper for client, (tamper, _) in tampers.items()})

    def tamper_of(client: int, server_round: int) -> Tamper | None:
        tamper, applies_in = tampers.get(client, (None, None))
        return tamper if applies_in is not None and applies_in(max(1, server_round)) else None

    def own(client: int, server_round: int = 1) -> Records:
        return held(client, tamper_of(client, server_round), server_round)

    @lru_cache(maxsize=1)
    def pool(path: str) -> Records:
        images = read_pool(Path(path), job.read)
        # A client's own records and the synthetic records are put into one tensor, so both need the same number type.
        # This type is float32 if the partition has a feature skew, and otherwise the type in the data set.
        if _is_skewed(experiment):
            inputs, labels = to_tensors(images, job.dataset)
            return Records.of(inputs.to(job.device), labels.to(job.device))
        return resident(images, job.dataset, job.device).whole()

    def joined(client: int, synthetic: str, tamper: Tamper | None, server_round: int) -> Records:
        if synthetic and not _trains_on_own(experiment, synthetic):
            return pool(synthetic)
        mine = held(client, tamper, server_round)
        return mine + pool(synthetic) if synthetic and (len(mine) or not hides) else mine

    hides, model = hides_clients(experiment.aggregator), job.model()
    initial = detached(trainable(model).items())
    model = model.to(job.device)

    @lru_cache(maxsize=2**16)  # class counts are cached, because counting waits for the GPU
    def counted(client: int, synthetic: str, tamper: Tamper | None, server_round: int) -> tuple[int, ...]:
        return joined(client, synthetic, tamper, server_round).class_counts(job.dataset.num_classes)

    def records(client: int, synthetic: str, server_round: int = 1) -> Records:
        return joined(client, synthetic, tamper_of(client, server_round), server_round)

    def class_counts(client: int, synthetic: str, server_round: int = 1) -> tuple[int, ...]:
        # With fixed shards, one cached count serves all rounds.
        counted_in = 1 if job.moving is None else server_round
        return counted(client, synthetic, tamper_of(client, server_round), counted_in)

    return ClientRuntime(
        algorithm=algorithm,
        model=model,
        records=records,
        own_records=own,
        tasks=tasks,
        class_counts=class_counts,
        trains_on_own=partial(_trains_on_own, experiment),
        # cached, because all clients of a round have the same local settings
        local_settings=lru_cache(maxsize=8)(partial(local_settings, job)),
        num_clients=experiment.num_clients,
        seed=experiment.seed,
        layers=layers,
        threads=experiment.engine.threads,
        precision=job.precision,
        graphs=not isinstance(experiment.engine, InProcess) or experiment.engine.graphs,
        read_tensors=job.read,
        initial=initial,
        ledger=partial(_ledger, job),
    )


def with_architectures(runtime: ClientRuntime, job: Job, layers: Sequence[tuple[ClientLayer, ...]]) -> ClientRuntime:
    """Add a client runtime for each model architecture to ``runtime``, if clients have different architectures.

    ``layers``: for each architecture, the client-side objects of the layers, such as compression.
    """
    jobs = job.by_architecture
    if len(jobs) == 1:
        return runtime
    built = [one.model() for one in jobs]
    others = [
        replace(runtime, model=model.to(job.device), initial=detached(trainable(model).items()), layers=halves)
        for model, halves in zip(built, layers, strict=True)
    ]
    return replace(runtime, by_architecture=tuple(others))


def _ledger(job: Job, client: int) -> Path:
    from fl_sim.simulation.client_ledgers import ledger_path  # noqa: PLC0415 (the accountants load slowly)

    return ledger_path(job, client)


def local_settings(job: Job, learning_rate: float) -> LocalSettings:
    """Return the settings of local training in a round that has the learning rate ``learning_rate``."""
    local = job.experiment.local
    # The fields are copied by name. If the experiment's settings lack a field of LocalSettings, getattr fails.
    same = {part.name: getattr(local, part.name) for part in fields(LocalSettings)}
    return LocalSettings(**{**same, "learning_rate": learning_rate, "augment": _augment(job)})


def steps_by_client(job: Job, num_synthetic: int = 0) -> NDArray[np.int64]:
    """Return the number of local steps of every client in round 1, shape (clients,).

    ``num_synthetic``: the number of synthetic records in the pool that all clients share.
    """
    settings = local_settings(job, job.experiment.local.learning_rate)
    sizes, which = np.unique(sizes_trained_on(job, num_synthetic), return_inverse=True)
    return np.array([settings.num_steps(size) for size in sizes.tolist()], dtype=np.int64)[which]


def workload_of(job: Job, num_synthetic: int, strategy: "FederatedStrategy") -> Workload:
    """Return the workload of each client in a round (records, local steps, bytes), to simulate the time of its device.

    ``num_synthetic``: the number of synthetic records in the pool that all clients share.
    """
    algorithm, shape = strategy.algorithm, job.dataset.input_shape

    @lru_cache
    def load_of(size: float) -> Load:
        traffic = strategy.traffic_of(size)
        if size == 1 or not isinstance(algorithm, Resizing):
            return Load(traffic)
        small = algorithm.resized(job.model(), strategy.sized(strategy.server, size).params, size)
        return Load(traffic, products(small, shape) / products(job.model(), shape))

    jobs = job.by_architecture
    work = [products(one.model(), shape) for one in jobs] if len(jobs) > 1 else [1]

    def load_of_client(client: int) -> Load:
        load = load_of(strategy.size_of(client))
        return load._replace(work=load.work * work[client % len(work)] / work[0])

    settings = local_settings(job, job.experiment.local.learning_rate)
    return Workload(sizes_trained_on(job, num_synthetic), settings, load_of_client)


def sizes_trained_on(job: Job, num_synthetic: int, server_round: int = 1) -> NDArray[np.int64]:
    """Return the number of training records of every client in a round, shape (clients,).

    A pool has ``num_synthetic`` synthetic records. The settings decide whether a client trains on its own records, on
    the pool, or on both.
    """
    own: NDArray[np.int64] = job.shards_in(server_round).sizes
    if not num_synthetic:
        return own
    if not _trains_on_own(job.experiment, "a pool"):
        return np.full_like(own, num_synthetic)
    return own + num_synthetic * ((own > 0) | (not hides_clients(job.experiment.aggregator)))


def _augment(job: Job) -> Augment:
    chosen = job.experiment.local.augment
    if chosen == "none":
        return Augment()
    if "reflect" in chosen and min(job.dataset.input_shape[1:]) <= PADDING:
        raise UserError(
            f"local.augment={chosen} pads images by {PADDING} of their own pixels, and images of shape "
            f"{job.dataset.input_shape} are too small: set local.augment={chosen.removeprefix('reflect-')}, which "
            "pads with black pixels"
        )
    scale = Scale.of(job.dataset, np.dtype(np.uint8), 4)
    black = scale.normalise_(torch.zeros_like(scale.offset)).flatten().tolist()
    return Augment(PADDING if "crop" in chosen else 0, "flip" in chosen, tuple(black), "reflect" in chosen)


def read_pool(path: Path, read: Callable[[str], Params] = load_file) -> Examples:
    """Return the synthetic records and labels of a pool file: images as uint8 in 0..255, features as float32.

    ``read``: a function that returns the tensors of a file, as in ``Job``.
    """
    tensors = read(str(path))
    return Examples(tensors["inputs"].numpy(), tensors["labels"].numpy())


def to_generator(inputs: torch.Tensor, job: Job) -> torch.Tensor:
    """Undo the normalisation of records, and scale images to [-1, 1], the value range of generators.

    The mean and the standard deviation are public constants of the data set. Feature vectors (the setting ``features``)
    are not scaled. Their L2 norm is at most 1, so their numbers are already in [-1, 1].
    """
    mean, std = _constants(job.dataset, inputs.ndim)
    records = inputs * std + mean
    return (records if job.experiment.features != "none" else 2 * records - 1).clamp(-1, 1)


def as_kept(records: torch.Tensor, job: Job) -> torch.Tensor:
    """Convert synthetic records in [-1, 1] for a pool file (a file of synthetic records).

    Images become uint8 values; feature vectors stay unchanged.
    """
    if job.experiment.features != "none":
        return records
    return ((records + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _held(job: Job, tampers: Mapping[int, Tamper]) -> Callable[[int, Tamper | None, int], Records]:
    """Return a function that looks up a client's own records in a round.

    The arguments of the function are the client ID, ``tamper`` as in ``_in_memory``, and the number of the round. If
    the training set fits into memory, the records of all clients in the current round stay in memory. Otherwise each
    call loads one client's records. ``tampers``: {client: function that changes the client's records}.
    """
    fits, lock = _num_bytes(job) <= _room(job.device), Lock()

    @lru_cache(maxsize=1)
    def of_shards(shards: Parts) -> Callable[[int, Tamper | None], Records]:
        return _in_memory(job, shards, tampers) if fits else partial(_own_records, job, shards)

    def held(client: int, tamper: Tamper | None, server_round: int) -> Records:
        with lock:  # clients may train in parallel threads; the first client loads all clients' records
            look_up = of_shards(job.shards_in(server_round))
        return look_up(client, tamper)

    of_shards(job.shards)
    return held


def _own_records(job: Job, shards: Parts, client: int, tamper: Tamper | None) -> Records:
    examples = _as_held_by(client, job.records.train.take(shards[client]), job)
    if tamper is not None:
        examples = tamper(examples)
    if not _is_skewed(job.experiment):
        return resident(examples, job.records, job.device).whole()
    inputs, labels = to_tensors(examples, job.records)
    return Records.of(_as_seen_by(client, inputs, job).to(job.device), labels.to(job.device))


def records_as_seen(job: Job, examples: Examples, client: int, purpose: str) -> Records:
    """Return the records ``examples`` of ``client``, on the job's device, with all changes that the partition makes.

    These changes are new inputs or labels, and feature skew. ``purpose``: the name of the random stream of the skew,
    such as "own test feature-noise" (see ``fl_sim.seeding``).
    """
    examples = _as_held_by(client, examples, job)
    if not _is_skewed(job.experiment):
        return resident(examples, job.records, job.device).whole()
    inputs, labels = to_tensors(examples, job.records)
    return Records.of(_as_seen_by(client, inputs, job, purpose).to(job.device), labels.to(job.device))


def _in_memory(job: Job, shards: Parts, tampers: Mapping[int, Tamper]) -> Callable[[int, Tamper | None], Records]:
    """Load the records of all clients into one large array; return a function that looks up one client's records.

    ``shards``: the indices of each client's records. The arguments of the function are the client ID and ``tamper``:
    the attack's function that changes the records, or None for unchanged records. ``tampers``: {client: function that
    changes the client's records}. The array has the unchanged records of all clients, then the changed records of the
    attacked clients.
    """
    honest, bounds = _as_held(job.records.train.take(shards.records), shards, job), shards.bounds
    changed = list[Examples]()
    for client, tamper in tampers.items():
        part = slice(*bounds[client : client + 2])
        changed.append(tamper(Examples(honest.inputs[part], honest.labels[part])))
    ends = np.concatenate([bounds, bounds[-1] + np.cumsum([len(one) for one in changed], dtype=np.int64)])
    everybody = honest
    if changed:
        inputs, labels = (
            np.concatenate([getattr(one, name) for one in (honest, *changed)]) for name in ("inputs", "labels")
        )
        everybody = Examples(inputs, labels)
    if _is_skewed(job.experiment):
        seen, known = to_tensors(everybody, job.records)
        holders = (*range(len(shards)), *tampers)
        for client, own in zip(holders, torch.split(seen, np.diff(ends).tolist()), strict=True):
            own.copy_(_as_seen_by(client, own, job))
        source = Source(seen.to(job.device), known.to(job.device))
    else:
        source = resident(everybody, job.records, job.device)
    place_of = {client: place for place, client in enumerate(tampers, len(shards))}

    def held(client: int, tamper: Tamper | None) -> Records:
        place = client if tamper is None else place_of[client]
        return Records(((source, range(int(ends[place]), int(ends[place + 1]))),))

    return held


def _tampers(job: Job) -> dict[int, tuple[Tamper, Callable[[int], bool]]]:
    """Return {client ID: (tamper, applies)} for all clients whose records an attack changes.

    ``tamper``: a function that changes the client's records. ``applies``: a function of the round number. It returns
    True if the attack changes the records in this round.
    """
    kinds, num_classes = layer_kinds(job.experiment), job.dataset.num_classes
    return {
        client: (tamper, partial(kind.tampers_in, job.experiment))
        for kind in kinds
        for client, tamper in kind.tampers(job.experiment, num_classes).items()
    }


def _num_bytes(job: Job) -> int:
    """Return the memory, in bytes, that the whole training set would take on the job's device."""
    records = job.records.train
    as_bytes = stays_bytes(records, job.device) and not _is_skewed(job.experiment)
    return (1 if as_bytes else 4) * records.inputs.size


def _room(device: torch.device) -> float:
    """Return the number of bytes of memory on ``device`` that the stored training set may take at most."""
    if device.type == "cpu":
        return max(KEEP_BYTES, KEEP_IN_MEMORY * machine_bytes() / (os.cpu_count() or 1))
    return KEEP_ON_GPU * torch.cuda.get_device_properties(device).total_memory


def _trains_on_own(experiment: Experiment, synthetic: str) -> bool:
    return not (synthetic and replaces_records(experiment.preprocess))


def _constants(dataset: Dataset, ndim: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (1, -1) + (1,) * (ndim - 2)
    return torch.tensor(dataset.mean).reshape(shape), torch.tensor(dataset.std).reshape(shape)


def validation_records(job: Job) -> Source:
    """Return the validation records on the job's device.

    Validation records may be held out from clients. The partition then changes them in the same way as the clients'
    training records. Validation records that come with the data set belong to no client, and are treated like test
    records.
    """
    if job.records.validation is not None:
        return _as_evaluated(job, job.records.validation, "validation feature-noise")
    examples = _as_held(job.records.train.take(job.validation.records), job.validation, job)
    if not _is_skewed(job.experiment):
        return resident(examples, job.records, job.device)
    inputs, labels = to_tensors(examples, job.records)
    for client, own in enumerate(torch.split(inputs, job.validation.sizes.tolist())):
        own.copy_(_as_seen_by(client, own, job, "validation feature-noise"))
    return Source(inputs.to(job.device), labels.to(job.device))


def evaluation_records(job: Job) -> Source:
    """Return the test records for evaluating the global model, on the job's device.

    If the partition defines a feature skew for evaluation, the records have this skew.
    """
    return _as_evaluated(job, job.records.test, "test feature-noise")


def _as_evaluated(job: Job, examples: Examples, purpose: str) -> Source:
    scheme: object = job.experiment.partition
    if not isinstance(scheme, EvaluationSkew) or job.experiment.num_clients == 1:
        return resident(examples, job.records, job.device)
    inputs, labels = to_tensors(examples, job.records)
    _, std = _constants(job.dataset, inputs.ndim)
    generator = rng(job.experiment.seed_of_partition, purpose)
    seen = scheme.evaluated_on(job.experiment.clients, inputs.numpy(), std.numpy(), generator)
    return Source(_kept_shape(scheme, "evaluated_on", seen, inputs).to(job.device), labels.to(job.device))


def _is_skewed(experiment: Experiment) -> bool:
    """Return True if clients have feature skew. Their records are then stored as float32 values, not as bytes."""
    return isinstance(experiment.partition, FeatureSkew) and experiment.num_clients > 1


def _changes_records(experiment: Experiment) -> bool:
    """Return True if the partition changes the stored inputs or labels of each client."""
    return isinstance(experiment.partition, RecordSkew) and experiment.num_clients > 1


def _as_held(examples: Examples, parts: Parts, job: Job) -> Examples:
    """Return ``examples`` with the inputs and labels that the partition gives to each client, without feature noise.

    ``parts``: the records of each client, as indices. ``examples``: the records of all clients, in the order of
    clients.
    """
    if not _changes_records(job.experiment):
        return examples
    inputs, labels = examples.inputs.copy(), examples.labels.copy()
    for client in np.flatnonzero(parts.sizes).tolist():
        place = slice(*parts.bounds[client : client + 2])
        held = _as_held_by(client, Examples(inputs[place], labels[place]), job)
        inputs[place], labels[place] = held.inputs, held.labels
    return replace(examples, inputs=inputs, labels=labels)


def _as_held_by(client: int, examples: Examples, job: Job) -> Examples:
    """Return ``examples`` with the inputs and labels that the partition gives to ``client``, without feature noise."""
    experiment, num_classes = job.experiment, job.dataset.num_classes
    scheme: object = experiment.partition
    if not _changes_records(experiment) or not isinstance(scheme, RecordSkew):
        return examples
    # The generator gives the same random numbers for every client, so all clients of a group get the same change.
    generator = rng(experiment.seed_of_partition, "client groups")
    inputs, labels = scheme.held_by(client, examples.inputs, examples.labels, num_classes, generator)
    for old, new in ((examples.inputs, inputs), (examples.labels, labels)):
        if new.shape != old.shape or new.dtype != old.dtype:
            raise UserError(
                f"partition {kind_of(scheme)}: held_by gave {new.dtype} of shape {new.shape} for {old.dtype} of shape "
                f"{old.shape}; it must keep type and shape"
            )
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        raise UserError(f"partition {kind_of(scheme)}: held_by gave labels outside 0 to {num_classes - 1}")
    return replace(examples, inputs=inputs, labels=labels)


def _as_seen_by(client: int, inputs: torch.Tensor, job: Job, purpose: str = "feature-noise") -> torch.Tensor:
    experiment = job.experiment
    scheme: object = experiment.partition
    if not _is_skewed(experiment) or not isinstance(scheme, FeatureSkew):
        return inputs
    _, std = _constants(job.dataset, inputs.ndim)
    generator = rng(experiment.seed_of_partition, purpose, client)
    seen = scheme.seen_by(client, experiment.clients, inputs.numpy(), std.numpy(), generator)
    return _kept_shape(scheme, "seen_by", seen, inputs)


def _kept_shape(scheme: object, method: str, seen: NDArray[np.float32], inputs: torch.Tensor) -> torch.Tensor:
    seen = np.asarray(seen)
    if seen.shape != inputs.shape or seen.dtype != np.float32:
        raise UserError(
            f"partition {kind_of(scheme)}: {method} gave {seen.dtype} of shape {seen.shape} for records that are "
            f"float32 of shape {tuple(inputs.shape)}; it must keep the type and the shape of the records"
        )
    return torch.from_numpy(seen)


SHARE_PER_CORE: Final = 0.9
"""The additional speed from one more core, relative to the speed of the first core."""

STACK_ON_GPU = 100
"""The default number of clients that a GPU trains as one computation."""


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def fixed_threads(threads: int) -> Iterator[None]:
    """Use ``threads`` threads in torch and in numpy's linear algebra; restore the old numbers after the ``with`` block.

    The number of threads changes the rounding of sums, so bit-identical runs need a fixed number. On busy cores the
    threads of OpenBLAS (numpy's linear algebra) wait for each other in busy loops: decompositions of 60 x 60 matrices
    took up to 25 times as long with two threads as with one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(threads, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


def generator_threads(engine: Engine) -> int:
    """Return the number of threads of this process for training the clients' generators with PyTorch on the CPU."""
    return (engine.workers if isinstance(engine, InProcess) else 0) or cores()


def workers_of(engine: Engine, job: Job) -> int:
    """Return the number of clients that ``engine`` trains at the same time in this process."""
    if not isinstance(engine, InProcess):
        return 1
    return min(threads_of(engine, job), job.experiment.num_clients)


def threads_of(engine: Engine, job: Job) -> int:
    """Return the number of threads of this process that may run the job's model at the same time."""
    is_parallel = all(one.trainer.is_parallel(job.input_shape) for one in job.by_architecture)
    if job.device.type != "cpu" or not is_parallel:
        return 1
    return (engine.workers if isinstance(engine, InProcess) else 0) or cores()


def stack_of(engine: Engine, job: Job) -> int:
    """Return the size of a stack: the number of clients that ``engine`` trains together as one batched computation.

    1 means that every client is trained by itself. The result is always 1 in two cases. First, the aggregator may hide
    which clients take part, for privacy. In a stack, the presence of one client would change the rounding of every
    other client's update, and so reveal this client. Second, the rounds may be asynchronous. The clients in a stack
    would then depend on the round after which a run resumes. Raises UserError if the settings ask for a stack and the
    model does not allow a stack.
    """
    experiment = job.experiment
    if isinstance(engine, Auto) or engine.stack == 1 or hides_clients(job.experiment.aggregator):
        return 1
    if not experiment.is_synchronous:
        return 1
    if isinstance(engine, InProcess):
        by_default = STACK_ON_GPU if job.device.type == "cuda" else 1
    else:
        share = math.ceil(experiment.sampler.expected_size(experiment.num_members) / max(1, engine.actors))
        by_default = min(STACK_ON_GPU, share) if engine.gpus else 1
    asked = engine.stack or by_default
    stackable = asked == 1 or all(one.trainer.is_stackable() for one in job.by_architecture)
    if not stackable and engine.stack:
        raise UserError(
            f"engine.stack={engine.stack}: this model cannot be trained on many clients at once, because it draws "
            "random numbers, or has layers that may not process every record separately; leave engine.stack out"
        )
    return min(asked, job.experiment.num_clients) if stackable else 1


def clients_at_once(engine: Engine, job: Job) -> float:
    """Return the training speed of ``engine``, as a multiple of the speed of one core or one GPU."""
    engine, experiment = local_engine(engine), job.experiment
    cohort = max(1, round(experiment.sampler.expected_size(experiment.num_members)))
    workers = workers_of(engine, job) if isinstance(engine, InProcess) else engine.actors or cores()
    return side_by_side(min(workers, cohort))


def answers_at_once(job: Job) -> float:
    """Return the total speed of the threads or Ray actors that execute client tasks; one core has the speed 1."""
    engine, clients = local_engine(job.experiment.engine), job.experiment.num_clients
    workers = generator_threads(engine) if isinstance(engine, InProcess) else engine.actors or cores()
    return side_by_side(min(workers, clients))


def side_by_side(workers: int) -> float:
    """Return the speed of ``workers`` parallel workers, relative to one worker.

    >>> side_by_side(1), side_by_side(3)
    (1.0, 2.8)
    """
    return 1 + (workers - 1) * SHARE_PER_CORE


def local_engine(engine: Engine) -> InProcess | Ray:
    """Return ``engine`` itself; for engine ``auto``, the in-process engine."""
    return InProcess(threads=engine.threads) if isinstance(engine, Auto) else engine
