"""Fair methods: fixed points on quadratic losses, FedAvg as their limit, losses of 0 and huge losses, and refusals."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fl_sim.errors import Diverged, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run
from fl_sim.types import Cohort, LocalTask, Reply, ServerState, Trained
from strategies.aggregators import WeightedMean
from strategies.agnostic_fl import AgnosticFL
from strategies.algorithm import reported_by, weighting_of
from strategies.fedavg import FedAvg
from strategies.fedmgda import FedMGDA, least_norm
from strategies.mixture import Mixture, on_simplex
from strategies.q_ffl import QFFL
from strategies.term import TERM


class Parabola(nn.Module):
    """One weight w. A record (a, b, 0) of label 0 has the loss a/2 (w - b)^2, by logits (0, log(exp(loss) - 1))."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        loss = records[:, 0] / 2 * (self.w - records[:, 1]) ** 2
        return torch.stack([torch.zeros_like(loss), torch.log(torch.expm1(loss))], 1)


@pytest.fixture
def after(federation: Any, records: Any, settings: Any) -> Any:
    """Return the weight after rounds of full-batch single steps, from .3; F is w^2/2 and 3/2 (w - 1)^2."""

    def play(algorithm: Any, rounds: int, rate: float, sizes: tuple[int, int] = (1, 1)) -> float:
        shards = [records(*[(1, 0, 0)] * sizes[0]), records(*[(3, 1, 0)] * sizes[1])]
        simulated = federation(algorithm, Parabola(0.3), shards, settings(rate))
        for _ in range(rounds):
            simulated.round()
        return float(simulated.w)

    return play


@pytest.mark.parametrize(
    ("algorithm", "rounds", "rate", "wanted"),
    [
        (QFFL(q=0), 200, 0.1, 0.75),
        (QFFL(q=1), 400, 0.1, 0.67534),
        (TERM(t=0), 200, 0.1, 0.75),
        (TERM(t=1), 200, 0.1, 0.72192),
        (TERM(t=10), 300, 0.05, 0.65959),
        (TERM(t=100), 400, 0.01, 0.63707),
        (TERM(t=-100), 200, 0.05, 0.0),
    ],
    ids=repr,
)
def test_fixed_points_on_two_quadratics(after: Any, algorithm: Any, rounds: int, rate: float, wanted: float) -> None:
    assert after(algorithm, rounds, rate) == pytest.approx(wanted, abs=1e-4)


def test_strengths_of_zero_are_fedavg_to_the_bit(after: Any) -> None:
    assert after(TERM(t=0), 9, 0.07, (1, 3)) == after(FedAvg(), 9, 0.07, (1, 3))
    assert after(QFFL(q=0), 9, 0.07, (1, 3)) == after(FedAvg(), 9, 0.07)
    assert after(QFFL(q=0), 9, 0.07, (1, 3)) != after(FedAvg(), 9, 0.07, (1, 3))


