"""FedALA's arithmetic on a quadratic loss, the start after convergence, and FedAvg as its limit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fl_sim
from clients.client_task import OnClient
from fl_sim import models
from fl_sim.params import detached
from fl_sim.training.records import Records
from fl_sim.training.trainer import Trainer
from fl_sim.types import LocalTask
from strategies.fedala import FedALA
from strategies.fedavg import FedAvg

RATE = 0.1


def client_at(bowl: Any, federation: Any, shard: Any, settings: Any, algorithm: FedALA, **state: float) -> Any:
    """Return a federation of one client that has trained before. ``state``: v, the weight, and a count of rounds."""
    simulated = federation(algorithm, bowl(state["x"]), [shard], settings(RATE))
    own, weight, rounds = (torch.tensor([state[name]], dtype=torch.float64) for name in ("v", "weight", "rounds"))
    simulated.states = [{"own-model": {"w": own}, "weights": {"w": weight}, "rounds": {"rounds": rounds}}]
    return simulated


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
@pytest.mark.parametrize(("a", "b"), [(1.0, 0.5), (3.0, -2.0), (1.0, 4.0)])
def test_a_later_round_makes_one_step_of_the_weights(
    bowl: Any, federation: Any, records: Any, settings: Any, weight: float, a: float, b: float
) -> None:
    x, v, eta = 2.0, 1.0, 0.3
    algorithm = FedALA(weight_learning_rate=eta, record_share=1.0)
    simulated = client_at(bowl, federation, records((a, b, 0)), settings, algorithm, x=x, v=v, weight=weight, rounds=2)
    update = simulated.client(0)
    before = v + (x - v) * weight
    learned = min(1.0, max(0.0, weight - eta * a * (before - b) * (x - v)))
    start = v + (x - v) * learned
    trained = start - RATE * a * (start - b)
    assert float(update.state["weights"]["w"]) == pytest.approx(learned, abs=1e-12)
    assert float(update.state["own-model"]["w"]) == pytest.approx(trained, abs=1e-12)
    assert float(update.payloads["delta"]["w"]) == pytest.approx(trained - x, abs=1e-12)
    assert float(update.state["rounds"]["rounds"]) == 3


@pytest.mark.parametrize("b", [-1.0, 0.5, 1.2, 5.0])
def test_the_second_round_starts_at_the_best_mixture(
    bowl: Any, federation: Any, records: Any, settings: Any, b: float
) -> None:
    """The start is the minimum b, cut to the segment from v to x."""
    x, v = 2.0, 0.0
    algorithm = FedALA(weight_learning_rate=0.2, record_share=1.0, threshold=1e-30)
    simulated = client_at(bowl, federation, records((1.0, b, 0)), settings, algorithm, x=x, v=v, weight=1.0, rounds=1)
    start = v + (x - v) * float(simulated.client(0).state["weights"]["w"])
    assert start == pytest.approx(min(x, max(v, b)), abs=1e-9)


def test_a_client_without_a_model_of_its_own_starts_at_the_received_one(
    bowl: Any, federation: Any, records: Any, settings: Any
) -> None:
    simulated = federation(FedALA(), bowl(0.4), [records((1, 0, 0)), records((3, 1, 0))], settings(RATE))
    for _ in range(3):
        simulated.round(0)
    x = simulated.w
    late = simulated.client(1)
    assert float(late.payloads["delta"]["w"]) == pytest.approx(-RATE * 3 * (x - 1), abs=1e-12)
    assert float(late.state["weights"]["w"]) == 1


@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_without_a_rate_it_is_fedavg_to_the_bit(
    bowl: Any, federation: Any, records: Any, settings: Any, rounds: int
) -> None:
    shards = [records((a, b, 0)) for a, b in ((1.0, 0.0), (3.0, 1.0))]
    ends = []
    for algorithm in (FedALA(weight_learning_rate=0), FedAvg()):
        simulated = federation(algorithm, bowl(0.4), shards, settings(0.05, 0.9))
        for _ in range(rounds):
            simulated.round()
        ends.append(simulated.w)
    assert ends[0] == ends[1]


def test_only_the_last_layers_are_mixed(settings: Any) -> None:
    model = models.build("mlp", (1, 8, 8), 10, seed=0)
    received = detached(model.named_parameters())
    head = [name for name in received if name.startswith("5.")]
    own = {name: received[name] + 0.1 for name in head}
    rounds = {"rounds": torch.tensor([2.0])}
    state = {"own-model": own, "weights": {name: torch.ones_like(own[name]) for name in head}, "rounds": rounds}
    inputs, labels = torch.randn(50, 1, 8, 8), torch.arange(50) % 10
    task = LocalTask(3, 0, 1, 50, settings(RATE, batch_size=10), received, state=state)
    client = OnClient(Records.of(inputs, labels), Trainer(model, None))
    starts = [FedALA(weight_learning_rate=20).start(task, client).params for _ in range(2)]
    for name, value in received.items():
        assert torch.equal(starts[0][name], starts[1][name])
        if name in head:
            assert ((starts[0][name] >= value - 1e-6) & (starts[0][name] <= own[name] + 1e-6)).all()
            assert not torch.equal(starts[0][name], value)
        else:
            assert starts[0][name] is value


def test_runs_without_a_rate_end_in_fedavgs_bits(tmp_path: Path) -> None:
    small = {
        "data": "digits", "partition": "label-2", "clients": 4, "model": "mlp", "rounds": 3,
        "local": {"learning_rate": 0.1, "batch_size": 32}, "evaluate": {"clients": "class-shares"},
    }  # fmt: skip
    ends, own = [], []
    for algorithm in ({"kind": "fedala", "weight_learning_rate": 0}, {"kind": "fedavg"}, {"kind": "fedala"}):
        out = tmp_path / str(len(ends))
        fl_sim.run({**small, "algorithm": algorithm}, out=out, progress=False)
        ends.append(load_file(out / "model.safetensors"))
        own.append(json.loads((out / "result.json").read_text())["personal"]["own_accuracy"])
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert any(not torch.equal(value, ends[2][name]) for name, value in ends[0].items())
    assert own[0] == own[1] < own[2]
