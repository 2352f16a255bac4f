"""A run that goes on notices what is lost, older, foreign or changed of what its clients kept."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from fl_sim.errors import UserError
from fl_sim.store.seal import open_seal
from fl_sim.store.tensors import load_state, save_state

PAGE = 4096


def _state(value):
    return {"control": {"w": torch.full((3,), float(value))}}


def _sealed(folder: Path, rounds: int, cohorts=((0, 1, 2), (1,), (0, 2))) -> Path:
    seal = open_seal(folder, 4, 0, _state(0))
    for server_round, cohort in enumerate(cohorts[:rounds], 1):
        for client in cohort:
            save_state(folder, client, server_round, _state(10 * client + server_round))
        seal.put(server_round, cohort)
    return folder


def test_what_was_sealed_is_taken_up_after_the_last_round_and_the_one_before(tmp_path: Path):
    for last_round in (2, 3):
        open_seal(_sealed(tmp_path / str(last_round), 3), 4, last_round, _state(0))
    with pytest.raises(UserError, match="does not hold what clients knew after round 1"):
        open_seal(tmp_path / "3", 4, 1, _state(0))


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


def _layout(folder: Path) -> None:
    (folder / "layout.json").write_text((folder / "layout.json").read_text().replace("[3]", "[4]"))


@pytest.mark.parametrize("damage", [_delete, _cut, _zero, _older, _older_states, _foreign, _layout])
def test_anything_lost_or_foreign_is_refused(tmp_path: Path, damage):
    folder = _sealed(tmp_path / "clients", 3)
    damage(folder)
    with pytest.raises(UserError, match=r"put .* back, or start again in a fresh directory"):
        open_seal(folder, 4, 3, _state(0))


@pytest.mark.parametrize("content", [b"", b"[]", bytes(70), b"[" * 100_000, b'{"3": 5}', b'{"3": null}'])
def test_a_damaged_seal_is_refused(tmp_path: Path, content: bytes):
    folder = _sealed(tmp_path / "clients", 3)
    (folder / "seal.json").write_bytes(content)
    with pytest.raises(UserError, match="does not hold what clients knew"):
        open_seal(folder, 4, 3, _state(0))


def test_in_a_round_that_did_not_finish_nobody_took_part(tmp_path: Path):
    """The round is run again with another cohort: client 0 must not start from what it kept in the first try."""
    folder = _sealed(tmp_path / "clients", 3)
    save_state(folder, 0, 4, _state(4))
    save_state(folder, 3, 4, _state(34))
    seal = open_seal(folder, 4, 3, _state(0))
    save_state(folder, 1, 4, _state(14))
    seal.put(4, [1])
    assert [load_state(folder, client, 5)["control"]["w"][0] for client in (0, 1, 2)] == [3, 14, 23]
    assert load_state(folder, 3, 5) == {}
    open_seal(folder, 4, 4, _state(0))


def test_a_refusal_changes_nothing(tmp_path: Path):
    folder = _sealed(tmp_path / "clients", 3)
    before = (folder / "states.bin").read_bytes()
    with pytest.raises(UserError):
        open_seal(folder, 4, 1, _state(0))
    assert (folder / "states.bin").read_bytes() == before


def test_a_run_whose_clients_kept_nothing_yet_is_sealed_too(tmp_path: Path):
    """Whether the folder is there must not tell whether anybody took part."""
    folder = _sealed(tmp_path / "clients", 2, cohorts=((), ()))
    open_seal(folder, 4, 2, _state(0))
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {"seal.json": 0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
