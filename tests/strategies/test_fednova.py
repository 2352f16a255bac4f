"""FedNova (Wang et al. 2020, equations 6 to 8)."""

import pytest
import torch

from strategies.fedavg import FedAvg
from strategies.fednova import FedNova


def test_unequal_steps_match_numbers_by_hand(bowl, federation, records, settings):
    # client 0: one record, one step, y = 0.1. client 1: three records, three steps, y = -0.2, -0.38, -0.542
    # p = 1/4, 3/4; a = 1, 3; tau_eff = 0.25 + 2.25 = 2.5; x+ = 2.5 (0.25 * 0.1 - 0.75 * 0.542 / 3) = -0.27625
    shards = [records((1, 1, 0)), records(*[(1, -2, 0)] * 3)]
    simulated = federation(FedNova(), bowl(0.0), shards, settings(0.1, batch_size=1))
    simulated.round()
    assert simulated.w == pytest.approx(-0.27625, rel=1e-7)


def test_unequal_steps_with_momentum_match_numbers_by_hand(bowl, federation, records, settings):
    # client 1: v = 2, 3.6, 4.68, y = -0.2, -0.56, -1.028; a(3, 0.9) = 1 + 1.9 + 2.71 = 5.61; a(1, 0.9) = 1
    shards = [records((1, 1, 0)), records(*[(1, -2, 0)] * 3)]
    simulated = federation(FedNova(), bowl(0.0), shards, settings(0.1, 0.9, batch_size=1))
    updates = simulated.round()
    assert [float(update.payloads["normaliser"]["a"]) for update in updates] == pytest.approx([1.0, 5.61], rel=1e-7)
    tau_eff = 0.25 * 1 + 0.75 * 5.61
    assert simulated.w == pytest.approx(tau_eff * (0.25 * 0.1 / 1 - 0.75 * 1.028 / 5.61), rel=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equal_steps_are_fedavg(bowl, federation, records, settings, momentum):
    shards = [records((1, 3, 0), (2, 1, 0)), records((4, -1, 0), (0.5, 2, 1)), records((1, 0, 0), (1, 9, 0))]
    reached = []
    for algorithm in (FedNova(), FedAvg()):
        simulated = federation(algorithm, bowl(0.5), shards, settings(0.03, momentum, batch_size=1, epochs=5))
        for _ in range(3):
            simulated.round()
        reached.append(simulated.w)
    assert reached[0] == pytest.approx(reached[1], rel=1e-6)


def test_equal_steps_on_unequal_shards_are_fedavg(bowl, federation, records, settings):
    shards = [records((1, 3, 0)), records(*[(4, -1, 0)] * 5)]
    reached = []
    for algorithm in (FedNova(), FedAvg()):
        simulated = federation(algorithm, bowl(0.5), shards, settings(0.03, 0.9, batch_size=8, epochs=6))
        simulated.round()
        reached.append(simulated.w)
    assert reached[0] == pytest.approx(reached[1], rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_unequal_steps_do_not_move_the_fixed_point(bowl, federation, records, settings, momentum):
    # 2 records at +1 (2 steps) and 18 records at -1 (18 steps): the minimum of the sum of losses is (2 - 18) / 20
    shards = [records(*[(1, 1, 0)] * 2), records(*[(1, -1, 0)] * 18)]

    def fixed_point(algorithm):
        """On quadratics a round is an affine map x -> s x + t, known from two values: t / (1 - s)."""
        values = []
        for start in (0.0, 1.0):
            simulated = federation(algorithm, bowl(start), shards, settings(1e-4, momentum, batch_size=1))
            simulated.round()
            values.append(simulated.w)
        return values[0] / (1 - (values[1] - values[0]))

    assert fixed_point(FedNova()) == pytest.approx(-0.8, abs=1e-3)
    assert abs(fixed_point(FedAvg()) + 0.8) > 0.15  # 18 steps pull at least 9 times as hard as 2: -0.98


def test_a_fixed_tau_eff_is_taken_as_it_is_and_nobody_sends_its_steps(bowl, federation, records, settings):
    # the first example with tau_eff = 4 instead of 2.5: x+ = 4 (0.25 * 0.1 - 0.75 * 0.542 / 3) = -0.442
    shards = [records((1, 1, 0)), records(*[(1, -2, 0)] * 3)]
    simulated = federation(FedNova(tau_eff=4.0), bowl(0.0), shards, settings(0.1, batch_size=1))
    updates = simulated.round()
    assert [set(update.payloads) for update in updates] == [{"direction"}] * 2
    assert simulated.w == pytest.approx(-0.442, abs=1e-14)


def test_an_empty_shard_has_no_say(bowl, federation, records, settings):
    shards = [records((1, 1, 0)), records()]
    simulated = federation(FedNova(), bowl(0.0), shards, settings(0.1, 0.9, epochs=2))
    _, empty = simulated.round()
    assert torch.equal(empty.payloads["direction"]["w"], torch.zeros(1, dtype=torch.float64))
    assert float(empty.payloads["normaliser"]["a"]) == 0.0
    assert simulated.w == pytest.approx(0.28, rel=1e-7)  # v = 1, then 0.9 + 0.9: 0.1 + 0.18


def test_only_empty_shards_leave_the_model_unchanged(bowl, federation, records, settings):
    simulated = federation(FedNova(), bowl(1.5), [records()], settings())
    simulated.round()
    assert simulated.w == 1.5
