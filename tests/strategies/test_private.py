"""Rounds under Global DP: who takes part is as secret as the noise, and a round is paid for before anybody is asked."""

import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fl_sim.engines import wire
from fl_sim.engines.grid import LocalGrid
from fl_sim.errors import RunError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.interface import run
from fl_sim.seeding import rng
from fl_sim.testing_runs import FakeEngine
from fl_sim.types import ClientUpdate
from strategies.fedavg import FedAvg
from strategies.flower import run_round
from strategies.global_dp import GlobalDP
from strategies.private import PrivateRounds, open_private_rounds
from strategies.samplers import FixedSize, Poisson

pytestmark = pytest.mark.usefixtures("quick_accounting")

MODEL = {"w": torch.zeros(2)}
CLIENTS, ROUNDS = 40, 12
SAMPLERS = [Poisson(sampling_rate=0.3), FixedSize(cohort_size=12)]


def _strategy(strategy_of, sampler, out, **settings):
    out.mkdir(exist_ok=True)
    strategy = strategy_of(FedAvg(), MODEL, CLIENTS, sampler, seed=7)
    strategy.aggregator = GlobalDP(**settings)
    strategy.wrap(open_private_rounds(strategy.aggregator, sampler, CLIENTS, 7, out, None))
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
        tuple(sampler.sample(CLIENTS, rng(7, "sampler", server_round).random, server_round))
        for server_round in range(1, ROUNDS + 1)
    ]
    seeded = _cohorts(_strategy(strategy_of, sampler, tmp_path / "seeded", noise="seeded"))
    assert not set(first) & {*published, *seeded}


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.kind)
def test_a_seeded_run_draws_the_cohorts_again_and_says_that_it_is_a_simulation(sampler, strategy_of, tmp_path) -> None:
    first = _strategy(strategy_of, sampler, tmp_path, noise="seeded")
    again = _strategy(strategy_of, sampler, tmp_path, noise="seeded")
    assert _cohorts(first) == _cohorts(again)
    assert "such as the cohorts, come from the experiment's seed" in str(
        again.layer.statement(ROUNDS)["does_not_cover"]
    )


def test_a_round_is_paid_for_before_anybody_is_asked_or_anything_released(strategy_of, tmp_path) -> None:
    strategy = _strategy(strategy_of, FixedSize(cohort_size=40), tmp_path)
    rounds, log = strategy.layer, tmp_path / "ledger.jsonl"
    seen = []

    def watching(client, message):
        seen.append(("asked", len(log.read_text().splitlines()) - 1))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_round(strategy, FakeEngine(CLIENTS, watching), 1, 0.1, timeout=1.0)
    assert seen == [("asked", 1)]
    assert [charge.release for charge in rounds.ledger.charges] == ["round 1"]


def test_a_round_that_the_budget_does_not_afford_asks_nobody(strategy_of, tmp_path) -> None:
    strategy = _strategy(strategy_of, Poisson(sampling_rate=0.3), tmp_path, epsilon=0.01)
    with pytest.raises(RunError, match="does not afford the first round"):
        run_round(strategy, None, 1, 0.1, timeout=1.0)  # no grid: whoever asks fails
    assert strategy.layer.ledger.charges == ()


def test_every_draw_of_a_round_has_coins_of_its_own(strategy_of, tmp_path) -> None:
    coins = _strategy(strategy_of, SAMPLERS[0], tmp_path).layer.coins(3)
    first, second = coins(50), coins(50)
    assert not np.isin(first, second).any()


