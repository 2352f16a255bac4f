"""The log of rounds: what is not exactly what was written is refused, but for what a crash leaves.

The server's state on disk: it comes back bit for bit, or not at all.
"""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fl_sim.errors import UserError
from fl_sim.store.run_directory import (
    CHECKPOINT,
    MEASURED,
    Progress,
    RoundRecord,
    append_round,
    chain_start,
    coarse,
    digest_of,
    log_chain,
    read_checkpoint,
    read_result,
    read_rounds,
    truncate_log,
    write_config,
    write_state,
    write_text,
)
from fl_sim.types import ServerState


def _record(number: int, accuracy: float = 0.5) -> RoundRecord:
    return RoundRecord(number, accuracy, 1.0, None, None, 10, 0.01, 0.1)


def _written(out: Path, rounds: int, accuracy: float = 0.5) -> list[str]:
    """Return the chain after each round, the first before any."""
    out.mkdir()
    write_config(out, {"seed": 3})
    chain = [chain_start(out)]
    for number in range(1, rounds + 1):
        chain.append(append_round(out, _record(number, accuracy), chain[-1]))
    return chain


def _lines(out: Path) -> list[bytes]:
    return (out / "rounds.jsonl").read_bytes().splitlines(keepends=True)


def test_the_log_comes_back(tmp_path: Path) -> None:
    chain = _written(tmp_path / "run", 3)
    assert read_rounds(tmp_path / "run") == [_record(1), _record(2), _record(3)]
    assert log_chain(tmp_path / "run") == chain[3]
    assert truncate_log(tmp_path / "run", 3, chain[3]) == [_record(1), _record(2), _record(3)]


@pytest.mark.parametrize("more", [b"", b'{"round": 4, "test_', b"{", bytes(50)])
def test_what_a_crash_leaves_behind_the_last_round_is_taken_off(tmp_path: Path, more: bytes) -> None:
    chain = _written(tmp_path / "run", 4)
    whole = _lines(tmp_path / "run")
    (tmp_path / "run" / "rounds.jsonl").write_bytes(b"".join(whole[:3]) + (more or whole[3]))
    assert [record.round for record in truncate_log(tmp_path / "run", 3, chain[3])] == [1, 2, 3]
    assert _lines(tmp_path / "run") == whole[:3]


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines, other: [*lines[:1], *lines[2:]],
        lambda lines, other: [lines[0], lines[0], *lines[1:]],
        lambda lines, other: [lines[1], lines[0], lines[2]],
        lambda lines, other: [*lines[:2], other[2]],
        lambda lines, other: [*lines[:2], bytes(len(lines[2]) - 1) + b"\n"],
        lambda lines, other: [*lines[:2], lines[2][:-2]],
        lambda lines, other: [*lines, *other],
        lambda lines, other: [*lines, other[2], other[2]],
        lambda lines, other: [*lines[:2], lines[2].replace(b"0.5", b"0.6")],
        lambda lines, other: [*lines[:2], b'{"round": 3}\n'],
        lambda lines, other: [*lines[:2], b"[" * 100_000 + b"\n"],
        lambda lines, other: [*lines[:2], lines[2].replace(b"0.5", b"NaN")],
        lambda lines, other: [],
    ],
    ids=["lost", "doubled", "reordered", "foreign", "zeros", "cut", "another log", "tail", "edited", "half", "deep",
         "nan", "empty"],
)  # fmt: skip
def test_any_other_log_is_refused(tmp_path: Path, damage) -> None:
    chain = _written(tmp_path / "run", 3)
    _written(tmp_path / "other", 3, accuracy=0.7)
    (tmp_path / "run" / "rounds.jsonl").write_bytes(
        b"".join(damage(_lines(tmp_path / "run"), _lines(tmp_path / "other")))
    )
    with pytest.raises(UserError, match=r"rounds\.jsonl"):
        truncate_log(tmp_path / "run", 3, chain[3])


def test_the_chain_begins_with_the_settings(tmp_path: Path) -> None:
    chain = _written(tmp_path / "run", 2)
    write_config(tmp_path / "run", {"seed": 4})
    with pytest.raises(UserError, match=r"config\.toml was changed"):
        truncate_log(tmp_path / "run", 2, chain[2])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b"\xff", b"1" * 5000])
def test_a_result_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "result.json").write_bytes(content)
    assert read_result(tmp_path) is None


def test_what_a_round_measures_is_known_by_its_name() -> None:
    # A longer run takes what the last round alone had off it by these names: a new field has to be put on one side.
    others = {part.name for part in fields(RoundRecord) if not part.name.startswith(MEASURED)}
    assert others == {
        "round", "train_loss", "epsilon", "cohort", "learning_rate", "seconds", "bytes_down", "bytes_up",
        "virtual_seconds", "late", "staleness",
    }  # fmt: skip


def test_private_times_fall_on_a_coarse_grid() -> None:
    assert {coarse(seconds) for seconds in (0.0, 3.7, 9.99, 10.0)} == {10.0}
    assert [coarse(seconds) for seconds in (10.01, 599.0, 601.0, 36_001.0)] == [60.0, 600.0, 3600.0, 360_000.0]
    assert all(coarse(seconds) >= seconds for seconds in (0.1, 15.0, 3_000.0, 50_000.0, 3_000_000.0))


