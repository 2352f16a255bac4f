"""SCAFFOLD (Karimireddy et al. 2020, algorithm 1, option II), and its controls under momentum."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fl_sim
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.groups import Local
from fl_sim.store.tensors import load_state, save_state
from strategies.fedavg import FedAvg
from strategies.scaffold import Scaffold


def _w(params):
    return float(params["w"])


@pytest.fixture
def pair(bowl, federation, records, settings):
    """Two clients with F = (w - 2)^2 / 2 and F = (w + 4)^2 / 2, two full-batch steps of eta = 0.1, x = 0."""

    def make(algorithm, momentum=0.0):
        return federation(
            algorithm, bowl(0.0), [records((1, 2, 0)), records((1, -4, 0))], settings(0.1, momentum, epochs=2)
        )

    return make


def test_first_round_matches_the_paper(pair):
    simulated = pair(Scaffold())
    updates = simulated.round()
    # client 0: g = -2 -> 0.2, g = -1.8 -> 0.38, c_0+ = (0 - 0.38) / (2 * 0.1); client 1: -0.4, then -0.76
    assert [_w(update.payloads["delta"]) for update in updates] == pytest.approx([0.38, -0.76], abs=1e-14)
    assert [_w(update.payloads["control_delta"]) for update in updates] == pytest.approx([-1.9, 3.8], abs=1e-13)
    assert [_w(update.state["control"]) for update in updates] == pytest.approx([-1.9, 3.8], abs=1e-13)
    assert simulated.w == pytest.approx(-0.19, abs=1e-14)
    assert _w(simulated.server.broadcast["control"]) == pytest.approx(0.95, abs=1e-13)


def test_second_round_corrects_every_step_and_sends_the_change_of_the_control(pair):
    simulated = pair(Scaffold())
    simulated.round()
    updates = simulated.round()
    # x = -0.19, c = 0.95; client 0 adds c - c_0 = 2.85: g = -2.19 + 2.85 = 0.66 -> -0.256, g = 0.594 -> -0.3154
    # client 1 adds 0.95 - 3.8 = -2.85: g = 0.96 -> -0.286, g = 0.864 -> -0.3724
    assert [_w(update.payloads["delta"]) for update in updates] == pytest.approx([-0.1254, -0.1824], abs=1e-14)
    # c_0+ = -1.9 - 0.95 + 0.1254 / 0.2 = -2.223 and c_1+ = 3.8 - 0.95 + 0.1824 / 0.2 = 3.762 stay; changes are sent
    assert [_w(update.state["control"]) for update in updates] == pytest.approx([-2.223, 3.762], abs=1e-13)
    assert [_w(update.payloads["control_delta"]) for update in updates] == pytest.approx([-0.323, -0.038], abs=1e-13)
    assert simulated.w == pytest.approx(-0.3439, abs=1e-14)
    assert _w(simulated.server.broadcast["control"]) == pytest.approx(0.7695, abs=1e-13)


def test_first_round_with_momentum_divides_by_the_reach_of_the_steps(pair):
    updates = pair(Scaffold(variant="momentum"), momentum=0.9).round()
    # v = -2 -> 0.2; v = -1.8 - 1.8 = -3.6 -> 0.56; a(2, 0.9) = 1 + 1.9 = 2.9, c_0+ = -0.56 / 0.29
    assert _w(updates[0].payloads["delta"]) == pytest.approx(0.56, abs=1e-14)
    assert _w(updates[0].state["control"]) == pytest.approx(-0.56 / 0.29, abs=1e-13)


def test_with_momentum_the_control_is_the_gradient_where_that_is_constant(bowl, federation, records, settings):
    shards = [records((0, 0, 1.5)), records((0, 0, -0.25))]
    simulated = federation(Scaffold(variant="momentum"), bowl(0.0), shards, settings(0.01, 0.9, epochs=25))
    for _ in range(4):  # from the second round on the correction is at work as well
        simulated.round()
        controls = [_w(state["control"]) for state in simulated.states]
        assert controls == pytest.approx([1.5, -0.25], abs=1e-12)
        assert _w(simulated.server.broadcast["control"]) == pytest.approx(0.625, abs=1e-12)


def test_the_benchmarks_program_corrects_after_momentum_divides_by_steps_and_counts_records(
    bowl, federation, records, settings
):
    # NIID-Bench's train_net_scaffold at momentum .9, by hand: F_0 = (w - 2)^2 / 2 with 3 records, F_1 = (w + 4)^2 / 2
    shards = [records(*[(1, 2, 0)] * 3), records((1, -4, 0))]
    simulated = federation(Scaffold(variant="niid-bench"), bowl(0.0), shards, settings(0.1, 0.9, epochs=2))
    x, c, own = 0.0, 0.0, [0.0, 0.0]
    for _ in range(3):
        ends, changes = [], []
        for client, target in enumerate((2.0, -4.0)):
            w, v = x, 0.0
            for _ in range(2):
                v = 0.9 * v + (w - target)
                w -= 0.1 * v
                w -= 0.1 * (c - own[client])
            changes.append(-c + (x - w) / (2 * 0.1))
            own[client] += changes[-1]
            ends.append(w)
        x, c = (3 * ends[0] + ends[1]) / 4, c + sum(changes) / 2
        simulated.round()
        assert simulated.w == pytest.approx(x, abs=1e-12)
        assert _w(simulated.server.broadcast["control"]) == pytest.approx(c, abs=1e-12)


def test_without_momentum_all_variants_are_the_paper_where_clients_hold_equally_much(pair):
    ways = []
    for variant in ("paper", "momentum", "niid-bench"):
        simulated = pair(Scaffold(variant=variant))
        for _ in range(3):
            simulated.round()
        ways.append(simulated.w)
    assert ways[1:] == pytest.approx([ways[0]] * 2, abs=1e-13)


def test_local_momentum_is_0_unless_the_user_sets_it_and_what_is_done_is_said():
    assert experiment_from({"algorithm": "scaffold"}).local.momentum == 0
    assert experiment_from({"algorithm": "scaffold", "local": {"epochs": 3}}).local.momentum == 0
    assert Experiment(algorithm=Scaffold(), local=Local(epochs=3)).local == Local(epochs=3, momentum=0)
    assert experiment_from({"algorithm": "scaffold", "local": {"momentum": 0.9}}).local.momentum == 0.9
    assert experiment_from({"algorithm": "fedavg"}).local.momentum == 0.9
    assert "without local momentum" in Scaffold().advice(0.0)
    assert "overshoot up to 10 times" in Scaffold().advice(0.9)
    assert "fl-sim's extension" in Scaffold(variant="momentum").advice(0.9)
    with pytest.raises(UserError, match="niid-bench weights models by their clients' records"):
        experiment_from({"algorithm": {"kind": "scaffold", "variant": "niid-bench"}, "aggregator": "global-dp"})


def test_a_run_that_diverges_names_the_settings_that_bear_on_it(tmp_path: Path):
    settings = {"algorithm": "scaffold", "local": {"momentum": 0.9, "learning_rate": 2.0}, "model": "mlp"}
    with pytest.raises(RunError, match=r"diverged; try .*; SCAFFOLD diverges if .* local.momentum"):
        fl_sim.run(settings, out=tmp_path / "run", progress=False)


def test_server_learning_rate_scales_the_model_and_not_the_control(pair):
    simulated = pair(Scaffold(server_learning_rate=0.5))
    simulated.round()
    assert simulated.w == pytest.approx(-0.095, abs=1e-14)
    assert _w(simulated.server.broadcast["control"]) == pytest.approx(0.95, abs=1e-13)


def test_clients_count_the_same_whatever_they_hold(bowl, federation, records, settings):
    shards = [records(*[(1, 2, 0)] * 5), records((1, -4, 0))]
    simulated = federation(Scaffold(), bowl(0.0), shards, settings(0.1, epochs=2))
    simulated.round()
    assert simulated.w == pytest.approx(-0.19, abs=1e-14)


def test_under_partial_participation_c_moves_by_the_cohorts_share_and_the_absent_keep_theirs(
    bowl, federation, records, settings
):
    shards = [records((0, 0, g)) for g in (1.0, 2.0, 4.0, 8.0)]
    simulated = federation(Scaffold(), bowl(0.0), shards, settings(0.01, epochs=3))
    simulated.round(0, 3)
    assert _w(simulated.server.broadcast["control"]) == pytest.approx((1 + 8) / 4, abs=1e-12)
    assert simulated.states[1] == {}
    simulated.round(1, 3)
    assert _w(simulated.server.broadcast["control"]) == pytest.approx((1 + 2 + 8) / 4, abs=1e-12)
    assert _w(simulated.states[0]["control"]) == pytest.approx(1.0, abs=1e-12)
    simulated.round(2)
    assert _w(simulated.server.broadcast["control"]) == pytest.approx((1 + 2 + 4 + 8) / 4, abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_client_is_sgd(federation, settings, momentum):
    generator = torch.Generator().manual_seed(0)
    shard = (torch.randn(11, 6, generator=generator), torch.randint(3, (11,), generator=generator))
    models = []
    for algorithm in (FedAvg(), Scaffold()):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        simulated = federation(algorithm, model, [shard], settings(0.1, momentum, batch_size=4, epochs=2))
        for _ in range(3):
            simulated.round()
        models.append(simulated.server.params)
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_many_rounds_on_heterogeneous_quadratics_reach_the_optimum_that_fedavg_misses(
    bowl, federation, records, settings, momentum
):
    # mean of (w - 1)^2 / 2 and 4 (w + 1)^2 / 2: its minimum is (1 - 4) / 5 = -0.6
    shards = [records((1, 1, 0)), records((4, -1, 0))]
    reached = {}
    for algorithm in (Scaffold(variant="momentum"), FedAvg()):
        simulated = federation(algorithm, bowl(0.0), shards, settings(0.01 * (1 - momentum) * 5, momentum, epochs=10))
        for _ in range(60):
            simulated.round()
        reached[algorithm.kind] = simulated.w
    assert reached["scaffold"] == pytest.approx(-0.6, abs=1e-5)
    assert abs(reached["fedavg"] + 0.6) > 0.03


def test_an_empty_shard_sends_zeros_and_keeps_its_control(bowl, federation, records, settings):
    simulated = federation(Scaffold(), bowl(0.0), [records((1, 2, 0)), records()], settings(0.1))
    simulated.states[1] = {"control": {"w": torch.tensor([7.0], dtype=torch.float64)}}
    _, empty = simulated.round()
    assert {name: _w(params) for name, params in empty.payloads.items()} == {"delta": 0.0, "control_delta": 0.0}
    assert (empty.state, empty.loss, empty.num_examples) == ({}, None, 0)
    assert _w(simulated.states[1]["control"]) == 7.0


def test_a_round_run_again_after_a_crash_gives_the_same_state(pair, tmp_path: Path):
    simulated = pair(Scaffold())
    for client in (0, 1):
        save_state(tmp_path, client, 1, simulated.client(client).state)
    simulated.round()
    first = []
    for _ in range(2):  # the second time round 2's own file is already there
        simulated.states = [load_state(tmp_path, client, 2) for client in (0, 1)]
        updates = [simulated.client(client) for client in (0, 1)]
        for client in (0, 1):
            save_state(tmp_path, client, 2, updates[client].state)
        first.append([_w(update.payloads["control_delta"]) for update in updates])
    assert first[0] == first[1]
    assert first[0] == pytest.approx([-0.323, -0.038], abs=1e-13)
    assert _w(load_state(tmp_path, 0, 3)["control"]) == pytest.approx(-2.223, abs=1e-13)
