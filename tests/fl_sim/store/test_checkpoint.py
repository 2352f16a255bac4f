"""The server's state on disk: it comes back bit for bit, or not at all."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fl_sim.errors import UserError
from fl_sim.store.checkpoint import Progress, digest_of, read_checkpoint, write_checkpoint
from fl_sim.types import ServerState

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
    write_checkpoint(tmp_path, PROGRESS, _state())
    progress, state = read_checkpoint(tmp_path, _state(1)) or (None, ServerState({}))
    assert progress == PROGRESS
    assert _same(state, _state())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.safetensors"]  # no partial files


def test_a_checkpoint_of_a_version_without_parts_of_layers_is_read_as_it_was_meant(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    for private, layers in ((PRIVATE, {"strategies.private:PrivateRounds": PRIVATE}),
                            (dict.fromkeys(PRIVATE), {})):  # fmt: skip
        write_checkpoint(tmp_path, Progress(7, "ab" * 32), _state())
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
    write_checkpoint(tmp_path, PROGRESS, _state())
    with pytest.raises(UserError, match=said):
        read_checkpoint(tmp_path, like())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, bad: float) -> None:
    state = _state()
    state.memory["first"]["z.weight"][1, 2] = bad
    write_checkpoint(tmp_path, PROGRESS, state)
    with pytest.raises(UserError, match=r"memory/first/z\.weight .*not finite"):
        read_checkpoint(tmp_path, _state())


def test_a_file_of_tensors_from_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    write_checkpoint(tmp_path, PROGRESS, _state())
    save_file(load_file(path), path)
    with pytest.raises(UserError, match="not a checkpoint of this version"):
        read_checkpoint(tmp_path, _state())


@given(st.data())
def test_any_damage_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    write_checkpoint(folder, PROGRESS, _state())
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
