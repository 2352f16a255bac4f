"""Noise correlated over rounds: what is hidden, how well, what it costs a client, and what the model gains."""

import json
import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fl_sim.errors import BudgetExhausted, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.privacy.accounting import delta_profile, epsilon_of_counts
from fl_sim.privacy.audit import EPSILONS, audit_profile, run_mechanism
from fl_sim.privacy.events import amplify_poisson
from fl_sim.privacy.mechanisms import Noise, grid_spacing
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent
from fl_sim.store.run_directory import LEDGER, ROUNDS
from fl_sim.types import Cohort, Reply
from strategies.correlated_noise import CorrelatedNoise, coefficients
from strategies.global_dp import GlobalDP
from strategies.private import open_private_rounds
from strategies.samplers import Cyclic

SIZE, NOISE = 6, Noise.seeded(3)
TEMPLATE = {"delta": {"w": torch.zeros(SIZE)}}


def matrix(bands: int, rounds: int) -> np.ndarray:
    """C, of ``rounds`` rows."""
    full = np.zeros((rounds, rounds))
    for lag, coefficient in enumerate(coefficients(bands)[:rounds]):
        full += coefficient * np.eye(rounds, k=-lag)
    return full


def released(aggregator: GlobalDP, rounds: list[dict[int, np.ndarray]], noise: Noise = NOISE) -> np.ndarray:
    """The sums that a run of these rounds releases, (rounds, SIZE); ``rounds``: {client: update} of each."""
    correlated, sums = CorrelatedNoise(aggregator.noise_bands), []
    for server_round, updates in enumerate(rounds, 1):
        replies = tuple(
            Reply(client, {"delta": {"w": torch.tensor(update, dtype=torch.float32)}}, 1, None)
            for client, update in updates.items()
        )
        cohort = Cohort(server_round, replies, num_clients=10, expected_size=1.0)
        aggregate, _ = aggregator.release(
            cohort, noise=noise, template=TEMPLATE, clipping_norm=aggregator.clipping_norm, correlated=correlated
        )
        sums.append(aggregate.payloads["delta"]["w"].double().numpy())
    return np.array(sums)


def test_the_coefficients_are_those_of_the_square_root_of_prefix_sums() -> None:
    raw = coefficients(40) / coefficients(40)[0]
    root = sum(value * np.eye(40, k=-lag) for lag, value in enumerate(raw))
    assert np.allclose(root @ root, np.tril(np.ones((40, 40))))
    assert all(math.isclose(np.linalg.norm(coefficients(bands)), 1.0) for bands in (1, 2, 5, 64))


@pytest.mark.parametrize("bands", [1, 2, 4])
def test_what_is_released_is_the_sums_and_the_fresh_noise_through_the_inverse(bands: int) -> None:
    rng, std, rounds = np.random.default_rng(0), 0.7, 9
    x, steps = rng.standard_normal((rounds, SIZE)), rng.integers(-(2**22), 2**22, (rounds, SIZE)).astype(float)
    correlated = CorrelatedNoise(bands)
    a = np.array([correlated.release(row, std, step) for row, step in zip(x, steps, strict=True)])
    c, grid = matrix(bands, rounds), grid_spacing(std)
    hidden = (c @ a - steps * grid) / grid
    assert np.abs(hidden - np.rint(hidden)).max() < 1e-4, "C a less the noise lies on the grid"
    assert np.abs(hidden * grid - c @ x).max() <= grid * 0.5001, "and is C x, rounded to it"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 3), st.floats(0.1, 50.0))
def test_a_client_moves_what_is_hidden_by_one_clipping_norm_for_each_of_its_turns(
    seed: int, bands: int, more: int, size: float
) -> None:
    rng, groups, rounds, norm = np.random.default_rng(seed), bands + more, 9, 0.8
    aggregator = GlobalDP(noise_multiplier=1.0, clipping_norm=norm, noise_bands=bands)
    turns = range(int(rng.integers(groups)), rounds, groups)
    others = [{0: rng.standard_normal(SIZE)} for _ in range(rounds)]
    push = rng.standard_normal(SIZE) * size
    there = [others[t] | ({1: push * (-1) ** t} if t in turns else {}) for t in range(rounds)]
    difference = matrix(bands, rounds) @ (released(aggregator, there) - released(aggregator, others))
    moved, least = np.linalg.norm(difference), min(norm, float(np.linalg.norm(push)))
    rounding = 1e-5  # what is released travels in float32
    assert moved <= math.sqrt(len(turns)) * norm + rounding
    cut = sum(np.sum(coefficients(bands)[: rounds - t] ** 2) for t in turns)  # columns that the end of the run cuts off
    assert moved >= math.sqrt(cut) * least * 0.999 - rounding, "the bound is attained"


