"""The Flower Strategy: who is asked what, what is made of the replies, and the round around it."""

import math
import pickle
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from fl_sim.engines import wire
from fl_sim.engines.grid import InProcessGrid, LocalGrid
from fl_sim.errors import RunError
from fl_sim.simulation.stage import Run
from fl_sim.stages.dafl import pool as pools
from fl_sim.stages.shares import SHARE, Shares
from fl_sim.testing_runs import FakeEngine, played_by
from fl_sim.types import ClientUpdate, Examples
from strategies.answers import Population, find_population
from strategies.fedavg import FedAvg
from strategies.flower import run_round
from strategies.layer import Layer
from strategies.samplers import FixedSize, Poisson
from strategies.scaffold import Scaffold
from strategies.server_opt import FedAvgM

MODEL = {"w": torch.tensor([1.0, 2.0])}
ROWS = {"inputs": torch.empty(0, 2), "labels": torch.empty(0, 3)}


def _update(client, num_examples=1, loss=1.0):
    return wire.update_content(ClientUpdate({"delta": {"w": torch.tensor([client, -client])}}, num_examples, loss))


def _app():
    """Client i moves every weight by i + 1 times the learning rate, and shares i + 1 rows of the number i."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        order, client = wire.read_task_config(message.content), context.node_config["partition-id"]
        if order.task == SHARE:
            return share(message, context)
        params, _ = wire.read_task(message.content)
        delta = {name: torch.full_like(value, (client + 1) * order.learning_rate) for name, value in params.items()}
        return Message(wire.update_content(ClientUpdate({"delta": delta}, 1, float(client))), reply_to=message)

    def share(message, context):
        client = context.node_config["partition-id"]
        if client == 1 and wire.read_task_config(message.content).experiment == "broken":
            raise ValueError("no records")
        rows = {"inputs": torch.full((client + 1, 2), float(client)), "labels": torch.ones(client + 1, 3)}
        return Message(wire.pool_content(rows), reply_to=message)

    @app.query()
    def who(message, context):
        return Message(wire.who_content(context.node_config["partition-id"]), reply_to=message)

    return app


def test_it_is_a_flower_strategy_that_evaluates_on_the_server_alone(strategy_of):
    strategy = strategy_of(FedAvg(), MODEL, 3)
    assert isinstance(strategy, Strategy)
    assert strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), LocalGrid(3)) == []
    assert strategy.aggregate_evaluate(1, []) is None
    assert strategy.summary() is None


class _TwoModels(Layer):
    """Clients with odd numbers receive another model."""

    def sent_to(self, client, server):
        self.other = getattr(self, "other", None) or replace(server, params={"w": server.params["w"] + 10})
        return self.other if client % 2 else server


def test_clients_that_receive_the_same_model_share_a_content_and_follow_one_another(strategy_of):
    strategy = strategy_of(FedAvg(), MODEL, 5)
    strategy.wrap(_TwoModels())
    messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord({"learning-rate": 0.1}), LocalGrid(5)))
    assert [message.metadata.dst_node_id - 1000 for message in messages] == [0, 2, 4, 1, 3]
    assert len({id(message.content) for message in messages}) == 2
    received = [wire.read_task(message.content)[0]["w"].tolist() for message in messages]
    assert received == [[1, 2]] * 3 + [[11, 12]] * 2
    strategy.aggregate_train(1, InProcessGrid(_app(), 5).send_and_receive(messages))
    assert strategy.server.params["w"].tolist() == pytest.approx([1.3, 2.3])


def test_every_client_of_the_cohort_gets_the_model_the_broadcast_and_the_rate(strategy_of):
    strategy = strategy_of(Scaffold(), MODEL, 20, FixedSize(cohort_size=5), seed=7)
    messages = list(strategy.configure_train(4, ArrayRecord(), ConfigRecord({"learning-rate": 0.25}), LocalGrid(20)))
    nodes = [message.metadata.dst_node_id for message in messages]
    assert nodes == [1000 + client for client in strategy.cohort]
    assert len(set(nodes)) == 5
    for message in messages:
        order = wire.read_task_config(message.content)
        assert (order.server_round, order.learning_rate) == (4, 0.25)
        params, broadcast = wire.read_task(message.content)
        assert torch.equal(params["w"], MODEL["w"])
        assert broadcast["control"]["w"].tolist() == [0.0, 0.0]


def test_cohorts_depend_on_seed_and_round_alone(strategy_of):
    def cohort(seed, server_round):
        strategy = strategy_of(FedAvg(), MODEL, 50, FixedSize(cohort_size=10), seed)
        strategy.configure_train(server_round, ArrayRecord(), ConfigRecord({"learning-rate": 0.1}), LocalGrid(50))
        return tuple(strategy.cohort)

    assert cohort(0, 3) == cohort(0, 3)
    assert len({cohort(0, 3), cohort(0, 4), cohort(1, 3)}) == 3


def test_a_round_moves_the_model_and_reports_the_mean_loss_by_records(strategy_of, reply_of):
    strategy = strategy_of(FedAvg(), MODEL, 3)
    replies = [
        reply_of(2, _update(2.0, 3, 5.0)), reply_of(0, _update(0.0, 1, 1.0)), reply_of(1, _update(9.0, 0, None)),
    ]  # fmt: skip
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays["w"].numpy().tolist() == [2.5, 0.5]  # 1 + 3/4 * 2, 2 - 3/4 * 2
    assert strategy.server.params["w"].tolist() == [2.5, 0.5]
    assert dict(metrics) == {"cohort": 3, "train_loss": 4.0}


@pytest.mark.parametrize("way", [lambda reply: reply, lambda reply: pickle.loads(pickle.dumps(reply))])
def test_replies_in_any_order_by_reference_or_as_bytes_give_the_same_bits(strategy_of, reply_of, way):
    generator = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(40, 3, generator=generator), "b": torch.randn(3, generator=generator)}
    sent = [
        {name: torch.randn(value.shape, generator=generator) * 10.0**client for name, value in start.items()}
        for client in range(6)
    ]
    exact = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
    for client, update in enumerate(sent):
        for name, value in update.items():
            exact[name].add_(value, alpha=(client + 1) / 21)
    for shuffle in range(3):
        strategy = strategy_of(FedAvg(), start, 6)
        replies = [
            way(reply_of(client, wire.update_content(ClientUpdate({"delta": update}, client + 1, 0.5))))
            for client, update in enumerate(sent)
        ]
        random.Random(shuffle).shuffle(replies)
        strategy.aggregate_train(1, replies)
        for name, value in start.items():
            assert torch.equal(strategy.server.params[name], value + exact[name].float())


def test_a_round_without_records_changes_nothing_and_has_no_loss(strategy_of, reply_of):
    strategy = strategy_of(FedAvg(), MODEL, 2)
    _, metrics = strategy.aggregate_train(1, [reply_of(i, _update(0.0, 0, None)) for i in range(2)])
    assert strategy.server.params is MODEL
    assert dict(metrics) == {"cohort": 2}


def test_a_client_that_does_not_answer_is_named(strategy_of, reply_of):
    strategy = strategy_of(FedAvg(), MODEL, 3)
    with pytest.raises(RunError, match="client 1 in round 6 did not answer in time"):
        strategy.aggregate_train(6, [reply_of(0, _update(1.0)), reply_of(2, _update(1.0))])


def test_a_client_that_fails_is_named_with_its_reason(strategy_of, reply_of):
    strategy = strategy_of(FedAvg(), MODEL, 2)
    failed = Message(Error(1, "ValueError: bad record"), reply_to=_sent(1))
    with pytest.raises(RunError, match="client 1 in round 6 failed: ValueError: bad record"):
        strategy.aggregate_train(6, [reply_of(0, _update(1.0)), failed])
    assert strategy.server.params is MODEL


def _sent(client):
    message = Message(wire.who_content(0), 1000 + client, wire.TRAIN)
    message.metadata.__dict__["_message_id"] = "sent"
    return message


def test_a_global_model_that_is_not_finite_stops_the_run_and_keeps_the_last_one(strategy_of, reply_of):
    # every update is finite, but the server's step is not: float32 ends at 3.4e38
    strategy = strategy_of(FedAvgM(server_learning_rate=1e37), MODEL, 2)
    with pytest.raises(RunError, match="global model is not finite after round 2"):
        strategy.aggregate_train(2, [reply_of(i, _update(90.0)) for i in range(2)])
    assert strategy.server.params is MODEL


def test_run_round_asks_answers_and_merges(strategy_of):
    strategy = strategy_of(FedAvg(), MODEL, 3)
    done = run_round(strategy, InProcessGrid(_app(), 3), 1, 0.5, timeout=10.0)
    assert strategy.server.params["w"].tolist() == [2.0, 3.0]  # plus 0.5 * (1 + 2 + 3) / 3
    assert (done.server_round, done.cohort_size, done.train_loss) == (1, 3, 1.0)
    assert 0 <= done.seconds < 10


def test_a_round_with_an_empty_poisson_cohort_sends_nothing_and_changes_nothing(strategy_of):
    strategy = strategy_of(FedAvg(), MODEL, 3, Poisson(sampling_rate=1e-12))
    grid = SimpleNamespace()  # cannot send
    done = run_round(strategy, grid, 1, 0.5, timeout=10.0)
    assert (done.cohort_size, done.train_loss) == (0, None)
    assert strategy.server.params is MODEL


def _shared(strategy, grid):
    job = SimpleNamespace(experiment=SimpleNamespace(round_timeout=10.0, algorithm="fedmix"))
    return Shares(job).gathered(Run(job, strategy, grid, Path(), None), ROWS)


def test_what_clients_share_is_concatenated_in_the_order_of_clients(strategy_of):
    strategy = strategy_of(FedAvg(), MODEL, 3)
    pool, num_bytes = _shared(strategy, InProcessGrid(_app(), 3))
    assert pool["inputs"][:, 0].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert pool["labels"].shape == (6, 3)
    assert num_bytes == 4 * sum(part.numel() for part in pool.values()) + 3 * 128  # a header each


def test_the_order_of_clients_does_not_depend_on_the_order_of_replies(strategy_of):
    grid = FakeEngine(4, played_by(_app(), 4), order=lambda replies: random.Random(1).sample(replies, len(replies)))
    pool, _ = _shared(strategy_of(FedAvg(), MODEL, 4), grid)
    assert pool["inputs"][:, 0].tolist() == [0.0] + [1.0] * 2 + [2.0] * 3 + [3.0] * 4


def test_a_client_that_fails_to_share_is_named(strategy_of):
    strategy = strategy_of(FedAvg(), MODEL, 3)
    strategy.order = wire.TaskConfig("broken", 0, 0.0, "", "", "")
    with pytest.raises(RunError, match="client 1, asked to share, failed: ValueError: no records"):
        _shared(strategy, InProcessGrid(_app(), 3))


def test_a_client_that_does_not_share_in_time_is_named(strategy_of):
    plays = played_by(_app(), 3)
    grid = FakeEngine(3, lambda client, message: plays(client, message) if client != 2 else None)
    with pytest.raises(RunError, match="client 2, asked to share, did not answer in time"):
        _shared(strategy_of(FedAvg(), MODEL, 3), grid)


class _Remote:
    """A grid as Flower's own runtime has it: nodes with ids out of order that come when they come."""

    def __init__(self, num_nodes, *, arrive_at=0, broken=False):
        self.inner = InProcessGrid(_app(), num_nodes)
        self.asked, self.arrive_at, self.broken = 0, arrive_at, broken

    def get_node_ids(self):
        self.asked += 1
        nodes = list(self.inner.get_node_ids())
        return nodes[::-1] if self.asked > self.arrive_at else nodes[:1]

    def send_and_receive(self, messages, *, timeout):
        assert math.isfinite(timeout)
        replies = self.inner.send_and_receive(messages)
        return [Message(Error(1, "lost"), reply_to=_sent(0)), *replies[:-1]] if self.broken else replies


