"""The class ``Job``: an experiment with its data set, device and shards (each client's training records).

Each process makes one job.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_sim import models
from fl_sim.data import load
from fl_sim.data.naming import is_own, parts_of, refused_if_private, without_settings
from fl_sim.errors import UserError
from fl_sim.experiment import own_tests
from fl_sim.experiment.experiment import Experiment, changed
from fl_sim.experiment.fixed_shards import has_moving_shards
from fl_sim.experiment.frozen_body import FrozenBody, body_of
from fl_sim.experiment.groups import Auto, Ray, held_out
from fl_sim.foreign_models import source_of
from fl_sim.kinds import Computing, Sealing, SettingAside, is_none, is_own_kind, kind_of, path_in
from fl_sim.native.kernel import load_kernel
from fl_sim.own_code import in_one_line
from fl_sim.params import copied, fixed_in
from fl_sim.seeding import rng, seed_torch, seeded_alone, torch_alone
from fl_sim.store.tensors import read_by_content
from fl_sim.store.weights import Placed, place, read_weights, records_of
from fl_sim.trained_part import TrainedPart, train_alone, whole
from fl_sim.training.features import num_features
from fl_sim.training.loop import resident, to_tensors
from fl_sim.training.records import Source
from fl_sim.training.trainer import Trainer
from fl_sim.types import Dataset, Examples, Params, Precision
from partitions import (
    ByGroup,
    ByLabels,
    ByRound,
    EvaluationSkew,
    FeatureSkew,
    MovingParts,
    Parts,
    RecordSkew,
    Scheme,
    WithinSources,
)
from strategies.algorithm import Bounded, Dealing, PartialTraining, Pooling, Rebuilding, num_further_outputs


@runtime_checkable
class Fitting(Protocol):
    """The interface of settings classes that support only some data sets, such as a method for images."""

    def check_data(self, dataset: Dataset, features: str) -> None:
        """Raise UserError if the class does not support ``dataset``. ``features``: the setting ``features``."""


@runtime_checkable
class Heading(Protocol):
    """The interface of settings classes that compute with the inputs of the model's last layer (its head)."""

    def check_head(self, num_features: int, num_classes: int) -> None:
        """Raise UserError if the model's head has more inputs or classes than the method supports."""


