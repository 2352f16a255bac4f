"""Aggregators: rules that turn a round's updates into one aggregate, which the algorithm merges into the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, Protocol

import numpy as np

from fl_sim.errors import Diverged, RunError
from fl_sim.importing import torch
from fl_sim.kinds import Choices, kind_of
from fl_sim.native.mean import weighted_mean
from fl_sim.params import FlatParams, flattened, is_finite
from fl_sim.settings import Settings
from fl_sim.types import Aggregate, Cohort, Params, Payloads, Reply
from strategies.algorithm import MeanOnly, Weigh, Weighing, Weighting
from strategies.samplers import Sampler


class Aggregator(Protocol):
    """A rule that turns the updates of a round into one aggregate, without a privacy guarantee."""

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the aggregate of the updates of clients with records, or None if no client has records.

        Raises RunError, with the client and the round in its message, if an update cannot be used.
        """
        ...


class WeightedMean(Settings):
    """The mean of the updates, with weights from the algorithm (numbers of records, or equal). No privacy guarantee."""

    kind: Literal["mean"] = "mean"

    def mean(self, cohort: Cohort, weighting: Weighting | Weigh) -> Aggregate | None:
        """Return the mean update of the clients that have records, or None if no client has records.

        Raises RunError, which names client and round, if an update or a training loss is not finite.
        """
        trained = _trained(cohort)
        if callable(weighting):
            for reply in trained:
                check_finite(reply, cohort.server_round)
            weights = list(weighting(trained)) if trained else []
        else:
            weights = weights_of(trained, weighting)
        payloads = (
            {name: weighted_mean([reply.payloads[name] for reply in trained], weights) for name in trained[0].payloads}
            if trained
            else {}
        )
        # A single update that is not finite makes the mean not finite. So a finite mean needs no further check.
        apart = [reply for reply in cohort.replies if reply.num_examples == 0 or not _has_finite_loss(reply)]
        for reply in apart if is_finite(payloads) else cohort.replies:
            check_finite(reply, cohort.server_round)
        return Aggregate(payloads, participation=cohort.participation(len(trained))) if trained else None


def check_weighing(experiment: Choices) -> None:
    """Raise ValueError if the algorithm computes the clients' weights and the aggregator is not the plain mean."""
    if isinstance(experiment.algorithm, Weighing) and type(experiment.aggregator) is not WeightedMean:
        raise ValueError(
            f"algorithm {kind_of(experiment.algorithm)} computes the clients' weights from their updates, but only "
            "aggregator mean uses such weights: leave aggregator out"
        )


def weights_of(replies: Sequence[Reply], weighting: Weighting) -> list[float]:
    """Return the weight of each reply in the mean, before division by the sum of all weights."""
    return [float(reply.num_examples) if weighting == "examples" else 1.0 for reply in replies]


class Robust(Settings):
    """Base class of robust aggregators: they compare single updates, and limit the effect of a few hostile clients.

    A robust aggregator treats all payloads of a client as one vector.
    """

    layer: ClassVar[str] = "strategies.aggregator_memory:AggregatorMemory"
    lower: ClassVar[str] = "aggregator.hostile"
    """The setting that a user may lower if rounds have too few clients."""
    needs_names: ClassVar[bool] = False
    """True if the rule needs client IDs, because it compares a client's updates of several rounds."""

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the algorithm needs the mean of the payloads, or if rounds have too few clients."""
        algorithm = experiment.algorithm
        if isinstance(algorithm, MeanOnly) and (why := algorithm.mean_only()):
            raise ValueError(
                f"algorithm {kind_of(algorithm)} cannot run with aggregator {kind_of(self)}: {why}; leave aggregator "
                "out, or take another algorithm, such as fedavg"
            )
        if (size := cohort_size(experiment)) < (needed := self.fewest()):
            raise ValueError(
                f"aggregator {kind_of(self)} needs {needed} clients in a round, and rounds have {size:g}: set a "
                f"smaller {self.lower}, or more clients"
            )

    def fewest(self) -> int:
        """Return the smallest number of updates that the rule needs."""
        return 1

    @property
    def has_memory(self) -> bool:
        """Return True if the rule keeps tensors from round to round (``Cohort.memory``)."""
        return False

    def remembered(self, payloads: Payloads, num_clients: int) -> Params:
        """Return the aggregator's memory before round 1. ``payloads``: tensors with names and shapes of an update."""
        del payloads, num_clients
        return {}

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the robust aggregate of all payloads, or None if no client has records; see ``Aggregator``."""
        if not (taken := self.taken(cohort)):
            return None
        rows = as_rows(taken.replies)
        payloads = from_row(self.of_rows(rows, taken, weighting).to(rows.dtype), taken.replies[0].payloads)
        memory = self.memory_after(taken, payloads)
        return Aggregate(payloads, cohort.participation(len(rows)), self.no_effect(rows, taken), memory)

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return the aggregate, shape (d,), of the updates ``rows``, shape (n, d). Row i belongs to reply i."""
        raise NotImplementedError

    def no_effect(self, rows: torch.Tensor, cohort: Cohort) -> str:
        """Return a warning if the rule had no effect (the aggregate equals the mean of ``rows``), otherwise ""."""
        del rows, cohort
        return ""

    def memory_after(self, cohort: Cohort, payloads: Payloads) -> Params:
        """Return the aggregator's memory for the next round. ``payloads``: the aggregate of this round."""
        del payloads
        return cohort.memory

    def taken(self, cohort: Cohort) -> Cohort | None:
        """Return ``cohort`` with only the replies of clients that have records, or None if there are no such clients.

        Raises RunError, which names client and round, if an update or a loss is not finite. Also raises RunError if
        there are too few updates for the rule.
        """
        for reply in cohort.replies:
            check_finite(reply, cohort.server_round)
        if not (replies := _trained(cohort)):
            return None
        if (count := len(replies)) < (needed := self.fewest()):
            raise RunError(
                f"round {cohort.server_round} has {count} clients with records: {kind_of(self)} needs at least "
                f"{needed}; set a smaller {self.lower}, or have more clients in a round"
            )
        return replace(cohort, replies=tuple(replies))


