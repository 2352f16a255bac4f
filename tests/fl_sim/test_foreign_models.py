"""Models of other libraries by name, and models whose inputs or outputs are not one tensor."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_sim import foreign_models, models
from fl_sim.architectures import HuggingFace, MeanOfTokens
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import Job, job_of
from fl_sim.foreign_models import source_of, take_logits, take_tokens
from fl_sim.simulation.rounds import procedure_of
from fl_sim.store.weights import Placed, digest_of, place, read_weights

CIFAR, GREY = (3, 32, 32), (1, 32, 32)


@pytest.mark.parametrize("shape", [CIFAR, GREY, (4, 40, 33)])
@pytest.mark.parametrize("name", ["torchvision:resnet18", "torchvision:squeezenet1_1", "timm:test_convnext"])
def test_architectures_by_name_take_the_channels_and_classes_of_the_data(name: str, shape: tuple[int, ...]) -> None:
    norms = "average" if name == "torchvision:resnet18" else "none"
    model = models.build(name, shape, 7, seed=0, batch_norm=norms)
    assert model.eval()(torch.zeros(2, *shape)).shape == (2, 7)
    again = models.build(name, shape, 7, seed=0, batch_norm=norms)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    other = models.build(name, shape, 7, seed=1, batch_norm=norms)
    assert any(not torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_vision_transformer_gets_the_size_of_the_images() -> None:
    assert models.build("timm:test_vit", CIFAR, 3, seed=0)(torch.zeros(2, *CIFAR)).shape == (2, 3)
    with pytest.raises(UserError, match=r"torchvision:vit_b_16 needs square images, these are 32x40"):
        models.build("torchvision:vit_b_16", (3, 32, 40), 3, seed=0)


def test_batch_norm_of_foreign_models_has_the_rules_of_own_models() -> None:
    with pytest.raises(UserError, match=r"'torchvision:resnet18' keeps running statistics .*local\.batch_norm=average"):
        models.build("torchvision:resnet18", CIFAR, 10, seed=0)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("torchvision:resnet81", CIFAR, r"torchvision has no classifier of this name; did you mean resnet18"),
        ("torchvision:fcn_resnet50", CIFAR, "no classifier of this name"),
        ("timm:test_vitt", CIFAR, r"timm has no classifier of this name; did you mean test_vit"),
        ("torchvision:resnet18", (14,), r"needs images, these records have shape \(14,\)"),
        ("timm:test_vit", (14,), "needs images"),
        ("hf:no_such_package", (14,), "package of this name contains config.json, and nothing is downloaded"),
        ("hf:bert-base-uncased", (14,), "nothing is downloaded"),
    ],
)
def test_unknown_names_and_unfit_records_are_refused(name: str, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        models.build(name, shape, 10, seed=0, vocabulary=9 if name.startswith("hf") else 0)


@pytest.mark.parametrize(("name", "extra"), [("timm:test_vit", "timm"), ("hf:here", "hf")])
def test_a_missing_library_is_told_with_its_pip_line(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("timm", "transformers"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=rf"is not installed: pip install 'fl-sim\[{extra}\]'"):
        models.build(name, CIFAR, 10, seed=0)


def test_small_images_are_noted() -> None:
    for name in ("torchvision:resnet18", "timm:test_vit"):
        source = source_of(name)
        assert source is not None
        assert "made for images of about 224x224 pixels, and reduces images of 32x32" in source.note(CIFAR, 0)
        assert source.note((3, 224, 224), 0) == ""


class Pink:
    """A source of another package."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self, input_shape: Any, num_classes: int, vocabulary: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(int(self.name), num_classes))


def test_another_package_adds_a_source(install_package: Any) -> None:
    install_package("pinks", {"fl_sim.model": {"pink": f"{__name__}:Pink"}})
    assert models.build("pink:64", (1, 8, 8), 5, seed=0)[1].weight.shape == (5, 64)
    assert source_of("mine:pink") is None
    assert source_of("resnet") is None


class Returns(nn.Module):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form, self.linear = form, nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.form(self.linear(inputs))