@dataclass(frozen=True, eq=False)
class Job:
    """A job: an experiment with its data set, shards and device. The run and each worker process create a job.

    ``experiment``: the experiment. Defaults that depend on the data are filled in. ``shards``: for each client, the
    indices of its training records in ``dataset.train``, before the first round. ``device``: the device of this
    process. ``root``: the folder in which data sets are searched first. ``validation``: for each client, the indices of
    its held-out records in ``dataset.train``; empty if no records are held out. ``own_tests``: for each client, the
    indices of its own test records in ``dataset.test``; empty if clients need no test records. ``read``: a function
    that takes the path of a file and returns the tensors in it. The name of such a file contains a digest of its
    tensors. ``weights``: the tensors from which the model starts; empty if all its weights are random. ``set_aside``:
    the server's own records, which no client holds; None if the server has none. ``moving``: the shards of all rounds,
    if they depend on the round (see ``shards_in``); otherwise None.
    """

    experiment: Experiment
    dataset: Dataset
    shards: Parts
    device: torch.device
    root: Path | None
    validation: Parts = field(default_factory=lambda: Parts.of(()))
    own_tests: Parts = field(default_factory=lambda: Parts.of(()))
    read: Callable[[str], Params] = read_by_content
    weights: Params = field(default_factory=dict)
    set_aside: Examples | None = None
    moving: MovingParts | None = None

    def shards_in(self, server_round: int) -> Parts:
        """Return the shards in a round: for each client, the indices of its training records in ``dataset.train``.

        ``server_round``: from 1; 0 means before the first round. Repeated calls for a round return the same object.
        """
        return self.shards if self.moving is None else self._moved(max(1, server_round))

    @cached_property
    def _moved(self) -> Callable[[int], Parts]:
        assert self.moving is not None
        return lru_cache(maxsize=2)(self.moving.in_round)

    @cached_property
    def members(self) -> NDArray[np.int64]:
        """The ascending IDs of the clients that may take part in rounds: all clients that are not held out."""
        everybody = self.experiment.num_clients
        held_out = everybody - self.experiment.num_members
        return own_tests.members(everybody, held_out, self.experiment.seed_of_partition)

    @cached_property
    def by_architecture(self) -> tuple["Job", ...]:
        """One job for each of the k architectures of the clients' models. Client i has the architecture i mod k.

        If all clients have the same architecture, the result is this job.
        """
        chosen = self.experiment.model
        alone = [chosen.model_copy(update={"name": name, "others": ()}) for name in chosen.names]
        if len(alone) == 1:
            return (self,)
        return tuple(replace(self, experiment=self.experiment.model_copy(update={"model": one})) for one in alone)

    @property
    def num_validated(self) -> int:
        """The number of validation records: the data set's own, or, without these, the records held out by clients."""
        # if the data set has validation records, the run uses them: job_of refuses other settings
        given = self.dataset.validation
        return len(self.validation.records) if given is None else len(given)

    def model(self) -> nn.Module:
        """Return a model for training, with the initial weights, on the CPU. Its inputs are in ``self.records``.

        The model is the experiment's model, or only its head if features are stored. If the device is the CPU, all
        returned models share the tensors of their frozen parameters. So no code may change frozen parameters.
        """
        if isinstance(self.body, FrozenBody):
            return copy.deepcopy(self.body.head)
        # On a GPU, each model needs a separate copy of the frozen parameters.
        return copied(self._first[0]) if self.device.type == "cpu" else self.whole_model()

    def whole_model(self) -> nn.Module:
        """Return a new copy of the experiment's whole model with its initial weights, on the CPU."""
        return copy.deepcopy(self._first[0])

    def built(self, seed: int) -> nn.Module:
        """Return the experiment's whole model, on the CPU. ``seed``: the seed of its random weights."""
        if seed == self.experiment.seed_of_model:
            return self.whole_model()  # the model is copied, because building a model of a library takes seconds
        return self._placed(seed)[0]

    @cached_property
    def body(self) -> FrozenBody | str:
        """The ``FrozenBody`` of the model, or a text: the reason why its features cannot be stored.

        The value is "" if the model has no frozen body.
        """
        return body_of(self._first[0], self.two_records, self.device, _uses_records(self.experiment))

    @cached_property
    def records(self) -> Dataset:
        """The inputs of ``model``: the experiment's data set, or the features that a frozen body computes from it."""
        return self.body.entered(self.dataset) if isinstance(self.body, FrozenBody) else self.dataset

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one record in ``records``."""
        return (self.body.size,) if isinstance(self.body, FrozenBody) else self.dataset.input_shape

    def source(self, examples: Examples) -> Source:
        """Return the ``Source`` of ``examples``: inputs of ``self.model()`` and labels, on the job's device.

        If features are stored, the inputs are the features of the records.
        """
        if not isinstance(self.body, FrozenBody):
            return resident(examples, self.dataset, self.device)
        features = torch.from_numpy(self.body.features_of(examples, self.dataset))
        return Source(features.to(self.device), torch.from_numpy(examples.labels).to(self.device))

    @property
    def fixed(self) -> Params:
        """The tensors of the whole model that training never changes. Callers must not change these tensors."""
        return fixed_in(self._first[0])

    @cached_property
    def placed(self) -> Placed:
        """The differences between the initial model and the file of weights, such as a new head."""
        return self._first[1]

    @cached_property
    def _first(self) -> tuple[nn.Module, Placed]:
        return self._placed(self.experiment.seed_of_model)

    def check_model(self) -> None:
        """Raise UserError if the job's model cannot be trained.

        If this process has already checked a library's model with another seed, the model is not checked again.
        """
        experiment, dataset = self.experiment, self.dataset
        if not models.is_tried(
            experiment.model.name, dataset.input_shape, self.num_outputs, experiment.local.batch_norm,
            dataset.vocabulary, _Preparation.of(self, experiment.seed_of_model),
        ):  # fmt: skip
            _ = self.body  # this access builds and tests the model

    def _placed(self, seed: int) -> tuple[nn.Module, Placed]:
        dataset, prepare = self.dataset, _Preparation.of(self, seed)
        model = models.build(
            self.experiment.model.name, dataset.input_shape, self.num_outputs, seed, prepare=prepare,
            batch_norm=self.experiment.local.batch_norm, vocabulary=dataset.vocabulary, trial=self.two_records,
        )  # fmt: skip
        return model, prepare.placed[-1] if prepare.placed else Placed()

    def whole(self, params: Params) -> Params:
        """Return all parameters of the model, for a file of the model. ``params``: the trained parameters.

        A frozen parameter has its initial value, unless ``params`` contains this parameter.
        """
        is_whole = self.experiment.model.trainable == "all" and not isinstance(self.body, FrozenBody)
        return params if is_whole else whole(self._first[0], params)

    @cached_property
    def frozen_in_words(self) -> str:
        """A sentence about the parameters that the setting ``model.trainable`` freezes; empty if none is frozen."""
        is_whole = self.experiment.model.trainable == "all"
        return "" if is_whole else _Preparation.of(self, self.experiment.seed_of_model).part.in_words(self._first[0])

    @property
    def model_in_words(self) -> list[str]:
        """Lines for the user about the model's initial weights, library and trained parameters; may be empty."""
        chosen, dataset = self.experiment.model, self.dataset
        source = source_of(chosen.name)
        said = [
            self.placed.in_words(chosen.origin) if self.weights else "",
            source.note(dataset.input_shape, dataset.vocabulary) if source is not None else "",
            self.frozen_in_words,
            "the frozen body's features are computed once for each record" if isinstance(self.body, FrozenBody) else "",
            f"the features of the frozen body cannot be stored, so every step computes them: {self.body}"
            if self.body and isinstance(self.body, str)
            else "",
        ]
        return [*filter(None, said)]

    @cached_property
    def predicts_classes(self) -> bool:
        """True if the model classifies records; False for a model that computes its loss itself, such as a decoder."""
        dataset, local = self.dataset, self.experiment.local
        return not models.has_own_loss(
            self.experiment.model.name, dataset.input_shape, self.num_outputs, local.batch_norm, dataset.vocabulary
        )

    @property
    def num_outputs(self) -> int:
        """The number of the model's outputs: one per class of the data set, and those that the algorithm adds."""
        return self.dataset.num_classes + num_further_outputs(self.experiment.algorithm)

    @cached_property
    def two_records(self) -> torch.Tensor:
        """Two normalised test records, as inputs for a first trial of a model. A single test record is repeated."""
        test = self.dataset.test
        return to_tensors(test.take(np.array([0, min(1, len(test) - 1)])), self.dataset)[0]

    @cached_property
    def trainer(self) -> Trainer:
        """The object that trains clients in this process. It also evaluates the experiment's model."""
        return Trainer(self.model().to(self.device), load_kernel()[0])

    @cached_property
    def num_features(self) -> int:
        """The number of inputs of the model's head (its last layer). Raises UserError for a model without a head."""
        algorithm = self.experiment.algorithm
        rebuilt_by = kind_of(algorithm) if isinstance(algorithm, Rebuilding) else ""
        return num_features(self.model(), self.input_shape, rebuilt_by)

    @property
    def precision(self) -> Precision:
        """The precision of training in this process. Raises UserError as ``precision_of`` does."""
        return precision_of(self.experiment, self.device)


