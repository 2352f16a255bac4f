"""Rounds under distributed DP: clients send noisy integers, and each sum is charged to the ledger before it is used.

Secure aggregation is simulated as a sum modulo 2^bits. The settings are in ``strategies.distributed_dp``, and the
arithmetic in ``fl_sim.privacy.modular_sums``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clients.client_layer import ClientLayer
from fl_sim.errors import BudgetExhausted, Malformed, RunError, UserError
from fl_sim.params import detached, layout_of, num_parameters, payload_vector, payloads_in, trainable
from fl_sim.privacy.ledger import Ledger, Receipt
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.modular_sums import (
    NoisyGrid,
    SumGrid,
    mean_of_sum,
    noise_for,
    packed,
    share_of,
    unpacked,
    wraps_around,
)
from fl_sim.privacy.terms import Adjacency, Terms, rounded_up
from fl_sim.store.run_directory import LEDGER, RoundRecord, read_rounds
from fl_sim.types import (
    Aggregate,
    ClientUpdate,
    Cohort,
    LocalTask,
    Packed,
    Params,
    Payloads,
    Reply,
    ServerState,
    Size,
    Trained,
)
from strategies.algorithm import Algorithm, first_template, payload_template
from strategies.answers import UNQUOTED, in_words
from strategies.distributed_dp import NoisySums
from strategies.layer import Beginning, Layer, Stop
from strategies.private_steps import digest_of
from strategies.private_updates import check_changes

_SHARE = "share"


def terms_of(settings: NoisySums) -> Terms:
    """Return the terms of the privacy ledger: privacy unit, adjacency, delta and budget. They define the epsilon."""
    return Terms(settings.unit, Adjacency.ADD_OR_REMOVE_ONE, settings.delta, settings.epsilon)


def grid_of(experiment: Any, sent: Payloads) -> NoisyGrid:
    """Return the rounding grid of a run's sums. ``sent``: the payload template of the algorithm.

    If the settings have no noise multiplier, the smallest noise multiplier that the budget allows is used. The noise is
    planned for sums over the smallest cohort: all clients, or the smallest group of a cyclic sampler.
    """
    dimension, apart = sum(num_parameters(params) for params in sent.values()), experiment.sampler.rounds_apart
    return _grid(experiment.aggregator, dimension, experiment.num_members // apart, num_charges(experiment))


def num_charges(experiment: Any) -> int:
    """Return the number of charges to the ledger in a run without dropouts.

    This number is the largest number of rounds in which a single client takes part.
    """
    rounds: int = experiment.rounds
    apart: int = experiment.sampler.rounds_apart
    return -(-rounds // apart)


@lru_cache(maxsize=64)
def _grid(settings: NoisySums, dimension: int, shares: int, charges: int) -> NoisyGrid:
    noise_multiplier = settings.noise_multiplier
    if noise_multiplier is None:
        assert settings.epsilon is not None
        first = settings.grid(dimension, shares, 1.0)
        noise_multiplier = noise_for(first, charges, settings.epsilon, settings.delta)
    return settings.grid(dimension, shares, noise_multiplier)


@dataclass
class DistributedSums(Layer):
    """Charges each round's noisy sum to the privacy ledger before the server opens (sees) the sum. Computes the mean.

    ``noise``: the run's noise source, from which the clients draw. The ledger stores an identifier of this source with
    each charge. ``grid``: the rounding grid of the sums, set before the first round. ``unopened``: the rounds whose
    sums were not opened, because they would have exceeded the budget. ``wrapped``: the rounds whose sums probably
    overflowed (wrapped around) the modulus.
    """

    settings: NoisySums
    rounds_apart: int
    seed: int
    ledger: Ledger
    noise: Noise
    grid: NoisyGrid | None = None
    unopened: list[int] = field(default_factory=list)
    wrapped: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> DistributedSums:
        """Open the privacy ledger in the run directory ``out``, and return the layer of the new or resumed run.

        A resumed run with secret noise draws new noise. So a round that was charged but not finished is charged again.
        """
        settings, paid = experiment.aggregator, progress.get("receipt")
        seeded = Noise.seeded(int.from_bytes(hashlib.sha256(digest_of(experiment).encode()).digest()))
        receipt = None if paid is None else Receipt.from_json(paid)
        ledger = Ledger(terms_of(settings), out / LEDGER, receipt=receipt, holder="what this run has released so far")
        noise = seeded if settings.noise == "seeded" else Noise.secret()
        return cls(settings, experiment.sampler.rounds_apart, experiment.seed, ledger, noise)

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: Any, model: Callable[[], nn.Module]) -> ClientShares:
        """Return the layer's code on clients (``ClientShares``), which clips and rounds updates, and adds noise."""
        params = detached(trainable(model()).items())
        template = first_template(algorithm, params, experiment.local.personal)
        run_digest = digest_of(experiment) if experiment.aggregator.noise == "seeded" else ""
        return ClientShares(grid_of(experiment, template), template, experiment.seed, run_digest)

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError for payloads other than updates, too little noise, or one round above the budget."""
        settings, grid = experiment.aggregator, grid_of(experiment, beginning.sent)
        check_changes(experiment.algorithm, beginning, f"aggregator={settings.kind}", "aggregator")
        cost = Ledger(Terms(settings.unit, Adjacency.ADD_OR_REMOVE_ONE, settings.delta)).charge(
            grid.event(grid.shares), release="one round", noise=""
        )
        if cost is None:
            raise UserError(
                f"the noise of aggregator {settings.kind} gives no guarantee: each of {grid.shares:,} clients would "
                f"add noise of {grid.share_variance**0.5:.3g} grid steps; set a larger aggregator.noise_multiplier or "
                f"{grid.cure}"
            )
        if settings.epsilon is not None and cost > settings.epsilon:
            raise UserError(
                f"aggregator.epsilon={settings.epsilon:g} does not afford one round, which costs {rounded_up(cost)} at "
                f"delta {settings.delta:g}: take a larger aggregator.noise_multiplier or epsilon, or leave "
                "noise_multiplier out; the noise is then computed from epsilon"
            )

    @classmethod
    def check_directory(cls, experiment: Any, out: Path) -> None:
        """Raise RunError if the run has published rounds whose costs are missing in the privacy ledger."""
        path, spent = out / LEDGER, max((one.epsilon or 0.0 for one in read_rounds(out)), default=0.0)
        found = Ledger(terms_of(experiment.aggregator), path).epsilon if path.exists() else 0.0
        if found is not None and found < spent:
            raise RunError(
                f"{path} holds charges of epsilon {found:.4g}, but rounds of epsilon {spent:.4g} were released: put an "
                "unchanged copy of it back, or start a new run in a fresh directory, which pays again"
            )

    def begin(self, server_round: int) -> None:
        """Raise Stop if the budget does not cover a round in which all clients answer.

        The round is charged later: after the number of answers is known, and before the server opens (sees) the sum.
        """
        if not self.affords(server_round):
            raise Stop(f"privacy budget spent after {server_round - 1} rounds (epsilon {self.settings.epsilon:g})")
        self.inner.begin(server_round)

    def lost(self, server_round: int, failed: Mapping[int, Malformed], *, answered: bool) -> None:
        """Treat failed clients as clients that dropped out. Raises RunError if no client answered.

        The reasons of the failures are written only to a private file.
        """
        if failed and not answered:
            raise RunError(
                f"no client sent a valid update in round {server_round}, so the cause is the set-up (the data, the "
                f"model, a setting) and not a single client; {UNQUOTED}",
                private=in_words("client", failed),
            )

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Charge the round's sum modulo 2^bits to the ledger, and return the mean update, computed from this sum.

        The result is None if no client answered, or if only few clients answered, so that their noise is too small for
        the budget. In these cases the model does not change.
        """
        assert self.grid is not None
        if not (present := len(cohort.replies)):
            return None
        try:
            self._pay(cohort.server_round, present)
        except BudgetExhausted:
            self.unopened.append(cohort.server_round)
            return None
        total = np.zeros(self.grid.padded, np.int64)
        for reply in cohort.replies:  # secure aggregation: the server sees only this sum, no single message
            total = (total + reply.payloads[_SHARE][_SHARE].numpy()) % self.grid.modulus
        mean = self.mean_of(total, cohort)
        template = payload_template(algorithm, server)
        return Aggregate(payloads_in(torch.from_numpy(mean), template), participation=present / cohort.num_clients)

    def mean_of(self, total: NDArray[np.int64], cohort: Cohort) -> NDArray[np.float64]:
        """Return the mean update, shape (dimension,), from ``total``, the sum of the messages modulo 2^bits.

        Sums that probably wrapped around are noted.
        """
        assert isinstance(self.grid, SumGrid)
        if wraps_around(total, self.grid):
            self.wrapped.append(cohort.server_round)
        present, server_round = len(cohort.replies), cohort.server_round
        return mean_of_sum(total, present, self.grid, seed=self.seed, server_round=server_round)

    def metrics(self) -> Mapping[str, Any]:
        """Return the fields of the round's line in ``rounds.jsonl``, with the epsilon of all rounds so far."""
        return {**self.inner.metrics(), "epsilon": self.ledger.epsilon}

    def affords(self, server_round: int) -> bool:
        """Return True if the budget covers a round in which all clients answer, or if the round is already charged."""
        assert self.grid is not None
        event = self.grid.event(self.grid.shares)
        return self._is_paid(server_round, self.grid.shares) or self.ledger.affords(event)

    def conclusions(self, rounds: Sequence[RoundRecord]) -> list[str]:
        """Return warnings about sums that were not opened, and about sums that overflowed the modulus."""
        warnings = self.inner.conclusions(rounds)
        if self.unopened:
            warnings.append(
                f"in {len(self.unopened)} rounds (first: round {self.unopened[0]}) so many clients dropped out that "
                "their noise was too little for the budget: these sums were not opened, and the model did not change"
            )
        if self.wrapped:
            assert self.grid is not None
            warnings.append(
                f"in {len(self.wrapped)} rounds (first: round {self.wrapped[0]}) the sum filled the range of "
                f"2^{self.grid.bits}, so some of its numbers probably wrapped around: set more aggregator.bits or "
                "a larger aggregator.headroom"
            )
        return warnings

    def state(self) -> Mapping[str, Any]:
        """Return the receipt for the checkpoint: the number and the digest of all ledger entries.

        With this receipt, a resumed run checks that the ledger still contains these entries.
        """
        return {"receipt": self.ledger.receipt.to_json()}

    def _pay(self, server_round: int, present: int) -> None:
        """Charge a round's sum of ``present`` answers to the ledger, if it is not charged yet. Raises BudgetExhausted.

        With a cyclic sampler, one charge covers consecutive rounds in which no client takes part twice. If a later
        round of this group has fewer answers than all earlier rounds of the group, it is charged again.
        """
        assert self.grid is not None
        if not self._is_paid(server_round, present):
            counted = min(present, self.grid.shares)
            release = self._release(server_round, counted)
            self.ledger.charge(self.grid.event(counted), release=release, noise=self.noise.identity)

    def _is_paid(self, server_round: int, present: int) -> bool:
        assert self.grid is not None
        enough = range(1, min(present, self.grid.shares) + 1)
        return any(self.ledger.has_charged(self._release(server_round, few), self.noise.identity) for few in enough)

    def _release(self, server_round: int, counted: int) -> str:
        assert self.grid is not None
        first = (server_round - 1) // self.rounds_apart * self.rounds_apart + 1
        rounds = f"round {first}" if self.rounds_apart == 1 else f"rounds {first} to {first + self.rounds_apart - 1}"
        return rounds if counted == self.grid.shares else f"{rounds}, {counted} of {self.grid.shares} noises"


