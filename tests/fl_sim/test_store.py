"""What clients keep between rounds."""

from pathlib import Path

import pytest
import torch

from fl_sim.store import load_groups, load_state, save_groups, save_state


def _state(value):
    return {"control": {"0.weight": torch.full((2, 3), float(value)), "0.bias": torch.tensor(float(value))}}


def _value(state):
    return float(state["control"]["0.bias"])


def _rounds(tmp_path, client):
    return sorted(path.name for path in (tmp_path / f"client-{client}").iterdir())


def test_groups_come_back_bit_for_bit(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    groups = {
        "params": {"0.weight": torch.randn(3, 4, generator=generator), "scalar": torch.randn((), generator=generator)},
        "memory.first": {"view": torch.arange(6.0).reshape(2, 3).T, "empty": torch.zeros(0, 2)},
    }
    save_groups(tmp_path / "deep" / "er" / "file.safetensors", groups)
    back = load_groups(tmp_path / "deep" / "er" / "file.safetensors")
    assert back.keys() == groups.keys()
    for name, group in groups.items():
        assert back[name].keys() == group.keys()
        assert all(torch.equal(back[name][key], value) for key, value in group.items())
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["file.safetensors"]  # no partial files


def test_a_client_starts_with_nothing(tmp_path: Path):
    assert load_state(tmp_path, 0, 1) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_round_reads_what_the_last_round_before_it_left(tmp_path: Path):
    save_state(tmp_path, 3, 2, _state(2))
    save_state(tmp_path, 3, 10, _state(10))
    assert [_value(load_state(tmp_path, 3, r)) for r in (3, 9, 10, 11, 200)] == [2, 2, 2, 10, 10]
    assert load_state(tmp_path, 3, 2) == {}
    assert load_state(tmp_path, 4, 11) == {}
    assert load_state(tmp_path, 33, 11) == {}


def test_only_the_last_two_states_are_kept(tmp_path: Path):
    for server_round in (1, 4, 9, 10, 11):
        save_state(tmp_path, 0, server_round, _state(server_round))
    save_state(tmp_path, 1, 1, _state(1))
    assert _rounds(tmp_path, 0) == ["10.safetensors", "11.safetensors"]
    assert _rounds(tmp_path, 1) == ["1.safetensors"]


def test_running_a_round_again_changes_nothing(tmp_path: Path):
    save_state(tmp_path, 0, 1, _state(1))
    for _ in range(3):
        assert _value(load_state(tmp_path, 0, 2)) == 1  # not the 2 that the first try left
        save_state(tmp_path, 0, 2, _state(2))
    assert _rounds(tmp_path, 0) == ["1.safetensors", "2.safetensors"]
    assert _value(load_state(tmp_path, 0, 3)) == 2


def test_an_empty_state_keeps_what_there_is(tmp_path: Path):
    save_state(tmp_path, 0, 1, _state(1))
    save_state(tmp_path, 0, 2, {})
    save_state(tmp_path, 5, 2, {})
    assert _value(load_state(tmp_path, 0, 3)) == 1
    assert not (tmp_path / "client-5").exists()


@pytest.mark.parametrize("name", ["3.txt", "3", "notes.safetensors", ".3.safetensors.77.part", "²", ".DS_Store"])
def test_stray_files_are_ignored_and_left_alone(tmp_path: Path, name: str):
    save_state(tmp_path, 0, 1, _state(1))
    (tmp_path / "client-0" / name).write_text("stray")
    assert _value(load_state(tmp_path, 0, 5)) == 1
    save_state(tmp_path, 0, 5, _state(5))
    save_state(tmp_path, 0, 6, _state(6))
    assert _rounds(tmp_path, 0) == sorted([name, "5.safetensors", "6.safetensors"])