@dataclass(frozen=True)
class _Preparation:
    """A function that copies weights into a new model, lets the algorithm rebuild it, and adds adapters.

    It also freezes the parameters that are not trained.

    ``settings``: the settings of the model and of the algorithm as text. If two preparations have equal settings, they
    differ only in the random values of adapters. ``placed``: for each prepared model, its differences from the file of
    weights.
    """

    settings: tuple[str, str]
    part: TrainedPart = field(compare=False)
    weights: Params = field(compare=False)
    origin: str = field(compare=False)
    algorithm: object = field(compare=False)
    input_shape: tuple[int, ...] = field(compare=False)
    placed: list[Placed] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, job: Job, seed: int) -> "_Preparation":
        """Return the preparation for the models of ``job``. ``seed``: the seed for the random values of adapters."""
        chosen, algorithm = job.experiment.model, job.experiment.algorithm
        settings = (
            chosen.model_dump_json(),
            repr(algorithm) if isinstance(algorithm, PartialTraining | Rebuilding) else "",
        )
        part = TrainedPart(chosen.trainable, chosen.rank, chosen.alpha, chosen.dropout, seed, chosen.target_modules)
        return cls(settings, part, job.weights, chosen.origin, algorithm, job.dataset.input_shape)

    def __call__(self, model: nn.Module) -> nn.Module:
        """Return the prepared ``model``: with the given weights, rebuilt, with adapters, and with frozen parameters.

        Raises UserError if the weights, the algorithm or the names of trained parameters do not fit the model.
        """
        if self.weights:
            self.placed.append(place(model, self.weights, self.origin))
        if isinstance(self.algorithm, Rebuilding):
            with torch_alone():
                seed_torch(self.part.seed, "rebuilt model")
                model = self.algorithm.rebuilt(model, self.input_shape)
        self.part(model)
        if isinstance(self.algorithm, PartialTraining):
            train_alone(model, self.algorithm.trains)
        return model


