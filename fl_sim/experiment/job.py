"""The class ``Job``: an experiment with its data set, device and shards (each client's training records).

Each process makes one job.
"""

import copy
from collections.abc import Callable
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
from fl_sim.experiment import device, own_tests
from fl_sim.experiment.experiment import Experiment, changed
from fl_sim.experiment.frozen_body import FrozenBody, body_of
from fl_sim.experiment.groups import held_out
from fl_sim.experiment.shards import dealt_shards, moving_shards, server_records, without_forgotten, without_left_out
from fl_sim.foreign_models import source_of
from fl_sim.kinds import Computing, Sealing, is_none, is_own_kind, kind_of, path_in
from fl_sim.moved import moved_name
from fl_sim.native.kernel import load_kernel
from fl_sim.params import copied, fixed_in
from fl_sim.seeding import seed_torch, torch_alone
from fl_sim.store.tensors import read_by_content
from fl_sim.store.weights import Placed, place, read_weights, records_of
from fl_sim.trained_part import TrainedPart, train_alone, whole
from fl_sim.training.features import num_features
from fl_sim.training.loop import resident, to_tensors
from fl_sim.training.records import Source
from fl_sim.training.trainer import Trainer
from fl_sim.types import Dataset, Examples, Params, Precision
from partitions import (
    EvaluationSkew,
    FeatureSkew,
    MovingParts,
    Parts,
    RecordSkew,
    WithinSources,
)
from strategies.algorithm import Bounded, PartialTraining, Pooling, Rebuilding, num_further_outputs


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
        return device.precision_of(self.experiment, self.device)


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
    moving = moving_shards(experiment, dataset)
    dealt = dealt_shards(experiment, dataset) if moving is None else moving.first
    shards = without_left_out(experiment, without_forgotten(experiment.forgotten, dealt))
    own, weights = server_records(experiment, dataset), start_weights(experiment)
    shards = shards.where(~np.isin(shards.records, own)) if len(own) else shards
    aside = dataset.train.take(own) if len(own) else None
    job = Job(
        experiment,
        dataset,
        shards,
        device.device_of(experiment),
        data_root,
        weights=weights,
        set_aside=aside,
        moving=moving,
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


def check_precision(job: Job) -> None:
    """Raise UserError if this process does not support the precision of training.

    Nothing is checked if clients train in Ray actors with GPUs, because this process may not see these GPUs.
    """
    if not device.has_gpus_elsewhere(job.experiment):
        device.precision_of(job.experiment, job.device)


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


def start_weights(experiment: Experiment) -> Params:
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


def __getattr__(name: str) -> Any:
    """Return a public name that has moved to another module, with a DeprecationWarning."""
    return moved_name(__name__, name)
