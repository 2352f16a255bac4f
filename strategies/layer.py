"""Layers (not network layers): objects that wrap every round, such as Global DP, attacks and the virtual clock.

Each layer wraps the next inner layer, and by default each of its methods calls the same method of the inner layer. The
innermost layer samples the cohort, aggregates the updates and merges the aggregate. ``ORDER`` lists the settings with
layers from the inside out. For example, ``attack`` is outside ``aggregator``, so Global DP adds noise after hostile
clients have sent their updates. ``devices`` is outside ``attack``, so a late client sends no update, even if it is
hostile. A layer may have code that runs on clients, called its client half, such as the compression of updates. Client
halves are nested in the same order: the outermost half sees a task first and an update last. A settings class names its
layer as ``layer = "module:Class"``; a user-defined settings class may do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from clients.client_layer import ClientLayer, OwnClientLayer
from fl_sim.errors import Malformed, UserError
from fl_sim.kinds import is_own_kind, kind_of, path_in
from fl_sim.local_plan import LocalPlan
from fl_sim.own_code import load_object
from fl_sim.types import Aggregate, Cohort, Examples, Load, LocalSettings, Payloads, Reply, ServerState, Traffic
from strategies.algorithm import Algorithm
from strategies.samplers import Coins

if TYPE_CHECKING:
    from torch import nn

    from fl_sim.privacy.bill import Payment
    from fl_sim.store.run_directory import RoundRecord

Kind = TypeVar("Kind", bound="Layer")
Read = TypeVar("Read")

Tamper: TypeAlias = Callable[[Examples], Examples]
"""A function from a client's records to changed records, with arrays of the same shapes and types."""

ORDER: Final = (
    "sampler", "compress", "local", "algorithm", "local.privacy", "aggregator", "attack", "devices", "evaluate",
)  # fmt: skip
"""The fields of an experiment whose layers wrap the rounds, from the inside out."""


_USUAL: Final = {
    "compress": "strategies.compression.layer:Compression",
    "local": "strategies.batch_norm:BatchNormLayers",
    "algorithm": "strategies.own_part:OwnPart",
    "attack": "strategies.attacks:HostileUpdates",
    "devices": "strategies.timed:TimedRounds",
    "evaluate": "strategies.early_stopping:EarlyStopping",
}  # the default layer of each setting, for settings classes that name no layer


class Layered(Protocol):
    """A settings class, such as ``GlobalDP``, that names its layer. The layer implements the settings."""

    layer: ClassVar[str]


@dataclass(frozen=True)
class Drawn:
    """The cohort of a round.

    ``clients``: the client IDs, ascending. ``most_steps``: {client: the largest number of local steps for which the
    client has time}. ``late``: the clients that receive the model, too, but whose updates come too late. ``asked``: the
    clients that evaluated the model before the cohort was drawn.
    """

    clients: NDArray[np.int64]
    most_steps: Mapping[int, int] = field(default_factory=dict)
    late: Sequence[int] = ()
    asked: tuple[int, ...] = ()


@dataclass(frozen=True)
class Beginning:
    """Facts about a run before its first round. Each layer's ``check`` reads them.

    ``plan``: an example of a local plan (a client's objective in a round). ``sent``: the payloads that a client without
    records sends. ``kept``: tensors with the names and shapes of the algorithm's client state. ``whole``: names of
    stages that train the whole model at the server.
    """

    server: ServerState
    plan: LocalPlan
    sent: Payloads
    kept: Payloads
    whole: Sequence[str] = ()


@dataclass(frozen=True)
class Workload:
    """The amount of work of every client in a round, from which the virtual clock computes durations.

    ``sizes``: number of training records of each client in round 1, shape (clients,). ``settings``: settings of local
    training. ``load_of``: a function that returns a client's load (bytes and computation) in the coming round.
    ``seconds(client, server_round)``: the virtual duration of a client's work in a round; always 0 without a virtual
    clock.
    """

    sizes: NDArray[np.int64]
    settings: LocalSettings
    load_of: Callable[[int], Load]
    seconds: Callable[[int, int], float] = lambda client, server_round: 0.0  # noqa: ARG005 (named for callers)


class Ask(Protocol):
    """A function that lets clients execute a task before a round, on the model and broadcast of the coming round."""

    def __call__(self, task: str, clients: Sequence[int], read: Callable[[Any], Read]) -> tuple[list[Read], Traffic]:
        """Return the answers of ``clients`` to the client task named ``task``, and the number of bytes that were sent.

        ``clients``: ascending. ``read``: a function that checks and converts one answer. Raises RunError, which names
        the first client without a valid answer.
        """


class Stop(Exception):  # noqa: N818 (an outcome of a run, not an error in it)
    """Raised before a round begins, to end the run without this round. The message is the reason."""