def test_on_flowers_runtime_nodes_say_which_client_they_are():
    grid = _Remote(4, arrive_at=2)
    assert find_population(grid, 4, timeout=5.0) == Population((1000, 1001, 1002, 1003))
    assert grid.asked == 3


def test_the_population_is_looked_for_once_before_the_first_round(strategy_of):
    strategy = strategy_of(FedAvg(), MODEL, 4)
    strategy.population = Population(())
    grid = _Remote(4)
    for server_round in (1, 2):
        strategy.configure_train(server_round, ArrayRecord(), ConfigRecord({"learning-rate": 0.1}), grid)
    assert grid.asked == 1


def test_too_few_nodes_end_the_wait_with_their_number():
    with pytest.raises(RunError, match="only 1 of 4 nodes connected in 0 s"):
        find_population(_Remote(4, arrive_at=10**9), 4, timeout=0.1)


def test_too_many_nodes_are_refused():
    with pytest.raises(RunError, match="5 nodes for 4 clients"):
        find_population(_Remote(5), 4, timeout=1.0)


def test_a_node_that_cannot_say_who_it_is_is_refused():
    with pytest.raises(RunError, match="node 1000, asked for its partition, failed; a client's error") as caught:
        find_population(_Remote(4, broken=True), 4, timeout=1.0)
    assert "lost" in caught.value.private


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ([0, 1, 2, 2], "node 1000 says that it holds partition 2, as node 1001 does: give each supernode"),
        ([0, 1, 2, 4], "node 1000 says that it holds partition 4: give each supernode a different partition-id"),
        (
            [0, 1, 2, -1],
            "node 1000, asked for its partition, sent a partition's number that is not a whole number from 0 on",
        ),
    ],
)
def test_partitions_that_are_not_0_to_n_minus_1_each_once_are_refused(says, message):
    app, left = ClientApp(), iter(says)

    @app.query()
    def who(message, context):
        return Message(wire.who_content(next(left)), reply_to=message)

    grid = _Remote(4)
    grid.inner = InProcessGrid(app, 4)
    with pytest.raises(RunError, match=message):
        find_population(grid, 4, timeout=1.0)


