"""Rounds of secure aggregation: clients send masked integers, and the server can unmask only their sum.

The settings are in ``strategies.secure_sum``, and the arithmetic of masks in ``strategies.masking``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clients.client_layer import ClientLayer
from fl_sim.engines import arrays, wire
from fl_sim.errors import RunError, UserError
from fl_sim.kinds import kind_of
from fl_sim.params import detached, num_parameters, payload_vector, payloads_in, trainable
from fl_sim.privacy.modular_sums import packed, signed, unpacked
from fl_sim.seeding import rng
from fl_sim.store.run_directory import RoundRecord
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
    Traffic,
    Trained,
)
from strategies.algorithm import Algorithm, Sizing, Unfolding, first_template, payload_template, turns_of, weighting_of
from strategies.layer import Ask, Beginning, Drawn, Layer, layer_kinds
from strategies.masking import exchange_bytes, masked, unmasked
from strategies.samplers import Coins
from strategies.secure_sum import SecureSum

GROUP: Final = "secure-sum"
"""Name of the layer's tensors in messages to clients, and of its numbers in replies."""

EXTRA: Final = 2
"""The number of extra entries at the end of a client's vector: 1 if it has records (else 0), and its weight."""


def scale_of(settings: SecureSum, cohort: int) -> float:
    """Return the factor that scales numbers before rounding, so that a sum over ``cohort`` clients cannot overflow."""
    return ((1 << (settings.bits - 1)) - 1) // cohort / settings.clipping_range


def is_weighted(settings: SecureSum, algorithm: Algorithm) -> bool:
    """Return True if the weight of a client in the mean is its number of records."""
    return settings.most_records > 0 and weighting_of(algorithm) == "examples"


def names_of(cohort: Sequence[int]) -> Params:
    """Return the client IDs of a cohort as a float32 tensor. The tensor is exact for client IDs up to 2^24."""
    return {"clients": torch.tensor(list(cohort), dtype=torch.float32)}


def quantised(
    values: NDArray[np.float64], scale: float, rounding: str, coins: Callable[[], np.random.Generator]
) -> NDArray[np.int64]:
    """Return ``values`` times ``scale``, rounded to integers, so that masks can be added.

    ``coins``: a function that creates the random generator of stochastic rounding.
    """
    scaled = values * scale
    if rounding == "nearest":
        return np.rint(scaled).astype(np.int64)
    below = np.floor(scaled)
    return (below + (coins().random(len(scaled)) < scaled - below)).astype(np.int64)


