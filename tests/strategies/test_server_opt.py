"""Server optimisers (Hsu et al. 2019; Reddi et al. 2021, algorithm 2), by numbers and against Flower's own.

Flower's adaptive strategies differ from the paper in two points: v starts at 0 where the paper has v >= tau^2, and
FedAdam corrects its bias (with exponent round + 1), which the paper leaves out. The comparisons below undo just that.
"""

from math import sqrt

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from fl_sim.types import Aggregate
from strategies.fedavg import FedAvg
from strategies.server_opt import FedAdagrad, FedAdam, FedAvgM, FedYogi


def _run(algorithm, start, deltas):
    """Merge mean updates one after another; return x after each."""
    server = algorithm.init({"w": torch.as_tensor(start)})
    seen = []
    for delta in deltas:
        server = algorithm.merge(server, Aggregate({"delta": {"w": torch.as_tensor(delta)}}, 1.0))
        seen.append(server.params["w"])
    return seen, server


def _two_rounds(algorithm):
    """x = 1, then mean updates of 0.1 and -0.2, in float64."""
    seen, server = _run(algorithm, np.array([1.0]), [np.array([0.1]), np.array([-0.2])])
    return [float(x) for x in seen], {name: float(group["w"]) for name, group in server.memory.items()}


def test_fedavgm_matches_numbers_by_hand():
    # v = 0.1, x = 1 + 0.5 * 0.1; v = 0.9 * 0.1 - 0.2 = -0.11, x = 1.05 - 0.055
    seen, memory = _two_rounds(FedAvgM(server_learning_rate=0.5, server_momentum=0.9))
    assert seen == pytest.approx([1.05, 0.995], abs=1e-15)
    assert memory == pytest.approx({"momentum": -0.11}, abs=1e-15)


def test_fedadagrad_matches_the_paper():
    # v_0 = 0.01; v_1 = 0.02, v_2 = 0.06; m = Delta
    seen, memory = _two_rounds(FedAdagrad(server_learning_rate=0.5, tau=0.1))
    first = 1 + 0.5 * 0.1 / (sqrt(0.02) + 0.1)
    assert seen == pytest.approx([first, first - 0.5 * 0.2 / (sqrt(0.06) + 0.1)], abs=1e-14)
    assert memory == pytest.approx({"first_moment": -0.2, "second_moment": 0.06}, abs=1e-15)


def test_fedadagrad_with_momentum_matches_the_paper():
    # m_1 = 0.5 * 0.1 = 0.05; m_2 = 0.025 - 0.1 = -0.075
    seen, _ = _two_rounds(FedAdagrad(server_learning_rate=0.5, tau=0.1, beta_1=0.5))
    first = 1 + 0.5 * 0.05 / (sqrt(0.02) + 0.1)
    assert seen == pytest.approx([first, first - 0.5 * 0.075 / (sqrt(0.06) + 0.1)], abs=1e-14)


def test_fedadam_matches_the_paper():
    # m_1 = 0.1 * 0.1 = 0.01, m_2 = 0.009 - 0.02 = -0.011
    # v_0 = 0.0025; v_1 = 0.99 * 0.0025 + 0.01 * 0.01 = 0.002575, v_2 = 0.99 * 0.002575 + 0.01 * 0.04 = 0.00294925
    seen, memory = _two_rounds(FedAdam(server_learning_rate=0.2, tau=0.05, beta_1=0.9, beta_2=0.99))
    first = 1 + 0.2 * 0.01 / (sqrt(0.002575) + 0.05)
    assert seen == pytest.approx([first, first - 0.2 * 0.011 / (sqrt(0.00294925) + 0.05)], abs=1e-14)
    assert memory == pytest.approx({"first_moment": -0.011, "second_moment": 0.00294925}, abs=1e-15)


def test_fedyogi_matches_the_paper():
    # v_0 = 0.0025 < Delta^2 = 0.01: v_1 = 0.0025 + 0.01 * 0.01 = 0.0026; 0.0026 < 0.04: v_2 = 0.0026 + 0.0004 = 0.003
    seen, memory = _two_rounds(FedYogi(server_learning_rate=0.2, tau=0.05, beta_1=0.9, beta_2=0.99))
    first = 1 + 0.2 * 0.01 / (sqrt(0.0026) + 0.05)
    assert seen == pytest.approx([first, first - 0.2 * 0.011 / (sqrt(0.003) + 0.05)], abs=1e-14)
    assert memory == pytest.approx({"first_moment": -0.011, "second_moment": 0.003}, abs=1e-15)


def test_fedyogi_shrinks_where_the_second_moment_is_above():
    # v_0 = 1 > Delta^2: v_1 = 1 - 0.5 * 0.01, v_2 = 0.995 - 0.5 * 0.04
    _, memory = _two_rounds(FedYogi(tau=1.0, beta_2=0.5))
    assert memory["second_moment"] == pytest.approx(0.975, abs=1e-15)