def job_of(experiment: Experiment, data_root: Path | None = None) -> Job:
    """Return the job of ``experiment``; defaults that depend on the data are filled in.

    ``data_root``: the first folder to look for data sets. Raises UserError for settings that do not fit the data or the
    model, for an impossible partition, and if a GPU is required but not available.
    """
    dataset = _scaled(load(experiment.data, data_root, experiment.features), experiment.normalise)
    experiment = _resolved(experiment, dataset)
    if pooled := experiment.evaluate.pooled_share:
        dataset = own_tests.merged(dataset)
    moving = _moving(experiment, dataset)
    dealt = _shards(experiment, dataset) if moving is None else moving.first
    shards = _without_some(experiment, _without(experiment.forgotten, dealt))
    own, weights = _set_aside(experiment, dataset), _weights(experiment)
    shards = shards.where(~np.isin(shards.records, own)) if len(own) else shards
    aside = dataset.train.take(own) if len(own) else None
    job = Job(
        experiment, dataset, shards, device_of(experiment), data_root, weights=weights, set_aside=aside, moving=moving
    )
    if not dataset.has_labels and job.predicts_classes:
        raise UserError(
            f"{without_settings(experiment.data)} has no labels, and model {experiment.model.name} predicts classes: "
            "set data.label=COLUMN, or use a model that predicts the next token, such as model=decoder"
        )
    if experiment.evaluate.measures_clients:
        job = _with_own_tests(job, pooled)
        dataset = job.dataset
    share = experiment.evaluate.validation
    _check_validation(experiment, dataset)
    if share and share != "given":
        trained_on, validated_on = held_out(job.shards, share, experiment.seed_of_partition)
        job = replace(job, shards=trained_on, validation=validated_on)
    for part in (experiment.algorithm, experiment.preprocess, experiment.calibrate):
        if isinstance(part, Heading):
            part.check_head(job.num_features, dataset.num_classes)
    _check_tested(experiment)
    return job


def _with_own_tests(job: Job, pooled: float) -> Job:
    """Return ``job`` with test records for each client.

    ``pooled``: if above 0, the share of each client's records that become its test records.
    """
    dataset, seed = job.dataset, job.experiment.seed_of_partition
    if pooled:
        dataset, shards, tests = own_tests.cut(dataset, job.shards, pooled, seed)
        return replace(job, dataset=dataset, shards=shards, own_tests=tests)
    if job.experiment.evaluate.clients == "own":
        return replace(job, own_tests=own_tests.of_sources(dataset, job.shards))
    partition = job.experiment.partition
    keeps_sources = isinstance(partition, WithinSources) and partition.keeps_sources and not job.experiment.is_central
    return replace(job, own_tests=own_tests.with_class_shares(dataset, job.shards, seed, keeps_sources=keeps_sources))


def _uses_records(experiment: Experiment) -> str:
    """Return the reason why stored features of a frozen body cannot replace the records in a round.

    The reason names a setting, such as ``local.augment``, which changes the records. The result is empty if there is no
    reason.
    """
    if experiment.local.augment != "none":
        return f"local.augment={experiment.local.augment} changes the records"
    if isinstance(experiment.partition, FeatureSkew | EvaluationSkew | RecordSkew) and experiment.num_clients > 1:
        return f"partition {kind_of(experiment.partition)} changes the records"
    for name in ("algorithm", "preprocess", "calibrate", "attack"):
        part = getattr(experiment, name)
        computes = isinstance(part, Computing) or path_in(type(part), "procedure")
        if computes or is_own_kind(part) or (name == "preprocess" and not is_none(part)):
            return f"{name} {kind_of(part)} may read the records"
    return "" if experiment.evaluate.metrics == "none" else "evaluate.metrics may read the records"


def resolved(experiment: Experiment, data_root: Path | None) -> Experiment:
    """Return ``experiment`` with every default that depends on the data filled in.

    Raises UserError for settings that do not fit the data.
    """
    return _resolved(experiment, load(experiment.data, data_root, experiment.features))


def shards_of(dataset: Dataset, scheme: Scheme, num_clients: int, seed: int) -> Parts:
    """Return the indices of each client's training records. Raises UserError for an impossible partition."""
    return _split(dataset, np.arange(len(dataset.train)), scheme, num_clients, seed)


def device_of(experiment: Experiment) -> torch.device:
    """Return the device of this process. Raises UserError if the settings require a GPU and none is visible."""
    if experiment.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device=cuda, but this process sees no CUDA device: set device=cpu, or use the GPUs of a Ray cluster by "
            "engine=ray engine.gpus=1"
        )
    return torch.device("cuda" if experiment.device != "cpu" and torch.cuda.is_available() else "cpu")


def check_precision(job: Job) -> None:
    """Raise UserError if this process does not support the precision of training.

    Nothing is checked if clients train in Ray actors with GPUs, because this process may not see these GPUs.
    """
    if not has_gpus_elsewhere(job.experiment):
        precision_of(job.experiment, job.device)


