"""Groups of settings in an experiment: ``model``, ``local`` (with learning-rate schedules), ``evaluate``, engines."""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeAlias

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from fl_sim.errors import UserError
from fl_sim.kinds import Choices, hides_clients, is_none, is_own_kind, kind_of, off
from fl_sim.own_code import error_context, load_object
from fl_sim.seeding import rng
from fl_sim.settings import OneOf, Settings, by_default, known_model, model_line
from fl_sim.types import BatchNorm, Optimizer, Precision
from partitions import Parts

_NAMES = r"[\w.:-]+(,[\w.:-]+)*"  # matches one or more names, separated by commas
_CONSTANT = "the learning rate is the same in every round"


def _joined(value: Any) -> Any:
    """Return a list of names as one text with commas; any other value is returned unchanged."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


class Model(Settings):
    """The model: its architecture, the weights from which it starts, and the part that is trained.

    ``name``: the name of a model, an architecture of a library (torchvision:NAME, timm:NAME, hf:FOLDER), or the import
    path of a function that returns a model. Left out: a model that suits the data. ``weights``: the file with the
    initial weights of the model, or the directory of another run, whose last model is then used. Left out: for
    hf:FOLDER the weights in this folder, and for all other models random weights. "none": random weights. The file is a
    safetensors file or a ``state_dict`` of PyTorch, without other Python objects. If the head (last layer) in the file
    is for another number of classes, the model gets a new head. ``digest``: the SHA-256 of the file with the initial
    weights. A run stores the digest at its start, to detect a later change of the file. ``others``: the names of
    further architectures. ``model=mlp,2nn`` sets two architectures. With k architectures, client i has the architecture
    number i mod k, counted from 0. Clients must then send no parameters, as with algorithm local-only. The evaluated
    model has the first architecture.

    ``trainable``: the parameters that are trained and sent; all other parameters keep their initial values. "head" is
    the last linear layer. "last:2" is the last two layers with parameters. "bias" is all biases, and "norm" is all
    parameters of normalisation layers. "lora" adds adapters to linear layers, convolutions and embeddings, and trains
    only the adapters. A model that already has adapters (names with lora_) gets no further adapters. Names of
    parameters or modules are possible, too; several are separated by commas. "all" is all parameters that the model
    itself does not freeze. ``rank``: the rank r of an adapter. An adapter has two matrices: B with r columns, and A
    with r rows. The adapter changes the weights W of its layer to W + alpha / r * B A. ``alpha``: the factor alpha of
    an adapter. ``dropout``: the dropout rate of an adapter's inputs in training. ``target_modules``: the layers with
    adapters, by name or by the end of their names, such as "query,value". Left out: all layers that can have an
    adapter.
    """

    name: Annotated[str, AfterValidator(known_model)] = ""
    others: tuple[Annotated[str, AfterValidator(known_model), Field(min_length=1)], ...] = ()
    weights: str = ""
    digest: str = Field("", pattern="^([0-9a-f]{64})?$")
    trainable: Annotated[str, BeforeValidator(_joined), Field(pattern=rf"^{_NAMES}$")] = "all"
    rank: int = Field(8, ge=0, le=10**6)
    alpha: float = Field(16.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: Annotated[str, BeforeValidator(_joined), Field(pattern=rf"^({_NAMES})?$")] = ""

    def __str__(self) -> str:
        """Return the settings of this group in one line, such as ``resnet, weights=cifar100.safetensors``."""
        return model_line({name: getattr(self, name) for name in ("name", *self._options)})

    @model_validator(mode="before")
    @classmethod
    def _several(cls, table: Any) -> Any:
        """Split a text of several models, such as "mlp,2nn": the first becomes ``name``, the rest become ``others``."""
        given = table.get("name") if isinstance(table, dict) else table
        names = given.split(",") if isinstance(given, str) else given
        if not isinstance(names, list | tuple) or (len(names) < 2 and names is not table) or not names:
            return table
        if isinstance(table, dict) and table.get("others"):
            raise ValueError(
                f"model.name={','.join(map(str, names))} and model.others are both set: give all names in one place"
            )
        rest = {"others": names[1:]} if len(names) > 1 else {}
        return {**(table if isinstance(table, dict) else {}), "name": names[0], **rest}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all k architectures. Client i has the architecture number i mod k, counted from 0."""
        return (self.name, *self.others)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if clients have different architectures, and a setting needs one common architecture."""
        if not self.others:
            return
        what = f"model={','.join(self.names)} gives clients different architectures"
        if not getattr(experiment.algorithm, "sends_nothing", False):
            raise ValueError(
                f"{what}, and algorithm {kind_of(experiment.algorithm)} averages their parameters: give one model, or "
                "use an algorithm whose clients send no parameters, such as local-only"
            )
        refused = {
            "model.weights": (self.weights, self.weights not in {"", "none"}),
            "model.trainable": (self.trainable, self.trainable != "all"),
            "local.batch_norm": (experiment.local.batch_norm, experiment.local.batch_norm != "none"),
            "attack": (kind_of(experiment.attack), experiment.attack.clients > 0),
            "server": (kind_of(experiment.server), kind_of(experiment.server) != "synchronous"),
        }
        for name, (value, is_refused) in refused.items():
            if is_refused:
                raise ValueError(
                    f"{what}, and {name}={value} needs the same architecture for all: leave {name} out, or give one "
                    "model"
                )

    def sealed(self, name: str = "") -> Self:
        """Return a copy of these settings with the digest of the weights file, to detect later changes of the file.

        Raises UserError if the file cannot be read.

        ``name``: the name of the model, used if the setting ``name`` is empty.
        """
        from fl_sim.store.weights import digest_of  # noqa: PLC0415 (torch is imported late)

        name = self.name or name
        return self.model_copy(update={"name": name, "digest": self.digest or digest_of(name, self.weights)})

    @property
    def without_weights(self) -> Self:
        """The same architecture with random weights."""
        return self.model_copy(update={"weights": "none", "digest": ""})

    @property
    def origin(self) -> str:
        """The file of the initial weights, or the name of the model if the model's library provides the weights."""
        return self.weights or self.name

    @model_validator(mode="after")
    def _has_a_file(self) -> Self:
        if self.digest and (self.weights == "none" or (not self.weights and ":" not in self.name)):
            raise ValueError(
                "model.digest is the digest of a file of weights: set model.weights, or leave model.digest out"
            )
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> Any:
        """Write only the model's name if all other settings have their defaults, as older versions of fl-sim did."""
        written: dict[str, Any] = write(self)
        return {key: written[key] for key in ("name", *self._options)} if self._options else self.name

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        for name in ("rank", "alpha", "dropout", "target_modules"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and "lora" not in self.trainable.split(","):
                raise ValueError(
                    f"model.{name}={value} is a setting of adapters, and model.trainable={self.trainable} adds no "
                    f"adapters: set model.trainable=lora, or leave model.{name} out"
                )
        return self

    @property
    def _options(self) -> list[str]:
        """The names of the settings of this group that differ from their defaults, without the setting ``name``."""
        fields = type(self).model_fields
        return [name for name in fields if name != "name" and getattr(self, name) != fields[name].default]


class RateSchedule(Protocol):
    """A schedule of the learning rate: a class of this module, or a user-defined class."""

    def factor(self, server_round: int, rounds: int) -> float:
        """Return the factor (at least 0) by which ``local.learning_rate`` is multiplied in a round.

        ``server_round``: the number of the round, from 1 to ``rounds``.
        """


class Constant(Settings):
    """The same learning rate in every round."""

    kind: Literal["constant"] = "constant"

    def factor(self, server_round: int, rounds: int) -> float:
        """Return the factor by which ``local.learning_rate`` is multiplied in this round."""
        del server_round, rounds
        return 1.0


class Exponential(Settings):
    """The learning rate is multiplied by ``decay``^(round - 1), with rounds counted from 1."""

    kind: Literal["exponential"] = "exponential"
    decay: float = Field(0.99, gt=0, le=1)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a warning if these settings leave the learning rate constant; an empty list otherwise."""
        del experiment
        return [] if self.decay < 1 else [off("local.schedule.decay=1", _CONSTANT)]

    def factor(self, server_round: int, rounds: int) -> float:
        """Return the factor by which ``local.learning_rate`` is multiplied in this round."""
        del rounds
        return float(self.decay ** (server_round - 1))


class Step(Settings):
    """The learning rate is multiplied by ``decay`` once per ``every`` rounds."""

    kind: Literal["step"] = "step"
    every: int = Field(10, ge=1)
    decay: float = Field(0.1, gt=0, le=1)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a warning if these settings leave the learning rate constant; an empty list otherwise."""
        if self.decay == 1:
            return [off("local.schedule.decay=1", _CONSTANT)]
        if self.every < experiment.rounds:
            return []
        return [off(f"local.schedule.every={self.every}", f"rounds={experiment.rounds}, and {_CONSTANT}")]

    def factor(self, server_round: int, rounds: int) -> float:
        """Return the factor by which ``local.learning_rate`` is multiplied in this round."""
        del rounds
        return float(self.decay ** ((server_round - 1) // self.every))


class Cosine(Settings):
    """The learning rate is multiplied by half a cosine wave: 1 in the first round, ``final`` after the last round."""

    kind: Literal["cosine"] = "cosine"
    final: float = Field(0.0, ge=0, le=1)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a warning if these settings leave the learning rate constant; an empty list otherwise."""
        del experiment
        return [] if self.final < 1 else [off("local.schedule.final=1", _CONSTANT)]

    def factor(self, server_round: int, rounds: int) -> float:
        """Return the factor by which ``local.learning_rate`` is multiplied in this round."""
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * (server_round - 1) / rounds)) / 2


Schedule: TypeAlias = Constant | Exponential | Step | Cosine


def _whole_as_int(value: float) -> float:
    """Return a whole number as int, so that files contain 10 and not 10.0. Return any other number unchanged."""
    return int(value) if value == int(value) else value


def goes_by_steps(local: Mapping[str, Any]) -> bool:
    """Return True if the settings ``local`` set the length of training in steps instead of epochs."""
    return str(local.get("steps", 0)) != "0"


class Local(Settings):
    """The training of clients in a round: NIID-Bench's protocol, but with one epoch in place of ten.

    ``epochs``: the number of passes over a client's records in a round; 0.5 is half of an epoch's batches, rounded up.
    ``steps``: the number of minibatch steps of every client in a round, in place of ``epochs`` (0: ``epochs`` is used).
    ``batch_size``: the number of records in a step; the last batch of an epoch may be smaller. ``learning_rate``: the
    learning rate of the first round. ``schedule``: the change of the learning rate over the rounds. ``momentum``: the
    momentum of SGD; its buffer starts at 0 in every round. ``weight_decay``: a factor. Each weight times this factor is
    added to the gradient of the weight ("adamw" shrinks the weight itself).

    ``clip_norm``: the largest L2 norm of the whole gradient, over all parameters (0: no clipping). A gradient with a
    larger norm is scaled down. This gradient includes the terms that the method adds. Weight decay and momentum are
    applied after the clipping. This clipping promises no privacy, unlike the aggregator ``global-dp``.
    ``label_smoothing``: a share in [0, 1). In training, this share of every label is spread evenly over all classes.
    ``optimizer``: "sgd", or torch's "adam" or "adamw", which start anew in every round and do not use ``momentum``
    (whose default is then 0). ``augment``: the random change of images in training. "crop" pads an image by 4 black
    pixels on every side, and cuts out a window of the image's size at a random place. "flip" mirrors an image with
    probability 1/2. "crop-flip" crops and flips. "reflect-crop" and "reflect-crop-flip" pad with the image's own
    pixels, mirrored at the edge, as NIID-Bench's program does with CIFAR-10.

    ``batch_norm``: the treatment of BatchNorm layers. "none" refuses models with BatchNorm. "average" averages running
    statistics in the same way as parameters, for every method. With "personal", each client trains with its own
    BatchNorm layers, which no mean replaces (FedBN, Li et al. 2021). Unlike in FedBN, clients also send these layers,
    and the server computes their mean over the last cohort. The evaluated model has this mean, and a client starts from
    it in its first round.

    ``personal``: the parameters that stay on every client, for any method. Clients train these parameters, but do not
    send them, and the server does not average them. "head" is the last linear layer, and "body" is all other
    parameters. Names of parameters are separated by commas. With "none" all parameters are sent.

    ``privacy``: the privacy mechanism that each client applies itself. "dp-sgd" makes every local step private for each
    record. "local-dp" makes each update private for the whole client.

    ``precision``: "tf32" rounds the inputs of matrix products to 11 bits, and "bfloat16" rounds them to 8 bits. Sums,
    weights, steps and evaluation stay float32. "tf32" is for GPUs. "bfloat16" is for GPUs, and for the native trainer
    on processors with bfloat16 products (AVX512-BF16, or AMX). With ``engine.stack`` above 1, "bfloat16" works on any
    CPU, but saves no time.
    """

    epochs: Annotated[float, AfterValidator(_whole_as_int), PlainSerializer(_whole_as_int, return_type=int | float)] = (
        Field(1, ge=0, le=10**6)
    )
    steps: int = Field(0, ge=0, le=10**9)
    batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(0.01, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(1e-5, ge=0)
    clip_norm: float = Field(0.0, ge=0)
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    optimizer: Optimizer = "sgd"
    augment: Literal["none", "crop", "flip", "crop-flip", "reflect-crop", "reflect-crop-flip"] = "none"
    batch_norm: BatchNorm = "none"
    schedule: Annotated[Schedule, OneOf("local.schedule", wants=RateSchedule)] = Constant()
    precision: Precision = "float32"
    personal: str = Field("none", pattern=r"^[\w.,]+$")
    privacy: Annotated[object, OneOf("local.privacy", group="fl_sim.local.privacy")] = by_default("none")

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out newer settings with default values. So all versions write the same file for the same settings."""
        written: dict[str, Any] = write(self)
        unused = {"personal"} if self.personal == "none" else set()
        unused |= {"privacy"} if is_none(self.privacy) else set()
        return {key: value for key, value in written.items() if key not in unused}

    def rate_in(self, server_round: int, rounds: int) -> float:
        """Return the learning rate of round ``server_round`` of ``rounds``, as the schedule defines it."""
        with error_context(f"factor of {type(self.schedule).__name__}"):
            factor = self.schedule.factor(server_round, rounds)
            if not 0 <= factor < math.inf:
                raise ValueError(f"returned {factor!r} in round {server_round}, not a finite number of at least 0")
            return self.learning_rate * factor

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if ``privacy`` is the user's own class, or if another setting rules out BatchNorm layers.

        Attacks and some aggregators do not support the running statistics of BatchNorm layers.
        """
        if is_own_kind(self.privacy):
            raise ValueError(
                f"local.privacy {kind_of(self.privacy)} is your own code, and no epsilon would cover it: use dp-sgd "
                "or local-dp, or write an algorithm with its own trainer and no epsilon "
                "(examples/private_steps.py)"
            )
        aggregator, attack, chosen = experiment.aggregator, experiment.attack, f"local.batch_norm={self.batch_norm}"
        if self.batch_norm == "none":
            return
        if hides_clients(aggregator):
            raise ValueError(
                f"{chosen} cannot run under aggregator {kind_of(aggregator)}: running statistics are means over a "
                "client's records, and clipping an update does not bound them; take a model with nn.GroupNorm"
            )
        if kind_of(aggregator) != "mean":
            raise ValueError(
                f"{chosen} works only with aggregator mean: {kind_of(aggregator)} compares the updates of single "
                "clients, and running statistics are not part of an update; leave aggregator out, or take a model with "
                "nn.GroupNorm"
            )
        if not is_none(attack):
            raise ValueError(
                f"{chosen} cannot run with attack {kind_of(attack)}: no attack defines the running statistics of "
                "hostile clients; leave attack out, or take a model with nn.GroupNorm"
            )

    @field_validator("personal", mode="before")
    @classmethod
    def _names_parameters(cls, given: Any) -> Any:
        """Refuse "batch-norm", which is no parameter: ``batch_norm=personal`` makes BatchNorm layers personal."""
        if given == "batch-norm":
            raise ValueError("'batch-norm' is no parameter: for FedBN set local.batch_norm=personal")
        return given

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, table: Any) -> Any:
        """Set the default of ``epochs`` to 0 if ``steps`` is set, and the default of ``momentum`` to 0 for Adam(W)."""
        if not isinstance(table, dict):
            return table
        filled = {"epochs": 0, **table} if goes_by_steps(table) else table
        return {"momentum": 0.0, **filled} if filled.get("optimizer", "sgd") != "sgd" else filled

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        if self.optimizer != "sgd" and self.momentum:
            raise ValueError(
                f"local.momentum={self.momentum:g} does not work with local.optimizer={self.optimizer}, which has its "
                "own momentum: leave local.momentum out, or set it to 0"
            )
        if bool(self.epochs) == bool(self.steps):
            raise ValueError(
                f"local.epochs={self.epochs} and local.steps={self.steps}: clients train for epochs or steps; set one "
                "of them and leave the other out, or at 0"
            )
        return self


def _share_or_given(value: Any) -> float | Literal["given"]:
    if value == "given":
        return "given"
    try:
        share = float(value)
    except (TypeError, ValueError, OverflowError):
        share = math.nan
    if not 0 <= share < 1:
        raise ValueError("it must be a share of every client's records, at least 0 and below 1, or the word 'given'")
    return share


Validation: TypeAlias = Annotated[
    float | Literal["given"], PlainValidator(_share_or_given, json_schema_input_type=float | Literal["given"])
]
"""The share of every client's training records that is held out for validation, or "given": the data set's own."""


def _known_own_tests(value: str) -> str:
    name, _, share = value.partition(":")
    if value in {"none", "own", "class-shares"}:
        return value
    if name == "pooled":
        with suppress(ValueError):
            if 0 < float(share or "0.25") < 1:
                return f"pooled:{float(share or '0.25'):g}"
    raise ValueError("it must be none, own, class-shares, or pooled:SHARE, a share above 0 and below 1, such as 0.25")


def _callable_at(path: str) -> str:
    if path != "none" and not callable(found := load_object(path, "evaluate.metrics")):
        raise ValueError(
            f"it must name a function of (round, model, test records), not an object of type {type(found).__name__}"
        )
    return path


class Evaluate(Settings):
    """The records on which the server's model is measured, and the rules that stop a run early.

    ``validation``: the share of every client's training records that is held out (0: no record is held out). The share
    is rounded to whole records. A client with two or more records holds out at least one record. Clients train on their
    other records. The model is measured on the union of all clients' held-out records, with their true labels and with
    each client's feature skew. The server itself measures the model, because this is a simulation. In a real
    federation, clients would measure the model and send their numbers of right answers. The test set is not used for
    validation. With "given", the model is measured on the validation records that the data set comes with (``x_val`` of
    an npz file), which no client holds.

    ``test``: the times at which the model is measured on the test records. With "rounds" it is measured after every
    evaluated round, and with "last" only after the last round. "never" is for a search of settings by validation, or
    for private test records.

    ``test_is_public``: true states that the test records of the user's own data are public. A run that promises privacy
    measures models on public records only, because the measures are published and no epsilon covers them.

    ``clients``: the records on which each client's own model is measured. "own" uses the test records from a client's
    sources (such as writers), if the data name the sources. "class-shares" uses records of the test set with the
    client's class distribution. "pooled:0.25" merges the training set and the test set, partitions all records, and
    holds out a quarter of each client's records as its test records. This is PFLlib's protocol; the test set then
    consists of all clients' test records. "none" measures the server's model only. ``personal_every``: a number n. The
    clients' own models are measured after every n-th round, and after the last round. ``fine_tune_epochs``: the number
    of epochs for which each client trains its own model after the last round. This model is measured, too (0: no such
    training). ``held_out_clients``: the share of clients that never take part in a round. Such clients receive the
    model after the last round. The model is measured on their records separately.

    ``count_noise``: the standard deviation of the Gaussian noise on a client's number of right answers. It is for runs
    with ``local.privacy=dp-sgd``. In such a run, each evaluation of a client's own model is a release, and its cost is
    first written into the client's privacy ledger. The privacy unit is one test record, which changes the number of
    right answers by at most 1. The number of a client's test records is public. If no value is given, the run computes
    the smallest noise for which the total cost of all evaluations is at most ``local.privacy.epsilon``. Each client
    measures only its own model, and all measures are computed from the noisy numbers. Noise is left out in one case:
    with ``evaluate.clients=own`` and public test records (a public data set, or ``evaluate.test_is_public``).
    "class-shares" is refused in such a run, because it chooses test records by the labels of training records.

    ``metrics``: user-defined metrics, as the import path of a function such as "mine:calibration", or "none". The
    function receives (round, model, test records) and returns {name: number}. It is called with the server's model
    after each round whose model is tested. With ``evaluate.clients`` set, it is also called at each client, with each
    of the client's models and the client's own test records.

    ``patience``: the run stops after this number of rounds without a better validation accuracy than before (0: no
    early stop). ``target_accuracy``: the run stops once the validation accuracy is at least this value (0: no early
    stop).
    """

    validation: Validation = 0.0
    test: Literal["rounds", "last", "never"] = "rounds"
    test_is_public: bool = False
    patience: int = Field(0, ge=0)
    target_accuracy: float = Field(0.0, ge=0, le=1)
    clients: Annotated[str, AfterValidator(_known_own_tests)] = "none"
    personal_every: int = Field(10, ge=1)
    fine_tune_epochs: int = Field(0, ge=0, le=10**6)
    held_out_clients: float = Field(0.0, ge=0, lt=1)
    count_noise: float | None = Field(None, ge=1e-3, lt=2**20)
    metrics: Annotated[str, AfterValidator(_callable_at)] = "none"

    stage: ClassVar[str] = "fl_sim.stages.own_models:OwnModels"

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        for name in ("fine_tune_epochs", "held_out_clients", "count_noise"):
            if (value := getattr(self, name)) and not self.measures_clients:
                raise ValueError(
                    f"evaluate.{name}={value:g} is about clients' own models, and evaluate.clients=none measures none: "
                    f"set evaluate.clients=class-shares, or leave evaluate.{name} out"
                )
        for name in ("patience", "target_accuracy"):
            if (value := getattr(self, name)) and not self.validation:
                raise ValueError(
                    f"evaluate.{name}={value:g} stops a run by its validation accuracy, and there are no validation "
                    f"records: set evaluate.validation, for example to 0.1, or leave evaluate.{name} out"
                )
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out newer settings with default values. So all versions write the same file for the same settings."""
        written: dict[str, Any] = write(self)
        newer = {"test_is_public", "clients", "personal_every", "fine_tune_epochs", "held_out_clients", "count_noise"}
        newer |= {"metrics"}
        unused = {name for name in newer if getattr(self, name) == type(self).model_fields[name].default}
        return {key: value for key, value in written.items() if key not in unused}

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a warning if there is only one client, because its own model is then the server's model."""
        if not (self.measures_clients and getattr(experiment.algorithm, "is_central", False)):
            return []
        return [off(f"evaluate.clients={self.clients}", "there is one client, with all records")]

    @property
    def measures_clients(self) -> bool:
        """True if the clients' own models are measured."""
        return self.clients != "none"

    @property
    def pooled_share(self) -> float:
        """The share of a client's records that become its test records; 0 if the data set's test set is used."""
        return float(self.clients.partition(":")[2]) if self.clients.startswith("pooled") else 0.0

    @property
    def measures_nothing(self) -> bool:
        """True if the server's model is never measured: neither on test records nor on validation records."""
        return self.test == "never" and not self.validation

    def tests(self, *, is_last: bool) -> bool:
        """Return True if the model is measured on the test set after a round in which models are measured.

        ``is_last``: True for the last round of the run.
        """
        return self.test == "rounds" or (self.test == "last" and is_last)


def held_out(shards: Parts, share: float, seed: int) -> tuple[Parts, Parts]:
    """Split each client's records, and return (training records, held-out records) of all clients.

    In both results, a client's records keep their order.

    ``share``: the share of each client's records that is held out. Raises UserError if a client would have no training
    records left, or if no record would be held out.
    """
    chosen = np.zeros(len(shards.records), dtype=bool)
    for client in np.flatnonzero(shards.sizes > 1).tolist():
        own = chosen[shards.bounds[client] : shards.bounds[client + 1]]
        count = max(1, round(share * len(own)))
        if count == len(own):
            raise UserError(
                f"evaluate.validation={share:g} holds out all {len(own)} records of client {client}, so none are left "
                "for training: use a smaller share, or fewer clients"
            )
        own[rng(seed, "validation", client).permutation(len(own))[:count]] = True
    if not chosen.any():
        raise UserError(
            f"evaluate.validation={share:g} holds no records out, because no client has two records: leave it out, or "
            "use fewer clients"
        )
    return shards.where(~chosen), shards.where(chosen)


class Auto(Settings):
    """Choose the faster engine, in-process or Ray, by timing a training step. The run prints the choice and the reason.

    ``threads``: torch threads of each worker.
    """

    kind: Literal["auto"] = "auto"
    threads: int = Field(1, ge=1)


class InProcess(Settings):
    """All clients run in this process, ``workers`` of them at the same time (0: one for each core).

    Clients train one after another if the model draws random numbers in training (dropout), or has a user-defined
    class. ``threads``: torch threads of each worker. ``stack``: the number of clients that are trained as one
    computation over stacked parameters. 0 means 100 on a GPU, and 1 on a CPU, where stacks save no time. The rounding
    of sums depends on the number of clients in a stack. ``graphs``: if true, a GPU receives each step of a stack as one
    CUDA graph, after the first few steps.
    """

    kind: Literal["inprocess"] = "inprocess"
    threads: int = Field(1, ge=1)
    workers: int = Field(0, ge=0)
    stack: int = Field(0, ge=0)
    graphs: bool = True


class Ray(Settings):
    """Ray actors execute the clients, on this machine or on a Ray cluster.

    ``cpus`` and ``gpus``: the processors and GPUs of each actor; with a fraction, several actors share a processor or a
    GPU.

    ``actors``: the number of actors; 0 means as many actors as fit into the cluster. ``address``: the address of a
    running cluster, which executes the clients. The machines of the cluster need fl-sim, but neither the data nor a
    shared disk. ``threads``: torch threads in each actor. ``stack``: the number of clients that an actor trains as one
    computation over stacked parameters. With 0, an actor with a GPU stacks its share of the clients in a round, at most
    100, and an actor without a GPU trains single clients. The rounding of sums depends on the number of clients in a
    stack.
    """

    kind: Literal["ray"] = "ray"
    actors: int = Field(0, ge=0)
    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)
    address: str = ""
    threads: int = Field(1, ge=1)
    stack: int = Field(0, ge=0)


Engine: TypeAlias = Auto | InProcess | Ray
