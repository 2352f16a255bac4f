"""Rounds under Global DP: who takes part is as secret as the noise, and a round is paid for before anybody is asked."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp

from fl_sim.engine import InProcessGrid, LocalGrid
from fl_sim.seeding import rng
from fl_sim.types import BudgetExhausted
from strategies.fedavg import FedAvg
from strategies.flower import run_round
from strategies.global_dp import GlobalDP
from strategies.private import open_private_rounds
from strategies.samplers import FixedSize, Poisson

MODEL = {"w": torch.zeros(2)}
CLIENTS, ROUNDS = 40, 12
SAMPLERS = [Poisson(sampling_rate=0.3), FixedSize(cohort_size=12)]


def _strategy(strategy_of, sampler, out, **settings):
    out.mkdir(exist_ok=True)
    strategy = strategy_of(FedAvg(), MODEL, CLIENTS, sampler, seed=7)
    strategy.aggregator = GlobalDP(**settings)
    strategy.privacy = open_private_rounds(strategy.aggregator, sampler, CLIENTS, 7, out, None)
    return strategy


def _cohorts(strategy):
    cohorts = []
    for server_round in range(1, ROUNDS + 1):
        rate = ConfigRecord({"learning-rate": 0.1})
        asked = strategy.configure_train(server_round, ArrayRecord(), rate, LocalGrid(CLIENTS))
        cohorts.append(tuple(message.metadata.dst_node_id - 1000 for message in asked))
    return cohorts


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.kind)
def test_two_secret_runs_of_one_seed_have_different_cohorts_that_the_seed_does_not_give(
    sampler, strategy_of, tmp_path
) -> None:
    first, second = (_cohorts(_strategy(strategy_of, sampler, tmp_path / name)) for name in "ab")
    assert not set(first) & set(second)
    assert len(set(first)) == ROUNDS
    published = [
        tuple(sampler.sample(CLIENTS, rng(7, "sampler", server_round).random)) for server_round in range(1, ROUNDS + 1)
    ]
    seeded = _cohorts(_strategy(strategy_of, sampler, tmp_path / "seeded", noise="seeded"))
    assert not set(first) & {*published, *seeded}


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.kind)
def test_a_seeded_run_draws_the_cohorts_again_and_says_that_it_is_a_simulation(sampler, strategy_of, tmp_path) -> None:
    first = _strategy(strategy_of, sampler, tmp_path, noise="seeded")
    again = _strategy(strategy_of, sampler, tmp_path, noise="seeded")
    assert _cohorts(first) == _cohorts(again)
    assert "who takes part in a round" in str(again.privacy.statement()["does_not_cover"])


def test_a_round_is_paid_for_before_anybody_is_asked_or_anything_released(strategy_of, tmp_path) -> None:
    strategy = _strategy(strategy_of, FixedSize(cohort_size=40), tmp_path)
    rounds, log = strategy.privacy, tmp_path / "ledger.jsonl"
    seen = []

    class Watching(InProcessGrid):
        def _exchange(self, messages, timeout):
            seen.append(("asked", len(log.read_text().splitlines()) - 1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_round(strategy, Watching(ClientApp(), CLIENTS), 1, 0.1, timeout=1.0)
    assert seen == [("asked", 1)]
    assert [charge.release for charge in rounds.ledger.charges] == ["round 1"]


def test_a_round_that_the_budget_does_not_afford_asks_nobody(strategy_of, tmp_path) -> None:
    strategy = _strategy(strategy_of, Poisson(sampling_rate=0.3), tmp_path, epsilon=0.01)
    with pytest.raises(BudgetExhausted):
        run_round(strategy, None, 1, 0.1, timeout=1.0)  # no grid: whoever asks fails
    assert strategy.privacy.ledger.charges == ()


def test_every_draw_of_a_round_has_coins_of_its_own(strategy_of, tmp_path) -> None:
    coins = _strategy(strategy_of, SAMPLERS[0], tmp_path).privacy.coins(3)
    first, second = coins(50), coins(50)
    assert not np.isin(first, second).any()