def has_gpus_elsewhere(experiment: Experiment) -> bool:
    """Return True if clients train in Ray actors with GPUs. This process may not see these GPUs."""
    return isinstance(experiment.engine, Ray) and bool(experiment.engine.gpus)


def precision_of(experiment: Experiment, device: torch.device) -> Precision:
    """Return the precision of training on ``device``. Raises UserError if ``device`` does not support it."""
    precision, engine = experiment.local.precision, experiment.engine
    stacked = not isinstance(engine, Auto) and engine.stack > 1
    if precision == "float32" or (precision == "bfloat16" and stacked):
        return precision
    if device.type == "cpu" and precision == "bfloat16":
        kernel, why_not = load_kernel()
        if kernel is not None and kernel.has_bfloat16:
            return precision
        why = "this processor has no avx512_bf16" if kernel is not None else f"no native trainer is here: {why_not}"
        raise UserError(
            "local.precision=bfloat16 needs the native trainer and a processor that multiplies bfloat16 numbers, "
            f"and {why}; leave it out"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return precision
    where = "a CPU" if device.type == "cpu" else "a GPU older than NVIDIA's Ampere"
    raise UserError(f"local.precision={precision} has no effect on {where}: leave it out, or train on a newer GPU")


def _scaled(dataset: Dataset, normalise: str) -> Dataset:
    """Return ``dataset`` with the mean and standard deviation that the setting ``normalise`` chooses.

    The chosen constants normalise pixels in [0, 1].
    """
    if normalise == "published":
        return dataset
    if normalise == "unit" and len(dataset.input_shape) != 3:
        raise UserError(
            f"normalise=unit scales images to [-1, 1], and the records of {dataset.name} are feature vectors: set "
            "normalise=published, or none to leave the vectors as they are"
        )
    mean, std = (0.5, 0.5) if normalise == "unit" else (0.0, 1.0)
    return replace(dataset, mean=(mean,) * len(dataset.mean), std=(std,) * len(dataset.std))


def _resolved(experiment: Experiment, dataset: Dataset) -> Experiment:
    if (augment := experiment.local.augment) != "none" and len(dataset.input_shape) != 3:
        raise UserError(
            f"local.augment={augment} changes images, but the records of {experiment.data} are feature vectors: leave "
            "it out"
        )
    if dataset.vocabulary:
        _check_sequences(experiment)
    if experiment.is_private and (reason := refused_if_private(experiment.data)):
        raise UserError(reason)
    for part in (experiment.algorithm, experiment.preprocess, experiment.calibrate):
        if isinstance(part, Fitting):
            part.check_data(dataset, experiment.features)
    filled: dict[str, Any] = {}
    if isinstance(experiment.algorithm, Bounded):
        filled |= {"rounds": experiment.algorithm.bound_rounds(experiment.rounds, dataset)}
    given = {name: getattr(experiment, name) for name in Experiment.model_fields}
    filled |= {name: part.sealed() for name, part in given.items() if isinstance(part, Sealing)}
    default = models.default_model(dataset.input_shape, dataset.vocabulary, has_labels=dataset.has_labels)
    filled["model"] = experiment.model.sealed(default)
    return changed(experiment, **filled)


def _weights(experiment: Experiment) -> Params:
    """Return the tensors from which the experiment's model starts; empty for random weights.

    Raises UserError if a run that promises privacy would start from a model that was trained on the same data. The
    epsilon of the new run would not cover the cost of that training.
    """
    model = experiment.model
    common = {*parts_of(experiment.data)} & {*parts_of(records_of(model.weights))} if model.weights else set()
    if experiment.is_private and common:
        raise UserError(
            f"model.weights={model.weights} was trained on {', '.join(sorted(common))}, and this run promises privacy "
            "for the same data: its epsilon would not cover what these weights reveal about the records; start from "
            "weights of other data, or leave model.weights out"
        )
    return read_weights(model.name, model.weights, model.digest)


def _check_tested(experiment: Experiment) -> None:
    """Raise UserError if a run with privacy would measure models on test records that are not declared public."""
    evaluate, algorithm = experiment.evaluate, experiment.algorithm
    if not (experiment.is_private and is_own(experiment.data)) or evaluate.test_is_public:
        return
    what, public = f"the test records of {without_settings(experiment.data)}", "set evaluate.test_is_public=true if"
    if isinstance(algorithm, Pooling) and algorithm.pools_test_records:
        raise UserError(
            f"algorithm {kind_of(algorithm)} uses {what} as its public pool, and this run promises privacy: {public} "
            "they are public and belong to no client, or use another public pool"
        )
    if evaluate.test != "never":
        raise UserError(
            f"evaluate.test={evaluate.test} publishes measures on {what}, which no epsilon covers, but this run "
            f"promises privacy: {public} they are public, or set evaluate.test=never, which measures nothing"
        )


def _check_validation(experiment: Experiment, dataset: Dataset) -> None:
    """Raise UserError if the validation records that the settings need are missing.

    Also raises UserError if the data set has validation records that the settings do not use.
    """
    asked, given = experiment.evaluate.validation == "given", dataset.validation
    if asked and given is None:
        raise UserError(
            f"evaluate.validation=given, but {dataset.name} has no validation records of its own: set "
            "evaluate.validation=0.1, which holds out a tenth of every client's training records, or see docs/data.md"
        )
    if given is not None and not asked:
        raise UserError(
            f"{dataset.name} comes with {len(given):,} validation records, which these settings do not use: set "
            "evaluate.validation=given, which measures models on them, or leave them out of the data"
        )


def _check_sequences(experiment: Experiment) -> None:
    """Raise UserError if a setting, such as a feature skew, computes with the numbers in records.

    This function is called for records that are texts. The numbers in such a record are token ids.
    """
    for what in ("algorithm", "preprocess", "partition"):
        part = getattr(experiment, what)
        if isinstance(part, FeatureSkew) or (isinstance(part, Computing) and part.computes_with_records):
            raise UserError(
                f"{what} {kind_of(part)} computes with the numbers in records, and the records of {experiment.data} "
                f"contain token ids, which have no numerical meaning: use another {what}"
            )


def _shards(experiment: Experiment, dataset: Dataset) -> Parts:
    """Return the shards: each client's training records, by the partition or by the algorithm's own rule."""
    algorithm, seed = experiment.algorithm, experiment.seed_of_partition
    if experiment.is_central:
        return Parts.of([np.arange(len(dataset.train))])
    if not isinstance(algorithm, Dealing):
        return shards_of(dataset, experiment.partition, experiment.clients, seed)

    def split(records: NDArray[np.int64]) -> Parts:
        if len(np.unique(records)) < len(records):
            raise UserError(
                f"algorithm {kind_of(algorithm)}: its method deal passes an index of the training set to split more "
                "than once: pass each index at most once"
            )
        return _split(dataset, records, experiment.partition, experiment.clients, seed)

    try:
        with seeded_alone(seed, "partition"):
            shards = algorithm.deal(dataset, split, seed)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"algorithm {kind_of(algorithm)}: deal failed with {in_one_line(error)}") from error
    return _checked(shards, experiment.num_clients, len(dataset.train), f"algorithm {kind_of(algorithm)}")


