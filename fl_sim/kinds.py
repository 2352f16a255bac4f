"""Kinds: what a settings class is called, what it is made of, how it is written, and what it may say of itself."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Protocol, Self, get_args, get_origin, runtime_checkable

from pydantic import BaseModel

from fl_sim.own_code import PACKAGES


class LocalChoices(Protocol):
    """How clients train, as far as a kind may have no place for it."""

    @property
    def label_smoothing(self) -> float:
        """Return what part of a label is spread over all classes."""
        ...

    @property
    def batch_norm(self) -> str:
        """Return what becomes of BatchNorm layers."""
        ...

    @property
    def optimizer(self) -> str:
        """Return how a step follows from a gradient."""
        ...


class Harm(Protocol):
    """What hostile clients do, as far as a kind may have no place for it."""

    @property
    def clients(self) -> int:
        """Return how many of them there are."""
        ...


class Compressing(Protocol):
    """How updates are compressed, as far as a kind may have no place for it."""

    @property
    def keeps_error(self) -> bool:
        """Say whether what is left out of an update is sent later."""
        ...


class Choices(Protocol):
    """What else an experiment is made of, as a kind's ``check`` sees it."""

    @property
    def clients(self) -> int:
        """Return how many clients are asked for."""
        ...

    @property
    def rounds(self) -> int:
        """Return how many rounds are asked for."""
        ...

    @property
    def partition(self) -> object:
        """Return the split."""
        ...

    @property
    def algorithm(self) -> object:
        """Return the algorithm."""
        ...

    @property
    def aggregator(self) -> object:
        """Return what makes the mean of a round's updates."""
        ...

    @property
    def sampler(self) -> object:
        """Return what draws the cohorts."""
        ...

    @property
    def sampling_seed(self) -> int | None:
        """Return the seed of the cohorts, where it is given."""
        ...

    @property
    def local(self) -> LocalChoices:
        """Return how clients train."""
        ...

    @property
    def preprocess(self) -> object:
        """Return what clients do before the first round."""
        ...

    @property
    def compress(self) -> Compressing:
        """Return how updates are compressed."""
        ...

    @property
    def attack(self) -> Harm:
        """Return what hostile clients do."""
        ...

    @property
    def devices(self) -> object:
        """Return how long clients take."""
        ...

    @property
    def engine(self) -> object:
        """Return what runs the clients."""
        ...

    @property
    def hides_time(self) -> bool:
        """Say whether how long clients take would tell what they were promised to keep private."""
        ...


class Staged(Protocol):
    """A kind whose work is a stage: before the first round, or after the last."""

    stage: ClassVar[str]
    """Where the stage is, as "module:Class"."""


class Proceeding(Protocol):
    """A kind of server with a procedure in place of the rounds."""

    procedure: ClassVar[str]
    """Import path of the procedure (fl_sim.simulation.procedure.Procedure), as "module:Class"."""


@runtime_checkable
class Checking(Protocol):
    """A kind that does not go together with everything else."""

    def check(self, experiment: Choices) -> None:
        """Raise ValueError, in a line that says what to change, for an ``experiment`` that it has no place in."""
        ...


@runtime_checkable
class Completing(Protocol):
    """A kind with a setting that may be left to be found from the whole experiment, as noise is from a budget."""

    @classmethod
    def completed(cls, given: Mapping[str, Any], made: Callable[[Mapping[str, Any]], Any]) -> Mapping[str, Any]:
        """Return the ``given`` table of settings of this kind with what was found in its place.

        ``made``: the experiment of another such table. Raises UserError where nothing can be found.
        """
        ...


@runtime_checkable
class Sealing(Protocol):
    """A kind that reads a file of the user's, and by whose digest a changed file is noticed."""

    def sealed(self) -> Self:
        """Return these settings with the file's digest. Raises UserError where the file cannot be read."""
        ...


@runtime_checkable
class Budgeted(Protocol):
    """A kind that pays for privacy from a budget of its own."""

    def check_budget(self, experiment: Choices, records: Sequence[int], num_classes: int) -> None:
        """Raise UserError where the budget does not afford the first release: asked before anything is trained.

        ``records``: how many each client holds. Takes seconds at most.
        """
        ...