def exact(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def agnostic(algorithm: AgnosticFL, rounds: int, rate: float) -> tuple[ServerState, Mixture, list[float]]:
    """Play full-batch single steps on the two quadratics, with the round layer."""
    layer, server = (
        Mixture(algorithm.mixture_learning_rate, {}),
        algorithm.init({"w": exact(0.3)}),
    )
    layer.inner = _mean_by(weighting_of(algorithm))
    models = []
    for server_round in range(1, rounds + 1):
        w = float(server.params["w"])
        replies = (sent(0, -rate * w, w**2 / 2), sent(1, -3 * rate * (w - 1), 1.5 * (w - 1) ** 2), sent(2, 9.0, 9.0, 0))
        aggregate = layer.aggregate(Cohort(server_round, replies, 3, 3), algorithm, server)
        assert aggregate is not None
        server = algorithm.merge(server, aggregate)
        models.append(float(server.params["w"]))
    return server, layer, models


def sent(client: int, delta: float, loss: float, size: int = 1) -> Reply:
    payloads = {
        "delta": {"w": exact(delta)},
        "received-loss": {"loss": torch.tensor([loss])},
    }
    return Reply(client, payloads, size, loss)


def _mean_by(weighting: Any) -> Any:
    return SimpleNamespace(aggregate=lambda cohort, algorithm, server: WeightedMean().mean(cohort, weighting))


def test_the_agnostic_model_ends_where_both_losses_are_equal() -> None:
    server, layer, models = agnostic(AgnosticFL(mixture_learning_rate=0.5), 1500, 0.05)
    assert models[-1] == pytest.approx(math.sqrt(3) / (1 + math.sqrt(3)), abs=1e-4)  # .63397
    # 0 = lambda w + 3 (1 - lambda) (w - 1)
    assert layer.weights[0] == pytest.approx(3 * (1 - models[-1]) / (models[-1] + 3 * (1 - models[-1])), abs=1e-3)
    assert list(layer.weights) == [0, 1]
    assert float(reported_by(AgnosticFL(), server)["w"]) == pytest.approx(np.mean(models), rel=1e-9)
    assert reported_by(AgnosticFL(average=False), server) is server.params


def test_without_ascent_the_agnostic_mean_is_uniform(after: Any) -> None:
    _, layer, models = agnostic(AgnosticFL(mixture_learning_rate=0), 9, 0.07)
    assert models[-1] == pytest.approx(after(FedAvg(), 9, 0.07), rel=1e-14)
    assert layer.weights == {0: 0.5, 1: 0.5}


def test_a_client_that_comes_later_gets_the_average_weight_and_a_late_one_keeps_its_own() -> None:
    layer = Mixture(0.0, {0: 0.75, 2: 0.25})
    layer.inner = _mean_by(AgnosticFL().weigh)
    server = ServerState({})
    found = layer.aggregate(Cohort(1, (sent(1, 1.0, 5.0), sent(2, 4.0, 5.0)), 3, 3), AgnosticFL(), server)
    assert layer.weights == pytest.approx({0: 0.5, 2: 1 / 6, 1: 1 / 3})
    assert found is not None
    assert float(found.payloads["delta"]["w"]) == pytest.approx((2 * 1 + 4) / 3)
    assert Mixture.of(experiment_from({"algorithm": "agnostic-fl"}), Path(), json.loads(json.dumps(layer.state())))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6))
def test_the_nearest_mixture_is_nearest(values: list[float]) -> None:
    """x is the projection of v where (v - x) (y - x) <= 0 for every corner y of the simplex."""
    wanted = np.array(values)
    found = on_simplex(wanted)
    assert (found >= 0).all()
    assert found.sum() == pytest.approx(1)
    apart = wanted - found
    assert (apart - apart @ found <= 1e-6).all()
    assert on_simplex(np.array([1e30, 0.0, 1e30])).tolist() == [0.5, 0.0, 0.5]


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.sampled_from([0.0, 0.05, 0.3, 1.0]))
def test_the_mixture_of_least_norm_is_least(seed: int, clients: int, epsilon: float) -> None:
    """No weight can move between two entries so that the norm falls, and all bounds hold."""
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((clients, draw.integers(1, 5)))
    shares = draw.dirichlet(np.ones(clients))
    mixture = least_norm(rows @ rows.T, shares, epsilon)
    assert mixture.sum() == pytest.approx(1)
    assert (mixture >= 0).all()
    assert (np.abs(mixture - shares) <= epsilon + 1e-12).all()
    slopes = rows @ (mixture @ rows)
    gains = slopes[mixture < np.minimum(1, shares + epsilon) - 1e-9]
    losses = slopes[mixture > np.maximum(0, shares - epsilon) + 1e-9]
    assert not len(gains) or not len(losses) or losses.max() - gains.min() < 1e-6


def test_fedmgda_steps_along_the_common_direction_and_stops_where_clients_oppose(federation: Any, records: Any,
                                                                                  settings: Any) -> None:  # fmt: skip
    shards = [records((1, 0, 0)), records((3, 1, 0), (3, 1, 0))]
    apart = federation(FedMGDA(epsilon=1), Parabola(0.4), shards, settings(0.1))
    apart.round()
    assert apart.w == pytest.approx(0.4, abs=1e-9)  # one client wants less, one more: no step helps both
    plain = federation(FedMGDA(epsilon=0, server_learning_rate=0.3), Parabola(0.4), shards, settings(0.1))
    plain.round()
    assert plain.w == pytest.approx(0.4 + 0.3 * (2 - 1) / 3)  # lengths 1, weights 1/3 and 2/3
    together = federation(FedMGDA(server_learning_rate=0.3), Parabola(2.0), shards, settings(0.1))
    together.round()
    assert together.w == pytest.approx(1.7)


