"""What layers compute is counted, and what PyTorch computes faster is left to it."""

import pytest
import torch
from torch import nn

from fl_sim.models import MODELS
from fl_sim.native.layers import describe
from fl_sim.native.work import products_of, shapes_of, slower_here
from fl_sim.training.trainer import Trainer


def network(channels: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 1), nn.Conv2d(channels, channels, kernel, stride, kernel // 2), nn.MaxPool2d(3, 2, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["niid-cnn", "resnet", "mlp"])
def test_shapes_and_products_are_those_of_the_models_layers(name: str) -> None:
    model = MODELS[name]((3, 32, 32), 10)
    stack = describe(model, (3, 32, 32))
    assert stack is not None
    products: list[int] = []

    def count(layer: nn.Module, _: object, output: torch.Tensor) -> None:
        products.append(output.numel() * next(layer.parameters())[0].numel())

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    with torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    assert sorted(products) == sorted(filter(None, products_of(stack)))
    assert shapes_of(stack)[-1] == (10, 1, 1)


@pytest.mark.parametrize(("channels", "kernel"), [(512, 1), (256, 5), (64, 7)])
def test_a_model_most_of_which_pytorch_computes_faster_is_left_to_it(channels: int, kernel: int) -> None:
    stack = describe(network(channels, kernel), (3, 8, 8))
    assert stack is not None
    told = f"convolutions of {kernel}x{kernel} pixels and {channels} channels, which PyTorch computes faster"
    assert slower_here(stack) == told
    trainer = Trainer(network(channels, kernel), None)
    assert trainer.slower_by_kernel((3, 8, 8)) == told
    assert not trainer.is_native((3, 8, 8))


@pytest.mark.parametrize(("channels", "kernel", "stride"), [(512, 3, 1), (512, 3, 2), (256, 1, 1), (32, 5, 1)])
def test_other_models_are_not(channels: int, kernel: int, stride: int) -> None:
    stack = describe(network(channels, kernel, stride), (3, 8, 8))
    assert stack is not None
    assert slower_here(stack) == ""


def test_one_slow_layer_among_others_is_taken_with_them() -> None:
    model = nn.Sequential(nn.Conv2d(3, 304, 3), *network(304, 1)[1:])
    assert slower_here(describe(model, (3, 8, 8))) != ""
    model = nn.Sequential(nn.Conv2d(3, 304, 1), nn.Conv2d(304, 304, 3), *network(304, 1)[1:])
    assert slower_here(describe(model, (3, 8, 8))) == ""