def _moving(experiment: Experiment, dataset: Dataset) -> MovingParts | None:
    """Return the shards of all rounds; None if shards do not depend on the round."""
    if not (isinstance(experiment.partition, ByRound) and has_moving_shards(experiment)):
        return None
    return moving_of(dataset, experiment.partition, experiment.clients, experiment.seed_of_partition)


def _without(forgotten: Sequence[int], shards: Parts) -> Parts:
    """Return ``shards`` without the records of the clients in ``forgotten``.

    Raises UserError if no record is left.
    """
    if not forgotten:
        return shards
    left = shards.where(np.repeat(~np.isin(np.arange(len(shards)), forgotten), shards.sizes))
    if not len(left.records):
        raise UserError(
            f"forgotten={'+'.join(map(str, forgotten))} removes the records of all clients that have "
            "records: leave at least one of these clients out of the list"
        )
    return left


def _without_some(experiment: Experiment, shards: Parts) -> Parts:
    """Return ``shards`` without the records that the setting ``left_out`` leaves out.

    A random number decides for each record. This number depends on the seed and the record's index, not on the
    partition. Raises UserError if no record is left. Also raises UserError if a run promises privacy for the user's own
    records, because its published seed would reveal which records were left out.
    """
    if not experiment.left_out:
        return shards
    what = f"left_out={experiment.left_out:g}"
    if experiment.is_private and is_own(experiment.data):
        raise UserError(
            f"{what} follows from the seed, which is published, and this run promises privacy for the records of "
            f"{without_settings(experiment.data)}: the seed would reveal which of them trained the model; remove "
            "the setting left_out, or use a public data set"
        )
    coins = rng(experiment.seed, "left out").random(1 + int(shards.records.max()))
    left = shards.where(coins[shards.records] >= experiment.left_out)
    if not len(left.records):
        raise UserError(f"{what} leaves no training record to any client: use a smaller number")
    return left