def _malformed(good: RecordDict) -> dict[str, RecordDict]:
    ((name, array),) = good["payload/delta"].items()
    nan = {"w": torch.tensor([1.0, math.nan])}
    return {
        "NaN": wire.update_content(ClientUpdate({"delta": nan}, 5, 0.1)),
        "nothing": RecordDict(),
        "another shape": wire.update_content(ClientUpdate({"delta": {"w": torch.ones(3)}}, 5, 0.1)),
        "foreign": RecordDict({**good, "payload/more": good["payload/delta"]}),
        "two arrays": RecordDict({**good, "payload/delta": ArrayRecord({name: array, "more": array})}),
        "records": RecordDict({**good, "report": MetricRecord({"num-examples": -1})}),
        "not JSON": RecordDict({**good, "payload/delta": ArrayRecord({"{": array})}),
    }


def test_whatever_one_client_sends_counts_as_zeros_and_is_charged_as_ever(strategy_of, reply_of, tmp_path) -> None:
    good = wire.update_content(ClientUpdate({"delta": {"w": torch.tensor([0.3, 0.4])}}, 5, 0.1))
    models = {}
    for name, odd in {"missing": None, **_malformed(good)}.items():
        strategy = _strategy(strategy_of, SAMPLERS[0], tmp_path / name.replace(" ", "-"), noise="seeded")
        strategy.cohort = np.array([0, 1])
        strategy.layer.pay(1)
        strategy.aggregate_train(1, [reply_of(0, good), *([reply_of(1, odd)] if odd is not None else [])])
        models[name] = strategy.server.params["w"].tolist()
        assert len(strategy.layer.ledger.charges) == 1
    assert all(model == models["missing"] for model in models.values()), models


def test_answers_that_nobody_asked_for_count_nothing(strategy_of, reply_of, tmp_path) -> None:
    good = wire.update_content(ClientUpdate({"delta": {"w": torch.tensor([0.3, 0.4])}}, 5, 0.1))
    models = []
    for name, others in (("a", ()), ("b", (2, 1000)), ("c", (1, 1))):  # outside the cohort, no client, twice
        strategy = _strategy(strategy_of, SAMPLERS[0], tmp_path / name, noise="seeded")
        strategy.cohort = np.array([0, 1])
        strategy.aggregate_train(1, [reply_of(client, good) for client in (0, *others)])
        models.append(strategy.server.params["w"].tolist())
    assert models[0] == models[1] == models[2]


def test_no_single_client_stops_a_run_and_two_that_fail_with_nobody_answering_do(
    strategy_of, reply_of, tmp_path
) -> None:
    strategy = _strategy(strategy_of, SAMPLERS[0], tmp_path)
    good = wire.update_content(ClientUpdate({"delta": {"w": torch.tensor([0.3, 0.4])}}, 5, 0.1))
    for server_round, (cohort, sent) in enumerate([([3], []), ([3], []), ([4], [4]), ([5], []), ([], [])], 1):
        strategy.cohort = np.array(cohort, dtype=np.int64)
        strategy.aggregate_train(server_round, [reply_of(client, good) for client in sent])
    strategy.cohort = np.array([6])
    with pytest.raises(RunError, match="no client sent a valid update") as caught:
        strategy.aggregate_train(6, [])
    assert not set("0123456789") & set(str(caught.value))
    assert caught.value.private.splitlines() == [
        f"client {client} did not answer in time: see whether it still runs, or give a larger round_timeout"
        for client in (5, 6)
    ]


SMALL = {"model": "logistic", "rounds": 1, "clients": 20, "partition": "iid", "sampler": "full", "engine": "inprocess"}


def test_noise_that_is_no_epsilon_is_told_when_the_run_starts_and_is_no_warning(tmp_path, capsys):
    run({**SMALL, "aggregator": "global-dp:8"}, out=tmp_path / "run")
    lines = capsys.readouterr().err.splitlines()
    [told] = [n for n, line in enumerate(lines) if "(in short global-dp:8) sets the noise and not epsilon" in line]
    assert told < next(number for number, line in enumerate(lines) if line.startswith("round 1/1"))
    assert "sets the noise and not epsilon" not in (tmp_path / "run" / "result.json").read_text()
    assert PrivateRounds.told(experiment_from({**SMALL, "aggregator": "global-dp"})) == []
