"""Layers: what wraps every round, such as Global DP, hostile clients and the virtual clock. One object for each.

A layer is around the next inner one, and each of its methods hands on to that by default; the innermost one draws the
cohort, takes the mean and merges it. From the inside out: ``ORDER``. So noise is added to what hostile clients sent,
and a client that is late has sent nothing. What a layer does on clients is its client half, in the same order: the
outermost is the first to see a task and the last to see an update. A settings class names its layer as
``layer = "module:Class"``; a user's own class may do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from clients.client_layer import ClientLayer, OwnClientLayer
from fl_sim.errors import Malformed, UserError
from fl_sim.kinds import is_own_kind, kind_of, path_in
from fl_sim.local_plan import LocalPlan
from fl_sim.own_code import load_object
from fl_sim.types import Aggregate, Cohort, LocalSettings, Payloads, Reply, ServerState, Traffic
from strategies.algorithm import Algorithm
from strategies.samplers import Coins

if TYPE_CHECKING:
    from torch import nn

    from fl_sim.privacy.bill import Payment
    from fl_sim.store.run_directory import RoundRecord

Kind = TypeVar("Kind", bound="Layer")

Relabel: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Labels -> as many other ones."""

ORDER: Final = ("compress", "local", "algorithm", "aggregator", "attack", "devices", "evaluate")
"""The settings whose layers wrap the rounds, from the inside out."""


_USUAL: Final = {
    "compress": "strategies.compression.layer:Compression",
    "local": "strategies.batch_norm:BatchNormLayers",
    "algorithm": "strategies.own_part:OwnPart",
    "attack": "strategies.attacks:HostileUpdates",
    "devices": "strategies.timed:TimedRounds",
    "evaluate": "strategies.early_stopping:EarlyStopping",
}  # of a kind that names none


class Layered(Protocol):
    """A kind that names a layer, which does the work in its place."""

    layer: ClassVar[str]


@dataclass(frozen=True)
class Drawn:
    """The cohort of a round: ``clients``, ascending; ``most_steps``: {client: number of steps it has time for}."""

    clients: NDArray[np.int64]
    most_steps: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Beginning:
    """The start of a run, as layers check it.

    ``plan``: what clients' plans look like. ``sent``: what a client without records sends. ``kept``: names and shapes
    of the algorithm's client state. ``whole``: names of stages that train the whole model at the server.
    """

    server: ServerState
    plan: LocalPlan
    sent: Payloads
    kept: Payloads
    whole: Sequence[str] = ()


@dataclass(frozen=True)
class Workload:
    """The work of every client in a round.

    ``sizes``: how many records it trains on, (clients,). ``settings``: how it trains. ``traffic``: what goes to it and
    what comes back.
    """

    sizes: NDArray[np.int64]
    settings: LocalSettings
    traffic: Traffic


class Stop(Exception):  # noqa: N818 (an outcome of a run, not an error in it)
    """The run ends before the next round, of which nothing has happened. Says why."""


