"""Adapters: what they compute, where they begin, how they merge, and that a rank of 0 changes nothing."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fl_sim import models
from fl_sim.adapters import adapt, adapted_in, merged, without_adapters
from fl_sim.errors import UserError
from fl_sim.params import detached, frozen_in, trainable
from fl_sim.trained_part import TrainedPart
from strategies.low_rank import head_shape


class Everything(nn.Module):
    """An embedding, plain and grouped convolutions with strides and padding, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.conv = nn.Conv2d(2, 6, 3, stride=2, padding=1, padding_mode="circular")
        self.grouped = nn.Conv2d(6, 4, 2, groups=2, bias=False)
        self.linear = nn.Linear(8, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(tokens.long())  # (n, 8, 8)
        planes = self.grouped(torch.relu(self.conv(torch.stack([rows, rows * rows], 1))))
        logits: torch.Tensor = self.head(torch.relu(self.linear(rows.mean(1)) + planes.mean((1, 2, 3))[:, None]))
        return logits


def network() -> nn.Module:
    torch.manual_seed(0)
    return Everything()


def tokens(count: int = 6) -> torch.Tensor:
    return torch.randint(0, 11, (count, 8), generator=torch.Generator().manual_seed(1)).float()


def adapted(rank: int = 3, alpha: float = 4.0, dropout: float = 0.0, seed: int = 7, *, move: bool = True) -> nn.Module:
    model = network()
    TrainedPart("lora", rank, alpha, dropout, seed)(model)
    if move:
        with torch.no_grad():
            for name, weight in trainable(model).items():
                if name.endswith("_B"):
                    weight.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


def test_the_layers_with_adapters_can_be_named() -> None:
    for targets, names in (("conv,head", {"conv", "head"}), ("linear", {"body.linear", "linear"}), ("", None)):
        model = network()
        model.body = nn.ModuleDict({"linear": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
        TrainedPart("lora", target_modules=targets)(model)
        assert set(adapted_in(model)) == (
            names or {*dict(model.named_children()), "body.linear", "body.other"} - {"body"}
        )
    with pytest.raises(
        UserError, match=r"model\.target_modules names 'quer', but no .*can have an adapter are embedding, conv"
    ):
        TrainedPart("lora", target_modules="conv,quer")(network())


def test_adapters_begin_where_the_model_is_and_train_nothing_else() -> None:
    model = adapted(move=False)
    assert set(adapted_in(model)) == {"embedding", "conv", "grouped", "linear", "head"}
    assert {name.rpartition(".")[2] for name in trainable(model)} == {
        "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"
    }  # fmt: skip
    for mode in (True, False):
        assert torch.equal(model.train(mode)(tokens()), network().train(mode)(tokens()))
    assert torch.equal(model.linear.base, network().linear.weight)


def test_the_first_factors_follow_from_the_seed_alone() -> None:
    first, again, other = (detached(trainable(adapted(seed=seed)).items()) for seed in (7, 7, 8))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["linear.lora_A"], other["linear.lora_A"])
    assert float(first["linear.lora_A"].abs().max()) <= 8**-0.5
    assert not torch.equal(first["linear.lora_A"][:, :5], first["head.lora_A"])


def test_training_and_merged_weights_compute_the_same() -> None:
    model = adapted()
    in_training, merged_in = model.train()(tokens()), model.eval()(tokens())
    assert torch.allclose(in_training, merged_in, atol=1e-5)
    assert not torch.allclose(merged_in, network()(tokens()), atol=1e-2)


def test_each_layer_is_w_plus_alpha_over_r_b_a() -> None:
    model = adapted(rank=2, alpha=5.0)
    layer = model.linear
    wanted = layer.base + 2.5 * layer.lora_B @ layer.lora_A
    assert torch.allclose(layer.weight, wanted)
    table = model.embedding
    assert torch.allclose(table.weight, table.base + 2.5 * (table.lora_embedding_B @ table.lora_embedding_A).T)
    assert torch.equal(table.weight[0], table.base[0])  # the padding


def test_merging_gives_a_plain_model_with_the_same_outputs() -> None:
    model, plain = adapted(), network()
    whole = merged(model, {**frozen_in(model), **detached(trainable(model).items())})
    assert whole.keys() == plain.state_dict().keys()
    plain.load_state_dict(dict(whole))
    assert torch.equal(plain.eval()(tokens()), model.eval()(tokens()))
    taken = without_adapters(copy.deepcopy(model))
    assert taken.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(taken.eval()(tokens()), model.eval()(tokens()))
    assert type(taken.linear) is nn.Linear
    assert merged(plain, whole) is whole


def test_dropout_is_of_the_adapter_in_training_alone() -> None:
    model = adapted(dropout=0.5)
    torch.manual_seed(3)
    assert not torch.allclose(model.train()(tokens()), model.eval()(tokens()), atol=1e-3)
    assert torch.equal(model.eval()(tokens()), adapted().eval()(tokens()))
    still = adapted(dropout=0.5, move=False)  # B is 0: what is dropped does not matter
    assert torch.equal(still.train()(tokens()), network()(tokens()))


def test_gradients_are_those_of_the_merged_weights() -> None:
    model = adapted()
    names = list(trainable(model))
    both = []
    for mode in (True, False):
        loss = model.train(mode)(tokens()).square().sum()
        both.append(torch.autograd.grad(loss, [model.get_parameter(name) for name in names]))
    for name, left, right in zip(names, *both, strict=True):
        first = 1 if name == "embedding.lora_embedding_A" else 0  # the padding's column takes part in no training
        assert torch.allclose(left[:, first:], right[:, first:], rtol=1e-3, atol=1e-3), name


def test_a_rank_of_zero_adds_nothing_and_a_large_rank_is_the_full_one() -> None:
    model, plain = network(), network()
    TrainedPart("lora,head", rank=0)(model)
    TrainedPart("head")(plain)
    assert {*model.state_dict()} == {*plain.state_dict()}
    assert {*trainable(model)} == {*trainable(plain)} == {"head.weight", "head.bias"}
    assert torch.equal(model(tokens()), plain(tokens()))
    with pytest.raises(UserError, match=r"model.trainable=lora leaves nothing to train"):
        TrainedPart("lora", rank=0)(network())
    assert adapted(rank=100).linear.lora_A.shape == (5, 8)


def test_a_layer_that_is_trained_itself_has_no_adapter() -> None:
    model = network()
    TrainedPart("lora,head", 2)(model)
    assert "head" not in adapted_in(model)
    assert {"head.weight", "head.bias", "linear.lora_A"} <= {*trainable(model)}


def test_layers_that_share_their_weights_and_unknown_layers_are_left_alone() -> None:
    class Mine(nn.Linear):
        """Might use its weights in any way."""

    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Mine(4, 4), nn.Linear(4, 2))
    tied[1].weight = tied[0].weight
    adapt(tied, 2, 2.0, 0.0, 0)
    assert set(adapted_in(tied)) == {"3"}
    with pytest.raises(UserError, match=r"lora adds adapters to nn\.Linear, .* this model has no such layer"):
        adapt(nn.Sequential(Mine(4, 4)), 2, 2.0, 0.0, 0)


def test_fast_paths_that_read_weights_past_forward_see_the_adapter() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    adapt(layer, 2, 4.0, 0.0, 0)
    assert set(adapted_in(layer)) == {"linear1", "linear2"}  # not self_attn.out_proj, a class of its own
    before = copy.deepcopy(layer)
    with torch.no_grad():
        layer.linear1.lora_B.fill_(1.0)
        inputs = torch.randn(2, 3, 8)
        slow = layer.train()(inputs)
        fast = layer.eval()(inputs)  # PyTorch's fast path takes linear1.weight
        assert torch.allclose(slow, fast, atol=1e-5)
        assert not torch.allclose(fast, before.eval()(inputs), atol=1e-3)


def test_functional_calls_and_stacks_of_clients_see_other_factors() -> None:
    model = adapted().train()
    params = detached(trainable(model).items())
    doubled = {name: value * 2 for name, value in params.items()}
    stacked = {name: torch.stack([value, doubled[name]]) for name, value in params.items()}
    records = tokens()
    both = torch.func.vmap(lambda own: functional_call(model, own, (records,)))(stacked)
    assert torch.allclose(both[0], model(tokens()), atol=1e-5)
    assert torch.allclose(both[1], functional_call(model, doubled, (tokens(),)), atol=1e-4)


def test_the_shape_of_an_adapted_head() -> None:
    model: Any = models.mlp((1, 8, 8), 10)
    wanted = head_shape(detached(model.named_parameters()))
    TrainedPart("lora", 4)(model)
    assert head_shape(detached(trainable(model).items())) == wanted == (10, 100)


def test_adapters_that_a_model_brings_are_found_by_their_names() -> None:
    class Peft(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(4, 4)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})

    model = Peft()
    TrainedPart("lora")(model)
    assert {*trainable(model)} == {"lora_A.default.weight", "lora_B.default.weight"}
    assert adapted_in(model) == {}
