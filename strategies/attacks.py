"""Attacks by hostile clients, which train on wrong labels or send wrong updates, to compare robust aggregators.

The hostile clients are drawn once, with the experiment's seed. This module neither protects nor measures privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from clients.client_layer import ClientLayer
from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.kinds import Choices, Promising, Withstanding, is_none, kind_of, off
from fl_sim.local_plan import LocalPlan
from fl_sim.seeding import rng
from fl_sim.settings import Settings
from fl_sim.types import Aggregate, Cohort, Examples, LocalTask, Reply, ServerState
from strategies.aggregators import as_rows, cohort_size, from_row
from strategies.algorithm import Algorithm, Central, Dealing, Sharing
from strategies.layer import Beginning, Layer, Tamper

if TYPE_CHECKING:
    from torch import nn


RESERVED: Final = "attack/"
"""Prefix of the names of an attack's tensors in client state."""


class Attack(Protocol):
    """An attack: the behaviour of the hostile clients. ``clients``: the number of hostile clients."""

    @property
    def clients(self) -> int:
        """Return the number of hostile clients."""
        ...

    def poisoned(self, labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
        """Return the labels on which a hostile client trains in place of its true ``labels``; both have shape (n,)."""
        ...

    def forged(self, hostile: Sequence[Reply], seen: Seen) -> Sequence[Reply]:
        """Return the forged updates of a round's hostile clients, which replace their honest updates.

        ``hostile``: the honest updates of these clients, at least one.
        """
        ...


@runtime_checkable
class Tampering(Protocol):
    """An attack that may also change the inputs of hostile clients' records. Its method ``poisoned`` is not called."""

    def tampered(self, examples: Examples, number: int, coins: np.random.Generator) -> Examples:
        """Return the records on which a hostile client trains.

        ``examples``: its own records; the method must not change them. ``number``: the index of the hostile client
        among all hostile clients, from 0. ``coins``: the client's random generator, seeded anew in every call.
        """
        ...


@runtime_checkable
class Planning(Protocol):
    """An attack that changes the objective of hostile clients."""

    def planned(self, plan: LocalPlan) -> LocalPlan:
        """Return the local plan (the objective) of a hostile client. ``plan``: the plan of an honest client."""
        ...


@runtime_checkable
class Scheduled(Protocol):
    """An attack that is active only in some rounds. In all other rounds hostile clients are honest."""

    def hostile_in(self, server_round: int) -> bool:
        """Return True if hostile clients attack in round ``server_round``, counted from 1."""
        ...


def hostile_in(attack: object, server_round: int) -> bool:
    """Return True if ``attack`` is active in round ``server_round``, counted from 1."""
    return not isinstance(attack, Scheduled) or attack.hostile_in(server_round)


@runtime_checkable
class ActingOnClients(Protocol):
    """An attack that executes code on clients."""

    def on_clients(self, hostile: frozenset[int]) -> ClientLayer:
        """Return the client part of the attack (its code on clients). ``hostile``: the IDs of the hostile clients."""
        ...


@dataclass(frozen=True)
class HostilePlans(ClientLayer):
    """The client part of an attack (its code on clients): ``hostile`` clients train with the attack's local plan."""

    attack: Planning
    hostile: frozenset[int]

    def planned(self, came: LocalTask, plan: LocalPlan) -> LocalPlan:
        """Return the attack's local plan for a hostile client, and ``plan`` for other clients."""
        return self.attack.planned(plan) if self.attacks(came) else plan

    def attacks(self, task: LocalTask) -> bool:
        """Return True if the client of ``task`` attacks in the round of ``task``."""
        return task.client in self.hostile and hostile_in(self.attack, task.server_round)

    def typical(self, plan: LocalPlan) -> LocalPlan:
        """Return an example of the attack's local plans. From it, a run finds the trainers that support the attack."""
        return self.attack.planned(plan)


@dataclass(frozen=True)
class Seen:
    """The information about a round that an attack may use.

    ``honest``: the updates of the honest clients with records; empty if ``sees_honest`` of the attack is False.
    ``cohort_size``: the number of clients in the round; the expected number if the cohort is secret. ``coins``: a
    random generator that depends on the run's seed. ``aggregated``: a function without side effects. It maps the forged
    updates of all hostile clients to the aggregate that the round would have, as one vector of all d numbers.
    ``aggregated`` is None if ``sees_honest`` of the attack is False.
    """

    honest: Sequence[Reply]
    cohort_size: int
    coins: np.random.Generator
    aggregated: Callable[[Sequence[Reply]], torch.Tensor] | None = None


class _Harmless(Settings):
    """Base class of attacks. ``poisoned`` and ``forged`` change nothing here; attacks override one of these methods."""

    def poisoned(self, labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
        del num_classes
        return labels

    def forged(self, hostile: Sequence[Reply], seen: Seen) -> Sequence[Reply]:
        del seen
        return hostile


class NoAttack(_Harmless):
    """All clients are honest."""

    kind: Literal["none"] = "none"
    clients: ClassVar[int] = 0
    layer: ClassVar[str] = ""


class HostileClients(_Harmless):
    """Base class of attacks. ``clients``: the number of hostile clients.

    Hostile clients may attack only in some rounds. In all other rounds they are honest. ``first_round``: the first
    round with an attack. ``last_round``: the last round in which an attack may happen; None means no limit. If
    the first and the last round are equal, there is one attack, as in single-shot model replacement (Bagdasaryan
    et al. 2020). ``every``: the number of rounds from one attack to the next attack.

    With Global DP or private local training, hostile clients cannot weaken the epsilon of an honest client, and privacy
    statements contain this fact. Attacks that compute forged updates from the updates of honest clients are an
    exception: under Global DP they need ``aggregator.noise=seeded``. In this case the epsilon describes the method, and
    does not hold for the models of this run.
    """

    clients: int = Field(2, ge=1)
    first_round: int = Field(1, ge=1)
    last_round: int | None = Field(None, ge=1)
    every: int = Field(1, ge=1)
    newer: ClassVar[tuple[str, ...]] = ("first_round", "last_round", "every")
    """The names of settings that were added in later versions of the attack."""

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialise the settings. Newer settings that have their default values are left out.

        So the names and files of older runs stay valid.
        """
        written: dict[str, Any] = write(self)
        unused = {name for name in self.newer if getattr(self, name) == type(self).model_fields[name].default}
        return {key: value for key, value in written.items() if key not in unused}

    def hostile_in(self, server_round: int) -> bool:
        """Return True if hostile clients attack in round ``server_round``, counted from 1."""
        is_between = self.first_round <= server_round <= (self.last_round or server_round)
        return is_between and (server_round - self.first_round) % self.every == 0

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for an algorithm, aggregator, stage or schedule that does not support the attack."""
        kind = kind_of(self)
        if isinstance(experiment.algorithm, Central) and experiment.algorithm.is_central:
            raise ValueError(
                f"attack {kind} cannot run with algorithm {kind_of(experiment.algorithm)}, which has one client: "
                "take another algorithm, or attack=none"
            )
        if self.clients >= experiment.clients:
            raise ValueError(
                f"attack {kind} by {self.clients} of {experiment.clients} clients leaves no honest client: set "
                "attack.clients to less than clients"
            )
        self._check_schedule(experiment.rounds)
        check_promises(self, experiment)
        if isinstance(experiment.algorithm, Sharing | Dealing):
            raise ValueError(
                f"attack {kind} cannot run with algorithm {kind_of(experiment.algorithm)}: attacks change the updates "
                "of rounds, and attacks before the first round are not modelled; take fedavg, fedprox, scaffold or "
                "another"
            )

    def _check_schedule(self, rounds: int) -> None:
        """Raise ValueError if no round of the run has an attack."""
        if self.first_round > rounds:
            raise ValueError(
                f"attack.first_round={self.first_round} is after the last of the {rounds} rounds, so no round has "
                f"an attack: set attack.first_round to {rounds} or less, or attack=none"
            )
        if self.last_round is not None and self.last_round < self.first_round:
            raise ValueError(
                f"attack.last_round={self.last_round} is before attack.first_round={self.first_round}, so no round has "
                f"an attack: set attack.last_round to {self.first_round} or more, or attack=none"
            )


class LabelFlip(HostileClients):
    """Hostile clients train with label C - 1 - y in place of y, for C classes (Fang et al. 2020, section 5.1)."""

    kind: Literal["label-flip"] = "label-flip"
    sees_honest: ClassVar[bool] = False

    def poisoned(self, labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
        """Return C - 1 - y for every label y."""
        return num_classes - 1 - labels


class SignFlip(HostileClients):
    """Hostile clients train honestly, but send -``strength`` times their honest update (Li et al. 2019, section 5)."""

    kind: Literal["sign-flip"] = "sign-flip"
    sees_honest: ClassVar[bool] = False
    strength: float = Field(1.0, gt=0, le=1e6)

    def forged(self, hostile: Sequence[Reply], seen: Seen) -> Sequence[Reply]:
        """Return -``strength`` times each honest update in ``hostile``."""
        del seen
        return [with_row(reply, as_rows([reply])[0] * -self.strength) for reply in hostile]


class Forging(HostileClients):
    """Base class of attacks whose forged updates are not multiples of the client's honest update."""

    def check(self, experiment: Choices) -> None:
        """Raise ValueError as the base class does, and for compression, which forged updates do not support."""
        super().check(experiment)
        if not is_none(experiment.compress):
            raise ValueError(
                f"attack {kind_of(self)} cannot run with compress {kind_of(experiment.compress)}: its forged updates "
                "have no compressed form, so no hostile client could send them; take attack sign-flip or label-flip, "
                "or leave compress out"
            )


class Knowing(Forging):
    """Base class of attacks that compute forged updates from several honest updates.

    ``knows``: "own" for the honest updates of the hostile clients, "all" for the updates of all honest clients of the
    round. If a round has no honest client, the attack uses the honest updates of the hostile clients.
    """

    knows: Literal["own", "all"] = "all"
    needs_two: ClassVar[bool] = True
    """True if the attack has no effect with one known update, because it uses the deviation of several updates."""

    @property
    def sees_honest(self) -> bool:
        """Return True if the attackers know the updates of honest clients."""
        return self.knows == "all"

    def known(self, hostile: Sequence[Reply], seen: Seen) -> torch.Tensor:
        """Return the updates that the attackers know, as the rows of a matrix."""
        return as_rows(seen.honest if self.knows == "all" and seen.honest else hostile)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        hostile = self.clients * cohort_size(experiment) / experiment.clients
        if not self.needs_two or self.knows == "all" or hostile >= 2:
            return []
        why = (
            f"a deviation needs two hostile clients in a round, and rounds have {hostile:g} of them on average; set a "
            "larger attack.clients"
        )
        return [off(f"attack {kind_of(self)}", why)]


class ALittleIsEnough(Knowing):
    """ALIE: hostile clients send mean - z * standard deviation of the updates they know (Baruch et al. 2019, alg. 3).

    ``deviations``: the number z; 1.5 is the default of the authors' released program. "formula" means the largest z
    that remains undetected according to Baruch et al. 2019. For n clients, f of them hostile, this z is the (n - f - s)
    / (n - f) quantile of the normal distribution, with s = floor(n / 2 + 1) - f. It is close to 0 for few hostile
    clients: 0 for f = 2 and even n, 0.14 for f = 2 and n = 11, 0.37 for f = 24 and n = 100, and above 1.5 for f >= 48
    and n = 100. ``knows``: "own" for the honest updates of the hostile clients, as in the paper, or "all" for the
    updates of all honest clients. If only one update is known, there is no deviation, and hostile clients send their
    honest updates.
    """

    kind: Literal["alie"] = "alie"
    knows: Literal["own", "all"] = "own"
    deviations: Annotated[float, Field(ge=0, le=1e6)] | Literal["formula"] = 1.5
    title: ClassVar[str] = "ALIE"
    before: ClassVar[Mapping[str, Any]] = {"deviations": "formula"}

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        size = cohort_size(experiment)
        hostile = self.clients * size / experiment.clients
        if alone := super().remarks(experiment):
            return alone
        if self._z(round(size), round(hostile)):
            return []
        why = f"z is 0 for {hostile:g} hostile clients among {size:g}; set attack.deviations=1.5, the authors' default"
        return [off(f"attack.deviations={self.deviations}", why)]

    def forged(self, hostile: Sequence[Reply], seen: Seen) -> Sequence[Reply]:
        """Return the forged updates: mean - z * standard deviation of the known updates, for every hostile client."""
        if len(rows := self.known(hostile, seen)) == 1:
            return hostile
        sent = rows.mean(dim=0) - self._z(seen.cohort_size, len(hostile)) * rows.std(dim=0, correction=0)
        return [with_row(reply, sent) for reply in hostile]

    def _z(self, count: int, hostile: int) -> float:
        if self.deviations != "formula":
            return self.deviations
        needed, honest = count // 2 + 1 - hostile, count - hostile
        share = (honest - needed) / honest if honest else 1.0
        return NormalDist().inv_cdf(min(max(share, 0.5), 0.999))


def sees_honest(attack: object) -> bool:
    """Return True if ``attack`` may compute forged updates from the updates of honest clients."""
    return bool(getattr(attack, "sees_honest", True))


def check_promises(attack: object, experiment: Choices) -> None:
    """Raise ValueError if a privacy guarantee of ``experiment`` would be false under ``attack``."""
    for part in _promising(experiment):
        if not isinstance(part, Withstanding):
            raise ValueError(
                f"attack {kind_of(attack)} cannot run with {kind_of(part)}: it does not check single updates, and its "
                "privacy cost holds only if all clients follow the protocol; take another one, or attack=none"
            )
        part.check_hostile(kind_of(attack), sees_honest=sees_honest(attack))


def _promising(experiment: Choices) -> list[object]:
    parts = (
        experiment.algorithm, experiment.aggregator, experiment.preprocess, experiment.calibrate,
        experiment.local.privacy,
    )  # fmt: skip
    return [part for part in parts if isinstance(part, Promising) and part.is_private]


def hostile_clients(attack: Attack, num_clients: int, seed: int) -> frozenset[int]:
    """Return the IDs of the hostile clients. They are the same in every round and on every engine."""
    if not attack.clients:
        return frozenset()
    return frozenset(rng(seed, "hostile clients").choice(num_clients, attack.clients, replace=False).tolist())


def _tampered(
    attack: Attack, num_classes: int, number: int, coins: Callable[[], np.random.Generator], examples: Examples
) -> Examples:
    """Return the records on which a hostile client trains in place of its own records."""
    if isinstance(attack, Tampering):
        return attack.tampered(examples, number, coins())
    return replace(examples, labels=_poisoned(attack, num_classes, examples.labels))


def _poisoned(attack: Attack, num_classes: int, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the attack's labels in place of ``labels``. Raises UserError if the attack's labels are invalid."""
    poisoned = np.asarray(attack.poisoned(labels.copy(), num_classes))
    is_like = poisoned.shape == labels.shape and poisoned.dtype.kind in "iu"
    if not is_like or not ((poisoned >= 0) & (poisoned < num_classes)).all():
        raise UserError(
            f"attack {kind_of(attack)}: method poisoned returned {poisoned.dtype} of shape {poisoned.shape}: return a "
            f"label from 0 to {num_classes - 1} for each of the {len(labels)} records"
        )
    return poisoned.astype(np.int64)


def with_row(reply: Reply, row: torch.Tensor) -> Reply:
    """Return a copy of ``reply`` whose payloads contain the numbers in ``row``, shape (d,)."""
    return replace(reply, payloads=from_row(row, reply.payloads))


_HOLDS: Final = "An honest client's epsilon holds whatever they send"
_KNOWN: Final = (
    "They are assumed to know the updates of honest clients without noise, and put them into forged updates, which "
    "readers of the models see. No epsilon covers that. Without this knowledge, an honest client's epsilon would hold "
    "whatever they send"
)


def _replaced(replies: Sequence[Reply], forged: Sequence[Reply]) -> tuple[Reply, ...]:
    """Return ``replies``, where each reply in ``forged`` replaces the reply of the same client."""
    by_client = {reply.client: reply for reply in forged}
    return tuple(by_client.get(reply.client, reply) for reply in replies)


class HostileUpdates(Layer):
    """Replaces the updates of hostile clients by the attack's forged updates, before the aggregation."""

    reserved: ClassVar[str] = RESERVED

    def __init__(self, attack: Attack, hostile: frozenset[int], seed: int, expected: float = 0.0) -> None:
        """Create the layer.

        ``expected``: the public, expected number of clients in a round.
        """
        self._attack, self._hostile, self._seed, self._expected = attack, hostile, seed, expected
        self._idle, self._is_due = False, True

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> HostileUpdates:
        """Return the layer (code around the rounds) that replaces updates of hostile clients.

        The hostile clients are drawn with the experiment's seed.
        """
        del out, progress
        attack, seed = experiment.attack, experiment.seed
        return cls(attack, hostile_clients(attack, experiment.num_clients, seed), seed, cohort_size(experiment))

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the experiment has an attack."""
        return not is_none(experiment.attack)

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: object, model: Callable[[], nn.Module]) -> ClientLayer | None:
        """Return the attack's code on clients if it changes the training of hostile clients, else None."""
        del algorithm, model
        attack = experiment.attack
        hostile = hostile_clients(attack, experiment.num_clients, experiment.seed)
        if isinstance(attack, ActingOnClients):
            return attack.on_clients(hostile)
        return HostilePlans(attack, hostile) if isinstance(attack, Planning) else None

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError if a privacy guarantee would be false under the attack, also for user-defined attacks."""
        del beginning
        try:
            check_promises(experiment.attack, experiment)
        except ValueError as error:
            raise UserError(str(error)) from error

    @classmethod
    def uncovered(cls, experiment: Any) -> Sequence[str]:
        """Return sentences for privacy statements, about the guarantees in a run with hostile clients."""
        count, kind = experiment.attack.clients, kind_of(experiment.attack)
        what = f"In this run there are {count} hostile clients (attack {kind})."
        return [
            f"{what} {_KNOWN if is_known else _HOLDS}, {part.despite_hostile()}. The epsilon is no promise to the "
            "hostile clients themselves. It is about readers of released results; hostile clients also know what they "
            "sent, and in which rounds."
            for part in _promising(experiment)
            if isinstance(part, Withstanding)
            for is_known in (part is experiment.aggregator and sees_honest(experiment.attack),)
        ]

    @classmethod
    def tampers(cls, experiment: Any, num_classes: int) -> Mapping[int, Tamper]:
        """Return {hostile client: function that changes its records}; the client trains on the changed records."""
        attack, seed = experiment.attack, experiment.seed
        hostile = sorted(hostile_clients(attack, experiment.num_clients, seed))
        return {
            client: partial(_tampered, attack, num_classes, number, partial(rng, seed, "tampered records", client))
            for number, client in enumerate(hostile)
        }

    @classmethod
    def tampers_in(cls, experiment: Any, server_round: int) -> bool:
        """Return True if hostile clients attack in round ``server_round``."""
        return hostile_in(experiment.attack, server_round)

    @classmethod
    def warnings(cls, experiment: Any, rounds_done: int, idle: Sequence[int]) -> Sequence[str]:
        """Return warnings about hostile clients without records, and about rounds with too many hostile clients.

        ``aggregator.hostile`` is the largest number of hostile clients in a round for which the aggregator is designed.
        """
        del rounds_done
        hostile = hostile_clients(experiment.attack, experiment.num_clients, experiment.seed)
        found, most = list[str](), getattr(experiment.aggregator, "hostile", None)
        if harmless := len(hostile.intersection(idle)):
            without = f"{harmless} of the {len(hostile)} hostile clients hold no records, so they have no effect"
            found.append(
                f"{without}: set a larger attack.clients, another seed, or a partition that leaves no client empty"
            )
        in_a_round = len(hostile) * cohort_size(experiment) / experiment.num_clients
        if isinstance(most, int) and in_a_round > most:
            found.append(
                f"rounds have {in_a_round:g} hostile clients on average, and aggregator "
                f"{kind_of(experiment.aggregator)} is set for {most}: set a larger aggregator.hostile, or a smaller "
                "attack.clients"
            )
        return found

    def begin(self, server_round: int) -> None:
        """Store whether hostile clients attack in this round."""
        self._is_due = hostile_in(self._attack, server_round)
        self.inner.begin(server_round)

    def received(self, replies: tuple[Reply, ...]) -> tuple[Reply, ...]:
        """Return the round's updates unchanged.

        Also store for ``remarks`` whether a hostile client with records took part.
        """
        replies = self.inner.received(replies)
        is_there = any(reply.client in self._hostile for reply in replies if reply.num_examples > 0)
        self._idle = self._is_due and not is_there and bool(self._hostile)
        return replies

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the aggregate of the round, in which forged updates replace the updates of hostile clients."""
        replies = self._with_forged(cohort, algorithm, server)
        return self.inner.aggregate(replace(cohort, replies=replies), algorithm, server)

    def _with_forged(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> tuple[Reply, ...]:
        """Return the updates of the round, with forged updates in place of the hostile clients' updates."""
        replies = cohort.replies
        trained = [reply for reply in replies if reply.num_examples > 0]
        hostile = [reply for reply in trained if reply.client in self._hostile]
        if not hostile or not hostile_in(self._attack, cohort.server_round):
            return replies
        honest = [reply for reply in trained if reply.client not in self._hostile and sees_honest(self._attack)]
        size = round(self._expected) if self.hides_clients else len(replies)
        coins = rng(self._seed, "forged updates", cohort.server_round)

        def aggregated(forged: Sequence[Reply]) -> torch.Tensor:
            tried = replace(cohort, replies=_replaced(replies, forged))
            found = self.inner.foreseen(tried, algorithm, server)
            assert found is not None  # not None: the hostile clients of this round have records
            return as_rows([replace(hostile[0], payloads=found.payloads)])[0]

        seen = Seen(honest, size, coins, aggregated if sees_honest(self._attack) else None)
        return _replaced(replies, self._attack.forged(hostile, seen))

    def remarks(self) -> Sequence[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        if self.hides_clients:  # the cohort is secret, so no remark may depend on the cohort
            return self.inner.remarks()
        said = off(f"attack {kind_of(self._attack)}", "no hostile client with records took part")
        return [*self.inner.remarks(), *([said] if self._idle else [])]