class Layer:
    """Wraps every round. ``inner``: the next layer inwards, set where the layer is put around it.

    A layer that does all of its work on clients, by ``on_clients``, is one that hands everything on here.
    """

    inner: Layer
    reserved: ClassVar[str] = ""
    """The name of its group among those that travel or are client state; one that ends in / begins several names."""

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the rounds of ``experiment`` have this layer."""
        del experiment
        return True

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> Layer | None:
        """Return the layer of a run of ``experiment`` in ``out``, None where that has no need of one.

        ``progress``: what the layer's ``state`` was in the checkpoint that the run goes on from; nothing at first.
        """
        del experiment, out, progress
        if cls.__init__ is object.__init__:
            return cls()
        raise NotImplementedError(f"{cls.__name__} is a layer without `of`, the classmethod that makes it for a run")

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: object, model: Callable[[], nn.Module]) -> ClientLayer | None:
        """Return the client half; None where the layer has none. ``model``: makes a fresh one of the run's."""
        del experiment, algorithm, model
        return None

    @classmethod
    def relabels(cls, experiment: Any, num_classes: int) -> Mapping[int, Relabel]:
        """Return {client: what it makes of its labels}, of those who train on other labels than they hold."""
        del experiment, num_classes
        return {}

    @classmethod
    def begun(cls, experiment: Any, model: nn.Module, server: ServerState) -> ServerState:
        """Return the initial server state: ``server``, made by the algorithm, with the layer's part of it."""
        del experiment, model
        return server

    @classmethod
    def payments(cls, experiment: Any) -> Sequence[Payment]:
        """Return the privacy cost of all rounds."""
        del experiment
        return ()

    @classmethod
    def told(cls, experiment: Any) -> Sequence[str]:
        """Return sentences on the rounds' privacy for the time before the run, beside their cost."""
        del experiment
        return ()

    @classmethod
    def warnings(cls, experiment: Any, rounds_done: int, idle: Sequence[int]) -> Sequence[str]:
        """Return warnings for the user before the next round.

        ``rounds_done``: by an earlier process. ``idle``: clients without records; none where that is private.
        """
        del experiment, rounds_done, idle
        return ()

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError where what the run starts from does not go with the layer."""

    @classmethod
    def check_directory(cls, experiment: Any, out: Path) -> None:
        """Raise RunError where ``out`` lacks what the rounds that it holds have left there."""

    def ready(self, work: Workload) -> None:
        """Hear, before the first round and after all stages before it, what clients will do."""
        self.inner.ready(work)

    def begin(self, server_round: int) -> None:
        """Do what comes before anything of a round. Raises Stop to end the run before it."""
        self.inner.begin(server_round)

    def cohort(self, server_round: int, coins: Coins | None = None) -> Drawn:
        """Return the round's cohort; ``coins``: its source of randomness, None for the run's seed."""
        return self.inner.cohort(server_round, coins)

    def received(self, replies: tuple[Reply, ...]) -> tuple[Reply, ...]:
        """Return the updates that count, sorted by client."""
        return self.inner.received(replies)

    def lost(self, server_round: int, failed: Mapping[int, Malformed], *, answered: bool) -> None:
        """Hear which clients failed in a round, and whether any answered well. Raises RunError to end the run."""
        self.inner.lost(server_round, failed, answered=answered)

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return one of many updates, None where there is none."""
        return self.inner.aggregate(cohort, algorithm, server)

    def merge(self, algorithm: Algorithm, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server's next state."""
        return self.inner.merge(algorithm, server, aggregate)

    def metrics(self) -> Mapping[str, Any]:
        """Return the layer's fields of the round's line in ``rounds.jsonl`` (``RoundRecord``)."""
        return self.inner.metrics()

    def remarks(self) -> Sequence[str]:
        """Return the settings that had no effect in the last round."""
        return self.inner.remarks()

    def ended(self, rounds: Sequence[RoundRecord]) -> str:
        """Return the reason for which a run with these rounds ends early; empty where it continues."""
        return self.inner.ended(rounds)

    def conclusions(self, rounds: Sequence[RoundRecord]) -> list[str]:
        """Return warnings after the last of these rounds."""
        return self.inner.conclusions(rounds)

    def affords(self, server_round: int) -> bool:
        """Return True if a round can be paid for."""
        return self.inner.affords(server_round)

    @property
    def hides_clients(self) -> bool:
        """Return True if participation is secret: the cohort's size and its losses are then written nowhere."""
        return self.inner.hides_clients

    def state(self) -> Mapping[str, Any]:
        """Return the layer's own part of the checkpoint, JSON values by name; ``of`` gets it when a run goes on."""
        return {}

    def statements(self, rounds: int) -> list[dict[str, object]]:
        """Return privacy statements of a run that was to have ``rounds`` rounds."""
        return self.inner.statements(rounds)


def found_in(layer: Layer, kind: type[Kind]) -> Kind:
    """Return the layer of that ``kind`` among ``layer`` and those within it. There is one."""
    while not isinstance(layer, kind):
        layer = layer.inner
    return layer


def name_of(kind: type[Layer]) -> str:
    """Return the name of a layer's state in the checkpoint."""
    return f"{kind.__module__}:{kind.__qualname__}"


def layer_kinds(experiment: Any) -> list[type[Layer]]:
    """Return the layers of an experiment's rounds, from the inside out. Raises UserError where one class is twice."""
    kinds = [kind for kind in _all_kinds(experiment) if kind.applies(experiment)]
    if twice := [kind.__name__ for kind in kinds if kinds.count(kind) > 1]:
        raise UserError(
            f"{twice[0]} is the layer of two settings, and a run holds each layer once: derive a class of its own for "
            "one of them"
        )
    return kinds


def check_names(experiment: Any, names: Iterable[str]) -> None:
    """Raise UserError where an algorithm's groups are called ``names``, and a layer's own group is, too."""
    reserved = [kind.reserved for kind in _all_kinds(experiment) if kind.reserved]
    begin = tuple(name for name in reserved if name.endswith("/"))
    if taken := [name for name in names if name in reserved or name.startswith(begin)]:
        raise UserError(
            f"algorithm {kind_of(experiment.algorithm)} sends or keeps something called {taken[0]!r}, and the names "
            f"{', '.join(reserved)} are those of layers' own groups: give it another name"
        )


def _all_kinds(experiment: Any) -> list[type[Layer]]:
    kinds = {name: type(getattr(experiment, name)) for name in ORDER}
    paths = (path_in(kind, "layer") or _USUAL.get(name, "") for name, kind in kinds.items())
    return [load_object(path, "layer") for path in paths if path]


def client_layers(experiment: Any, algorithm: object, model: Callable[[], nn.Module]) -> tuple[ClientLayer, ...]:
    """Return the client halves of an experiment's layers, from the inside out. ``model``: makes a fresh one."""
    halves = (kind.on_clients(experiment, algorithm, model) for kind in layer_kinds(experiment))
    return tuple(OwnClientLayer(half) if is_own_kind(half) else half for half in halves if half is not None)
