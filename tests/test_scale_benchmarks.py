"""The benchmarks of aggregation, scale and one round's profile: they run, and what they report adds up."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch


def test_both_ways_to_aggregate_agree_and_all_are_measured(load_benchmark: Callable[[str], ModuleType]) -> None:
    aggregation = load_benchmark("aggregation")
    updates = aggregation.updates_of(num_clients=9, parameters=60_000)
    strategy, replies = aggregation.strategy_and_replies(updates)
    strategy.aggregate_train(1, replies)
    counts = np.array([1 + client % 7 for client in range(9)])
    plain = aggregation.plain_mean(
        [{name: value.numpy() for name, value in update.items()} for update in updates], counts / counts.sum()
    )
    assert list(plain) == list(strategy.server.params)
    for name, value in plain.items():
        assert torch.allclose(strategy.server.params[name], torch.from_numpy(value), atol=1e-6)
    rows = aggregation.measure(num_clients=3, parameters=60_000, repeat=2)
    assert set(rows) == set(aggregation.NAMES)
    assert all(row["cpu_seconds"] > 0 for row in rows.values())
    assert rows["plain numpy loop"]["cpu_ratio"] == 1.0


def test_every_rule_of_the_robustness_tables_is_measured(load_benchmark: Callable[[str], ModuleType]) -> None:
    rules = load_benchmark("robust_rules")
    for name in ("fashion_mnist", "cifar10"):
        assert len(rules.rules_of(rules.TABLE.with_name(f"{name}.toml"))) == 16
    rows = rules.measure(rules.rules_of(rules.TABLE), clients=20, parameters=100, repeat=2)
    assert rows["mean"]["ratio"] == 1.0
    assert all(row["milliseconds"] > 0 for row in rows.values())


@pytest.fixture
def scale(load_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("FL_SIM_DATA", raising=False)
    return load_benchmark("scale")


def test_a_run_reports_its_start_rounds_memory_and_states(scale: ModuleType, tmp_path: Path) -> None:
    data = scale.data_of(tmp_path, records=400)
    row = scale.measured(scale.Setting(200, 5, algorithm="scaffold", rounds=3), data)
    assert row.start_cpu_seconds > 0
    assert 0 < row.round_seconds <= row.slowest_round_seconds < row.start_seconds
    assert 0 < row.memory_at_start_mb <= row.memory_mb
    assert 0 < row.memory_first_mb <= 1.01 * row.memory_mb
    one_state = 4 * 44_426 / 1e6
    assert 5 * one_state < row.states_mb < 1.1 * 5 * 5 * one_state  # holes take no space: five rounds of five clients
    assert row == scale.read_row(json.loads(json.dumps(scale.asdict(row))))
    assert "| 200 | 5 | scaffold | iid |" in scale.table([row])


def test_a_population_of_made_up_clients_is_split_by_client_and_at_random(scale: ModuleType, tmp_path: Path) -> None:
    data = scale.numbers_of(tmp_path, 300)
    assert {setting.population for setting in scale.MILLION} == {1_000_000}
    for setting in scale.MILLION[:2]:
        row = scale.measured(scale.replace(setting, population=300, cohort=5, rounds=1), data)
        assert row.round_seconds > 0


def test_the_large_model_has_105_megabytes(load_benchmark: Callable[[str], ModuleType]) -> None:
    model = load_benchmark("large_model").large((1, 28, 28), 10)
    assert round(4 * sum(weights.numel() for weights in model.parameters()) / 1e6) == 105


def test_the_plot_shows_every_kind_of_run(scale: ModuleType, tmp_path: Path) -> None:
    rows = [scale.Row(setting, 3.0, 2.0, 0.1, 0.1, 0.2, 700.0, 600.0, 650.0, 700.0, 0.0) for setting in scale.SETTINGS]
    scale.plot(rows, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_a_profile_charges_every_second_of_a_round_once(
    scale: ModuleType, load_benchmark: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    profile_round = load_benchmark("profile_round")  # imports scale, which is loaded
    clock = profile_round.Clock()
    inner = clock.timed("inner", lambda: sum(range(200_000)))
    clock.timed("outer", lambda: [inner(), sum(range(200_000))])()
    lap = clock.lap()
    assert set(lap) == {"inner", "outer", profile_round.REST}
    assert lap["inner"] > 0
    assert lap["outer"] > 0
    assert clock.lap()[profile_round.REST] < lap["inner"]

    parts = profile_round.profile(20, 4, algorithm="scaffold", data=scale.data_of(tmp_path, 400), rounds=2)
    assert list(parts) == list(profile_round.PARTS)
    assert all(parts[part] > 0 for part in parts)
    profile_round.plot({"small": parts}, tmp_path / "profile.png", "title")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert "| training kernel |" in profile_round.table({"small": parts})


def test_runs_of_one_algorithm_or_split_can_be_asked_for_alone(scale: ModuleType) -> None:
    def asked(**given: object) -> list[tuple[str, str, int]]:
        options = {"million": True, "large_model": False, "quick": False, "rounds": None, "algorithm": None}
        chosen = scale.settings_of(Namespace(**options | {"partition": None} | given))
        return [(one.algorithm, one.partition, one.rounds) for one in chosen]

    assert len(asked()) == 4
    assert asked(algorithm="fedavg", partition="natural", rounds=1000) == [("fedavg", "natural", 1000)]
    assert asked(algorithm="scaffold") == [("scaffold", "natural", 20), ("scaffold", "dirichlet:0.5", 20)]
    with pytest.raises(SystemExit, match="no run has --algorithm None and --partition iid"):
        asked(partition="iid")
