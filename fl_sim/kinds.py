"""Kinds, the variants of a setting, such as ``fedprox`` for the setting ``algorithm``. Each kind is a settings class.

A settings class may have optional members, such as a method ``check``. This module has a protocol for each of these
members. It also has functions for the names, fields and short forms of settings.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Protocol, Self, get_args, get_origin, runtime_checkable

from pydantic import BaseModel

from fl_sim.own_code import PACKAGES


class LocalChoices(Protocol):
    """The settings of local training that other settings may read in their method ``check``."""

    @property
    def label_smoothing(self) -> float:
        """The share of each label that label smoothing spreads evenly over all classes."""

    @property
    def batch_norm(self) -> str:
        """The treatment of BatchNorm layers: "none", "average" or "personal"."""

    @property
    def augment(self) -> str:
        """The augmentation, a random change of images in training; "none" for no change."""

    @property
    def optimizer(self) -> str:
        """The name of the optimiser."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first round."""

    @property
    def momentum(self) -> float:
        """The momentum of SGD."""

    @property
    def steps(self) -> int:
        """The number of local steps; 0 if training is counted in epochs."""

    @property
    def privacy(self) -> object:
        """The privacy mechanism that each client applies itself, such as DP-SGD."""

    @property
    def personal(self) -> str:
        """The parameters that clients do not send: "none", "head", "body", or names of parameters."""


class ModelChoices(Protocol):
    """The settings of the model that other settings may read in their method ``check``."""

    @property
    def trainable(self) -> str:
        """The trained parameters: words such as "head" or names of parameters, separated by commas."""


class EvaluateChoices(Protocol):
    """The settings of evaluation that other settings may read in their method ``check``."""

    @property
    def fine_tune_epochs(self) -> int:
        """The number of epochs for which each client fine-tunes its own model after the last round."""

    @property
    def measures_clients(self) -> bool:
        """True if each client's own model is measured."""

    @property
    def validation(self) -> object:
        """The share of each client's records that is held out; "given": the data set's own validation records."""


class Harm(Protocol):
    """The settings of an attack (``attack``) that other settings may read in their method ``check``."""

    @property
    def clients(self) -> int:
        """The number of attacking clients."""


class Compressing(Protocol):
    """The settings of compression that other settings may read in their method ``check``."""

    @property
    def keeps_error(self) -> bool:
        """True for error feedback: the compression error of a round is added to the client's next update."""


class Choices(Protocol):
    """The parts of an experiment that a settings class may read in its method ``check``."""

    @property
    def clients(self) -> int:
        """The number of clients."""

    @property
    def rounds(self) -> int:
        """The number of rounds."""

    @property
    def partition(self) -> object:
        """The partition: the rule that assigns training records to clients."""

    @property
    def algorithm(self) -> object:
        """The federated algorithm, such as FedAvg."""

    @property
    def aggregator(self) -> object:
        """The aggregator: the rule that turns the updates of a round into one aggregate."""

    @property
    def sampler(self) -> object:
        """The sampler: the rule that chooses the clients of a round."""

    @property
    def sampling_seed(self) -> int | None:
        """The seed from which cohorts are sampled; None if the setting is not given."""

    @property
    def model(self) -> ModelChoices:
        """The settings of the model."""

    @property
    def local(self) -> LocalChoices:
        """The settings of local training."""

    @property
    def evaluate(self) -> EvaluateChoices:
        """The settings of evaluation."""

    @property
    def preprocess(self) -> object:
        """The stage before the first round."""

    @property
    def calibrate(self) -> object:
        """The stage after the last round, which changes the model."""

    @property
    def compress(self) -> Compressing:
        """The compression of updates."""

    @property
    def attack(self) -> Harm:
        """The attack by hostile clients."""

    @property
    def devices(self) -> object:
        """The speeds of the clients' devices, for the virtual clock."""

    @property
    def server(self) -> object:
        """The server, such as "synchronous", which waits for all clients of a round."""

    @property
    def engine(self) -> object:
        """The engine, which executes clients: in this process, or on Ray."""

    @property
    def is_private(self) -> bool:
        """True if the run promises privacy."""

    @property
    def hides_time(self) -> bool:
        """True if the run hides the computing time of each client, because the time would reveal private facts."""


class Staged(Protocol):
    """A settings class that adds a stage before the first round or after the last round."""

    stage: ClassVar[str]
    """Import path of the stage, as "module:Class"."""


class Proceeding(Protocol):
    """The settings class of a server that does not run the usual rounds, such as the asynchronous FedBuff."""

    procedure: ClassVar[str]
    """Import path of the procedure (fl_sim.simulation.stage.Procedure), as "module:Class"."""


