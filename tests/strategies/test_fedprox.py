"""FedProx (Li et al. 2020, algorithm 2)."""

import pytest
import torch
from torch import nn

from strategies.fedavg import FedAvg
from strategies.fedprox import FedProx


def test_two_steps_match_numbers_by_hand(bowl, federation, records, settings):
    # F = (w - 1)^2 / 2, x = 2, mu = 0.5, eta = 0.1: g = 1 -> 1.9; g = 0.9 + 0.5 (1.9 - 2) = 0.85 -> 1.815
    simulated = federation(FedProx(mu=0.5), bowl(2.0), [records((1, 1, 0))], settings(0.1, epochs=2))
    simulated.round()
    assert simulated.w == pytest.approx(1.815, abs=1e-14)


def test_the_proximal_term_goes_through_momentum_and_beside_weight_decay(bowl, federation, records, settings):
    # mu = 0.5, weight decay 0.1, momentum 0.9, x = 2, target 1:
    # v = 1 + 0.2 = 1.2 -> 1.88; g = 0.88 + 0.5 (-0.12) + 0.188 = 1.008, v = 1.08 + 1.008 = 2.088 -> 1.6712
    local = settings(0.1, 0.9, weight_decay=0.1, epochs=2)
    simulated = federation(FedProx(mu=0.5), bowl(2.0), [records((1, 1, 0))], local)
    simulated.round()
    assert simulated.w == pytest.approx(1.6712, abs=1e-14)


def test_mu_zero_is_fedavg_bit_for_bit(federation, settings):
    generator = torch.Generator().manual_seed(0)
    shards = [(torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)) for n in (5, 9, 14)]
    models = []
    for algorithm in (FedAvg(), FedProx(mu=0.0)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        simulated = federation(algorithm, model, shards, settings(0.1, 0.9, batch_size=4, weight_decay=1e-3, epochs=2))
        for _ in range(3):
            simulated.round()
        models.append(simulated.server.params)
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_bigger_mu_moves_less(bowl, federation, records, settings):
    moved = []
    for mu in (0.0, 0.001, 0.01, 0.1, 1.0):
        simulated = federation(FedProx(mu=mu), bowl(0.0), [records((1, 3, 0))], settings(0.1, epochs=10))
        simulated.round()
        moved.append(simulated.w)
    assert moved == sorted(moved, reverse=True)
    assert len(set(moved)) == 5
    assert moved[-1] > 0


def test_many_steps_reach_the_minimum_of_the_proximal_objective(bowl, federation, records, settings):
    # argmin a/2 (w - b)^2 + mu/2 (w - x)^2 = (a b + mu x) / (a + mu) = (2 * 3 + 0.5 * -1) / 2.5 = 2.2
    simulated = federation(FedProx(mu=0.5), bowl(-1.0), [records((2, 3, 0))], settings(0.1, epochs=200))
    simulated.round()
    assert simulated.w == pytest.approx(2.2, abs=1e-12)
