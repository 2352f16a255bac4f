"""The plain mean of a cohort."""

import pytest
import torch

from fl_sim.errors import RunError
from fl_sim.params import flattened
from fl_sim.types import Cohort, Reply
from strategies.aggregators import WeightedMean


def _cohort(*replies, num_clients=8):
    return Cohort(3, tuple(replies), num_clients, expected_size=5.5)  # of a Poisson sampler: not how many came


def _reply(client, values, num_examples, loss=1.0):
    return Reply(client, {"delta": {"w": torch.tensor(values)}}, num_examples, loss)


def test_mean_by_records_matches_numbers_by_hand():
    aggregate = WeightedMean().mean(
        _cohort(_reply(0, [1.0, 0.0], 1), _reply(4, [3.0, -4.0], 3), num_clients=8), "examples"
    )
    assert aggregate.payloads["delta"]["w"].tolist() == [2.5, -3.0]
    assert aggregate.participation == 0.25


def test_uniform_mean_ignores_how_many_records_but_leaves_out_clients_without_any():
    aggregate = WeightedMean().mean(_cohort(_reply(0, [1.0], 1), _reply(4, [3.0], 999), _reply(5, [8.0], 0)), "uniform")
    assert aggregate.payloads["delta"]["w"].tolist() == [2.0]


def test_every_payload_is_averaged():
    replies = [
        Reply(i, {"a": {"w": torch.tensor([i])}, "b": {"v": torch.tensor([2.0 * i])}}, 1, None) for i in (1.0, 3.0)
    ]
    payloads = WeightedMean().mean(_cohort(*replies), "examples").payloads
    assert {name: {key: value.tolist() for key, value in group.items()} for name, group in payloads.items()} == {
        "a": {"w": [2.0]}, "b": {"v": [4.0]},
    }  # fmt: skip


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_nobody_has_no_mean(weighting):
    assert WeightedMean().mean(_cohort(), weighting) is None


def test_empty_shards_alone_have_no_mean_by_records():
    assert WeightedMean().mean(_cohort(_reply(0, [0.0], 0, None), _reply(1, [0.0], 0, None)), "examples") is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_name_client_and_round(bad):
    with pytest.raises(RunError, match="client 4 in round 3 sent numbers that are not finite"):
        WeightedMean().mean(_cohort(_reply(0, [1.0, 1.0], 1), _reply(4, [0.0, bad], 1)), "examples")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_found_in_vectors_and_in_updates_of_no_weight(bad):
    def reply(client, value, num_examples):
        return Reply(client, {"delta": flattened({"w": torch.tensor([1.0, value])})}, num_examples, 1.0)

    with pytest.raises(RunError, match="client 4 in round 3 sent numbers"):
        WeightedMean().mean(_cohort(reply(0, 1.0, 1), reply(4, bad, 1), reply(6, -bad, 1)), "examples")
    with pytest.raises(RunError, match="client 4 in round 3 sent numbers"):
        WeightedMean().mean(_cohort(reply(0, 1.0, 1), reply(4, bad, 0)), "examples")
    with pytest.raises(RunError, match="client 4 in round 3 sent numbers"):
        WeightedMean().mean(_cohort(reply(4, bad, 0)), "examples")


def test_the_first_client_that_diverged_is_named_whatever_it_sent():
    bad_loss, bad_numbers = _reply(4, [0.0], 1, float("nan")), _reply(2, [float("nan")], 1)
    with pytest.raises(RunError, match="client 2 in round 3 sent numbers"):
        WeightedMean().mean(_cohort(_reply(0, [1.0], 1), bad_numbers, bad_loss), "examples")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_client_and_round(bad):
    with pytest.raises(RunError, match=f"client 4 in round 3 has a training loss of {bad}"):
        WeightedMean().mean(_cohort(_reply(0, [1.0], 1), _reply(4, [0.0], 1, bad)), "examples")