@runtime_checkable
class Checking(Protocol):
    """A settings class that refuses some values of other settings, by the method ``check``."""

    def check(self, experiment: Choices) -> None:
        """Raise ValueError, with the cure in one line, if ``experiment`` is incompatible with these settings."""


@runtime_checkable
class Completing(Protocol):
    """A settings class that computes a missing value from the experiment, such as the noise from a privacy budget."""

    @classmethod
    def completed(cls, given: Mapping[str, Any], made: Callable[[Mapping[str, Any]], Any]) -> Mapping[str, Any]:
        """Return {field: value} for this class: the user's values ``given``, and the computed missing values.

        ``made``: a function that takes values for these fields, and returns the whole experiment with these values.
        Raises UserError if no value is possible.
        """


@runtime_checkable
class Sealing(Protocol):
    """A settings class that reads a file, such as a table of devices, and stores a digest of it to detect changes."""

    def sealed(self) -> Self:
        """Return a copy of these settings that contains the digest of their file, such as a table of devices.

        Raises UserError if the file cannot be read.
        """


@runtime_checkable
class ReadingFurther(Protocol):
    """A settings class whose code reads a second data set, such as public records for the server."""

    def further_data(self) -> str:
        """Return the name of the second data set; "" for none.

        An unfinished run cannot be resumed if this data set is the user's own, and its records have changed.
        """
        ...


@runtime_checkable
class Budgeted(Protocol):
    """A settings class with a privacy budget."""

    def check_budget(self, experiment: Choices, records: Sequence[int], num_classes: int) -> None:
        """Raise UserError if the privacy budget is too small for the first private output.

        The run calls this method before any training. The call takes a few seconds at most. ``records``: the number of
        records of each client.
        """


@runtime_checkable
class Remarking(Protocol):
    """A settings class that may warn the user about its values."""

    def remarks(self, experiment: Choices) -> Sequence[str]:
        """Return warnings, one line each, about settings with no effect or a surprising effect in this experiment."""


@runtime_checkable
class Promising(Protocol):
    """A settings class that may promise privacy. If ``is_private`` is True, a run shows no facts about a single client.

    Even the training time of a single client is then hidden.
    """

    is_private: ClassVar[bool]


@runtime_checkable
class Withstanding(Protocol):
    """A settings class with a privacy guarantee for honest clients that may hold despite hostile clients."""

    def check_hostile(self, attack: str, *, sees_honest: bool) -> None:
        """Raise ValueError if the privacy guarantee would not hold during the attack with the name ``attack``.

        ``sees_honest``: True if attackers compute their forged updates from the updates of honest clients.
        """

    def despite_hostile(self) -> str:
        """Return the reason why the guarantee holds despite hostile clients, as a clause that begins with "because"."""


@runtime_checkable
class Supplying(Protocol):
    """A settings class of a stage before round 1 that makes training records, such as synthetic records."""

    @property
    def replaces_records(self) -> bool:
        """True if clients train only on the records that the stage makes, and not on their own records."""

    @property
    def supplies_rounds(self) -> bool:
        """True if clients train on the stage's records in the rounds; False if only the server trains on them."""


@runtime_checkable
class UsingPool(Protocol):
    """A settings class whose server may learn from the synthetic records that a stage before round 1 makes."""

    @property
    def uses_pool(self) -> bool:
        """True if the server learns from the synthetic records of the stage before round 1."""


@runtime_checkable
class SettingAside(Protocol):
    """A settings class that gives some of the training records to the server, so that no client holds them."""

    @property
    def num_set_aside(self) -> int:
        """The number of training records that the server gets, at least 0."""


@runtime_checkable
class FollowingMoves(Protocol):
    """A settings class whose stage reads no shards. So it may be used in runs whose shards depend on the round."""

    follows_moves: ClassVar[bool]


def follows_moves(kind: object) -> bool:
    """Return True if a settings class states that its stage reads no shards (``FollowingMoves``)."""
    return isinstance(kind, FollowingMoves) and kind.follows_moves


def replaces_records(kind: object) -> bool:
    """Return True if clients train only on records from the stage before round 1, and not on their own records."""
    return isinstance(kind, Supplying) and kind.replaces_records


@runtime_checkable
class Captioned(Protocol):
    """A settings class that adds captions to a table of results."""

    @classmethod
    def captions(cls, chosen: Sequence[Any], values: Callable[[Iterable[Any]], str]) -> list[str]:
        """Return captions for the table, one sentence each. ``chosen``: the objects of this class in the table's runs.

        ``values``: a function that takes the values of one field in all runs, and returns a text with the distinct
        values.
        """