def _set_aside(experiment: Experiment, dataset: Dataset) -> NDArray[np.int64]:
    """Return the indices of the training records that the server keeps for itself, in ascending order.

    The settings ``forgotten`` and ``left_out`` do not change these indices. Raises UserError if clients would have no
    records left.
    """
    held, counts = len(dataset.train), dict[str, int]()
    for name in ("aggregator", "algorithm"):
        if isinstance(part := getattr(experiment, name), SettingAside) and part.num_set_aside:
            counts[f"{name} {kind_of(part)}"] = part.num_set_aside
    if len(counts) > 1:
        raise UserError(
            f"{' and '.join(counts)} both set training records aside for the server, but it has one set of records: "
            "leave one of them out"
        )
    count = sum(counts.values())
    if count >= held:
        raise UserError(
            f"{''.join(counts)} sets {count:,} training records aside, and {dataset.name} has {held:,}: "
            "set fewer records aside, so that clients have records, too"
        )
    drawn = rng(experiment.seed_of_partition, "records of the server")
    return np.sort(drawn.choice(held, count, replace=False)) if count else np.zeros(0, dtype=np.int64)


def _split(dataset: Dataset, records: NDArray[np.int64], scheme: Scheme, num_clients: int, seed: int) -> Parts:
    """Partition the training records with the indices ``records`` by the rule ``scheme``.

    The result has one array for each client: the positions of the client's records in the array ``records``.
    """
    labels, groups, giver = dataset.train.labels[records], dataset.train.groups, f"partition {kind_of(scheme)}"

    def drawn() -> Parts:
        def draw(coins: np.random.Generator) -> object:
            if groups is not None and isinstance(scheme, ByGroup):
                return scheme.split_groups(labels, groups[records], num_clients, coins)
            return scheme.split(labels, num_clients, coins)

        return _checked(_drawn(dataset, scheme, num_clients, seed, draw), num_clients, len(labels), giver)

    parts = drawn()
    again = drawn() if is_own_kind(scheme) else parts
    if not _are_equal(parts, again):
        raise UserError(_not_repeated(giver, "split"))
    return parts


def moving_of(dataset: Dataset, scheme: ByRound, num_clients: int, seed: int) -> MovingParts:
    """Return the shards of all rounds, for a partition whose shards depend on the round.

    Raises UserError for an impossible partition.
    """
    giver, num_records = f"partition {kind_of(scheme)}", len(dataset.train)

    def drawn() -> MovingParts:
        def draw(coins: np.random.Generator) -> object:
            return scheme.moving(dataset.train.labels, dataset.train.groups, num_clients, coins)

        found = _drawn(dataset, scheme, num_clients, seed, draw)
        if not isinstance(found, MovingParts):
            raise UserError(f"{giver}: moving gave {type(found).__name__}; it must give partitions.MovingParts")
        rounds = np.asarray(found.rounds)
        if rounds.shape != (num_records,) or rounds.dtype.kind not in "iu":
            raise UserError(
                f"{giver}: moving gave rounds of shape {rounds.shape} and type {rounds.dtype}; it must give one whole "
                f"number for each of {num_records:,} records"
            )
        first, last = (_checked(parts, num_clients, num_records, giver) for parts in (found.first, found.last))
        return MovingParts(first, last, rounds)

    moving = drawn()
    again = drawn() if is_own_kind(scheme) else moving
    same = _are_equal(moving.first, again.first) and _are_equal(moving.last, again.last)
    if not (same and np.array_equal(moving.rounds, again.rounds)):
        raise UserError(_not_repeated(giver, "moving"))
    return moving


def _drawn(
    dataset: Dataset,
    scheme: Scheme | ByRound,
    num_clients: int,
    seed: int,
    draw: Callable[[np.random.Generator], object],
) -> object:
    """Return the result of ``draw``, a function that calls a method of the partition ``scheme`` with a generator.

    Raises UserError if the partition is impossible for ``dataset``, or if its code fails.
    """
    giver = f"partition {kind_of(scheme)}"
    if isinstance(scheme, ByLabels) and scheme.uses_labels and not dataset.has_labels:
        raise UserError(
            f"partition={kind_of(scheme)} divides records by their labels, and {without_settings(dataset.name)} has no "
            "labels: set data.label=COLUMN, or set partition=iid, natural (by the column data.client) or quantity:0.5"
        )
    try:
        if isinstance(scheme, RecordSkew) and num_clients > 1:
            scheme.check_records(dataset.input_shape, dataset.num_classes)
        coins = rng(seed, "partition")
        with seeded_alone(seed, "partition"):
            return draw(coins)
    except ValueError as error:
        raise UserError(f"{giver} of {dataset.name} over {num_clients} clients: {error}") from error
    except Exception as error:
        raise UserError(f"{giver} failed with {in_one_line(error)}") from error


def _are_equal(parts: Parts, others: Parts) -> bool:
    return np.array_equal(parts.records, others.records) and np.array_equal(parts.bounds, others.bounds)