def test_half_a_character_is_written_as_its_number(tmp_path: Path) -> None:
    write_text(tmp_path / "page.html", "a\ud800b")
    assert (tmp_path / "page.html").read_text() == "a\\ud800b"


RECEIPT = {"ledger": "id", "charges": 3, "digest": "cd"}
PRIVATE = {"clipping_norm": 0.1 + 0.2, "receipt": RECEIPT}
PROGRESS = Progress(7, "ab" * 32, layers={"strategies.private:PrivateRounds": PRIVATE, "mine:Counting": {"seen": [1]}})


def _state(seed: int = 0) -> ServerState:
    generator = torch.Generator().manual_seed(seed)

    def params() -> dict[str, torch.Tensor]:
        return {
            "z.weight": torch.randn(3, 4, generator=generator), "a/odd": torch.randn((), generator=generator),
            "view": torch.randn(2, 3, generator=generator).T, "empty": torch.zeros(0, 2),
        }  # fmt: skip

    return ServerState(params(), {"control": params()}, {"second": params(), "first": params()})


def _same(left: ServerState, right: ServerState) -> bool:
    pairs = [({"": left.params}, {"": right.params}), (left.broadcast, right.broadcast), (left.memory, right.memory)]
    return all(
        list(one) == list(other)
        and list(one[group]) == list(other[group])
        and all(torch.equal(value, other[group][name]) for name, value in one[group].items())
        for one, other in pairs
        for group in one
    )


def test_it_comes_back_bit_for_bit_in_its_order(tmp_path: Path) -> None:
    write_state(tmp_path / CHECKPOINT, PROGRESS, _state())
    progress, state = read_checkpoint(tmp_path, _state(1)) or (None, ServerState({}))
    assert progress == PROGRESS
    assert _same(state, _state())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.safetensors"]  # no partial files


def test_a_checkpoint_of_a_version_without_parts_of_layers_is_read_as_it_was_meant(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    for private, layers in ((PRIVATE, {"strategies.private:PrivateRounds": PRIVATE}),
                            (dict.fromkeys(PRIVATE), {})):  # fmt: skip
        write_state(tmp_path / CHECKPOINT, Progress(7, "ab" * 32), _state())
        tensors = load_file(path)
        facts = json.dumps({"last_round": 7, "chain": "ab" * 32, **private, "records": ""})
        save_file(tensors, path, {"progress": facts, "sha256": digest_of(facts, dict(sorted(tensors.items())))})
        progress, state = read_checkpoint(tmp_path, _state(1)) or (None, ServerState({}))
        assert progress == Progress(7, "ab" * 32, layers=layers)
        assert _same(state, _state())


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path, _state()) is None


def _grown() -> ServerState:
    state = _state()
    return ServerState({**state.params, "z.weight": torch.zeros(3, 5)}, state.broadcast, state.memory)


def _more() -> ServerState:
    return ServerState({**_state().params, "new": torch.zeros(1)}, _state().broadcast, _state().memory)


def _fewer() -> ServerState:
    return ServerState(_state().params, _state().broadcast, {"first": _state().memory["first"]})


def _moved() -> ServerState:
    return ServerState(_state().params, {}, {**_state().memory, "control": _state().broadcast["control"]})


def _typed() -> ServerState:
    state = _state()
    return ServerState({**state.params, "z.weight": torch.zeros(3, 4).double()}, state.broadcast, state.memory)


def _reordered() -> ServerState:
    state = _state()
    return ServerState(dict(reversed(state.params.items())), state.broadcast, state.memory)


@pytest.mark.parametrize(
    ("like", "said"),
    [
        (
            _grown,
            r"tensor params//z.weight is float32 of shape \(3, 4\), but in this run it is float32 of shape \(3, 5\)",
        ),
        (_more, "tensor params//new is not there, but in this run it is float32"),
        (_fewer, r"tensor memory/second/z\.weight .* in this run it is unknown"),
        (_moved, r"tensor memory/control/z\.weight is not there"),
        (_typed, "is float32 of shape .* in this run it is float64"),
        (_reordered, "in another order"),
    ],
)
def test_another_model_or_algorithm_is_refused_with_the_name_of_the_tensor(tmp_path: Path, like, said: str) -> None:
    write_state(tmp_path / CHECKPOINT, PROGRESS, _state())
    with pytest.raises(UserError, match=said):
        read_checkpoint(tmp_path, like())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, bad: float) -> None:
    state = _state()
    state.memory["first"]["z.weight"][1, 2] = bad
    write_state(tmp_path / CHECKPOINT, PROGRESS, state)
    with pytest.raises(UserError, match=r"memory/first/z\.weight .*not finite"):
        read_checkpoint(tmp_path, _state())


def test_a_file_of_tensors_from_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    write_state(tmp_path / CHECKPOINT, PROGRESS, _state())
    save_file(load_file(path), path)
    with pytest.raises(UserError, match="not a checkpoint of this version"):
        read_checkpoint(tmp_path, _state())


@given(st.data())
def test_any_damage_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    write_state(folder / CHECKPOINT, PROGRESS, _state())
    path = folder / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "zero", "insert"])):
        case "flip":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del content[place:]
        case "zero":
            content[place:] = bytes(len(content) - place)
        case "insert":
            content[place:place] = data.draw(st.binary(min_size=1, max_size=20))
    if bytes(content) == path.read_bytes():
        return
    path.write_bytes(content)
    with pytest.raises(UserError, match="delete it to start this run again"):
        read_checkpoint(folder, _state())