def test_an_update_that_cannot_be_used_is_named_with_client_and_round(strategy_of, reply_of):
    strategy = strategy_of(FedAvg(), MODEL, 3)
    strategy.most_examples = 50
    bad = _update(1.0, 51)
    with pytest.raises(RunError, match=r"client 1 in round 6 .* 0 to 50"):
        strategy.aggregate_train(6, [reply_of(0, _update(0.0)), reply_of(1, bad), reply_of(2, _update(2.0))])
    assert strategy.server.params is MODEL


def test_a_client_that_answers_twice_is_named(strategy_of, reply_of):
    strategy = strategy_of(FedAvg(), MODEL, 2)
    with pytest.raises(RunError, match="client 1 in round 6 answered 2 times"):
        strategy.aggregate_train(6, [reply_of(0, _update(0.0)), reply_of(1, _update(1.0)), reply_of(1, _update(1.0))])


def test_a_node_that_plays_no_client_is_named(strategy_of, reply_of):
    strategy = strategy_of(FedAvg(), MODEL, 2)
    with pytest.raises(RunError, match="node 1007 is no client of this run, but answered"):
        strategy.aggregate_train(6, [reply_of(client, _update(1.0)) for client in (0, 1, 7)])


def test_a_client_outside_the_cohort_does_not_count(strategy_of, reply_of):
    strategy = strategy_of(FedAvg(), MODEL, 3)
    strategy.cohort = strategy.cohort[:2]
    strategy.aggregate_train(1, [reply_of(0, _update(2.0)), reply_of(1, _update(2.0)), reply_of(2, _update(9.0))])
    assert strategy.server.params["w"].tolist() == [3.0, 0.0]