@runtime_checkable
class Choosing(Protocol):
    """The interface of ``OneOf``, the marker of a field whose value is an object of one of several classes."""

    def known(self, annotation: Any) -> Mapping[str, type]:
        """Return fl-sim's own settings classes for the field with this ``annotation``, as {name: class}."""

    def names(self, annotation: Any) -> list[str]:
        """Return the names of settings classes that a user may choose for a field with this ``annotation``."""


@runtime_checkable
class Computing(Protocol):
    """A settings class whose code may compute with the numbers in records, such as averages of records.

    If ``computes_with_records`` is True, the class is refused for text, because an average of token ids has no meaning.
    """

    computes_with_records: ClassVar[bool]


def hides_clients(aggregator: object) -> bool:
    """Return True if ``aggregator`` promises privacy for clients: nobody may learn which clients have records.

    With such an aggregator, a client without records sends zeros, even if it could train on synthetic records. The mean
    of the updates includes these zeros.
    """
    return isinstance(aggregator, Promising) and aggregator.is_private


def is_none(kind: object) -> bool:
    """Return True if a setting has the kind "none", such as no compression, no attack or no stage."""
    return kind_of(kind) == "none"


def path_in(kind: type, name: str) -> str:
    """Return the import path ``module:Class`` in an attribute of a settings class; empty if there is no such path.

    ``name``: the name of the attribute: "stage", "layer" or "procedure". A user's own class may have a parameter of the
    same name with another meaning. The value of such a parameter is not returned.
    """
    path = getattr(kind, name, "")
    return path if isinstance(path, str) and ":" in path else ""


def off(setting: str, instead: str) -> str:
    """Return a warning for the user: a setting has no effect. ``instead``: a sentence about what happens instead.

    >>> off("algorithm.mu=0", "the run is one of fedavg")
    'algorithm.mu=0 has no effect: the run is one of fedavg'
    """
    return f"{setting} has no effect: {instead}"


def kinds(union: Any) -> dict[str, type]:
    """Return {name: class} of the settings classes in ``union``, a union type or a single class."""
    members = get_args(union) if get_origin(union) is not None else (union,)
    return {field_defaults(member)["kind"]: member for member in members}


def field_defaults(settings: type) -> dict[str, Any]:
    """Return {field: default} of a settings class, a pydantic model or a dataclass, in the order of the fields."""
    if issubclass(settings, BaseModel):
        return {name: field.default for name, field in settings.model_fields.items()}
    assert is_dataclass(settings)
    return {field.name: field.default for field in fields(settings)}


def is_settings(settings: type) -> bool:
    """Return True if a class is a settings class: a frozen pydantic model or a frozen dataclass."""
    if issubclass(settings, BaseModel):
        return bool(settings.model_config.get("frozen"))
    return is_dataclass(settings) and bool(settings.__dataclass_params__.frozen)  # type: ignore[attr-defined]  # typeshed has no such name


def kind_of(value: Any) -> str:
    """Return the name of a settings object's class: fl-sim's short name, or the import path of a user's own class.

    A user's class has its import path as its name, even if it inherits from a class of fl-sim.
    """
    settings = type(value)
    return f"{settings.__module__}:{settings.__qualname__}" if is_own_kind(value) else str(value.kind)


def is_own_kind(value: object) -> bool:
    """Return True if the class of ``value`` is the user's own, from outside of fl-sim's packages."""
    return is_own(type(value))


def is_own(kind: type) -> bool:
    """Return True if the class ``kind`` is the user's own, from outside of fl-sim's packages."""
    return kind.__module__.partition(".")[0] not in PACKAGES


def title_of(value: Any) -> str:
    """Return the readable title of a settings object: the class attribute ``title``, or the name of the class."""
    return str(value.title) if "title" in vars(type(value)) else type(value).__name__


def short_form(value: Any) -> str:
    """Return the short form of a settings object, such as ``label-1``, ``dirichlet:0.05`` or ``rotate:4 label-1``."""
    short = kind = kind_of(value)
    inner = inner_split(value)
    parameter = next((name for name in field_defaults(type(value)) if name != "kind"), "over")
    if parameter != "over":
        given = getattr(value, parameter)
        short = f"{kind.removesuffix('-k')}-{given}" if is_numbered(kind, type(value)) else f"{kind}:{given}"
    return short if inner is None else f"{short} {short_form(inner)}"


def inner_split(value: Any) -> Any:
    """Return the inner partition of a partition such as ``rotate:4 label-1``: the value of its field ``over``.

    Return None if the partition has no such field, or if the field has its default.
    """
    defaults = field_defaults(type(value))
    return value.over if "over" in defaults and value.over != defaults["over"] else None


def is_numbered(kind: str, settings: type) -> bool:
    """Return True if the name of a kind contains the parameter ``k``: ``label-2`` means ``label-k`` with ``k`` = 2."""
    return kind.endswith("-k") and "k" in field_defaults(settings)