@dataclass(frozen=True)
class ClientShares(ClientLayer):
    """Turns a client's update into noisy integers modulo 2^bits.

    ``template``: the payload template of the algorithm. ``seed``: the public seed of the rotation. ``run_digest``: a
    digest of the experiment, from which seeded noise is derived; empty for secret noise.
    """

    only_sums: ClassVar[bool] = True
    grid: NoisyGrid
    template: Payloads
    seed: int
    run_digest: str

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return the client's noisy numbers as an update of weight 1, without the loss.

        Client state stays on the client. A client without records sends only noise. Raises RunError if names or shapes
        of the update differ from the template, because they could reveal facts about records.
        """
        del task
        shapes = [{group: dict(layout_of(one)) for group, one in of.items()} for of in (update.payloads, self.template)]
        if shapes[0] != shapes[1] or update.packed:
            raise RunError(
                "the algorithm's update has other tensors than the update of a client without records, so it could "
                "reveal facts about records: let finish return tensors with the same names and shapes for all clients"
            )
        share = self.share(came, trained, update)
        first, *others = self.template
        content = {first: Packed.of(torch.zeros(0), packed(share, self.grid.bits))}
        content |= {name: Packed.blank(Size(0)) for name in others}
        return ClientUpdate({}, 1, None, update.state, content)

    def share(self, came: LocalTask, trained: Trained, update: ClientUpdate) -> NDArray[np.int64]:
        """Return the noisy numbers of a message: the rounded update plus the client's noise, modulo 2^bits."""
        del trained
        values = payload_vector(update.payloads, self.template).double().cpu().numpy()
        if not came.num_examples:
            values = np.zeros_like(values)
        noise = self._noise(came.client, came.server_round)
        assert isinstance(self.grid, SumGrid)
        return share_of(values, self.grid, noise, seed=self.seed, server_round=came.server_round)

    def packs(self, template: Payloads, model: Params) -> Mapping[str, Size]:
        """Return the packed size of each payload. The first payload contains the numbers of all payloads."""
        del model
        first, *others = template
        return {first: Size(0, self.grid.num_bytes), **dict.fromkeys(others, Size(0))}

    def unpacked(self, reply: Reply, template: Payloads, server_round: int) -> Reply:
        """Return the reply with the client's numbers as its only tensor."""
        del server_round
        numbers = unpacked(reply.packed[next(iter(template))].bits, self.grid.padded, self.grid.bits)
        return Reply(reply.client, {_SHARE: {_SHARE: torch.from_numpy(numbers)}}, 1, None)

    def _noise(self, client: int, server_round: int) -> Noise:
        """Return the source of the noise that ``client`` adds to its message in round ``server_round``."""
        if not self.run_digest:
            return Noise.secret()
        text = f"{self.run_digest} {client} {server_round}"
        return Noise.seeded(int.from_bytes(hashlib.sha256(text.encode()).digest()))
