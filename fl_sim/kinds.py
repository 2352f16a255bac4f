"""Kinds, the variants of a setting: names, fields and short forms of their classes, protocols of optional members."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Protocol, Self, get_args, get_origin, runtime_checkable

from pydantic import BaseModel

from fl_sim.own_code import PACKAGES


class LocalChoices(Protocol):
    """The settings of local training that a kind's ``check`` may read."""

    @property
    def label_smoothing(self) -> float:
        """The share of a label that is spread over all classes."""

    @property
    def batch_norm(self) -> str:
        """The treatment of BatchNorm layers: "none", "average" or "personal"."""

    @property
    def optimizer(self) -> str:
        """The name of the optimiser."""


class Harm(Protocol):
    """The settings of an attack that a kind's ``check`` may read."""

    @property
    def clients(self) -> int:
        """The number of attacking clients."""


class Compressing(Protocol):
    """The settings of compression that a kind's ``check`` may read."""

    @property
    def keeps_error(self) -> bool:
        """True if the unsent rest of an update is sent in a later round (error feedback)."""


class Choices(Protocol):
    """The experiment in the form that a kind's ``check`` may read."""

    @property
    def clients(self) -> int:
        """The number of clients of the experiment."""

    @property
    def rounds(self) -> int:
        """The number of rounds of the experiment."""

    @property
    def partition(self) -> object:
        """The partition."""

    @property
    def algorithm(self) -> object:
        """The algorithm."""

    @property
    def aggregator(self) -> object:
        """The aggregator."""

    @property
    def sampler(self) -> object:
        """The sampler."""

    @property
    def sampling_seed(self) -> int | None:
        """The seed from which cohorts are sampled, if it is set."""

    @property
    def local(self) -> LocalChoices:
        """The settings of local training."""

    @property
    def preprocess(self) -> object:
        """The stage before the first round."""

    @property
    def compress(self) -> Compressing:
        """The compression of updates."""

    @property
    def attack(self) -> Harm:
        """The attack by hostile clients."""

    @property
    def devices(self) -> object:
        """The devices of the virtual clock."""

    @property
    def engine(self) -> object:
        """The engine."""

    @property
    def hides_time(self) -> bool:
        """True if durations of clients would reveal private facts and are therefore hidden."""


class Staged(Protocol):
    """A kind that adds a stage before the first round or after the last round."""

    stage: ClassVar[str]
    """Import path of the stage, as "module:Class"."""


class Proceeding(Protocol):
    """A kind of server that runs a procedure of its own in place of the rounds."""

    procedure: ClassVar[str]
    """Import path of the procedure (fl_sim.simulation.stage.Procedure), as "module:Class"."""


@runtime_checkable
class Checking(Protocol):
    """A kind that excludes some values of other settings."""

    def check(self, experiment: Choices) -> None:
        """Raise ValueError, in one line with the cure, if ``experiment`` is incompatible with this kind."""


@runtime_checkable
class Completing(Protocol):
    """A kind that can compute a missing setting from the whole experiment, such as noise from a budget."""

    @classmethod
    def completed(cls, given: Mapping[str, Any], made: Callable[[Mapping[str, Any]], Any]) -> Mapping[str, Any]:
        """Return the table ``given`` of this kind's settings, with missing values computed.

        ``made``: a function from such a table to the experiment with it. Raises UserError if no value fits.
        """


@runtime_checkable
class Sealing(Protocol):
    """A kind that reads a file of the user and stores the file's digest, which detects changes of the file."""

    def sealed(self) -> Self:
        """Return these settings with the digest of the file. Raises UserError if the file cannot be read."""


@runtime_checkable
class Budgeted(Protocol):
    """A kind with a privacy budget of its own."""

    def check_budget(self, experiment: Choices, records: Sequence[int], num_classes: int) -> None:
        """Raise UserError if the budget is too small for the first release. Called before any training.

        ``records``: the number of records of each client. The check takes seconds at most.
        """


@runtime_checkable
class Remarking(Protocol):
    """A kind with settings that have no effect, or an unexpected effect, in some experiments."""

    def remarks(self, experiment: Choices) -> Sequence[str]:
        """Return sentences for the user about settings without effect or with an unexpected one, each in one line."""


@runtime_checkable
class Promising(Protocol):
    """A kind that may promise privacy: then a run shows nothing about single clients, not even durations."""

    is_private: ClassVar[bool]