def test_turns_closer_than_the_bands_would_move_it_further() -> None:
    aggregator = GlobalDP(noise_multiplier=1.0, clipping_norm=1.0, noise_bands=4)
    push, rounds = np.full(SIZE, 9.0), 8
    there = [{1: push} if t < 4 else {} for t in range(rounds)]
    difference = matrix(4, rounds) @ (released(aggregator, there) - released(aggregator, [{}] * rounds))
    assert np.linalg.norm(difference) > 1.3 * math.sqrt(4)


def test_the_hidden_sums_have_just_the_noise_that_is_charged_for() -> None:
    bands, rounds, z, norm = 3, 6, 1.7, 0.5
    aggregator = GlobalDP(noise_multiplier=z, clipping_norm=norm, noise_bands=bands)
    fresh = [matrix(bands, rounds) @ released(aggregator, [{}] * rounds, Noise.seeded(seed)) for seed in range(200)]
    z_found = np.concatenate(fresh).ravel() / norm
    count = z_found.size
    assert abs(z_found.mean()) < 5 * z / math.sqrt(count)
    assert abs(z_found.var() / z**2 - 1) < 5 * math.sqrt(2 / count)
    by_round = np.array(fresh) / norm
    between = np.corrcoef(by_round.transpose(1, 0, 2).reshape(rounds, -1))
    assert np.abs(between - np.eye(rounds)).max() < 5 / math.sqrt(200 * SIZE), "fresh in every round"


@pytest.mark.parametrize(("added", "is_refuted"), [(0.6, False), (0.3, True)])
def test_the_best_auditor_refutes_half_the_noise_and_not_all_of_it(*, added: float, is_refuted: bool) -> None:
    """It knows C and the client's update, and adds up what is hidden along both, over the client's two turns."""
    bands, rounds, z = 2, 3, 0.6
    aggregator = GlobalDP(noise_multiplier=added, clipping_norm=1.0, noise_bands=bands)
    push, c = np.full(SIZE, 5.0), matrix(bands, rounds)
    along = c @ np.array([1.0, 0.0, 1.0])

    def seen(world: int, number: int) -> np.ndarray:
        there = [{1: push} if world and t % 2 == 0 else {} for t in range(rounds)]
        hidden = c @ released(aggregator, there, Noise.seeded(number))
        return np.array([along @ hidden @ push / np.linalg.norm(push)])

    claimed = delta_profile([dp_event.GaussianDpEvent(z)] * 2, EPSILONS)
    audit = audit_profile(*run_mechanism(seen, 200), claimed)
    assert audit.refuted == is_refuted
    assert is_refuted or audit.power > 0.8


def _error(z: float, bands: int, rounds: int, cohort: float) -> float:
    """RMSE of the model's noise over all rounds, per number and clipping norm: prefix sums of C^-1 Z over a cohort."""
    one_number = [CorrelatedNoise(bands) for _ in range(rounds)]
    grid = grid_spacing(1.0)
    impulses = np.array([
        [one.release(np.zeros(1), 1.0, np.array([float(t == at) / grid]))[0] for t in range(rounds)]
        for at, one in enumerate(one_number)
    ])  # fmt: skip
    return float(z * np.sqrt((np.cumsum(impulses, axis=1) ** 2).sum(axis=0).mean()) / cohort)


@pytest.mark.parametrize(
    ("rate", "bands", "z", "error"), [(0.1, 1, 0.85736, 0.0433), (0.1, 8, 1.47253, 0.0366), (1.0, 1, 4.50911, 0.0228)]
)
def test_the_models_noise_is_as_little_as_computed_elsewhere(rate: float, bands: int, z: float, error: float) -> None:
    """1,000 clients, 50 rounds, epsilon 8, delta 1e-5 by RDP, clients sampled at ``rate``; figures of a script."""
    charge = amplify_poisson(dp_event.GaussianDpEvent(z), min(1.0, rate * bands))
    assert epsilon_of_counts({charge: math.ceil(50 / bands)}, 1e-5) == pytest.approx(8.0, abs=1e-3)
    assert _error(z, bands, 50, 1000 * rate) == pytest.approx(error, abs=1e-4)


def test_turns_without_secret_coins_leave_as_little_noise_as_coins_do() -> None:
    """At z 1.43, which five turns at epsilon 8 need."""
    assert epsilon_of_counts({dp_event.GaussianDpEvent(1.43): 5}, 1e-5) < 8.0
    assert _error(1.43, 8, 50, 100) == pytest.approx(0.0356, abs=1e-4)


def _rounds(tmp_path, sampler=None, **changes):
    aggregator = GlobalDP(noise_bands=2, **changes)
    return open_private_rounds(aggregator, sampler or Cyclic(groups=3), 9, 0, tmp_path, None)


