"""Aggregators: rules that turn the updates of a round into one aggregate for the server half of an algorithm."""

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
    """A rule that turns the updates of a round into one aggregate, without a privacy guarantee."""

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the mean over the clients that have records, or None if no client has records.

        Raises RunError, which names client and round, if an update cannot be used.
        """
        ...


class WeightedMean(Settings):
    """The plain mean, weighted by number of records or uniform as the algorithm asks. It gives no privacy guarantee."""

    kind: Literal["mean"] = "mean"

    def mean(self, cohort: Cohort, weighting: Weighting | Weigh) -> Aggregate | None:
        """Return the mean over the clients that have records, or None if no client has records.

        Raises RunError, which names client and round, if an update or a training loss is not finite.
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
        # One number that is not finite makes the mean not finite. So single updates are checked only in that case.
        apart = [reply for reply in cohort.replies if reply.num_examples == 0 or not _has_finite_loss(reply)]
        for reply in apart if is_finite(payloads) else cohort.replies:
            _check_finite(reply, cohort.server_round)
        return Aggregate(payloads, participation=cohort.participation(len(trained))) if trained else None


def check_weighing(experiment: Choices) -> None:
    """Raise ValueError if the algorithm computes the clients' weights and the aggregator is not the plain mean."""
    if isinstance(experiment.algorithm, Weighing) and type(experiment.aggregator) is not WeightedMean:
        raise ValueError(
            f"algorithm {kind_of(experiment.algorithm)} computes the clients' weights from their updates, and only "
            "aggregator mean uses such weights: leave aggregator out"
        )


def weights_of(replies: Sequence[Reply], weighting: Weighting) -> list[float]:
    """Return the weight of each reply in the mean, before division by the sum of all weights."""
    return [float(reply.num_examples) if weighting == "examples" else 1.0 for reply in replies]


class Robust(Settings):
    """Base class of robust aggregators, which compare single updates so that a few hostile clients have little effect.

    They treat all payloads of a client as one vector.
    """

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the algorithm needs the mean of the payloads: robust aggregators return no mean."""
        algorithm = experiment.algorithm
        if isinstance(algorithm, MeanOnly) and (why := algorithm.mean_only()):
            raise ValueError(
                f"algorithm {kind_of(algorithm)} cannot run with aggregator {kind_of(self)}: {why}; leave aggregator "
                "out, or take another algorithm, such as fedavg"
            )


def cohort_size(experiment: Choices) -> float:
    """Return the number of clients in a round: the expected number if the sampler draws a random number of clients."""
    sampler = experiment.sampler
    return sampler.expected_size(experiment.clients) if isinstance(sampler, Sampler) else float(experiment.clients)


Combine: TypeAlias = "Callable[[torch.Tensor, Sequence[Reply]], torch.Tensor]"
"""A function that combines updates, the rows of a matrix (see ``as_rows``), into one row. The function also receives
the clients' replies, one for each row."""


def combined(
    cohort: Cohort, combine: Combine, no_effect: Callable[[torch.Tensor], str] | None = None
) -> Aggregate | None:
    """Return the robust aggregate of the updates of clients with records, or None if no client has records.

    ``combine``: the aggregation rule. ``no_effect``: a function that gets the updates, as rows. If the rule only
    returns the mean of these updates, the function returns a sentence that says so for the user, otherwise an empty
    string. Raises RunError, which names client and round, if an update or a loss is not finite.
    """
    for reply in cohort.replies:
        _check_finite(reply, cohort.server_round)
    if not (replies := _trained(cohort)):
        return None
    rows = as_rows(replies)
    row = combine(rows, replies).to(rows.dtype)
    remark = no_effect(rows) if no_effect else ""
    return Aggregate(from_row(row, replies[0].payloads), cohort.participation(len(replies)), remark)


def _trained(cohort: Cohort) -> list[Reply]:
    return [reply for reply in cohort.replies if reply.num_examples > 0]


def as_rows(replies: Sequence[Reply]) -> torch.Tensor:
    """Return a matrix with one row per reply: all payloads as one vector, in the order of the first reply's names."""
    order = list(replies[0].payloads)
    return torch.stack([torch.cat([flattened(reply.payloads[name]).flat for name in order]) for reply in replies])


def from_row(row: torch.Tensor, like: Payloads) -> Payloads:
    """Return the payloads that one row of the matrix from ``as_rows`` holds, with the names and shapes of ``like``."""
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
