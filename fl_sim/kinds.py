"""Kinds: names, fields and short forms of settings classes, and the protocols of their optional members."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Protocol, Self, get_args, get_origin, runtime_checkable

from pydantic import BaseModel

from fl_sim.own_code import PACKAGES


class LocalChoices(Protocol):
    """The settings of local training that the check of a kind reads."""

    @property
    def label_smoothing(self) -> float:
        """The share of a label that is spread over all classes."""

    @property
    def batch_norm(self) -> str:
        """The treatment of BatchNorm layers."""

    @property
    def optimizer(self) -> str:
        """The name of the optimiser."""


class Harm(Protocol):
    """The settings of an attack that the check of a kind reads."""

    @property
    def clients(self) -> int:
        """The number of hostile clients."""


class Compressing(Protocol):
    """The settings of compression that the check of a kind reads."""

    @property
    def keeps_error(self) -> bool:
        """True if the rest of an update is sent in a later round (error feedback)."""


class Choices(Protocol):
    """An experiment as the ``check`` of a kind sees it."""

    @property
    def clients(self) -> int:
        """The number of clients in the settings."""

    @property
    def rounds(self) -> int:
        """The number of rounds in the settings."""

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
        """The seed of the cohorts, if it is set."""

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
        """The attack of hostile clients."""

    @property
    def devices(self) -> object:
        """The devices of the virtual clock."""

    @property
    def engine(self) -> object:
        """The engine."""

    @property
    def hides_time(self) -> bool:
        """True if the time that clients take would reveal what is private."""


class Staged(Protocol):
    """A kind with a stage: before the first round, or after the last."""

    stage: ClassVar[str]
    """Import path of the stage, as "module:Class"."""


class Proceeding(Protocol):
    """A kind of server with a procedure in place of the rounds."""

    procedure: ClassVar[str]
    """Import path of the procedure (fl_sim.simulation.stage.Procedure), as "module:Class"."""


@runtime_checkable
class Checking(Protocol):
    """A kind that is incompatible with some other settings."""

    def check(self, experiment: Choices) -> None:
        """Raise ValueError, in one line with the cure, for an incompatible ``experiment``."""


@runtime_checkable
class Completing(Protocol):
    """A kind that can compute a missing setting from the whole experiment, such as noise from a budget."""

    @classmethod
    def completed(cls, given: Mapping[str, Any], made: Callable[[Mapping[str, Any]], Any]) -> Mapping[str, Any]:
        """Return the ``given`` table of settings of this kind, completed.

        ``made``: returns the experiment with another such table. Raises UserError where no value fits.
        """


@runtime_checkable
class Sealing(Protocol):
    """A kind that reads a file of the user's, and detects changes of the file by its digest."""

    def sealed(self) -> Self:
        """Return these settings with the file's digest. Raises UserError where the file cannot be read."""


@runtime_checkable
class Budgeted(Protocol):
    """A kind with a privacy budget of its own."""

    def check_budget(self, experiment: Choices, records: Sequence[int], num_classes: int) -> None:
        """Raise UserError where the budget is too small for the first release; called before any training.

        ``records``: the number of records of each client. Takes seconds at most.
        """


@runtime_checkable
class Remarking(Protocol):
    """A kind with settings that have no effect, or an unexpected one, in some experiments."""

    def remarks(self, experiment: Choices) -> Sequence[str]:
        """Return sentences for the user, each in one line."""


@runtime_checkable
class Promising(Protocol):
    """A kind that may promise privacy: then a run shows nothing about single clients, not even their time."""

    is_private: ClassVar[bool]


@runtime_checkable
class Supplying(Protocol):
    """A kind that gives all clients further records for training."""

    @property
    def replaces_records(self) -> bool:
        """True if clients train on those alone, and not on their own."""


def replaces_records(kind: object) -> bool:
    """Return True if clients train on records of ``kind`` alone, and not on their own."""
    return isinstance(kind, Supplying) and kind.replaces_records