@pytest.mark.usefixtures("quick_accounting")
def test_a_turn_of_all_groups_is_one_charge(tmp_path) -> None:
    rounds = _rounds(tmp_path, delta=1e-3)
    spent = [rounds.pay(server_round) for server_round in range(1, 8)]
    by_turns = [epsilon_of_counts({dp_event.GaussianDpEvent(1.0): turns}, 1e-3) for turns in (1, 2, 3)]
    assert spent == [by_turns[0]] * 3 + [by_turns[1]] * 3 + [by_turns[2]]
    assert [charge.release for charge in rounds.ledger.charges] == ["rounds 1 to 3", "rounds 4 to 6", "rounds 7 to 9"]
    said = rounds.statement(8)
    assert said["steps_planned"] == 3
    assert "One step of this statement covers 3 rounds." in str(said["covers"])


@pytest.mark.usefixtures("quick_accounting")
def test_a_turn_under_a_coin_is_one_sampled_charge(tmp_path) -> None:
    rounds = _rounds(tmp_path, Cyclic(groups=3, sampling_rate=0.5))
    for server_round in (1, 2, 3, 4):
        rounds.pay(server_round)
    event = dp_event.PoissonSampledDpEvent(0.5, dp_event.GaussianDpEvent(1.0))
    assert [charge.event for charge in rounds.ledger.charges] == [event, event]


@pytest.mark.usefixtures("quick_accounting")
def test_the_budget_ends_a_run_at_the_end_of_a_turn(tmp_path) -> None:
    budget = epsilon_of_counts({dp_event.GaussianDpEvent(1.0): 2}, 1e-5)
    rounds = _rounds(tmp_path, epsilon=budget)
    for server_round in range(1, 7):
        assert rounds.affords(server_round)
        rounds.pay(server_round)
    assert not rounds.affords(7)
    with pytest.raises(BudgetExhausted):
        rounds.pay(7)


@pytest.mark.usefixtures("quick_accounting")
def test_rounds_that_go_on_with_another_key_pay_for_their_turn_again(tmp_path) -> None:
    rounds = _rounds(tmp_path)
    rounds.pay(1)
    rounds.pay(2)
    on = _rounds(tmp_path)
    on.pay(2)
    on.pay(3)
    assert [charge.release for charge in on.ledger.charges] == ["rounds 1 to 3"] * 2
    assert on.correlated.sums == on.correlated.released, "nothing of earlier noise is known"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregator": {"noise_bands": 4}}, r"any 4 rounds in a row: take sampler=cyclic sampler.groups=4 or more"),
        ({"aggregator": {"noise_bands": 4}, "sampler": {"kind": "cyclic", "groups": 3}}, r"groups=4 or more"),
        ({"sampler": {"kind": "cyclic", "groups": 11}}, r"11 groups needs as many clients, and there are 10"),
        ({"aggregator": {"noise_bands": 2, "adaptive_clipping": {}}}, r"every round has its own"),
        ({"aggregator": {"noise_bands": 2, "noise_multiplier": 0.0}}, r"no noise to correlate"),
        ({"aggregator": {"noise_bands": 0}}, r"greater than or equal to 1"),
    ],
)
def test_what_would_not_be_private_is_refused(changes: dict[str, dict[str, object]], message: str) -> None:
    sampler = changes.get("sampler", {"kind": "cyclic", "groups": 4} if "aggregator" in changes else {})
    if changes.get("aggregator") == {"noise_bands": 4} and "sampler" not in changes:
        sampler = {"kind": "poisson"}
    aggregator = {"kind": "global-dp", **changes.get("aggregator", {})}
    with pytest.raises((UserError, ValidationError), match=message):
        experiment_from({"data": "digits", "clients": 10, "aggregator": aggregator, "sampler": sampler})


@pytest.mark.usefixtures("quick_accounting")
def test_a_run_has_such_noise_and_goes_on_after_a_stop_and_says_what_that_means(tmp_path) -> None:
    changes = {
        "data": "digits", "model": "logistic", "clients": 10, "rounds": 5, "engine": "inprocess",
        "aggregator": {"kind": "global-dp", "noise_bands": 2, "noise": "seeded", "noise_multiplier": 2.0},
        "sampler": {"kind": "cyclic", "groups": 2},
    }  # fmt: skip
    experiment = experiment_from(changes)
    result = run(experiment, tmp_path / "whole")
    (said,) = result["privacy"]
    expected = epsilon_of_counts({dp_event.GaussianDpEvent(2.0): 3}, 1e-5)
    assert said["epsilon_rdp"] == expected
    assert said["steps"] == 3
    stopped = tmp_path / "stopped"

    class Stopping(Silent):
        def finished_round(self, record):
            if record.round == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, stopped, observer=Stopping())
    after = run(experiment, stopped)
    assert any("the correlation of the noise starts again" in warning for warning in after["warnings"])
    read = [
        [json.loads(line) for line in (tmp_path / name / ROUNDS).read_text().splitlines()]
        for name in ("whole", "stopped")
    ]
    assert [line["test_loss"] for line in read[0][:3]] == [line["test_loss"] for line in read[1][:3]]
    assert len(read[1]) == 5
    assert len((stopped / LEDGER).read_text().splitlines()) == 1 + 3
