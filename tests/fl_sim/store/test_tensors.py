"""What clients keep between rounds, with its seal: a resumed run notices what is lost, older, foreign or changed."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier

import pytest
import torch

from fl_sim.errors import RunError, UserError
from fl_sim.store import tensors
from fl_sim.store.tensors import (
    clients_with_state,
    delete_states_from,
    load_state,
    open_state_checksum,
    save_state,
    state_checksums,
)


def _state(value):
    return {"control": {"0.weight": torch.full((2, 3), float(value)), "0.bias": torch.tensor(float(value))}}


def _value(state):
    return float(state["control"]["0.bias"])


def _tensors(state):
    return {group: {name: value.tolist() for name, value in params.items()} for group, params in state.items()}


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


@pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="this system does not tell holes")
def test_clients_that_were_never_met_take_no_space_and_are_not_looked_for(tmp_path: Path):
    assert list(clients_with_state(tmp_path, 10**6)) == []
    for client in (999_999, 3, 70_000):
        save_state(tmp_path, client, 1, _state(client))
    assert list(clients_with_state(tmp_path, 10**6)) == [3, 70_000, 999_999]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["layout.json", "states.bin"]
    assert (tmp_path / "states.bin").stat().st_blocks * 512 < 10 * 4096
    assert [client for client, *_ in state_checksums(tmp_path, clients_with_state(tmp_path, 10**6), 2)] == [
        3,
        70_000,
        999_999,
    ]
    delete_states_from(tmp_path, 10**6, 1)
    assert list(state_checksums(tmp_path, clients_with_state(tmp_path, 10**6), 2)) == []


def test_all_clients_are_looked_for_where_holes_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_state(tmp_path, 3, 1, _state(3))
    monkeypatch.delattr(os, "SEEK_DATA", raising=False)
    assert list(clients_with_state(tmp_path, 9)) == [*range(9)]
    assert [client for client, *_ in state_checksums(tmp_path, clients_with_state(tmp_path, 9), 2)] == [3]


def test_groups_names_shapes_and_bits_come_back(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    state = {
        "control": {"w": torch.randn(3, 2, generator=generator), "odd/name": torch.randn((), generator=generator)},
        "memory": {"w": torch.randn(1025, generator=generator), "empty": torch.zeros(0, 2)},
    }
    for client in (7, 0, 9_999):
        save_state(tmp_path, client, 1, state)
    back = load_state(str(tmp_path), 0, 2)
    assert [(name, list(group)) for name, group in back.items()] == [
        ("control", ["w", "odd/name"]), ("memory", ["w", "empty"]),
    ]  # fmt: skip
    assert all(
        torch.equal(back[group][name], value) for group, params in state.items() for name, value in params.items()
    )
    assert back["memory"]["empty"].shape == (0, 2)


def test_clients_do_not_touch_each_other(tmp_path: Path):
    for server_round in (1, 2, 3):
        for client in (5, 0, 3, 4):
            save_state(tmp_path, client, server_round, _state(10 * client + server_round))
    assert [_value(load_state(tmp_path, client, 4)) for client in (0, 3, 4, 5)] == [3, 33, 43, 53]
    assert [_value(load_state(tmp_path, client, 3)) for client in (0, 3, 4, 5)] == [2, 32, 42, 52]
    assert [load_state(tmp_path, client, 4) for client in (1, 2, 6, 1000)] == [{}] * 4


def test_two_states_of_every_client_are_kept_in_one_file(tmp_path: Path):
    for server_round in (1, 4, 9, 10, 11):
        save_state(tmp_path, 0, server_round, _state(server_round))
        save_state(tmp_path, 1, server_round, _state(server_round))
    assert [_value(load_state(tmp_path, 0, r)) for r in (11, 12)] == [10, 11]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layout.json", "states.bin"]
    assert (tmp_path / "states.bin").stat().st_size <= 2 * 2 * 4096


def test_ten_thousand_clients_take_the_space_of_those_that_took_part(tmp_path: Path):
    save_state(tmp_path, 9_999, 1, _state(1))
    assert (tmp_path / "states.bin").stat().st_blocks * 512 <= 64 * 1024
    assert _value(load_state(tmp_path, 9_999, 2)) == 1


def test_running_a_round_again_changes_nothing(tmp_path: Path):
    save_state(tmp_path, 0, 1, _state(1))
    for _ in range(3):
        assert _value(load_state(tmp_path, 0, 2)) == 1  # not the 2 that the first try left
        save_state(tmp_path, 0, 2, _state(2))
    assert _value(load_state(tmp_path, 0, 2)) == 1
    assert _value(load_state(tmp_path, 0, 3)) == 2


def test_going_back_to_the_first_round_starts_from_nothing(tmp_path: Path):
    for server_round in (1, 5, 7):
        save_state(tmp_path, 0, server_round, _state(server_round))
    for server_round in (1, 2, 3):
        assert _tensors(load_state(tmp_path, 0, server_round)) == _tensors(
            _state(server_round - 1) if server_round > 1 else {}
        )
        save_state(tmp_path, 0, server_round, _state(server_round))
    assert _value(load_state(tmp_path, 0, 4)) == 3


@pytest.mark.parametrize("after", range(4))
def test_a_process_that_dies_while_it_saves_leaves_the_state_it_started_from(tmp_path: Path, monkeypatch, after: int):
    """``after``: how many of the writes to the file are done when the process dies."""
    for server_round in (1, 2, 3):
        save_state(tmp_path, 0, server_round, _state(server_round))
    done, write = [], tensors._write

    def dying(file, place, content):
        if len(done) == after:
            half = memoryview(content).cast("B")
            write(file, place, half[: len(half) // 2])  # torn
            raise KeyboardInterrupt
        done.append(place)
        write(file, place, content)

    monkeypatch.setattr(tensors, "_write", dying)
    with pytest.raises(KeyboardInterrupt) if after < 3 else nullcontext():
        save_state(tmp_path, 0, 4, _state(4))
    monkeypatch.undo()
    assert _value(load_state(tmp_path, 0, 4)) == 3
    save_state(tmp_path, 0, 4, _state(4))
    assert _value(load_state(tmp_path, 0, 4)) == 3
    assert _value(load_state(tmp_path, 0, 5)) == 4


def test_numbers_that_never_reached_the_disk_are_noticed(tmp_path: Path):
    save_state(tmp_path, 3, 2, _state(2))
    with (tmp_path / "states.bin").open("r+b") as file:
        file.seek(2 * 3 * 4096 + 20)
        file.write(bytes(8))
    with pytest.raises(RunError, match=r"states\.bin is damaged: .*client 3 from round 2"):
        load_state(tmp_path, 3, 3)


@pytest.mark.parametrize(
    "content", ["", "\0" * 80, "{", "[]", '{"dtype": "<f4"}', "[" * 100_000, '{"groups": [[1]], "dtype": 3}']
)
def test_a_damaged_layout_is_refused_in_words(tmp_path: Path, content: str):
    save_state(tmp_path, 0, 1, _state(1))
    (tmp_path / "layout.json").write_text(content)
    with pytest.raises(RunError, match=r"layout\.json .*is damaged"):
        load_state(tmp_path, 0, 2)


def test_a_file_that_ends_too_soon_is_noticed(tmp_path: Path):
    save_state(tmp_path, 0, 1, _state(0))  # zeros have the same checksum as nothing
    os.truncate(tmp_path / "states.bin", 30)
    with pytest.raises(RunError, match="client 0 from round 1"):
        load_state(tmp_path, 0, 2)


def test_nobody_else_may_read_what_clients_keep_from_the_first_byte_on(tmp_path: Path):
    before = os.umask(0)
    try:
        save_state(tmp_path / "clients", 0, 1, _state(1))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path, *tmp_path.rglob("*")) if path != tmp_path}
    assert modes == {"clients": 0o700, "states.bin": 0o600, "layout.json": 0o600}


def test_a_state_that_cannot_be_written_is_an_error_with_the_cure(tmp_path: Path):
    save_state(tmp_path, 0, 1, _state(1))
    (tmp_path / "states.bin").unlink()
    (tmp_path / "states.bin").mkdir()
    with pytest.raises(RunError, match=r"states\.bin: there is a folder where a file is needed"):
        save_state(tmp_path, 0, 2, _state(2))


def test_threads_and_processes_may_make_the_file_at_once(tmp_path: Path):
    start = Barrier(8)

    def save(client):
        start.wait(20)
        save_state(tmp_path / "new", client, 1, _state(client))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(8)))
    assert [_value(load_state(tmp_path / "new", client, 2)) for client in range(8)] == list(range(8))


def test_other_tensors_than_those_of_the_run_are_refused(tmp_path: Path):
    save_state(tmp_path, 0, 1, _state(1))
    with pytest.raises(AssertionError, match="the same schema"):
        save_state(tmp_path, 1, 1, {"control": {"w": torch.zeros(2)}})
    doubles = {name: value.double() for name, value in _state(1)["control"].items()}
    with pytest.raises(AssertionError, match="the same schema"):
        save_state(tmp_path, 1, 1, {"control": doubles})


def test_an_empty_state_keeps_what_there_is(tmp_path: Path):
    save_state(tmp_path, 0, 1, _state(1))
    save_state(tmp_path, 0, 2, {})
    save_state(tmp_path, 5, 2, {})
    assert _value(load_state(tmp_path, 0, 3)) == 1
    assert load_state(tmp_path, 5, 3) == {}


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path):
    (tmp_path / "client-0").mkdir()
    (tmp_path / "client-0" / "share.safetensors").write_text("kept by DA-FL")
    assert load_state(tmp_path, 0, 1) == {}
    save_state(tmp_path, 0, 1, _state(1))
    assert _value(load_state(tmp_path, 0, 5)) == 1
    assert (tmp_path / "client-0" / "share.safetensors").read_text() == "kept by DA-FL"


PAGE = 4096


def _control(value):
    return {"control": {"w": torch.full((3,), float(value))}}


def _sealed(folder: Path, rounds: int, cohorts=((0, 1, 2), (1,), (0, 2))) -> Path:
    seal = open_state_checksum(folder, 4, 0, _control(0))
    for server_round, cohort in enumerate(cohorts[:rounds], 1):
        for client in cohort:
            save_state(folder, client, server_round, _control(10 * client + server_round))
        seal.put(server_round, cohort)
    return folder


def test_what_was_sealed_is_taken_up_after_the_last_round_and_the_one_before(tmp_path: Path):
    for last_round in (2, 3):
        open_state_checksum(_sealed(tmp_path / str(last_round), 3), 4, last_round, _control(0))
    with pytest.raises(UserError, match="does not hold the client states after round 1"):
        open_state_checksum(tmp_path / "3", 4, 1, _control(0))


def _delete(folder: Path) -> None:
    shutil.rmtree(folder)


def _cut(folder: Path) -> None:
    os.truncate(folder / "states.bin", 2 * PAGE)


def _zero(folder: Path) -> None:
    (folder / "states.bin").write_bytes(bytes((folder / "states.bin").stat().st_size))


def _older(folder: Path) -> None:
    shutil.rmtree(folder)
    _sealed(folder, 2)


def _older_states(folder: Path) -> None:
    seal = (folder / "seal.json").read_bytes()
    _older(folder)
    (folder / "seal.json").write_bytes(seal)


def _foreign(folder: Path) -> None:
    shutil.rmtree(folder)
    _sealed(folder, 3, cohorts=((0,), (1,), (2,)))
    with (folder / "seal.json").open("r+") as file:
        said = json.load(file)
        file.seek(0)
        json.dump(said | {"3": "0" * 64}, file)


def _other_layout(folder: Path) -> None:
    (folder / "layout.json").write_text((folder / "layout.json").read_text().replace("[3]", "[4]"))


@pytest.mark.parametrize("damage", [_delete, _cut, _zero, _older, _older_states, _foreign, _other_layout])
def test_anything_lost_or_foreign_is_refused(tmp_path: Path, damage):
    folder = _sealed(tmp_path / "clients", 3)
    damage(folder)
    with pytest.raises(UserError, match=r"restore .*, or start again in a fresh directory"):
        open_state_checksum(folder, 4, 3, _control(0))


@pytest.mark.parametrize("content", [b"", b"[]", bytes(70), b"[" * 100_000, b'{"3": 5}', b'{"3": null}'])
def test_a_damaged_seal_is_refused(tmp_path: Path, content: bytes):
    folder = _sealed(tmp_path / "clients", 3)
    (folder / "seal.json").write_bytes(content)
    with pytest.raises(UserError, match="does not hold the client states"):
        open_state_checksum(folder, 4, 3, _control(0))


def test_in_a_round_that_did_not_finish_nobody_took_part(tmp_path: Path):
    """The round is run again with another cohort: client 0 must not start from what it kept in the first try."""
    folder = _sealed(tmp_path / "clients", 3)
    save_state(folder, 0, 4, _control(4))
    save_state(folder, 3, 4, _control(34))
    seal = open_state_checksum(folder, 4, 3, _control(0))
    save_state(folder, 1, 4, _control(14))
    seal.put(4, [1])
    assert [load_state(folder, client, 5)["control"]["w"][0] for client in (0, 1, 2)] == [3, 14, 23]
    assert load_state(folder, 3, 5) == {}
    open_state_checksum(folder, 4, 4, _control(0))


def test_a_refusal_changes_nothing(tmp_path: Path):
    folder = _sealed(tmp_path / "clients", 3)
    before = (folder / "states.bin").read_bytes()
    with pytest.raises(UserError):
        open_state_checksum(folder, 4, 1, _control(0))
    assert (folder / "states.bin").read_bytes() == before


def test_a_run_whose_clients_kept_nothing_yet_is_sealed_too(tmp_path: Path):
    """Whether the folder is there must not tell whether anybody took part."""
    folder = _sealed(tmp_path / "clients", 2, cohorts=((), ()))
    open_state_checksum(folder, 4, 2, _control(0))
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {"seal.json": 0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