@runtime_checkable
class Captioned(Protocol):
    """A kind that adds captions to a table."""

    @classmethod
    def captions(cls, chosen: Sequence[Any], values: Callable[[Iterable[Any]], str]) -> list[str]:
        """Return captions, one sentence each, for the settings of this kind in a table.

        ``values``: writes the values of one field, each once.
        """


@runtime_checkable
class Choosing(Protocol):
    """The mark of a field with further kinds than the union in its annotation."""

    def known(self, annotation: Any) -> Mapping[str, type]:
        """Return {kind: class}."""

    def names(self, annotation: Any) -> list[str]:
        """Return the valid names."""


@runtime_checkable
class Computing(Protocol):
    """A kind that may compute with the numbers of a record, which has no meaning for tokens."""

    computes_with_records: ClassVar[bool]


def hides_clients(aggregator: object) -> bool:
    """Return True if an aggregator hides the cohort: then the set of clients with records is secret, too.

    A client without records then sends zeros, even where there is a pool of synthetic records, and counts as all do.
    """
    return isinstance(aggregator, Promising) and aggregator.is_private


def is_none(kind: object) -> bool:
    """Return True if a setting is of the kind "none": no compression, no attack, no clock, no stage."""
    return kind_of(kind) == "none"


def path_in(kind: type, name: str) -> str:
    """Return the import path ``module:Class`` of a kind's ``stage``, ``layer`` or ``procedure``, empty if it has none.

    A user's own parameter of that name is no import path.
    """
    path = getattr(kind, name, "")
    return path if isinstance(path, str) and ":" in path else ""


def off(setting: str, instead: str) -> str:
    """Return a remark on a setting without effect.

    >>> off("algorithm.mu=0", "the run is one of fedavg")
    'algorithm.mu=0 has no effect: the run is one of fedavg'
    """
    return f"{setting} has no effect: {instead}"


def kinds(union: Any) -> dict[str, type]:
    """Return {kind: class} of a union of settings classes (or of one class)."""
    members = get_args(union) if get_origin(union) is not None else (union,)
    return {field_defaults(member)["kind"]: member for member in members}


def field_defaults(settings: type) -> dict[str, Any]:
    """Return {field: default} of a settings class, in order; works for pydantic models and dataclasses."""
    if issubclass(settings, BaseModel):
        return {name: field.default for name, field in settings.model_fields.items()}
    assert is_dataclass(settings)
    return {field.name: field.default for field in fields(settings)}


def is_settings(settings: type) -> bool:
    """Return True if a class is a frozen pydantic model or dataclass."""
    if issubclass(settings, BaseModel):
        return bool(settings.model_config.get("frozen"))
    return is_dataclass(settings) and bool(settings.__dataclass_params__.frozen)  # type: ignore[attr-defined]  # typeshed has no such name


def kind_of(value: Any) -> str:
    """Return the kind of a settings value: the name of one of ours, the import path of one of the user's own.

    A class that inherits from one of ours is the user's own, whatever kind it inherits.
    """
    settings = type(value)
    return f"{settings.__module__}:{settings.__qualname__}" if is_own_kind(value) else str(value.kind)


def is_own_kind(value: object) -> bool:
    """Return True if a value is of a class of the user's own."""
    return is_own(type(value))


def is_own(kind: type) -> bool:
    """Return True if a class is the user's own."""
    return kind.__module__.partition(".")[0] not in PACKAGES


def title_of(value: Any) -> str:
    """Return the title of a kind: its ``title``, else the name of its class."""
    return str(value.title) if "title" in vars(type(value)) else type(value).__name__


def short_form(value: Any) -> str:
    """Return the short form of a settings value, such as ``label-1`` or ``dirichlet:0.05``."""
    kind = kind_of(value)
    parameter = next((name for name in field_defaults(type(value)) if name != "kind"), None)
    if parameter is None:
        return kind
    given = getattr(value, parameter)
    return f"{kind.removesuffix('-k')}-{given}" if is_numbered(kind, type(value)) else f"{kind}:{given}"


def is_numbered(kind: str, settings: type) -> bool:
    """Return True if a kind has its number in its name, as ``label-2`` is ``label-k`` with a ``k`` of 2."""
    return kind.endswith("-k") and "k" in field_defaults(settings)
