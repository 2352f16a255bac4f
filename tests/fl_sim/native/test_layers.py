"""Models as the compiled trainer reads them, and the work of their layers."""

import pytest
import torch
from torch import nn

from fl_sim.models import MODELS, ResidualBlock
from fl_sim.native.layers import FIELDS, describe, products_of, shapes_of, slower_here
from fl_sim.training.trainer import Trainer


def rows(model: nn.Module, shape: tuple[int, ...]) -> list[list[int]]:
    stack = describe(model, shape)
    assert stack is not None
    return stack.layers.tolist()


def test_relu_and_pooling_are_fused_in_either_order() -> None:
    def model(*between: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *between, nn.Flatten(), nn.Linear(64, 10))

    fused = [0, 4, 3, 3, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0]
    assert rows(model(nn.ReLU(), nn.MaxPool2d(2)), (1, 8, 8))[0] == fused
    assert rows(model(nn.MaxPool2d(2), nn.ReLU()), (1, 8, 8))[0] == fused
    assert len(rows(model(nn.MaxPool2d(3, 2, 1)), (1, 8, 8))) == 3  # another window stays a layer


def test_nested_sequentials_and_the_order_of_parameters() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU()), nn.Linear(5, 3))
    stack = describe(model, (1, 2, 3))
    assert stack is not None
    assert [name for name, _ in stack.layout] == ["1.0.weight", "2.weight", "2.bias"]
    assert [row[1] for row in stack.layers.tolist()] == [5, 3]


class _Own(nn.Sequential):
    """A subclass may compute anything."""


_HOOKED = nn.Linear(4, 4)
_HOOKED.register_forward_hook(lambda *_: None)
_SHARED = nn.Linear(4, 4)
_PRECISE = nn.Linear(4, 4, dtype=torch.float64)
_TIED = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
_TIED[1].weight = _TIED[0].weight


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.5), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 4)),  # of features, not of planes
        nn.Sequential(_HOOKED, nn.Linear(4, 4)),
        nn.Sequential(_SHARED, nn.ReLU(), _SHARED),
        nn.Sequential(_PRECISE),
        _TIED,
        _Own(nn.Linear(4, 4)),
        nn.Sequential(nn.Flatten(0), nn.Linear(4, 4)),
    ],
)
def test_what_is_more_than_a_plain_stack_is_left_to_pytorch(model: nn.Module) -> None:
    assert describe(model, (4,)) is None


@pytest.mark.parametrize(
    "first",
    [
        nn.Conv2d(2, 4, 3, dilation=2, padding=2),
        nn.Conv2d(2, 4, 3, padding="same"),
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(2),
        nn.GroupNorm(2, 2, affine=False),
        nn.Conv2d(2, 4, 1, padding=1),
    ],
)
def test_layers_with_settings_the_kernel_does_not_know(first: nn.Module) -> None:
    with torch.no_grad():
        width = first(torch.zeros(1, 2, 8, 8)).numel()
    assert describe(nn.Sequential(first, nn.Flatten(), nn.Linear(width, 3)), (2, 8, 8)) is None


def test_a_linear_layer_on_images_is_left_to_pytorch() -> None:
    assert describe(nn.Sequential(nn.Linear(8, 3)), (1, 8, 8)) is None


def test_our_models() -> None:
    taken = {name for name, made in MODELS.items() if describe(made((3, 16, 16), 10), (3, 16, 16)) is not None}
    assert taken == set(MODELS) - {"random-features"}


def test_a_block_reads_its_input_twice() -> None:
    model = nn.Sequential(nn.Conv2d(2, 8, 1), ResidualBlock(8, 16, 2), ResidualBlock(16, 16, 1))
    layers = rows(nn.Sequential(model, nn.AdaptiveAvgPool2d(1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)), (2, 4, 4))
    kind, source, other, relu = (
        FIELDS.index("kind"),
        FIELDS.index("source"),
        FIELDS.index("other"),
        FIELDS.index("relu"),
    )
    assert [(row[kind], row[source], row[other]) for row in layers[1:7]] == [
        (0, 1, 0), (4, 2, 0), (0, 3, 0), (4, 4, 0), (0, 1, 0), (5, 5, 6),
    ]  # fmt: skip
    assert [row[relu] for row in layers] == [0, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0]
    assert layers[11][source : other + 1] == [11, 7]  # an identity: what the block read


def test_nothing_is_fused_with_what_a_shortcut_reads() -> None:
    block = ResidualBlock(8, 8, 1)
    block.body = nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 1, 1))
    model = nn.Sequential(nn.Conv2d(2, 8, 1), block, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 2))
    assert [row[0] for row in rows(model, (2, 4, 4))] == [0, 2, 1, 5, 1, 3]


class Upside(nn.Flatten):
    """A layer of the user's own that is called like one of PyTorch's."""

    def forward(self, inputs):
        return super().forward(inputs).flip(1)


def test_a_layer_that_only_looks_like_a_known_one_is_none():
    own_forward = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    own_forward[1].forward = lambda inputs: inputs[:, :3]
    for model in (nn.Sequential(Upside(), nn.Linear(64, 3)), own_forward):
        assert describe(model, (1, 8, 8)) is None
    assert describe(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), (1, 8, 8)) is not None


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
