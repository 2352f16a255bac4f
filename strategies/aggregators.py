"""Aggregators: rules that turn a round's updates into the one aggregate that the server half of an algorithm sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

from fl_sim.errors import Diverged
from fl_sim.importing import torch
from fl_sim.kinds import Choices, kind_of
from fl_sim.native.mean import weighted_mean
from fl_sim.params import FlatParams, flattened, is_finite
from fl_sim.settings import Settings
from fl_sim.types import Aggregate, Cohort, Payloads, Reply
from strategies.algorithm import MeanOnly, Weigh, Weighing, Weighting
from strategies.samplers import Sampler


class Aggregator(Protocol):
    """A way to make one mean of a round's updates, without a guarantee of privacy."""

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the mean over the clients that have records, or None where none has.

        Raises RunError, naming client and round, where an update cannot be used.
        """
        ...


class WeightedMean(Settings):
    """The plain mean, by number of records or uniform as the algorithm asks. It protects nothing: no privacy."""

    kind: Literal["mean"] = "mean"

    def mean(self, cohort: Cohort, weighting: Weighting | Weigh) -> Aggregate | None:
        """Return the mean over the clients that have records, or None where none has.

        Raises RunError, naming client and round, where an update or a training loss is not finite.
        """
        trained = _trained(cohort)
        if callable(weighting):
            for reply in trained:
                _check_finite(reply, cohort.server_round)
            weights = list(weighting(trained)) if trained else []
        else:
            weights = weights_of(trained, weighting)
        payloads = (
            {name: weighted_mean([reply.payloads[name] for reply in trained], weights) for name in trained[0].payloads}
            if trained
            else {}
        )
        # A sum of finite numbers is finite and one bad number spoils it: only then each update is looked at by itself.
        apart = [reply for reply in cohort.replies if reply.num_examples == 0 or not _has_finite_loss(reply)]
        for reply in apart if is_finite(payloads) else cohort.replies:
            _check_finite(reply, cohort.server_round)
        return Aggregate(payloads, participation=cohort.participation(len(trained))) if trained else None


def check_weighing(experiment: Choices) -> None:
    """Raise ValueError where an algorithm weighs clients itself, and an aggregator does not ask it."""
    if isinstance(experiment.algorithm, Weighing) and type(experiment.aggregator) is not WeightedMean:
        raise ValueError(
            f"algorithm {kind_of(experiment.algorithm)} weighs clients by what they declare of themselves: of the "
            "aggregators only mean does that; leave aggregator out"
        )


def weights_of(replies: Sequence[Reply], weighting: Weighting) -> list[float]:
    """Return each client's weight in the mean, before division by their sum."""
    return [float(reply.num_examples) if weighting == "examples" else 1.0 for reply in replies]


class Robust(Settings):
    """A robust aggregator: looks at single updates, so that a few hostile clients have little effect.

    All that a client sends is one vector to it.
    """

    def check(self, experiment: Choices) -> None:
        """Raise ValueError beside an algorithm whose server needs the mean."""
        algorithm = experiment.algorithm
        if isinstance(algorithm, MeanOnly) and (why := algorithm.mean_only()):
            raise ValueError(
                f"algorithm {kind_of(algorithm)} cannot run with aggregator {kind_of(self)}: {why}; leave aggregator "
                "out, or take another algorithm, such as fedavg"
            )


def cohort_size(experiment: Choices) -> float:
    """Return the number of clients in a round, the expected one where it is drawn."""
    sampler = experiment.sampler
    return sampler.expected_size(experiment.clients) if isinstance(sampler, Sampler) else float(experiment.clients)


Combine: TypeAlias = "Callable[[torch.Tensor, Sequence[Reply]], torch.Tensor]"
"""(rows as ``as_rows`` makes them, the replies that they are of) -> one row."""


def combined(cohort: Cohort, combine: Combine, idle: Callable[[torch.Tensor], str] | None = None) -> Aggregate | None:
    """Return the aggregate of the clients that have records, by an aggregator that looks at single updates.

    ``idle``: a remark on rows of which it makes no more than their mean. None where no client has records. Raises
    RunError, naming client and round, where an update or a loss is not finite.
    """
    for reply in cohort.replies:
        _check_finite(reply, cohort.server_round)
    if not (replies := _trained(cohort)):
        return None
    rows = as_rows(replies)
    row = combine(rows, replies).to(rows.dtype)
    said = idle(rows) if idle else ""
    return Aggregate(from_row(row, replies[0].payloads), cohort.participation(len(replies)), said)


def _trained(cohort: Cohort) -> list[Reply]:
    return [reply for reply in cohort.replies if reply.num_examples > 0]


def as_rows(replies: Sequence[Reply]) -> torch.Tensor:
    """Return all payloads of each reply as one vector, (replies, numbers), in the order of the first one's names."""
    order = list(replies[0].payloads)
    return torch.stack([torch.cat([flattened(reply.payloads[name]).flat for name in order]) for reply in replies])


def from_row(row: torch.Tensor, like: Payloads) -> Payloads:
    """Return a vector of the kind that ``as_rows`` makes as payloads of the names and shapes of ``like``."""
    parts = [flattened(params) for params in like.values()]
    cut = row.split_with_sizes([part.flat.numel() for part in parts])
    return {name: FlatParams(piece, part.layout) for name, part, piece in zip(like, parts, cut, strict=True)}


def _has_finite_loss(reply: Reply) -> bool:
    return reply.loss is None or math.isfinite(reply.loss)


def _check_finite(reply: Reply, server_round: int) -> None:
    where = f"client {reply.client} in round {server_round}"
    if not _has_finite_loss(reply):
        raise Diverged(
            f"{where} has a training loss of {reply.loss}: training diverged; try a smaller local.learning_rate"
        )
    if not is_finite(reply.payloads):
        raise Diverged(
            f"{where} sent numbers that are not finite: training diverged; try a smaller local.learning_rate"
        )
