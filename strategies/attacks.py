"""Clients that do harm, for tables of aggregators against attacks: what they train on, or what they send, is wrong.

Who they are is drawn once, from the experiment's seed. Nothing here protects or measures privacy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.kinds import Choices, Promising, is_none, kind_of, off
from fl_sim.seeding import rng
from fl_sim.settings import Settings
from fl_sim.types import Reply
from strategies.aggregators import as_rows, cohort_size, from_row
from strategies.algorithm import Central, Dealing, Sharing
from strategies.layer import Layer, Relabel


class Attack(Protocol):
    """An attack: the behaviour of ``clients`` of the experiment's clients."""

    @property
    def clients(self) -> int:
        """Return how many clients are hostile."""
        ...

    def poisoned(self, labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
        """Return the labels that a hostile client trains on in place of its own, (n,)."""
        ...

    def forged(self, hostile: Sequence[Reply], cohort_size: int) -> Sequence[Reply]:
        """Return the updates that a round's ``hostile`` clients, at least one, send in place of honest ones.

        ``cohort_size``: how many clients the round has.
        """
        ...


class _Harmless(Settings):
    """The honest behaviour, of which every attack changes one part: records and updates stay as they are."""

    def poisoned(self, labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
        """Return the labels as they are."""
        del num_classes
        return labels

    def forged(self, hostile: Sequence[Reply], cohort_size: int) -> Sequence[Reply]:
        """Return the updates that a round's ``hostile`` clients, at least one, send in place of honest ones."""
        del cohort_size
        return hostile


class NoAttack(_Harmless):
    """All clients are honest."""

    kind: Literal["none"] = "none"
    clients: ClassVar[int] = 0
    layer: ClassVar[str] = ""


class _Attack(_Harmless):
    """``clients`` of the experiment's clients are hostile."""

    clients: int = Field(2, ge=1)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError where the attack would not be what it says."""
        kind = kind_of(self)
        if isinstance(experiment.algorithm, Central) and experiment.algorithm.is_central:
            raise ValueError(
                f"attack {kind} has no place beside algorithm {kind_of(experiment.algorithm)}, which has one client: "
                "take another algorithm, or attack=none"
            )
        if self.clients >= experiment.clients:
            raise ValueError(
                f"attack {kind} by {self.clients} of {experiment.clients} clients leaves nobody to attack: set "
                "attack.clients to less than clients"
            )
        for part in (experiment.algorithm, experiment.aggregator, experiment.preprocess):
            if isinstance(part, Promising) and part.is_private:
                raise ValueError(
                    f"attack {kind} has no place beside {kind_of(part)}: what a single client sends is not looked at "
                    "there, and a bill for clients that break the protocol would mean nothing; take another one, or "
                    "attack=none"
                )
        if isinstance(experiment.algorithm, Sharing | Dealing):
            raise ValueError(
                f"attack {kind} has no place beside algorithm {kind_of(experiment.algorithm)}: it is on the updates of "
                "rounds, and what hostile clients would share or be given before the first one is not modelled; take "
                "fedavg, fedprox, scaffold or another"
            )


class LabelFlip(_Attack):
    """Hostile clients train on class C - 1 - y for y (Fang et al. 2020, section 5.1)."""

    kind: Literal["label-flip"] = "label-flip"

    def poisoned(self, labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
        """Return C - 1 - y for every label y."""
        return num_classes - 1 - labels


class SignFlip(_Attack):
    """Hostile clients train honestly and send -``strength`` times what comes of it (Li et al. 2019, section 5)."""

    kind: Literal["sign-flip"] = "sign-flip"
    strength: float = Field(1.0, gt=0, le=1e6)

    def forged(self, hostile: Sequence[Reply], cohort_size: int) -> Sequence[Reply]:
        """Return the updates that a round's ``hostile`` clients, at least one, send in place of honest ones."""
        del cohort_size
        return [_with(reply, as_rows([reply])[0] * -self.strength) for reply in hostile]


class ALittleIsEnough(_Attack):
    """ALIE: all hostile clients send mean - z * deviation of what they would have sent (Baruch et al. 2019, alg. 3).

    ``deviations``: z; 1.5 is the released program's default. "formula" takes the paper's bound on z below which nobody
    is conspicuous: the (n - f - s) / (n - f) quantile of the normal distribution, s = floor(n / 2 + 1) - f, of n
    clients with f hostile. For few of them that is next to nothing: exactly 0 for two of any even number, .14 for two
    of 11, .37 for 24 of 100, and above 1.5 from 48 of 100 on. A hostile client that is alone in a round knows no
    deviation and sends what an honest one would.
    """

    kind: Literal["alie"] = "alie"
    deviations: Annotated[float, Field(ge=0, le=1e6)] | Literal["formula"] = 1.5
    title: ClassVar[str] = "ALIE"
    before: ClassVar[Mapping[str, Any]] = {"deviations": "formula"}

    def check(self, experiment: Choices) -> None:
        """Raise ValueError where no client could send what it forges."""
        super().check(experiment)
        if not is_none(experiment.compress):
            raise ValueError(
                f"attack alie cannot run with compress {kind_of(experiment.compress)}: what it forges would not travel "
                "through that, so no hostile client could send it; take attack sign-flip or label-flip, or leave "
                "compress out"
            )

    def remarks(self, experiment: Choices) -> list[str]:
        """Name settings without effect."""
        size = cohort_size(experiment)
        hostile = self.clients * size / experiment.clients
        if hostile < 2:
            why = (
                f"a hostile client that is alone in a round knows no deviation, and rounds have {hostile:g} of them on "
                "average; set a larger attack.clients"
            )
            return [off("attack alie", why)]
        if self._z(round(size), round(hostile)):
            return []
        why = f"z is 0 for {hostile:g} hostile clients of {size:g}; 1.5 is the released program's default"
        return [off(f"attack.deviations={self.deviations}", why)]

    def forged(self, hostile: Sequence[Reply], cohort_size: int) -> Sequence[Reply]:
        """Return the updates that a round's ``hostile`` clients, at least one, send in place of honest ones."""
        if len(hostile) == 1:
            return hostile
        rows = as_rows(hostile)
        sent = rows.mean(dim=0) - self._z(cohort_size, len(hostile)) * rows.std(dim=0, correction=0)
        return [_with(reply, sent) for reply in hostile]

    def _z(self, count: int, hostile: int) -> float:
        if self.deviations != "formula":
            return self.deviations
        needed, honest = count // 2 + 1 - hostile, count - hostile
        share = (honest - needed) / honest if honest else 1.0
        return NormalDist().inv_cdf(min(max(share, 0.5), 0.999))


def hostile_clients(attack: Attack, num_clients: int, seed: int) -> frozenset[int]:
    """Return the hostile clients: the same in every round, and on every engine."""
    if not attack.clients:
        return frozenset()
    return frozenset(rng(seed, "hostile clients").choice(num_clients, attack.clients, replace=False).tolist())


def _poisoned(attack: Attack, num_classes: int, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ``labels`` that an attack makes, also one of the user's own. Raises UserError for other labels."""
    poisoned = np.asarray(attack.poisoned(labels.copy(), num_classes))
    is_like = poisoned.shape == labels.shape and poisoned.dtype.kind in "iu"
    if not is_like or not ((poisoned >= 0) & (poisoned < num_classes)).all():
        raise UserError(
            f"attack {kind_of(attack)}: poisoned gave {poisoned.dtype} of shape {poisoned.shape}; wanted is a label "
            f"from 0 to {num_classes - 1} for each of {len(labels)} records"
        )
    return poisoned.astype(np.int64)


def _with(reply: Reply, row: torch.Tensor) -> Reply:
    return replace(reply, payloads=from_row(row, reply.payloads))


class HostileUpdates(Layer):
    """Replaces what hostile clients sent by what the attack makes of it, before anybody takes a mean."""

    def __init__(self, attack: Attack, hostile: frozenset[int]) -> None:
        self._attack, self._hostile = attack, hostile
        self._idle = False

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> HostileUpdates:
        """Return the layer of a run: who is hostile follows from its seed."""
        del out, progress
        attack = experiment.attack
        return cls(attack, hostile_clients(attack, experiment.num_clients, experiment.seed))

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if there are hostile clients."""
        return not is_none(experiment.attack)

    @classmethod
    def relabels(cls, experiment: Any, num_classes: int) -> Mapping[int, Relabel]:
        """Let hostile clients train on the labels that the attack poisons."""
        hostile = hostile_clients(experiment.attack, experiment.num_clients, experiment.seed)
        return dict.fromkeys(hostile, partial(_poisoned, experiment.attack, num_classes))

    @classmethod
    def warnings(cls, experiment: Any, rounds_done: int, idle: Sequence[int]) -> Sequence[str]:
        """Count the hostile clients without records to do harm with."""
        del rounds_done
        hostile = hostile_clients(experiment.attack, experiment.num_clients, experiment.seed)
        if not (harmless := len(hostile.intersection(idle))):
            return []
        told = f"{harmless} of the {len(hostile)} hostile clients hold no records, so they do nothing: set a larger "
        return [f"{told}attack.clients, another seed, or a split that leaves no client empty"]

    def received(self, replies: tuple[Reply, ...]) -> tuple[Reply, ...]:
        """Return the round's updates with those of hostile clients as the attack forges them."""
        replies = self.inner.received(replies)
        hostile = [reply for reply in replies if reply.client in self._hostile and reply.num_examples > 0]
        self._idle = not hostile and bool(self._hostile)
        if not hostile:
            return replies
        forged = {reply.client: reply for reply in self._attack.forged(hostile, len(replies))}
        return tuple(forged.get(reply.client, reply) for reply in replies)

    def remarks(self) -> Sequence[str]:
        """Name settings without effect."""
        said = off(f"attack {kind_of(self._attack)}", "no hostile client took part with records")
        return [*self.inner.remarks(), *([said] if self._idle else [])]