def cohort_size(experiment: Choices) -> float:
    """Return the number of clients in a round: the expected number if the sampler draws a random number of clients."""
    sampler = experiment.sampler
    return sampler.expected_size(experiment.clients) if isinstance(sampler, Sampler) else float(experiment.clients)


def _trained(cohort: Cohort) -> list[Reply]:
    return [reply for reply in cohort.replies if reply.num_examples > 0]


def as_rows(replies: Sequence[Reply]) -> torch.Tensor:
    """Return a matrix with one row per reply: its payloads as one vector, with tensors in the first reply's order."""
    order = list(replies[0].payloads)
    return torch.stack([torch.cat([flattened(reply.payloads[name]).flat for name in order]) for reply in replies])


def from_row(row: torch.Tensor, like: Payloads) -> Payloads:
    """Convert one row of the matrix from ``as_rows`` back to payloads, with the names and shapes of ``like``."""
    parts = [flattened(params) for params in like.values()]
    cut = row.split_with_sizes([part.flat.numel() for part in parts])
    return {name: FlatParams(piece, part.layout) for name, part, piece in zip(like, parts, cut, strict=True)}


def ordered(rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` with the values of every column in ascending order.

    For many short columns, NumPy is several times as fast as PyTorch, which sorts the columns one by one.
    """
    return torch.from_numpy(np.sort(rows.numpy(), axis=0))


def squared_distances(rows: torch.Tensor) -> torch.Tensor:
    """Return the squared distances between all pairs of ``rows``, float64 (n, n)."""
    centred = (rows - rows.mean(dim=0)).double()  # centring changes no distance, and reduces rounding errors
    products = centred @ centred.T
    squares = products.diagonal()
    distances: torch.Tensor = (squares[:, None] + squares[None, :] - 2 * products).clamp(min=0).fill_diagonal_(0)
    return distances


def as_named(payloads: Payloads) -> Params:
    """Return all tensors of the payloads as {"payload name/tensor name": tensor}."""
    return {f"{group}/{name}": value for group, params in payloads.items() for name, value in params.items()}


def row_like(named: Params, like: Payloads, prefix: str = "") -> torch.Tensor:
    """Join the tensors in ``named`` into one vector, in the order of the tensors of an update.

    ``like``: the payloads of an update. Tensors that are missing in ``named`` are replaced by zeros.

    ``prefix``: the beginning of each tensor's name in ``named``.
    """
    parts = [named.get(prefix + name, torch.zeros_like(value)).flatten() for name, value in as_named(like).items()]
    return torch.cat(parts)


def _has_finite_loss(reply: Reply) -> bool:
    return reply.loss is None or math.isfinite(reply.loss)


def check_finite(reply: Reply, server_round: int) -> None:
    """Raise Diverged, which names client and round, if an update or a training loss is not finite."""
    where = f"client {reply.client} in round {server_round}"
    if not _has_finite_loss(reply):
        raise Diverged(
            f"{where} has a training loss of {reply.loss}: training diverged; try a smaller local.learning_rate"
        )
    if not is_finite(reply.payloads):
        raise Diverged(
            f"{where} sent numbers that are not finite: training diverged; try a smaller local.learning_rate"
        )
