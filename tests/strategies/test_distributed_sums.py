"""What a client sends and what the server does with it: bytes, secret noise, charges before sums, drop-outs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fl_sim.errors import Malformed, RunError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.privacy import audit, modular_sums
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.modular_sums import SumGrid, centred, unpacked
from fl_sim.types import Aggregate, ClientUpdate, Cohort, LocalSettings, LocalTask, Reply, ServerState, Size, Trained
from strategies.algorithm import payload_template
from strategies.distributed_sums import ClientShares, DistributedSums, grid_of
from strategies.layer import Stop
from strategies.scaffold import Scaffold

LOCAL = LocalSettings(learning_rate=0.1, momentum=0.0, weight_decay=0.0, batch_size=10, epochs=1)
PARAMS = {"w": torch.zeros(20, 15)}
SERVER = ServerState(PARAMS, {"control": PARAMS})
TEMPLATE = payload_template(Scaffold(), SERVER)
FIRST, SECOND = TEMPLATE
SEED = 5


def _experiment(clients: int = 4, rounds: int = 3, sampler: Any = "full", **aggregator: Any) -> Any:
    chosen = {"kind": "distributed-dp", "noise_multiplier": 2.0, **aggregator}
    return experiment_from(
        {"clients": clients, "rounds": rounds, "sampler": sampler, "aggregator": chosen, "algorithm": "scaffold",
         "seed": SEED}
    )  # fmt: skip


def _half(grid: SumGrid, run_digest: str = "") -> ClientShares:
    return ClientShares(grid, TEMPLATE, SEED, run_digest)


def _task(client: int, server_round: int = 1, count: int = 40) -> LocalTask:
    return LocalTask(server_round, client, 9, count, LOCAL, PARAMS)


def _sent(half: ClientShares, client: int, value: float, server_round: int = 1, count: int = 40) -> ClientUpdate:
    task = _task(client, server_round, count)
    update = ClientUpdate({name: {"w": torch.full((20, 15), value)} for name in TEMPLATE}, count, 0.7, TEMPLATE)
    return half.sent(task, task, Trained(PARAMS, {}, 1, 0.7), update)


def _replies(half: ClientShares, values: Sequence[float], server_round: int = 1) -> tuple[Reply, ...]:
    sent = [_sent(half, client, value, server_round) for client, value in enumerate(values)]
    return tuple(
        half.unpacked(Reply(client, {}, 1, None, one.packed), TEMPLATE, server_round) for client, one in enumerate(sent)
    )


def _layer(out: Path, experiment: Any, progress: dict[str, Any] | None = None) -> DistributedSums:
    layer = DistributedSums.of(experiment, out, progress or {})
    layer.inner = _Inner()
    layer.grid = grid_of(experiment, TEMPLATE)
    return layer


class _Inner:
    def begin(self, server_round: int) -> None:
        del server_round

    def metrics(self) -> dict[str, Any]:
        return {}

    def conclusions(self, rounds: object) -> list[str]:
        del rounds
        return []


def _opened(layer: DistributedSums, values: Sequence[float], server_round: int = 1) -> Aggregate | None:
    assert layer.grid is not None
    replies = _replies(_half(layer.grid), values, server_round)
    return layer.aggregate(Cohort(server_round, replies, 4, 4.0), Scaffold(), SERVER)


def test_everything_that_is_sent_is_one_clipped_vector_of_few_bits() -> None:
    grid = grid_of(_experiment(bits=18), TEMPLATE)
    half = _half(grid)
    assert (grid.dimension, grid.padded, grid.shares) == (600, 1024, 4)
    assert half.packs(TEMPLATE, PARAMS) == {FIRST: Size(0, 1024 * 18 // 8), SECOND: Size(0, 0)}
    sent = _sent(half, 2, 5.0)
    assert (sent.payloads, sent.num_examples, sent.loss, sent.state) == ({}, 1, None, TEMPLATE)
    assert {name: (len(one.numbers), len(one.bits)) for name, one in sent.packed.items()} == {
        FIRST: (0, 2304), SECOND: (0, 0)
    }  # fmt: skip
    with pytest.raises(RunError, match="other tensors than the update of a client without records"):
        half.sent(_task(2), _task(2), Trained(PARAMS, {}, 1, None), ClientUpdate({FIRST: PARAMS}, 40))


def test_the_mean_is_that_of_the_clipped_updates(tmp_path: Path) -> None:
    layer = _layer(tmp_path, _experiment(noise_multiplier=1e-4, clipping_norm=3.0, bits=20))
    found = _opened(layer, [9.0, -0.01, 0.05, 0.0])
    assert found is not None
    assert found.participation == 1.0
    clipped = 3.0 / 600**0.5  # the first vector has a norm of 9 sqrt(600)
    for name in TEMPLATE:
        wanted = (clipped - 0.01 + 0.05) / 4
        assert found.payloads[name]["w"].numpy() == pytest.approx(wanted, abs=2e-3)
    fewer = _opened(layer, [0.05, 0.03], 2)
    assert fewer is not None
    assert fewer.participation == 0.5
    assert fewer.payloads[FIRST]["w"].numpy() == pytest.approx(0.04, abs=2e-3)  # two clients answered


def test_clients_without_records_and_broken_updates_send_the_noise_alone() -> None:
    grid = grid_of(_experiment(), TEMPLATE)
    half = _half(grid)
    for client, (value, count) in enumerate([(5.0, 0), (float("nan"), 40), (0.0, 40)]):
        sent = _sent(half, client, value, count=count)
        assert sent.num_examples == 1  # the server cannot tell them from others
        numbers = centred(unpacked(sent.packed[FIRST].bits, 1024, 16), grid)
        assert stats.kstest(numbers / grid.share_variance**0.5, "norm").pvalue > 1e-3
    seeded = _half(grid, "ab" * 8)
    numbers = [unpacked(_sent(seeded, 0, value, count=count).packed[FIRST].bits, 1024, 16)
               for value, count in ((5.0, 40), (5.0, 0))]  # fmt: skip
    moved = centred(numbers[0] - numbers[1], grid)
    assert 0.99 * grid.scale < np.linalg.norm(moved) <= grid.l2


def test_secret_noise_is_never_drawn_twice_and_seeded_noise_differs_by_client_and_round() -> None:
    grid = grid_of(_experiment(), TEMPLATE)

    def numbers(half: ClientShares, client: int, server_round: int) -> np.ndarray:
        sent = _sent(half, client, 0.0, server_round)
        return centred(unpacked(sent.packed[FIRST].bits, 1024, 16), grid)

    secret, seeded = _half(grid), _half(grid, "ab" * 8)
    drawn = [
        *(numbers(secret, client, 1) for client in (0, 0, 1)),
        *(numbers(seeded, client, server_round) for client in (0, 1) for server_round in (1, 2)),
        numbers(_half(grid, "cd" * 8), 0, 1),
    ]
    correlations = np.corrcoef(drawn) - np.eye(len(drawn))
    assert np.abs(correlations).max() < 0.16
    assert (numbers(seeded, 0, 1) == drawn[3]).all()


def test_the_noise_of_the_mean_is_independent_in_numbers_and_rounds(tmp_path: Path) -> None:
    layer = _layer(tmp_path, _experiment(rounds=99))
    rows = []
    for number in range(1, 41):
        found = _opened(layer, [0.0] * 4, number)
        assert found is not None
        rows.append(torch.cat([found.payloads[name]["w"].flatten() for name in TEMPLATE]).numpy()[:100] * 4 / 2.0)
    assert min(audit.noise_calibration(np.array(rows)).values()) > 1e-4


def test_a_sum_is_charged_before_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer(tmp_path, _experiment())
    assert layer.grid is not None

    def broken(*_: object, **__: object) -> np.ndarray:
        assert [one.release for one in layer.ledger.charges] == ["round 1"]
        raise RunError("nothing is opened")

    monkeypatch.setattr("strategies.distributed_sums.mean_of_sum", broken)
    with pytest.raises(RunError, match="nothing is opened"):
        _opened(layer, [0.0] * 4)
    assert layer.ledger.charges[0].event == layer.grid.event(4)


def test_drop_outs_are_charged_for_the_noise_that_was_added(tmp_path: Path) -> None:
    layer = _layer(tmp_path, _experiment())
    assert layer.grid is not None
    spent = [layer.metrics()["epsilon"]]
    for number, present in ((1, 4), (2, 3), (3, 1), (4, 0)):
        found = _opened(layer, [1.0] * present, number)
        assert (found is None) == (present == 0)
        spent.append(layer.metrics()["epsilon"])
    assert [one.release for one in layer.ledger.charges] == [
        "round 1",
        "round 2, 3 of 4 noises",
        "round 3, 1 of 4 noises",
    ]
    assert [one.event for one in layer.ledger.charges] == [layer.grid.event(present) for present in (4, 3, 1)]
    costs = [epsilon_of_counts({one.event: 1}, 1e-5) for one in layer.ledger.charges]
    assert costs == sorted(costs)
    assert spent[0] == 0.0
    assert spent == sorted(spent)
    assert spent[3] == spent[4]


def test_a_sum_with_too_little_noise_for_the_budget_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = _layer(tmp_path, _experiment(noise_multiplier=None, epsilon=4.0, rounds=2))
    assert layer.affords(1)
    assert _opened(layer, [0.0] * 4, 1) is not None
    with monkeypatch.context() as patch:
        patch.setattr("strategies.distributed_sums.mean_of_sum", None)  # would fail if it were called
        assert _opened(layer, [0.0] * 3, 2) is None
    assert [one.release for one in layer.ledger.charges] == ["round 1"]
    assert any("these sums were not opened" in one for one in layer.conclusions([]))
    layer.begin(3)
    assert _opened(layer, [0.0] * 4, 3) is not None
    assert 3.99 < (layer.ledger.epsilon or 0.0) <= 4.0
    assert not layer.affords(4)
    with pytest.raises(Stop, match="privacy budget spent after 3 rounds"):
        layer.begin(4)


def test_groups_in_turn_pay_once_and_again_only_for_less_noise(tmp_path: Path) -> None:
    experiment = _experiment(clients=9, rounds=6, sampler="cyclic:2")
    layer = _layer(tmp_path, experiment)
    assert layer.grid is not None
    assert layer.grid.shares == 4  # the smaller group
    for number, present in ((1, 5), (2, 4), (3, 5), (4, 3), (5, 2), (6, 2)):
        _opened(layer, [0.0] * present, number)
    assert [one.release for one in layer.ledger.charges] == [
        "rounds 1 to 2", "rounds 3 to 4", "rounds 3 to 4, 3 of 4 noises", "rounds 5 to 6, 2 of 4 noises",
    ]  # fmt: skip


def test_a_resumed_layer_needs_its_charges_and_pays_again_under_secret_noise(tmp_path: Path) -> None:
    experiment = _experiment()
    layer = _layer(tmp_path, experiment)
    _opened(layer, [0.0] * 4)
    state = {"receipt": layer.ledger.receipt.to_json()}
    assert dict(layer.state()) == state
    resumed = _layer(tmp_path, experiment, state)
    _opened(resumed, [0.0] * 4)
    assert [one.release for one in resumed.ledger.charges] == ["round 1", "round 1"]
    seeded = _experiment(noise="seeded")
    for _ in range(2):
        again = _layer(tmp_path / "seeded", seeded) if (tmp_path / "seeded").mkdir(exist_ok=True) is None else None
        assert again is not None
        _opened(again, [0.0] * 4)
        assert len(again.ledger.charges) == 1  # the same release
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(RunError, match="is missing"):
        _layer(tmp_path, experiment, state)


def test_a_client_that_fails_drops_out_and_only_a_failure_of_all_ends_the_run(tmp_path: Path) -> None:
    layer = _layer(tmp_path, _experiment())
    layer.lost(1, {2: Malformed("sent my records")}, answered=True)
    with pytest.raises(RunError, match="no client sent a valid update in round 1") as refused:
        layer.lost(1, {2: Malformed("sent my records")}, answered=False)
    assert "my records" not in str(refused.value)
    assert "my records" in refused.value.private


def test_a_full_range_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer(tmp_path, _experiment(headroom=1.0, noise_multiplier=0.1))
    _opened(layer, [9.0] * 4)
    assert layer.wrapped == [1]
    assert any("filled the range of 2^16" in one for one in layer.conclusions([]))
    monkeypatch.setattr(modular_sums, "EDGE", 1.0)
    quiet = _layer(tmp_path, _experiment())
    _opened(quiet, [9.0] * 4)
    assert quiet.wrapped == []