class Layer:
    """Base class of layers. ``inner``: the next inner layer, to which each method passes its call by default.

    A layer that acts on clients only, such as compression, overrides ``on_clients`` and inherits the other methods.
    """

    inner: Layer
    reserved: ClassVar[str] = ""
    """Name of the layer's own tensors in payloads and client state, or a prefix of names that ends in "/"."""

    def __init_subclass__(cls) -> None:
        """Raise TypeError if a subclass defines a method under its old name, because no code calls this name."""
        super().__init_subclass__()
        if "relabels" in vars(cls):
            raise TypeError(
                f"layer {cls.__name__} defines relabels, which is now called tampers: rename it, and let its functions "
                "take and return the records (fl_sim.types.Examples), not only the labels"
            )

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if this layer wraps the rounds of ``experiment``."""
        del experiment
        return True

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> Layer | None:
        """Return the layer for a run of ``experiment`` in run directory ``out``, or None if the run needs no layer.

        ``progress``: in a resumed run, the layer's ``state`` from the checkpoint; in a new run, empty.
        """
        del experiment, out, progress
        if cls.__init__ is object.__init__:
            return cls()
        raise NotImplementedError(
            f"layer {cls.__name__} has an __init__: define the classmethod `of`, which creates it"
        )

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: object, model: Callable[[], nn.Module]) -> ClientLayer | None:
        """Return the layer's client half (its code that runs on clients), or None. ``model``: creates a new model."""
        del experiment, algorithm, model
        return None

    @classmethod
    def tampers(cls, experiment: Any, num_classes: int) -> Mapping[int, Tamper]:
        """Return {client: function that changes its records} for all clients that train on changed records."""
        del experiment, num_classes
        return {}

    @classmethod
    def tampers_in(cls, experiment: Any, server_round: int) -> bool:
        """Return True if the clients of ``tampers`` train on changed records in round ``server_round``, from 1."""
        del experiment, server_round
        return True

    @classmethod
    def begun(cls, experiment: Any, model: nn.Module, server: ServerState) -> ServerState:
        """Return the initial server state: the algorithm's state ``server`` with the layer's own tensors added."""
        del experiment, model
        return server

    @classmethod
    def payments(cls, experiment: Any) -> Sequence[Payment]:
        """Return the layer's privacy costs for all rounds, such as those of Global DP; empty if it is not private."""
        del experiment
        return ()

    @classmethod
    def exchanged(cls, experiment: Any, server: ServerState) -> Traffic:
        """Return a forecast: the number of bytes that the layer adds to a round, summed over the round's clients.

        Models and updates are not counted. ``server``: the initial server state.
        """
        del experiment, server
        return Traffic(0, 0)

    @classmethod
    def told(cls, experiment: Any) -> Sequence[str]:
        """Return sentences about the privacy of the rounds.

        Users read them before the run, next to the privacy cost.
        """
        del experiment
        return ()

    @classmethod
    def uncovered(cls, experiment: Any) -> Sequence[str]:
        """Return sentences about what the privacy guarantees do not cover. Every privacy statement ends with them."""
        del experiment
        return ()

    @classmethod
    def warnings(cls, experiment: Any, rounds_done: int, idle: Sequence[int]) -> Sequence[str]:
        """Return warnings for the user before the first round of this process.

        ``rounds_done``: number of rounds that an earlier process completed. ``idle``: IDs of clients without records;
        empty if these IDs are private.
        """
        del experiment, rounds_done, idle
        return ()

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError if the layer does not fit the run's algorithm, model or initial state."""

    @classmethod
    def check_directory(cls, experiment: Any, out: Path) -> None:
        """Raise RunError if ``out``, the run directory, has rounds but lacks the layer's files, such as a ledger."""

    def ready(self, work: Workload) -> None:
        """Store what the layer needs of the clients' workload: numbers of records, local settings, bytes.

        Called once, before round 1.
        """
        self.inner.ready(work)

    def begin(self, server_round: int) -> None:
        """Prepare a round. Called before everything else in the round. Raises Stop to end the run before the round."""
        self.inner.begin(server_round)

    def consult(self, server_round: int, ask: Ask) -> Traffic:
        """Send client tasks before the cohort is drawn, if the layer needs answers. Return the number of bytes sent."""
        return self.inner.consult(server_round, ask)

    def cohort(self, server_round: int, coins: Coins | None = None) -> Drawn:
        """Return the round's cohort. ``coins``: the source of random numbers, or None for the run's seed."""
        return self.inner.cohort(server_round, coins)

    def sent_to(self, client: int, server: ServerState) -> ServerState:
        """Return the server state whose model and broadcast tensors ``client`` receives; by default ``server`` itself.

        Clients that receive the same tensors get the same object. Their messages then share one copy of the tensors.
        """
        return self.inner.sent_to(client, server)

    def received(self, replies: tuple[Reply, ...]) -> tuple[Reply, ...]:
        """Return the updates that are aggregated, sorted by client. A layer may leave out or replace updates."""
        return self.inner.received(replies)

    def lost(self, server_round: int, failed: Mapping[int, Malformed], *, answered: bool) -> None:
        """Handle clients that failed in a round. ``failed``: {client: error}. Raises RunError if the run must end.

        ``answered``: True if at least one client sent a valid update.
        """
        self.inner.lost(server_round, failed, answered=answered)

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the aggregate of the cohort's updates, or None if no client of the cohort has records."""
        return self.inner.aggregate(cohort, algorithm, server)

    def foreseen(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the aggregate of a hypothetical ``cohort``. Attackers call this to try out forged updates.

        A layer overrides this method if the aggregator needs the layer's tensors. The method changes no state.
        """
        return self.inner.foreseen(cohort, algorithm, server)

    def merge(self, algorithm: Algorithm, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Merge the aggregate into the server state, and return the state after the round."""
        return self.inner.merge(algorithm, server, aggregate)

    def metrics(self) -> Mapping[str, Any]:
        """Return the fields that the layer adds to the round's line in ``rounds.jsonl`` (``RoundRecord``)."""
        return self.inner.metrics()

    def remarks(self) -> Sequence[str]:
        """Return one sentence for each setting that had no effect in the last round."""
        return self.inner.remarks()

    def ended(self, rounds: Sequence[RoundRecord]) -> str:
        """Return the reason for ending the run early after these ``rounds``, or an empty string to continue."""
        return self.inner.ended(rounds)

    def conclusions(self, rounds: Sequence[RoundRecord]) -> list[str]:
        """Return warnings for the user at the end of the run. ``rounds``: the records of all rounds of the run."""
        return self.inner.conclusions(rounds)

    def affords(self, server_round: int) -> bool:
        """Return True if the privacy budget covers the cost of round ``server_round``."""
        return self.inner.affords(server_round)

    @property
    def hides_clients(self) -> bool:
        """Return True if the cohort is secret; then no file contains the size or the losses of the cohort."""
        return self.inner.hides_clients

    def state(self) -> Mapping[str, Any]:
        """Return the layer's state for the checkpoint: JSON values by name. A resumed run passes them to ``of``."""
        return {}

    def statements(self, rounds: int) -> list[dict[str, object]]:
        """Return the privacy statements of a run with ``rounds`` planned rounds."""
        return self.inner.statements(rounds)


def found_in(layer: Layer, kind: type[Kind]) -> Kind:
    """Find the layer of class ``kind``: ``layer`` itself, or one of the layers that it wraps."""
    while not isinstance(layer, kind):
        layer = layer.inner
    return layer


def name_of(kind: type[Layer]) -> str:
    """Return the key of a layer's state in the checkpoint: "module:Class"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def layer_kinds(experiment: Any) -> list[type[Layer]]:
    """Return the layer classes of an experiment, from the inside out. Raises UserError if a class occurs twice."""
    kinds = [kind for kind in _all_kinds(experiment) if kind.applies(experiment)]
    if twice := [kind.__name__ for kind in kinds if kinds.count(kind) > 1]:
        raise UserError(
            f"{twice[0]} is the layer of two settings, and a run has each layer once: name a subclass of it for "
            "one of them"
        )
    return kinds


def check_names(experiment: Any, names: Iterable[str]) -> None:
    """Raise UserError if one of ``names``, the names of payloads and client states, is reserved for a layer."""
    reserved = [kind.reserved for kind in _all_kinds(experiment) if kind.reserved]
    begin = tuple(name for name in reserved if name.endswith("/"))
    if taken := [name for name in names if name in reserved or name.startswith(begin)]:
        raise UserError(
            f"algorithm {kind_of(experiment.algorithm)} has a payload or client state with the name {taken[0]!r}, and "
            f"the names {', '.join(reserved)} are reserved for layers: give it another name"
        )


def _all_kinds(experiment: Any) -> list[type[Layer]]:
    kinds = {name: type(attrgetter(name)(experiment)) for name in ORDER}
    paths = (path_in(kind, "layer") or _USUAL.get(name, "") for name, kind in kinds.items())
    return [load_object(path, "layer") for path in paths if path]


def client_layers(experiment: Any, algorithm: object, model: Callable[[], nn.Module]) -> tuple[ClientLayer, ...]:
    """Return the client halves (the code on clients) of an experiment's layers, from the inside out.

    ``model``: a function that creates a new model.
    """
    halves = (kind.on_clients(experiment, algorithm, model) for kind in layer_kinds(experiment))
    return tuple(OwnClientLayer(half) if is_own_kind(half) else half for half in halves if half is not None)