@dataclass
class SecureRounds(Layer):
    """Sends the cohort's client IDs to all its clients, and computes the mean from the sum of their masked numbers.

    ``clients``: the cohort of the round. ``unopened``: the rounds whose sums could not be unmasked. ``dropped``: the
    number of drop-outs in all rounds.
    """

    reserved = GROUP
    settings: SecureSum
    seed: int
    clients: tuple[int, ...] = ()
    unopened: list[int] = field(default_factory=list)
    dropped: int = 0
    _sent: tuple[object, ...] = ()

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> SecureRounds:
        """Return the layer of a new or resumed run."""
        del out
        return cls(
            experiment.aggregator, experiment.seed,
            unopened=list(progress.get("unopened", [])), dropped=int(progress.get("dropped", 0)),
        )  # fmt: skip

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: Any, model: Callable[[], nn.Module]) -> ClientLayer:
        """Return the layer's code on clients. It rounds the numbers of an update to integers, and adds masks."""
        params = detached(trainable(model()).items())
        template = first_template(algorithm, params, experiment.local.personal)
        settings = experiment.aggregator
        return ClientMasks(settings, template, experiment.seed, is_weighted(settings, algorithm))

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError if another layer or the algorithm needs single updates, or if the bits are too few."""
        algorithm, what = experiment.algorithm, "cannot run with aggregator secure-sum"
        if isinstance(algorithm, Sizing | Unfolding) or turns_of(algorithm) > 1:
            raise UserError(
                f"algorithm {kind_of(algorithm)} {what}: clients send different tensors, and masked numbers can only "
                "be added if all tensors are equal in shape; take another algorithm, such as fedavg"
            )
        for kind in layer_kinds(experiment):
            names = ("received", "aggregate", "consult")
            if kind is not cls and any(getattr(kind, name) is not getattr(Layer, name) for name in names):
                raise UserError(
                    f"{kind.__name__}, a layer of these settings, {what}: it reads single updates or losses, and the "
                    "server sees only their sum; leave the setting of this layer out, or take aggregator mean"
                )
        settings, most = experiment.aggregator, experiment.num_members
        largest = most * max(1, settings.most_records)
        if largest >= 1 << settings.bits or not scale_of(settings, most):
            raise UserError(
                f"aggregator.bits={settings.bits} are too few for sums of {most:,} clients: set more bits, or a "
                "smaller aggregator.most_records"
            )
        del beginning

    @classmethod
    def exchanged(cls, experiment: Any, server: ServerState) -> Traffic:
        """Return the number of bytes of keys, secret shares and client IDs, for a cohort of the expected size."""
        del server
        settings, size = experiment.aggregator, round(experiment.sampler.expected_size(experiment.num_members))
        down, up = exchange_bytes(size, round(size * (1 - settings.dropout)))
        without, sent = (
            arrays.num_bytes(wire.task_content(wire.BLANK, {}, groups))
            for groups in ({}, {GROUP: names_of(range(size))})
        )
        return Traffic(down + size * (sent - without), up)

    def consult(self, server_round: int, ask: Ask) -> Traffic:
        """Return the number of bytes of keys, secret shares and client IDs that clients exchange through the server."""
        cohort = self.inner.cohort(server_round).clients.tolist()
        down, up = exchange_bytes(len(cohort), len(self._present(server_round, cohort)))
        return self.inner.consult(server_round, ask) + Traffic(down, up)

    def cohort(self, server_round: int, coins: Coins | None = None) -> Drawn:
        """Return the round's cohort, and store it, because the clients of the cohort agree on masks."""
        drawn = self.inner.cohort(server_round, coins)
        self.clients = tuple(drawn.clients.tolist())
        return drawn

    def sent_to(self, client: int, server: ServerState) -> ServerState:
        """Return the server state with the client IDs of the cohort, the same object for all clients of a round."""
        server = self.inner.sent_to(client, server)
        if not self._sent or self._sent[0] is not server or self._sent[1] != self.clients:
            broadcast = {**server.broadcast, GROUP: names_of(self.clients)}
            self._sent = (server, self.clients, replace(server, broadcast=broadcast))
        sent = self._sent[2]
        assert isinstance(sent, ServerState)
        return sent

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the mean of the clients' updates from the sum of their masked numbers.

        Returns None if the sum cannot be unmasked, or if no client of the sum has records. The model is then unchanged.
        """
        settings, bits = self.settings, self.settings.bits
        remaining = frozenset(self._present(cohort.server_round, self.clients))
        replies = [one for one in cohort.replies if one.client in remaining]
        self.dropped += len(self.clients) - len(replies)
        if len(replies) < max(2, threshold := ceil(settings.threshold * len(self.clients))):
            self.unopened.append(cohort.server_round)
            return None
        template = payload_template(algorithm, server)
        total = np.zeros(sum(map(num_parameters, template.values())) + EXTRA, np.int64)
        for reply in replies:
            total += reply.payloads[GROUP][GROUP].numpy()
        summed = unmasked(
            total, self.clients, [one.client for one in replies],
            threshold=threshold, seed=self.seed, server_round=cohort.server_round, bits=bits,
        )  # fmt: skip
        with_records, weights = (int(one) for one in summed[-EXTRA:])
        if not weights:
            return None
        unit = settings.most_records if is_weighted(settings, algorithm) else 1
        mean = signed(summed[:-EXTRA], bits) / scale_of(settings, len(self.clients)) * (unit / weights)
        return Aggregate(payloads_in(torch.from_numpy(mean), template), cohort.participation(with_records))

    def conclusions(self, rounds: Sequence[RoundRecord]) -> list[str]:
        """Return warnings, one of them about rounds whose sums could not be unmasked."""
        warnings = self.inner.conclusions(rounds)
        if self.unopened:
            warnings.append(
                f"in {len(self.unopened)} rounds (first: round {self.unopened[0]}) too few clients answered to remove "
                "the masks: these sums were not opened, and the model did not change"
            )
        return warnings

    def state(self) -> Mapping[str, Any]:
        """Return the rounds whose sums could not be unmasked, and the number of drop-outs, for the checkpoint."""
        return {"unopened": self.unopened, "dropped": self.dropped}

    def _present(self, server_round: int, cohort: Sequence[int]) -> list[int]:
        """Return the clients of ``cohort`` that answer in the round: those that do not drop out."""
        coins = rng(self.seed, "drop-outs", server_round).random(len(cohort))
        return [client for client, coin in zip(cohort, coins, strict=True) if coin >= self.settings.dropout]


@dataclass(frozen=True)
class ClientMasks(ClientLayer):
    """Turns an update into masked integers.

    ``template``: the payload template of the algorithm. ``is_weighted``: True if the weight of a client is its number
    of records.
    """

    only_sums: ClassVar[bool] = True
    settings: SecureSum
    template: Payloads
    seed: int
    is_weighted: bool

    def received(self, task: LocalTask) -> LocalTask:
        """Return the task without the client IDs of the cohort, which the algorithm does not use."""
        return replace(task, broadcast={name: one for name, one in task.broadcast.items() if name != GROUP})

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return the client's masked numbers. Its loss and its number of records are not sent.

        Raises RunError if a number exceeds ``clipping_range``, or if the client has more than ``most_records`` records.
        """
        del task, trained
        settings, bits = self.settings, self.settings.bits
        cohort = [int(one) for one in came.broadcast[GROUP]["clients"].tolist()]
        values = payload_vector(update.payloads, self.template).double().cpu().numpy()
        if not np.abs(values).max(initial=0.0) <= settings.clipping_range:  # "not <=" also refuses NaN; ">" would not
            raise RunError(
                f"its update has a number beyond aggregator.clipping_range={settings.clipping_range:g}: training "
                "diverged, or a larger clipping_range is needed"
            )
        weight, unit = min(1, came.num_examples), 1
        if self.is_weighted:
            weight, unit = came.num_examples, settings.most_records
        if weight > unit:
            raise RunError(
                f"it has more records than aggregator.most_records={unit}: set the largest number of a client's records"
            )
        scale = scale_of(settings, len(cohort))
        whole = quantised(
            values * (weight / unit), scale, settings.rounding,
            lambda: rng(self.seed, "rounding of secure sums", came.client, came.server_round),
        )  # fmt: skip
        numbers = np.concatenate([whole, [min(1, came.num_examples), weight]])
        sent = masked(numbers, came.client, cohort, self.seed, came.server_round, bits)
        first, *others = self.template
        content = {first: Packed.of(torch.zeros(0), packed(sent, bits))}
        content |= {name: Packed.blank(Size(0)) for name in others}
        return ClientUpdate({}, 0, None, update.state, content)

    def packs(self, template: Payloads, model: Params) -> Mapping[str, Size]:
        """Return the size of each payload. The first payload contains all masked numbers; the others are empty."""
        del model
        first, *others = template
        return {first: Size(0, self._num_bytes(template)), **dict.fromkeys(others, Size(0))}

    def unpacked(self, reply: Reply, template: Payloads, server_round: int) -> Reply:
        """Return the client's reply with one tensor, the masked integers, which the server adds up."""
        del server_round
        count = sum(map(num_parameters, template.values())) + EXTRA
        numbers = unpacked(reply.packed[next(iter(template))].bits, count, self.settings.bits)
        return Reply(reply.client, {GROUP: {GROUP: torch.from_numpy(numbers)}}, 0, None)

    def _num_bytes(self, template: Payloads) -> int:
        count = sum(map(num_parameters, template.values())) + EXTRA
        return -(-count * self.settings.bits // 8)