def _not_repeated(giver: str, method: str) -> str:
    return (
        f"{giver} gave different shards in two calls with the same seed: take random numbers from the generator that "
        f"{method} receives, or from the global generators of torch, NumPy or Python, which are seeded"
    )


def _checked(parts: object, num_clients: int, num_records: int, giver: str) -> Parts:
    """Check ``parts``, the result of a partition, and return them as shards.

    Raises UserError if ``parts`` are not disjoint arrays of record indices, one per client. ``giver``: the name of the
    partition or algorithm that made the parts, for the error message.
    """
    if isinstance(parts, Parts):
        laid_out = parts
    else:
        wanted = "it must give a list of arrays of record indices, one for each client"
        if isinstance(parts, Mapping | str) or not isinstance(parts, Sequence | np.ndarray):
            way = ": return list(parts.values())" if isinstance(parts, Mapping) else ""
            raise UserError(f"{giver} gave {type(parts).__name__}; {wanted}{way}")
        try:
            laid_out = Parts.of([np.asarray(part) for part in parts])
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{giver} gave shards that cannot be arrays of indices ({in_one_line(error)}); {wanted}"
            ) from error
    if len(laid_out) != num_clients:
        raise UserError(f"{giver} gave {len(laid_out)} shards for {num_clients} clients: it must give one for each")
    indices = laid_out.records
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or not ((indices >= 0) & (indices < num_records)).all():
        raise UserError(f"{giver} gave shards that are not arrays of record indices from 0 to {num_records - 1}")
    if len(indices) and (counts := np.bincount(indices)).max() > 1:
        raise UserError(f"{giver} gave record {int(counts.argmax())} to several clients: shards must be disjoint")
    if not len(indices):
        raise UserError(f"{giver} gave no record to any of {num_clients} clients: give records to at least one client")
    return replace(laid_out, records=indices.astype(np.int64, copy=False))


def public_facts(dataset: Dataset) -> dict[str, Any]:
    """Return the public facts of ``dataset``, as JSON values, for nodes (client machines) with their own data.

    The public facts are the shape of a record, the number of classes, and the constants of normalisation.
    """
    return {
        "shape": list(dataset.input_shape), "classes": dataset.num_classes, "mean": list(dataset.mean),
        "std": list(dataset.std),
    }  # fmt: skip


def own_job(experiment: Experiment, name: str, client: int, facts: dict[str, Any]) -> Job:
    """Return the job of a client that runs on a node with its own data set ``name``.

    The client with the ID ``client`` holds all training records of this data set. ``facts``: the result of
    ``public_facts`` for the server's data set. The node's records are normalised by the constants in ``facts``. Raises
    UserError for records of another shape or with other classes. Also raises UserError if the data set has validation
    records, because a node evaluates no models.
    """
    if experiment.evaluate.measures_clients:
        raise UserError(
            f"evaluate.clients={experiment.evaluate.clients} chooses each client's test records at the server, and "
            "this node has records of its own: leave evaluate.clients out"
        )
    if has_moving_shards(experiment):
        raise UserError(
            f"partition={kind_of(experiment.partition)} moves records of the server's data set between clients, but "
            "this node has records of its own: use a partition with fixed shards, such as iid"
        )
    if experiment.left_out:
        raise UserError(
            f"left_out={experiment.left_out:g} chooses records of the server's data set, but this node has records of "
            "its own: remove the setting left_out"
        )
    own = load(name, None, experiment.features)
    if list(own.input_shape) != facts["shape"]:
        raise UserError(
            f"the node's own records have shape {list(own.input_shape)}, but the experiment's have shape "
            f"{facts['shape']}: give the node records of that shape"
        )
    # the server receives this error message, so the message must not quote a label
    if int(own.train.labels.max()) >= facts["classes"]:
        raise UserError(
            f"the node's own records have a class beyond the experiment's {facts['classes']}: give the node records "
            "with the experiment's classes"
        )
    if own.validation is not None:
        raise UserError(
            f"the node's own records come with {len(own.validation):,} validation records, and a node evaluates no "
            "models: leave them out"
        )
    dataset = replace(own, num_classes=facts["classes"], mean=tuple(facts["mean"]), std=tuple(facts["std"]))
    # A node does not partition its records. The partition is set to iid, which has no feature skew.
    experiment = changed(experiment, data=name, partition="iid")
    none, everything = np.zeros(0, dtype=np.int64), np.arange(len(dataset.train))
    held = none if client in experiment.forgotten else everything
    shards = Parts.of([held if one == client else none for one in range(experiment.num_clients)])
    return Job(experiment, dataset, shards, device_of(experiment), None, weights=_weights(experiment))
