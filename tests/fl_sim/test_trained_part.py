"""The setting ``model.trainable``: which parameters each word chooses, what is refused, what stays frozen."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.models import resnet
from fl_sim.params import frozen_in, norms_in, running_in, trainable
from fl_sim.trained_part import TrainedPart

HERE = __name__


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3)
    )


HEAD, LAST = {"6.weight", "6.bias"}, {"4.weight", "4.bias"}
CHOICES = {
    "head": HEAD,
    "last:1": HEAD,
    "last:2": HEAD | LAST,
    "last:4": {"0.weight", "0.bias", "1.weight", "1.bias"} | LAST | HEAD,
    "bias": {"0.bias", "1.bias", "4.bias", "6.bias"},
    "norm": {"1.weight", "1.bias"},
    "norm,head": {"1.weight", "1.bias"} | HEAD,
    "4": LAST,
    "4.weight,0.bias": {"4.weight", "0.bias"},
}


@pytest.mark.parametrize(("choice", "names"), CHOICES.items())
def test_words_and_names(choice: str, names: set[str]) -> None:
    model = network()
    TrainedPart(choice)(model)
    assert {*trainable(model)} == names
    assert {*frozen_in(model)} == {name for name, _ in model.named_parameters()} - names
    assert set(norms_in(model)) == ({"1"} if {"1.weight", "1.bias"} & names else set())


def test_all_leaves_what_the_model_froze_itself_and_no_word_thaws_it() -> None:
    model = network()
    model[4].requires_grad_(requires_grad=False)
    before = {name: weight.requires_grad for name, weight in model.named_parameters()}
    TrainedPart("all")(model)
    assert {name: weight.requires_grad for name, weight in model.named_parameters()} == before
    TrainedPart("last:2")(model)
    assert {*trainable(model)} == {"1.weight", "1.bias"} | HEAD
    with pytest.raises(UserError, match=r"names '4', and this model has no such trained parameter .* it trains 1\."):
        TrainedPart("4")(model)


def test_the_head_is_the_module_of_this_name_if_there_is_one() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.other = nn.Linear(4, 2), nn.Linear(4, 4)

    model = Two()
    TrainedPart("head")(model)
    assert {*trainable(model)} == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("haed", r"'haed' \(did you mean 'head'\?\), and this model has no such .*it trains 0\.weight, 0\.bias, 1\.w"),
        ("4.weigth", r"did you mean '4\.weight'"),
        ("last:9", r"last:9: this model has 4 layers with trained parameters"),
        ("last:0", r"names 'last:0'"),
        ("none", r"names 'none'.*words are all, head, bias, norm, last:K, lora"),
    ],
)
def test_what_is_unknown_is_refused_with_what_there_is(choice: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainedPart(choice)(network())


def test_an_empty_part_is_refused() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))
    for choice in ("norm", "bias"):
        with pytest.raises(UserError, match=rf"model.trainable={choice} leaves nothing to train in this model"):
            TrainedPart(choice)(copy.deepcopy(plain))


def test_a_frozen_batch_norm_stays_in_evaluation_mode_also_in_copies() -> None:
    model = network()
    TrainedPart("last:2")(model)
    for one in (model, copy.deepcopy(model)):
        one.train()
        assert one[0].training
        assert not one[1].training
        one(torch.randn(8, 1, 4, 4))
        assert running_in(one) == {}
        assert int(one[1].num_batches_tracked) == 0


def with_norm(shape: tuple[int, ...], classes: int) -> nn.Module:
    del shape
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, classes))


def _model(*settings: str) -> nn.Module:
    return job_of(experiment_from(with_overrides({"data": "digits", "partition": "iid"}, list(settings)))).model()


def test_a_model_with_batch_norm_needs_no_setting_for_it_if_its_norms_are_frozen() -> None:
    assert {*trainable(_model(f"model={HERE}:with_norm", "model.trainable=head"))} == {"4.weight", "4.bias"}
    with pytest.raises(UserError, match=r"evaluation mode.*leave local\.batch_norm=average out"):
        _model(f"model={HERE}:with_norm", "model.trainable=head", "local.batch_norm=average")
    with pytest.raises(UserError, match=r"set local\.batch_norm=average or personal"):
        _model(f"model={HERE}:with_norm", "model.trainable=norm")


def test_the_setting_is_a_word_a_text_or_a_list_and_belongs_to_the_run() -> None:
    def experiment(model: Any) -> Any:
        return experiment_from({"data": "digits", "model": model})

    named = experiment({"name": "mlp", "trainable": ["3.weight", "head"]})
    assert named.model.trainable == "3.weight,head"
    assert named == experiment_from(with_overrides({"data": "digits"}, ["model=mlp", "model.trainable=3.weight,head"]))
    assert named.as_written()["model"] == {"name": "mlp", "trainable": "3.weight,head"}
    assert experiment("mlp").as_written()["model"] == "mlp"
    assert named.chosen("model") != experiment("mlp").chosen("model")
    words = r"model\.rank=4 is a setting of adapters, and model\.trainable=head adds no adapters"
    with pytest.raises(UserError, match=words):
        experiment({"name": "mlp", "trainable": "head", "rank": 4})
    with pytest.raises(UserError, match=r"model\.target_modules=query is a setting of adapters"):
        experiment({"name": "mlp", "target_modules": "query"})
    assert experiment({"trainable": "lora", "target_modules": ["1", "3"]}).model.target_modules == "1,3"
    for wrong in ("", "head,", "a b"):
        with pytest.raises(UserError, match=r"model\.trainable"):
            experiment({"name": "mlp", "trainable": wrong})


def test_what_is_frozen_is_said() -> None:
    settings = with_overrides({"data": "digits", "partition": "iid"}, ["model=mlp", "model.trainable=head"])
    job = job_of(experiment_from(settings))
    assert job.frozen_in_words.startswith("model.trainable=head trains 1,010 of 100,110 parameters: ")


def test_groups_of_a_residual_network() -> None:
    model = resnet((3, 8, 8), 10)
    TrainedPart("norm")(model)
    names = {name for name, part in model.named_modules() if isinstance(part, nn.GroupNorm)}
    assert {*trainable(model)} == {f"{name}.{key}" for name in names for key in ("weight", "bias")}