@pytest.mark.parametrize(
    "form",
    [
        lambda logits: {"loss": None, "logits": logits, "twice": 2 * logits},
        lambda logits: {"scores": logits, "states": logits[:, :1]},
        lambda logits: (logits, torch.zeros(2, 5), None),
        lambda logits: [torch.zeros(2, 3, dtype=torch.long), logits],
        lambda logits: logits,
    ],
)
def test_logits_are_found_in_what_a_model_returns(form: Any) -> None:
    model, records = Returns(form), torch.randn(2, 4)
    expected = model.linear(records)
    assert torch.equal(take_logits("mine:model", model, model(records), 3), expected)
    assert torch.equal(model(records), expected)
    called = torch.func.functional_call(model, {"linear.bias": torch.zeros(3)}, (records,))
    assert torch.equal(called, records @ model.linear.weight.T)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda logits: {"a": logits, "b": 2 * logits}, r"dict for a batch \(a: \(2, 3\), b: \(2, 3\)\), and several"),
        (lambda logits: (logits[:, :2], "text"), r"tuple for a batch \(0: \(2, 2\), 1: str\), and none of them"),
    ],
)
def test_outputs_without_known_logits_are_refused_with_their_names(form: Any, said: str) -> None:
    model = Returns(form)
    with pytest.raises(UserError, match=said):
        take_logits("mine:model", model, model(torch.zeros(2, 4)), 3)