def test_losses_that_are_large_do_not_overflow(strategy_of, reply_of):
    strategy = strategy_of(FedAvg(), MODEL, 2)
    _, metrics = strategy.aggregate_train(1, [reply_of(i, _update(1.0, 10**9, 3e38)) for i in range(2)])
    assert metrics["train_loss"] == 3e38


def test_beside_synthetic_records_a_client_that_fails_is_not_quoted(strategy_of, reply_of):
    strategy = strategy_of(FedAvg(), MODEL, 2)
    strategy.order = wire.TaskConfig("", 0, 0.0, "", "", synthetic="pool")
    failed = Message(Error(1, "ValueError: bad record"), reply_to=_sent(1))
    with pytest.raises(RunError, match="client 1 in round 6 failed; a client's error message may contain") as caught:
        strategy.aggregate_train(6, [reply_of(0, _update(1.0)), failed])
    assert "bad record" not in str(caught.value)
    assert "bad record" in caught.value.private


def test_a_client_that_fails_to_release_records_is_not_quoted(strategy_of):
    app = ClientApp()

    @app.train()
    def synthesize(message, context):
        raise ValueError("bad record [0.25]")

    records = Examples(np.zeros((5, 2), np.float32), np.zeros(5, np.int64))
    dataset = SimpleNamespace(train=records, num_classes=3)
    job = SimpleNamespace(experiment=SimpleNamespace(round_timeout=5.0), dataset=dataset)
    asking = Run(job, strategy_of(FedAvg(), MODEL, 2), InProcessGrid(app, 2), Path(), None)
    with pytest.raises(RunError, match="client 0, asked to synthesize, failed; a client's error message") as caught:
        pools.ask_clients(asking, wire.TaskConfig("", 0, 0.0, "", ""))
    assert "0.25" not in str(caught.value)
    assert "client 0, asked to synthesize, failed: ValueError: bad record [0.25]" in caught.value.private