def finished(algorithm: Any, loss: float, delta: float, settings: Any) -> Reply:
    """Return what a client sends that received a model of loss ``loss``."""
    task = LocalTask(1, 0, 2, 1, settings(0.1), {"w": torch.zeros(1)})
    client = SimpleNamespace(records=[0], scores=lambda params: SimpleNamespace(loss=loss))
    task = algorithm.start(task, client)
    update = algorithm.finish(task, Trained({"w": torch.tensor([delta])}, {}, 1, 0.0))
    return Reply(0, update.payloads, 1, None)


@pytest.mark.parametrize("q", [0.1, 1.0, 2.0])
def test_losses_of_zero_have_powers(q: float, settings: Any) -> None:
    """With F = 0 the released code's formula, in which each F is F + 1e-10, decides."""
    replies = [finished(QFFL(q=q), 0.0, 0.2, settings), finished(QFFL(q=q), 2.0, -0.5, settings)]
    aggregate = WeightedMean().mean(Cohort(1, tuple(replies), 2, 2), QFFL(q=q).weigh)
    assert aggregate is not None
    merged = QFFL(q=q).merge(ServerState({"w": torch.zeros(1)}), aggregate)
    losses, deltas, rate = np.array([1e-10, 2 + 1e-10]), np.array([0.2, -0.5]), 0.1
    gradients = -deltas / rate
    h = q * losses ** (q - 1) * gradients**2 + losses**q / rate
    assert float(merged.params["w"]) == pytest.approx(-(losses**q @ gradients) / h.sum(), rel=1e-5)


def test_huge_losses_do_not_overflow(settings: Any) -> None:
    replies = [sent(0, 1.0, 1e30), sent(1, 1.0, 5e29), sent(2, 1.0, 0.0)]
    assert TERM(t=1e6).weigh(replies) == [1.0, 0.0, 0.0]
    assert TERM(t=-1e6).weigh(replies) == [0.0, 0.0, 1.0]
    assert QFFL(q=1e6).weigh(replies) == [1.0, 0.0, 0.0]
    assert QFFL(q=2).weigh(replies) == pytest.approx([1.0, 0.25, 0.0])
    assert TERM().weigh([sent(0, 1.0, -7.0), sent(1, 1.0, 0.0)]) == [1.0, 1.0]  # no loss is below 0
    for algorithm in (QFFL(), TERM()):
        reply = finished(algorithm, math.inf, 1.0, settings)
        with pytest.raises(Diverged, match="client 0 in round 1 sent numbers that are not finite"):
            WeightedMean().mean(Cohort(1, (reply,), 1, 1), algorithm.weigh)


def test_the_loss_is_that_of_the_received_model_on_all_records(federation: Any, records: Any, settings: Any) -> None:
    """Not the mean loss of the local steps, which is lower: here .5 against .5 .81^k at step k."""
    shards = [records(*[(1, 0, 0)] * 4)]
    simulated = federation(TERM(), Parabola(1.0), shards, settings(0.1, batch_size=2, epochs=3))
    [update] = simulated.round()
    assert float(update.payloads["received-loss"]["loss"]) == pytest.approx(0.5)
    assert update.loss is not None
    assert update.loss < 0.4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "q-ffl", "aggregator": "global-dp"}, "only aggregator mean uses such weights"),
        ({"algorithm": "term", "aggregator": "median"}, "only aggregator mean uses such weights"),
        ({"algorithm": "agnostic-fl", "aggregator": "distributed-dp:8"}, "weighs clients"),
        ({"algorithm": "fedmgda", "local": {"privacy": {"kind": "local-dp", "epsilon": 8}}}, "weighs clients"),
        ({"algorithm": "agnostic-fl", "sampler": "fixed-size:2"}, "leave sampler out, or take q-ffl or term"),
        ({"algorithm": "agnostic-fl", "local": {"personal": "head"}}, "leave local.personal out"),
        ({"algorithm": "q-ffl", "local": {"optimizer": "adam", "momentum": 0}}, "curvature of the loss"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        experiment_from({"clients": 4, "partition": "iid", **settings})


@pytest.mark.parametrize("algorithm", ["q-ffl", "term", "agnostic-fl"])
def test_losses_are_not_sent_beside_private_steps(algorithm: str, tmp_path: Path) -> None:
    privacy = {"kind": "dp-sgd", "epsilon": 8, "noise": "seeded"}
    settings = {"algorithm": algorithm, "clients": 3, "partition": "iid", "rounds": 1, "local": {"privacy": privacy}}
    with pytest.raises(UserError, match="reads a client's records without noise"):
        run(experiment_from(settings), tmp_path)