class Reads(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.words = nn.Embedding(9, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return torch.cat([input_ids, attention_mask], 1)


@pytest.mark.parametrize(("padding", "ids"), [(0, [[5, 2, 0, 0]]), (1, [[4, 1, 1, 1]]), (None, [[4, 1, 0, 0]])])
def test_models_of_ids_get_the_mask_and_their_own_ids(padding: int | None, ids: list[list[int]]) -> None:
    model = Reads(pad_token_id=padding, vocab_size=9, max_position_embeddings=4)
    take_tokens("mine:model", model, 4, 9)
    seen = torch.func.vmap(model)(torch.tensor([[[5.0, 2.0, 0.0, 0.0]]]))[0]
    assert seen.tolist() == [ids[0] + [1, 1, 0, 0]]


def test_a_batch_is_as_long_as_its_longest_record() -> None:
    model = Reads(pad_token_id=0, vocab_size=9)
    take_tokens("mine:model", model, 4, 9)
    assert model(torch.tensor([[5, 0, 0, 0], [3, 0, 4, 0]])).tolist() == [[5, 0, 0, 1, 0, 0], [3, 0, 4, 1, 0, 1]]
    assert model(torch.zeros(2, 4)).tolist() == [[0, 0], [0, 0]]
    assert model(torch.zeros(0, 4)).shape == (0, 2)


def test_a_tokenizer_that_does_not_fit_and_sequences_beyond_the_positions_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"has a vocabulary of 9 tokens, and the data have 10: the tokenizer does not fit"
    ):
        take_tokens("mine:model", Reads(pad_token_id=0, vocab_size=9), 4, 10)
    take_tokens("mine:model", Reads(pad_token_id=1, vocab_size=9), 4, 10)  # tokens are one higher in records
    with pytest.raises(UserError, match=r"has 3 positions, and the records have 4 tokens: set data\.max_length=3"):
        take_tokens("mine:model", Reads(pad_token_id=0, max_position_embeddings=3), 4, 9)


SMALL = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 16, "max_position_embeddings": 12}  # fmt: skip


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a small encoder and of a small classifier with three classes, with random weights."""
    transformers = pytest.importorskip("transformers")
    folder, config = tmp_path_factory.mktemp("hf"), transformers.BertConfig(**SMALL)
    torch.manual_seed(5)
    transformers.BertModel(config).save_pretrained(folder / "encoder")
    config.num_labels = 3
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "classifier")
    return {kind: folder / kind for kind in ("encoder", "classifier")}


def tokens(count: int = 2, length: int = 8) -> torch.Tensor:
    drawn = torch.randint(1, 30, (count, length), generator=torch.Generator().manual_seed(count)).float()
    drawn[0, 5:] = 0
    return drawn


def started(folder: Path, num_classes: int, weights: str = "") -> tuple[nn.Module, Placed]:
    name = f"hf:{folder}"
    model = models.build(name, (8,), num_classes, seed=0, vocabulary=30, trial=tokens())
    return model, place(model, read_weights(name, weights, digest_of(name, weights)), name)


def test_an_encoder_gets_the_mean_over_tokens_and_a_new_head(bert: dict[str, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    model, placed = started(bert["encoder"], 4)
    assert isinstance(model, MeanOfTokens)
    assert placed.new == ("head.bias", "head.weight")
    assert "with a new head (head.bias, head.weight), because the file has no head" in placed.in_words("x")
    records = tokens()
    theirs = transformers.BertModel.from_pretrained(bert["encoder"]).eval()
    states = [theirs(input_ids=row[row > 0].long()[None]).last_hidden_state[0].mean(0) for row in records]
    model.eval()
    assert torch.allclose(model(records), model.head(torch.stack(states)), atol=1e-5)  # padding changes nothing


def _job(model: dict[str, str], folder: Path) -> Job:
    records, labels = tokens(12).numpy().astype(np.int64), np.arange(12) % 2
    np.savez(folder / "t.npz", x_train=records, y_train=labels, x_test=records, y_test=labels, vocabulary=30)
    data = f"npz:{folder}/t.npz"
    return job_of(experiment_from({"data": data, "model": model, "clients": 2, "partition": "iid"}))


def test_models_of_clients_share_the_frozen_tensors_of_an_encoder(bert: dict[str, Path], tmp_path: Path) -> None:
    job = _job({"name": f"hf:{bert['encoder']}", "trainable": "lora,head"}, tmp_path)
    kept, *others = (
        dict(one.named_parameters()) for one in (job.model(), job.model(), procedure_of(job).runtime().model)
    )
    frozen = {name for name, weight in kept.items() if not weight.requires_grad}
    for other in others:
        assert {name for name, weight in kept.items() if weight.data_ptr() == other[name].data_ptr()} == frozen
    assert "body.embeddings.word_embeddings.weight" in frozen


def test_features_of_an_encoder_are_computed_once_without_its_dropout(bert: dict[str, Path], tmp_path: Path) -> None:
    job = _job({"name": f"hf:{bert['encoder']}", "trainable": "head"}, tmp_path)
    assert any(isinstance(part, torch.nn.Dropout) for part in job.whole_model().modules())
    features = torch.from_numpy(job.records.test.inputs)
    with torch.no_grad():
        expected = job.whole_model().eval()(torch.from_numpy(job.dataset.test.inputs))
        assert torch.allclose(job.model().train()(features), expected, atol=1e-5)


def test_a_classifier_keeps_its_head_for_its_classes_and_gets_a_new_one_for_others(bert: dict[str, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertForSequenceClassification.from_pretrained(bert["classifier"]).eval()
    model, placed = started(bert["classifier"], 3)
    assert placed == Placed()
    records = tokens()
    expected = theirs(input_ids=records.long(), attention_mask=(records != 0).long()).logits
    assert torch.allclose(model.eval()(records), expected, atol=1e-5)
    assert started(bert["classifier"], 2)[1] == Placed(("classifier.bias", "classifier.weight"), 3)


def test_records_of_another_tokenizer_are_noted(bert: dict[str, Path]) -> None:
    source = source_of(f"hf:{bert['encoder']}")
    assert source is not None
    assert "has 30 tokens, and the data have 26: its weights are useful only with its own" in source.note((5,), 26)
    assert source.note((5,), 27) == source.note((5,), 30) == ""


def test_weights_none_leaves_random_weights_and_a_folder_without_weights_is_refused(
    bert: dict[str, Path], tmp_path: Path
) -> None:
    assert digest_of(f"hf:{bert['encoder']}", "none") == ""
    (tmp_path / "config.json").write_text((bert["encoder"] / "config.json").read_text())
    with pytest.raises(UserError, match=r"no weights in a safetensors file.*model\.weights=none"):
        digest_of(f"hf:{tmp_path}", "")
    models.build(f"hf:{tmp_path}", (8,), 2, seed=0, vocabulary=30)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such"}))
    with pytest.raises(UserError, match="holds no known model"):
        models.build(f"hf:{tmp_path}", (8,), 2, seed=0, vocabulary=30)


def test_hf_models_refuse_images_long_records_and_foreign_tokens(bert: dict[str, Path]) -> None:
    name = f"hf:{bert['encoder']}"
    with pytest.raises(UserError, match=r"reads tokens, and these records have shape \(3, 32, 32\)"):
        models.build(name, CIFAR, 2, seed=0)
    with pytest.raises(UserError, match=r"has 12 positions, and the records have 13 tokens"):
        models.build(name, (13,), 2, seed=0, vocabulary=30)
    with pytest.raises(UserError, match=r"has a vocabulary of 30 tokens, and the data have 31"):
        models.build(name, (8,), 2, seed=0, vocabulary=31)


def test_a_changed_folder_is_another_start(bert: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(bert["encoder"], tmp_path / "copy")
    name = f"hf:{tmp_path / 'copy'}"
    digest = digest_of(name, "")
    assert digest == digest_of(f"hf:{bert['encoder']}", "")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(UserError, match="has changed since the run began"):
        read_weights(name, "", digest)
    assert HuggingFace(str(tmp_path / "copy")).files()[0].name == "config.json"
    assert foreign_models.SOURCES == "fl_sim.model"
