"""FedAvg (McMahan et al. 2017, algorithm 1) and the centralized upper bound."""

import random

import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import nn
from torch.nn import functional

from fl_sim.engines import wire
from fl_sim.params import detached
from fl_sim.seeding import rng
from fl_sim.types import ClientUpdate
from strategies.fedavg import Centralized, FedAvg


def _linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _data(size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator, dtype=torch.float64), torch.randint(
        3, (size,), generator=generator
    )


def _plain_sgd(model, learning_rate, momentum, weight_decay):
    return torch.optim.SGD(model.parameters(), learning_rate, momentum=momentum, weight_decay=weight_decay)


def test_a_round_is_the_mean_weighted_by_records(bowl, federation, records, settings):
    # x = 0, eta = 0.5: y_0 = 0.5 * 4 = 2 with 1 record, y_1 = 0.5 * -4 = -2 with 3; x+ = (1 * 2 + 3 * -2) / 4 = -1
    shards = [records((1, 4, 0)), records(*[(1, -4, 0)] * 3)]
    simulated = federation(FedAvg(), bowl(0.0), shards, settings(0.5))
    updates = simulated.round()
    assert [float(update.payloads["delta"]["w"]) for update in updates] == [2.0, -2.0]
    assert [update.num_examples for update in updates] == [1, 3]
    assert simulated.w == -1.0
    assert [update.loss for update in updates] == [58.0, 58.0]  # 50 + 4^2 / 2


def test_aggregate_agrees_with_flowers_own_fedavg_on_the_same_replies(strategy_of, reply_of):
    generator = torch.Generator().manual_seed(0)
    shapes = {"conv": (3, 2, 5, 5), "bias": (7,), "scalar": ()}
    model = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    sizes = [7, 60, 600, 1]
    deltas = [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in sizes]

    strategy = strategy_of(FedAvg(), model, len(sizes))
    ours, metrics = strategy.aggregate_train(
        1,
        [reply_of(i, wire.update_content(ClientUpdate({"delta": deltas[i]}, n, 0.5 * i))) for i, n in enumerate(sizes)],
    )
    theirs, their_metrics = FlowerFedAvg().aggregate_train(
        1,
        [
            reply_of(
                i,
                RecordDict(
                    {
                        "arrays": ArrayRecord({k: Array((model[k] + deltas[i][k]).numpy()) for k in model}),
                        "metrics": MetricRecord({"num-examples": n, "loss": 0.5 * i}),
                    }
                ),
            )
            for i, n in enumerate(sizes)
        ],
    )
    for name in model:
        torch.testing.assert_close(torch.from_numpy(ours[name].numpy()), torch.from_numpy(theirs[name].numpy()))
    assert metrics["train_loss"] == pytest.approx(their_metrics["loss"], rel=1e-12)


def test_the_order_of_replies_changes_no_bit(strategy_of, reply_of):
    generator = torch.Generator().manual_seed(0)
    model = {"w": torch.randn(1000, generator=generator)}
    deltas = [torch.randn(1000, generator=generator) for _ in range(9)]
    assert not torch.equal(sum(deltas), sum(reversed(deltas)))  # plain sums do depend on the order
    updates = [
        wire.update_content(ClientUpdate({"delta": {"w": delta}}, 3 * i + 1, 0.1 * i)) for i, delta in enumerate(deltas)
    ]
    results = []
    for seed in range(4):
        strategy = strategy_of(FedAvg(), model, 9)
        replies = [reply_of(i, update) for i, update in enumerate(updates)]
        random.Random(seed).shuffle(replies)
        _, metrics = strategy.aggregate_train(1, replies)
        results.append((strategy.server.params["w"], metrics["train_loss"]))
    assert all(torch.equal(params, results[0][0]) and loss == results[0][1] for params, loss in results)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_step_on_equal_shards_is_one_centralized_step_on_the_union(federation, settings, momentum):
    inputs, labels = _data(12)
    shards = [(inputs[i::3], labels[i::3]) for i in range(3)]
    simulated = federation(FedAvg(), _linear(), shards, settings(0.3, momentum, batch_size=4, weight_decay=0.01))
    simulated.round()

    central = _linear()
    functional.cross_entropy(central(inputs), labels).backward()
    _plain_sgd(central, 0.3, momentum, 0.01).step()
    for name, value in central.named_parameters():
        torch.testing.assert_close(simulated.server.params[name], value.data, rtol=1e-13, atol=1e-15)


def test_an_empty_shard_sends_zeros_of_weight_zero_and_no_loss(bowl, federation, records, settings):
    simulated = federation(FedAvg(), bowl(0.0), [records((1, 4, 0)), records()], settings(0.5, epochs=3))
    _, empty = simulated.round()
    assert torch.equal(empty.payloads["delta"]["w"], torch.zeros(1, dtype=torch.float64))
    assert (empty.num_examples, empty.loss) == (0, None)
    assert simulated.w == 4 * (1 - 0.5**3)  # the other client alone: three halvings of the way to 4


def test_a_cohort_of_empty_shards_leaves_the_model_unchanged(bowl, federation, records, settings):
    simulated = federation(FedAvg(), bowl(1.25), [records(), records()], settings())
    simulated.round()
    assert simulated.w == 1.25


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_rounds_of_centralized_training_are_one_longer_sgd_run(federation, settings, momentum, weight_decay):
    inputs, labels = _data(10)
    local = settings(0.1, momentum, weight_decay=weight_decay, batch_size=4, epochs=2)
    simulated = federation(Centralized(), _linear(), [(inputs, labels)], local)
    for _ in range(3):
        simulated.round()

    model = _linear()
    optimizer = _plain_sgd(model, 0.1, momentum, weight_decay)
    for server_round in (1, 2, 3):
        shuffle = rng(0, "batches", 0, server_round)
        for _ in range(2):
            for batch in torch.from_numpy(shuffle.permutation(10)).split(4):
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimizer.step()
    for name, value in detached(model.named_parameters()).items():
        # x + (y - x) may round once a round, so not bit for bit
        torch.testing.assert_close(simulated.server.params[name], value, rtol=1e-13, atol=1e-15)


def test_centralized_training_without_momentum_keeps_nothing(bowl, federation, records, settings):
    assert federation(Centralized(), bowl(0.0), [records((1, 1, 0))], settings()).client(0).state == {}