@runtime_checkable
class Starting(Protocol):
    """An algorithm or an aggregator with which other settings of an experiment start from values that suit it."""

    starts_with: ClassVar[Mapping[str, Any]]
    """{setting: value}; of a table, what the user does not set."""


@runtime_checkable
class Remarking(Protocol):
    """A kind with settings that have no effect in some experiments, or another one than their names say."""

    def remarks(self, experiment: Choices) -> Sequence[str]:
        """Sentences for the user, each in one line; none where every setting does what its name says."""
        ...


@runtime_checkable
class Revised(Protocol):
    """A kind with settings that came later, and whose defaults are not what runs did before."""

    before: ClassVar[Mapping[str, Any]]
    """{setting: its value in runs whose ``config.toml`` does not name it}."""


@runtime_checkable
class Promising(Protocol):
    """A kind that may promise privacy: then a run shows nothing about single clients, not even how long they take."""

    is_private: ClassVar[bool]


@runtime_checkable
class Supplying(Protocol):
    """A kind that gives all clients further records to train on."""

    @property
    def replaces_records(self) -> bool:
        """Say whether clients train on those alone, and not on their own."""
        ...


def replaces_records(kind: object) -> bool:
    """Say whether clients train on records that ``kind`` gives them, and not on their own."""
    return isinstance(kind, Supplying) and kind.replaces_records


@runtime_checkable
class Captioned(Protocol):
    """A kind of which a table must say more than its name, below its rows."""

    @classmethod
    def captions(cls, chosen: Sequence[Any], values: Callable[[Iterable[Any]], str]) -> list[str]:
        """Return what is said of the table's settings of this kind, a sentence a line.

        ``values``: writes what they have in one place, each value once.
        """
        ...


@runtime_checkable
class Choosing(Protocol):
    """What a field is marked with whose kinds are not the union that annotates it alone."""

    def known(self, annotation: Any) -> Mapping[str, type]:
        """Return {kind: class}."""
        ...

    def names(self, annotation: Any) -> list[str]:
        """Return the names that a user may choose from."""
        ...


@runtime_checkable
class Computing(Protocol):
    """A kind that may compute with the numbers of a record, which makes no sense of tokens."""

    computes_with_records: ClassVar[bool]


def hides_clients(aggregator: object) -> bool:
    """Say whether an aggregator promises to hide who takes part: then who holds records is secret, too.

    A client without records of its own must then send zeros, so it does not train on a pool beside which others have
    theirs, and is counted as all clients are.
    """
    return isinstance(aggregator, Promising) and aggregator.is_private


def is_none(kind: object) -> bool:
    """Say whether a setting holds its kind "none": there is no compression, no attack, no clock, no stage."""
    return kind_of(kind) == "none"


def path_in(kind: type, name: str) -> str:
    """Return the import path ``module:Class`` that a kind has as its ``stage``, ``layer`` or ``procedure``; or nothing.

    A parameter of that name, of a kind of the user's own, is none.
    """
    path = getattr(kind, name, "")
    return path if isinstance(path, str) and ":" in path else ""


def off(setting: str, instead: str) -> str:
    """Word a remark on a setting that switches off what a kind is chosen for.

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
    """Say whether values of a class are frozen and made of fields that can be written down."""
    if issubclass(settings, BaseModel):
        return bool(settings.model_config.get("frozen"))
    return is_dataclass(settings) and bool(settings.__dataclass_params__.frozen)  # type: ignore[attr-defined]  # typeshed has no such name


def kind_of(value: Any) -> str:
    """Return the kind of a settings value: the name of one of ours, the import path of one of the user's own.

    A class that inherits from one of ours is the user's own, whatever kind it inherits.
    """
    settings = type(value)
    if not is_own_kind(value):
        return str(value.kind)
    return f"{settings.__module__}:{settings.__qualname__}"


def is_own_kind(value: Any) -> bool:
    """Say whether a settings value is of a class of the user's own."""
    return is_own(type(value))


def is_own(kind: type) -> bool:
    """Say whether a class is the user's own."""
    return kind.__module__.partition(".")[0] not in PACKAGES


def title_of(value: Any) -> str:
    """Return how a kind is written for people: its ``title``, else the name of its class."""
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
    """Say whether a kind is written with its number in its name, as ``label-2`` is ``label-k`` with a ``k`` of 2."""
    return kind.endswith("-k") and "k" in field_defaults(settings)
