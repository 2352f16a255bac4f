"""Models with exits: their blocks, the first blocks alone, and models that cannot have exits."""

import pytest
import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.exits import WithExits, first_blocks, num_exits, with_exits
from fl_sim.models import build
from fl_sim.params import detached

SHAPE = (1, 16, 16)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("resnet", [16 * 4 * 4, 32 * 4 * 4, 64]),
        ("niid-cnn", [6 * 6 * 6, 16, 120, 84]),
        ("dafl-cnn", [32 * 4 * 4, 64 * 4 * 4, 128]),
        ("mlp", [600, 100]),
    ],
)
def test_each_block_ends_in_one_linear_exit_and_the_last_one_is_the_models_own(name: str, inputs: list[int]) -> None:
    plain, records = build(name, SHAPE, 10, 0).eval(), torch.randn(5, *SHAPE)
    model = with_exits(build(name, SHAPE, 10, 0), SHAPE).eval()
    heads = [leave[-1] for leave in model.exits]
    assert [(head.in_features, head.out_features) for head in heads] == [(size, 10) for size in inputs]
    outputs, logits = records, list[torch.Tensor]()
    for block, leave in zip(model.blocks, model.exits, strict=True):
        outputs = block(outputs)
        logits.append(leave(outputs))
    assert torch.equal(logits[-1], plain(records))
    assert torch.equal(model(records), torch.stack(logits, 1).mean(1))
    for depth in range(1, len(logits) + 1):
        part, params = model.first(depth), first_blocks(detached(model.named_parameters()), depth)
        assert params.keys() == dict(part.named_parameters()).keys()
        assert num_exits(params) == depth
        assert torch.equal(part(records), torch.stack(logits[:depth], 1).mean(1))
    assert with_exits(model, SHAPE) is model


class Foreign(nn.Module):
    """A model whose blocks are not known."""


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (Foreign(), "exits cannot be added to a Foreign: .*WithExits; use resnet"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Softmax(1)), "whose last layer is an nn.Linear"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "two blocks or more, .*use a deeper model"),
    ],
)
def test_a_model_without_known_blocks_is_refused(model: nn.Module, match: str) -> None:
    with pytest.raises(UserError, match=match):
        with_exits(model, (4,))


def test_a_users_composite_layers_are_blocks_with_the_layers_around_them() -> None:
    block = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)]
    model = with_exits(nn.Sequential(nn.Linear(4, 4), block[0], nn.ReLU(), block[1], nn.Linear(4, 2)), (4,))
    assert isinstance(model, WithExits)
    assert [[type(layer).__name__ for layer in one] for one in model.blocks] == [
        ["Linear", "Sequential", "ReLU"],
        ["Sequential"],
    ]