@runtime_checkable
class Supplying(Protocol):
    """A kind that gives all clients additional training records."""

    @property
    def replaces_records(self) -> bool:
        """True if clients train only on the supplied records, not on their own records."""


def replaces_records(kind: object) -> bool:
    """Return True if clients train only on the records that ``kind`` supplies, not on their own records."""
    return isinstance(kind, Supplying) and kind.replaces_records


@runtime_checkable
class Captioned(Protocol):
    """A kind that adds captions to a table."""

    @classmethod
    def captions(cls, chosen: Sequence[Any], values: Callable[[Iterable[Any]], str]) -> list[str]:
        """Return captions, one sentence each, for the settings of this kind that occur in a table.

        ``values``: a function that writes the values of one field as text, each value once.
        """


@runtime_checkable
class Choosing(Protocol):
    """The marker of a field that accepts more kinds than the union in its annotation."""

    def known(self, annotation: Any) -> Mapping[str, type]:
        """Return {kind: settings class} of all kinds that are known for the field."""

    def names(self, annotation: Any) -> list[str]:
        """Return the valid kind names."""


@runtime_checkable
class Computing(Protocol):
    """A kind that may compute with the numbers of a record; tokens are numbers with which this makes no sense."""

    computes_with_records: ClassVar[bool]


def hides_clients(aggregator: object) -> bool:
    """Return True if an aggregator hides the cohort; then the set of clients with records is secret, too.

    In this case a client without records sends zeros, even if there is a pool of synthetic records, and counts as any
    other client does.
    """
    return isinstance(aggregator, Promising) and aggregator.is_private


def is_none(kind: object) -> bool:
    """Return True if a setting has the kind "none", such as no compression, no attack, no virtual clock, no stage."""
    return kind_of(kind) == "none"


def path_in(kind: type, name: str) -> str:
    """Return the import path ``module:Class`` of a kind's ``stage``, ``layer`` or ``procedure``; empty if it has none.

    A parameter of the same name in a user's own kind is not an import path.
    """
    path = getattr(kind, name, "")
    return path if isinstance(path, str) and ":" in path else ""


def off(setting: str, instead: str) -> str:
    """Return a remark for the user about a setting without effect.

    >>> off("algorithm.mu=0", "the run is one of fedavg")
    'algorithm.mu=0 has no effect: the run is one of fedavg'
    """
    return f"{setting} has no effect: {instead}"


def kinds(union: Any) -> dict[str, type]:
    """Return {kind: class} of the members of a union of settings classes (or of one class)."""
    members = get_args(union) if get_origin(union) is not None else (union,)
    return {field_defaults(member)["kind"]: member for member in members}


def field_defaults(settings: type) -> dict[str, Any]:
    """Return {field: default} of a settings class, in order; works for pydantic models and dataclasses."""
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
    """Return the kind of a settings object: the name of a kind of fl-sim, or the import path of the user's own class.

    A class that inherits from a class of fl-sim is the user's own, and its kind is its own import path.
    """
    settings = type(value)
    return f"{settings.__module__}:{settings.__qualname__}" if is_own_kind(value) else str(value.kind)


def is_own_kind(value: object) -> bool:
    """Return True if the class of ``value`` is the user's own."""
    return is_own(type(value))


def is_own(kind: type) -> bool:
    """Return True if ``kind`` is a class of the user's own, from outside of fl-sim's packages."""
    return kind.__module__.partition(".")[0] not in PACKAGES


def title_of(value: Any) -> str:
    """Return the title of a kind: its attribute ``title``, or the name of its class if it has none."""
    return str(value.title) if "title" in vars(type(value)) else type(value).__name__


def short_form(value: Any) -> str:
    """Return the short form of a settings object, such as ``label-1`` or ``dirichlet:0.05``."""
    kind = kind_of(value)
    parameter = next((name for name in field_defaults(type(value)) if name != "kind"), None)
    if parameter is None:
        return kind
    given = getattr(value, parameter)
    return f"{kind.removesuffix('-k')}-{given}" if is_numbered(kind, type(value)) else f"{kind}:{given}"


def is_numbered(kind: str, settings: type) -> bool:
    """Return True if the kind's name contains a number, as in ``label-2``, which is ``label-k`` with ``k`` = 2."""
    return kind.endswith("-k") and "k" in field_defaults(settings)
