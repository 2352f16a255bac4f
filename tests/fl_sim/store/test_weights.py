"""Weights from files: what is read, what is refused with every name, and what the model keeps."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from fl_sim.errors import UserError
from fl_sim.store.weights import Placed, digest_of, place, read_weights, records_of


class Tied(nn.Module):
    """A model whose embedding and head are one parameter, with a constant and the statistics of a norm."""

    def __init__(self, classes: int = 5, scale: float = 2.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.decoder = nn.Linear(4, 7, bias=False)
        self.decoder.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, classes)
        self.register_buffer("scale", torch.tensor(scale))


def net(classes: int = 3, channels: int = 3, width: int = 4) -> nn.Sequential:
    torch.manual_seed(classes + 10 * channels + 100 * width)
    return nn.Sequential(nn.Conv2d(channels, width, 3), nn.Flatten(), nn.Linear(4 * width, classes))


def read(path: Path) -> Any:
    return read_weights("mlp", str(path), digest_of("mlp", str(path)))


def equal(model: nn.Module, weights: Any, *names: str) -> bool:
    state = model.state_dict()
    return all(torch.equal(state[name], weights[name]) for name in names or state)


@pytest.mark.parametrize("form", ["safetensors", "zip", "old pickle", "trainer", "data parallel", "compiled", "half"])
def test_weights_in_every_usual_form_become_those_of_the_model(tmp_path: Path, form: str) -> None:
    there, here, path = net(), net(width=4, classes=3), tmp_path / "weights.bin"
    state = there.state_dict()
    nn.init.zeros_(here[0].weight)
    match form:
        case "safetensors":
            save_file(state, path)
        case "zip":
            torch.save(state, path)
        case "old pickle":
            torch.save(state, path, _use_new_zipfile_serialization=False)
        case "trainer":
            torch.save({"epoch": 3, "state_dict": state, "optimizer": {"lr": 0.1}}, path)
        case "half":
            state = {name: value.half() for name, value in state.items()}
            torch.save(state, path)
        case _:
            prefix = "module." if form == "data parallel" else "_orig_mod."
            torch.save({f"{prefix}{name}": value for name, value in state.items()}, path)
    assert place(here, read(path), "file") == Placed()
    assert equal(here, state)
    assert all(value.dtype == torch.float32 for value in here.state_dict().values())


class Payload:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code of a file ran')",)


@pytest.mark.parametrize("kind", ["module", "code", "plain pickle"])
def test_pickled_objects_are_refused_and_their_code_does_not_run(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "weights.pt"
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps({"weight": Payload()}))
    else:
        torch.save(net() if kind == "module" else {"weight": Payload()}, path)
    with pytest.raises(UserError, match=r"pickled Python objects.*refused: save only the tensors, by safetensors"):
        read(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no weights"),
        (b"weights", "contains"),
        (b"\x10\0\0\0\0\0\0\0{'a': damaged     ", "no safetensors file, or is damaged"),
        ({}, "an empty table"),
        ([torch.zeros(2)], "list, not tensors by name"),
        ({"a": torch.zeros(2), "b": 3, "c": "text"}, r"other values than tensors \(b, c\)"),
        ({"a": torch.tensor([1.0, torch.nan]), "b": torch.tensor([torch.inf])}, r"NaN or infinite numbers in a, b"),
    ],
)  # fmt: skip
def test_files_of_anything_else_are_refused_in_words(tmp_path: Path, content: Any, said: str) -> None:
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UserError, match=said) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_missing_files_folders_without_a_model_and_changed_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with pytest.raises(UserError, match=r"weights\.safetensors does not exist: give a safetensors file"):
        digest_of("mlp", str(path))
    with pytest.raises(UserError, match=r"is a folder, and it has no model\.safetensors"):
        digest_of("mlp", str(tmp_path))
    (tmp_path / "config.toml").write_text('data = "mnist"')
    with pytest.raises(UserError, match=r"it holds a run without model\.safetensors"):
        digest_of("mlp", str(tmp_path))
    assert (records_of(str(tmp_path)), records_of(str(path))) == ("mnist", "")
    save_file(net().state_dict(), path)
    digest = digest_of("mlp", str(path))
    save_file(net(classes=4).state_dict(), path)
    with pytest.raises(UserError, match="has changed since the run began"):
        read_weights("mlp", str(path), digest)


def test_all_names_and_shapes_that_differ_are_named_at_once() -> None:
    weights = {**net(width=5).state_dict(), "extra.weight": torch.zeros(2), "extra.bias": torch.zeros(2)}
    del weights["0.bias"]
    with pytest.raises(UserError) as caught:
        place(net(), weights, "file")
    said = str(caught.value)
    assert "0.bias missing in the file; extra.bias, extra.weight unknown in the model" in said
    assert (
        "0.weight is (5, 3, 3, 3) in the file and (4, 3, 3, 3) in the model, 2.weight is (3, 20) in the file and"
        in said
    )


def test_a_head_for_other_classes_stays_new_and_all_else_comes_from_the_file() -> None:
    there, here = net(classes=100), net(classes=10)
    head = {name: here.state_dict()[name].clone() for name in ("2.weight", "2.bias")}
    placed = place(here, there.state_dict(), "file")
    assert placed == Placed(("2.bias", "2.weight"), 100)
    assert equal(here, head, *head)
    assert equal(here, there.state_dict(), "0.weight", "0.bias")
    assert placed.in_words("x.pt") == (
        "the model started from x.pt, with a new head (2.bias, 2.weight), because the file's head is for 100 classes"
    )


def test_a_body_without_a_head_gets_a_new_one() -> None:
    state = net(classes=3).state_dict()
    placed = place(net(), {name: value for name, value in state.items() if not name.startswith("2.")}, "file")
    assert placed == Placed(("2.bias", "2.weight"))
    del state["2.bias"]
    with pytest.raises(UserError, match=r"2\.bias missing in the file"):
        place(net(), state, "file")


def test_a_head_of_other_features_is_no_other_number_of_classes() -> None:
    there = net(classes=100).state_dict()
    there["2.weight"] = torch.zeros(100, 17)
    with pytest.raises(UserError, match=r"2\.weight is \(100, 17\) in the file and \(10, 16\) in the model"):
        place(net(classes=10), there, "file")


def test_grey_images_get_the_sum_of_the_three_colours() -> None:
    there, here = net(), net(channels=1)
    assert place(here, there.state_dict(), "file") == Placed(summed=("0.weight",))
    grey = torch.randn(2, 1, 4, 4)
    assert torch.allclose(here(grey), there(grey.expand(-1, 3, -1, -1)), atol=1e-6)


def test_tied_parameters_may_have_one_name_and_constants_and_counts_may_be_left_out(tmp_path: Path) -> None:
    torch.manual_seed(1)
    there, here = Tied(), Tied()
    there.norm.running_mean.fill_(3.0)
    save_model(there, str(tmp_path / "weights.safetensors"))  # leaves one of the two tied names out
    weights = dict(read(tmp_path / "weights.safetensors"))
    assert {"embedding.weight", "decoder.weight"} - weights.keys()
    del weights["scale"], weights["norm.num_batches_tracked"]
    place(here, weights, "file")
    assert torch.equal(here.embedding.weight, there.embedding.weight)
    assert here.embedding.weight is here.decoder.weight
    assert torch.equal(here.norm.running_mean, there.norm.running_mean)


def test_other_values_in_tied_names_other_constants_and_missing_statistics_are_refused() -> None:
    state = Tied().state_dict()
    with pytest.raises(UserError, match=r"other values in decoder\.weight than in embedding\.weight"):
        place(Tied(), {**state, "embedding.weight": torch.zeros(7, 4)}, "file")
    with pytest.raises(UserError, match="other values in the constant scale"):
        place(Tied(), Tied(scale=3.0).state_dict(), "file")
    del state["norm.running_var"]
    with pytest.raises(UserError, match=r"norm\.running_var missing in the file"):
        place(Tied(), state, "file")
