"""FedDisco: weights by declared divergence, by literal numbers."""

import math
from typing import Any

import pytest
import torch

from fl_sim.errors import RunError
from fl_sim.types import Cohort, LocalSettings, LocalTask, Reply, Trained
from strategies.aggregators import WeightedMean
from strategies.algorithm import weighting_of
from strategies.fedavg import FedAvg
from strategies.feddisco import FedDisco


def reply(client: int, size: int, divergence: float, update: float = 0.0) -> Reply:
    payloads = {"delta": {"w": torch.tensor([update])}, "labels": {"divergence": torch.tensor([divergence])}}
    return Reply(client, payloads, size, 0.0)


@pytest.mark.parametrize(
    ("counts", "divergence"),
    [((5, 5, 5, 5), 0.0), ((7, 0, 0, 0), math.log(4)), ((3, 3, 0, 0), math.log(2)), ((0, 0, 0, 0), 0.0), ((), 0.0)],
)
def test_clients_declare_the_divergence_from_uniform(counts: tuple[int, ...], divergence: float) -> None:
    settings, params = LocalSettings(0.1, 0.0, 0.0, batch_size=4, epochs=1), {"w": torch.zeros(1)}
    task = LocalTask(1, 0, 4, sum(counts), settings, params, class_counts=counts)
    update = FedDisco().finish(task, Trained(params, {}, 1, 0.0))
    assert float(update.payloads["labels"]["divergence"]) == pytest.approx(divergence, abs=1e-6)


def test_weights_are_the_papers() -> None:
    """p = (.5, .25, .25), d = (0, .25, .75): .5 + .1, .25 - .125 + .1, and .25 - .375 + .1 < 0."""
    replies = [reply(0, 10, 0.0), reply(1, 5, 0.5), reply(2, 5, 1.5)]
    assert FedDisco().weigh(replies) == pytest.approx([0.6, 0.225, 0.0])
    assert FedDisco(a=0, b=0).weigh(replies) == [0.5, 0.25, 0.25]
    assert FedDisco(a=9, b=0).weigh(replies[1:]) == [0.5, 0.5]  # all would be 0


def test_the_mean_is_weighed_so() -> None:
    replies = (reply(0, 10, 0.0, 1.0), reply(1, 5, 0.5, 2.0), reply(2, 5, 1.5, 50.0), reply(3, 0, 0.0, 70.0))
    aggregate = WeightedMean().mean(Cohort(1, replies, 4, 4.0), weighting_of(FedDisco()))
    assert aggregate is not None
    assert float(aggregate.payloads["delta"]["w"]) == pytest.approx((0.6 * 1 + 0.225 * 2) / 0.825)
    assert aggregate.participation == 0.75
    assert weighting_of(FedAvg()) == "examples"


@pytest.mark.parametrize("divergence", [math.nan, math.inf])
def test_a_declared_number_that_is_none_is_refused_with_its_client(divergence: float) -> None:
    replies: Any = (reply(0, 10, 0.0), reply(1, 5, divergence))
    with pytest.raises(RunError, match="client 1 in round 1 sent numbers that are not finite"):
        WeightedMean().mean(Cohort(1, replies, 2, 2.0), weighting_of(FedDisco()))


def test_a_round_in_which_nobody_has_records_has_no_mean() -> None:
    assert WeightedMean().mean(Cohort(1, (reply(0, 0, 0.0),), 1, 1.0), weighting_of(FedDisco())) is None