def test_fedavgm_with_momentum_zero_and_rate_one_is_fedavg(bowl, federation, records, settings):
    shards = [records((1, 3, 0)), records(*[(4, -1, 0)] * 5)]
    reached = []
    for algorithm in (FedAvg(), FedAvgM(server_learning_rate=1.0, server_momentum=0.0)):
        simulated = federation(algorithm, bowl(0.5), shards, settings(0.03, 0.9, batch_size=2, epochs=2))
        for _ in range(4):
            simulated.round()
        reached.append(simulated.w)
    assert reached[0] == reached[1]


@pytest.mark.parametrize("algorithm", [FedAvgM(), FedAdagrad(), FedAdam(), FedYogi()])
def test_a_mean_update_of_zero_from_the_start_changes_nothing(algorithm):
    seen, _ = _run(algorithm, np.array([1.0]), [np.array([0.0])])
    assert float(seen[0]) == 1.0


def _flowers(strategy, second_moment, start, deltas, reply_of):
    """Feed Flower's strategy one reply a round whose model is its own model plus the mean update."""
    model = start
    if second_moment is not None:
        strategy.v_t = {"w": np.full_like(start, second_moment)}
    seen = []
    strategy.current_arrays = ArrayRecord({"w": Array(model)})
    for server_round, delta in enumerate(deltas, 1):
        if second_moment is not None:
            strategy.current_arrays = {"w": model}
        content = RecordDict({"a": ArrayRecord({"w": Array(model + delta)}), "m": MetricRecord({"num-examples": 3})})
        arrays, _ = strategy.aggregate_train(server_round, [reply_of(0, content), reply_of(1, content)])
        model = arrays["w"].numpy()
        seen.append(model)
    return seen


@pytest.fixture
def rounds():
    generator = np.random.default_rng(0)
    return generator.standard_normal(6), [0.1 * generator.standard_normal(6) for _ in range(5)]


def _agree(ours, theirs):
    for mine, his in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.numpy(), his, rtol=1e-10, atol=1e-13)


def test_fedavgm_agrees_with_flowers(rounds, reply_of):
    start, deltas = rounds
    ours, _ = _run(FedAvgM(server_learning_rate=0.7, server_momentum=0.9), start, deltas)
    theirs = _flowers(flower.FedAvgM(server_learning_rate=0.7, server_momentum=0.9), None, start, deltas, reply_of)
    _agree(ours, theirs)


def test_fedadagrad_agrees_with_flowers_once_v_starts_at_tau_squared(rounds, reply_of):
    start, deltas = rounds
    ours, _ = _run(FedAdagrad(server_learning_rate=0.3, tau=0.02), start, deltas)
    _agree(ours, _flowers(flower.FedAdagrad(eta=0.3, tau=0.02), 0.02**2, start, deltas, reply_of))
    from_zero = _flowers(flower.FedAdagrad(eta=0.3, tau=0.02), 0.0, start, deltas, reply_of)
    assert np.abs(ours[0].numpy() - from_zero[0]).max() > 1e-3


def test_fedyogi_agrees_with_flowers_once_v_starts_at_tau_squared(rounds, reply_of):
    start, deltas = rounds
    ours, _ = _run(FedYogi(server_learning_rate=0.3, tau=0.02, beta_1=0.8, beta_2=0.95), start, deltas)
    theirs = flower.FedYogi(eta=0.3, tau=0.02, beta_1=0.8, beta_2=0.95)
    _agree(ours, _flowers(theirs, 0.02**2, start, deltas, reply_of))


def test_fedadam_agrees_with_flowers_once_v_starts_at_tau_squared_and_the_bias_correction_is_undone(rounds, reply_of):
    start, deltas = rounds
    rate, beta_1, beta_2 = 0.3, 0.8, 0.95
    theirs = flower.FedAdam(eta=rate, tau=0.02, beta_1=beta_1, beta_2=beta_2)
    steps = np.diff([start, *_flowers(theirs, 0.02**2, start, deltas, reply_of)], axis=0)
    ours, _ = _run(FedAdam(server_learning_rate=rate, tau=0.02, beta_1=beta_1, beta_2=beta_2), start, deltas)
    our_steps = np.diff([start, *[x.numpy() for x in ours]], axis=0)
    for server_round, (mine, his) in enumerate(zip(our_steps, steps, strict=True), 1):
        correction = sqrt(1 - beta_2 ** (server_round + 1)) / (1 - beta_1 ** (server_round + 1))
        np.testing.assert_allclose(mine * correction, his, rtol=1e-9)
        assert correction != pytest.approx(1, abs=0.05)
