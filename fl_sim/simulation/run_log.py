"""What a run has to show so far, and who is told of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fl_sim.experiment.experiment import Experiment
from fl_sim.simulation.measuring import Measured
from fl_sim.store.run_directory import RoundRecord
from fl_sim.store.tensors import StateChecksum
from fl_sim.types import Params, ServerState, Traffic
from strategies.layer import Layer


@dataclass(frozen=True)
class Pooled:
    """Records that all clients train on: ``count`` of them, in the file ``path``."""

    path: Path
    count: int


class Telling(Protocol):
    """What has done something before or after the rounds, and says what, for ``result.json``."""

    def facts(self) -> Mapping[str, Any]:
        """Return facts, by their keys there."""
        ...

    def statements(self, others: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Return the privacy statements ``others`` with its own among them."""
        ...


@dataclass
class RunLog:
    """What a run has to show so far.

    ``engine``: its kind; ``trainer``: who trains clients, in words. ``measured``: the last model that was;
    ``measured_again``: after a stage that changed the model of the last round. ``pooled``: what all clients train on.
    ``stages``: of the run; ``layer``: the outermost one of its rounds; ``layer_states``: {layer: its part of the
    checkpoint}. ``traffic``: of each client in a round, None
    where there was none; ``before`` and ``after`` the rounds: of all clients, by what it was, None where that depends
    on private records. ``facts`` and ``statements`` (of privacy) are a procedure's own: they go into ``result.json`` as
    they are. ``records``: a digest of the user's own records, for the checkpoint. ``versions``: {round: digest} of the
    models that are kept for clients still at work on them. ``counts_holders``: whether clients without records are left
    out where an algorithm counts all clients. ``fixed``: what of the model nobody trains, which is saved beside what
    the server has.
    """

    server: ServerState
    rounds: list[RoundRecord] = field(default_factory=list)
    preprocess_seconds: float = 0.0
    engine: str = ""
    trainer: str = ""
    stopped: str = ""
    layer: Layer | None = None
    pooled: Pooled | None = None
    stages: tuple[Telling, ...] = ()
    measured: Measured | None = None
    measured_again: Measured | None = None
    traffic: Traffic | None = None
    before: dict[str, Traffic | None] = field(default_factory=dict)
    after: dict[str, Traffic | None] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    statements: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    chain: str = ""
    layer_states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seal: StateChecksum | None = None
    records: str = ""
    versions: dict[int, str] = field(default_factory=dict)
    counts_holders: bool = True
    fixed: Params = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)

    @property
    def num_pooled(self) -> int:
        """Return how many records the pool has that all clients train on; 0 where there is none."""
        return self.pooled.count if self.pooled else 0


class Observer(Protocol):
    """Whoever shows progress."""

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Hear which engine was taken and why, and where the run begins (above 1 where it goes on after a crash)."""
        ...

    def preparing(self, what: str) -> None:
        """Hear what clients do before the first round; ``replied`` counts who is done."""
        ...

    def replied(self, replies: int) -> None:
        """Hear how many clients of the current exchange have answered."""
        ...

    def finished_round(self, record: RoundRecord) -> None:
        """Hear of a round, whose line in ``rounds.jsonl`` and checkpoint are on the disk."""
        ...

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Hear what ``result.json`` says, also of a run that failed or was interrupted."""
        ...


class Silent:
    """Shows nothing."""

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Ignore the start."""

    def preparing(self, what: str) -> None:
        """Ignore what is prepared."""

    def replied(self, replies: int) -> None:
        """Ignore a reply."""

    def finished_round(self, record: RoundRecord) -> None:
        """Ignore a round."""

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Ignore the end."""
