"""Narrow models: copies of a model with fewer channels in every layer, for clients with less memory.

The parameters of a narrow model are slices of the whole model's parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.models import ResidualBlock
from fl_sim.params import Layout, head_weight
from fl_sim.types import Params

Places: TypeAlias = Mapping[str, tuple[torch.Tensor, ...]]
"""{name: indices}: ``whole[name][indices]`` is a parameter of the narrow model."""

_PASSED = (
    nn.Identity, nn.Flatten, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.MaxPool2d,
    nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Dropout,
)  # fmt: skip
"""The layers without parameters. They work with any number of channels."""

_WINDOW = ("kernel_size", "stride", "padding", "dilation", "padding_mode")


class _Scaled(nn.Module):
    """Base class of layers whose outputs are multiplied by ``factor`` in training mode only."""

    factor: float = 1.0
    draws_random_numbers = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the layer, multiplied by ``factor`` in training mode."""
        outputs: torch.Tensor = super().forward(inputs)
        return outputs * self.factor if self.training else outputs


class ScaledLinear(_Scaled, nn.Linear):
    """A linear layer whose outputs are multiplied by a factor in training mode."""


class ScaledConv2d(_Scaled, nn.Conv2d):
    """A convolution whose outputs are multiplied by a factor in training mode."""


def check_narrowable(model: nn.Module) -> None:
    """Raise UserError if no narrow model can be made from ``model``. The message names an unsupported layer."""
    for name, module in model.named_modules():
        kind = type(module)
        is_known = kind in {nn.Sequential, ResidualBlock, nn.Linear, nn.GroupNorm, *_PASSED}
        is_known = is_known or (kind is nn.Conv2d and module.groups == 1)
        if not is_known or (kind is nn.GroupNorm and not module.affine):
            raise UserError(
                f"a narrow model cannot be made from layer {name or 'model'} ({kind.__name__}): possible are "
                "sequences of nn.Linear, nn.Conv2d with groups=1, nn.GroupNorm, activations, pooling and ResNet-8's "
                "blocks; use niid-cnn, dafl-cnn, mlp, 2nn, niid-mlp or resnet"
            )
    params = dict(model.named_parameters())
    if frozen := [name for name, value in params.items() if not value.requires_grad]:
        raise UserError(f"a narrow model has no frozen parameters, but {frozen[0]} is frozen: train all parameters")
    if sum(value.ndim > 1 for value in params.values()) < 2:
        raise UserError(
            "a model of one layer has no channels between layers, so no narrow model can be made from it: use a model "
            "of several layers"
        )


def narrowed(model: nn.Module, params: Params, factor: float) -> nn.Module:
    """Return a copy of ``model`` with narrower layers: its parameters have the shapes of ``params``, but no values yet.

    ``factor``: in training mode, the outputs of all linear and convolution layers except the last are multiplied by
    ``factor``. In nn.GroupNorm, the number of channels per group becomes the greatest common divisor of the old number
    and the layer's new number of channels.
    """
    small, head = copy.deepcopy(model), head_weight(params)
    for name, module in [*small.named_modules()]:
        weight = params.get(f"{name}.weight")
        if weight is None:
            continue
        made, (outputs, *inputs) = module, weight.shape
        if isinstance(module, nn.GroupNorm):
            each = math.gcd(module.num_channels // module.num_groups, outputs)
            made = nn.GroupNorm(outputs // each, outputs, module.eps, device="meta")
        elif isinstance(module, nn.Linear):
            made = ScaledLinear(inputs[0], outputs, module.bias is not None, device="meta")
        elif isinstance(module, nn.Conv2d):
            same: Any = {part: getattr(module, part) for part in _WINDOW}
            made = ScaledConv2d(inputs[0], outputs, bias=module.bias is not None, device="meta", **same)
        if isinstance(made, ScaledLinear | ScaledConv2d) and f"{name}.weight" != head:
            made.factor = factor
        parent, _, last = name.rpartition(".")
        setattr(small.get_submodule(parent), last, made.to_empty(device=module.weight.device))
    return small


def cut(params: Params, places: Places) -> Params:
    """Return the parameters of a narrow model: slices (copies) of ``params``, the whole model's parameters.

    ``places``: the result of ``places_of``.
    """
    return {name: value[places[name]] for name, value in params.items()}


@lru_cache(maxsize=64)
def places_of(layout: Layout, width: float, first: int = 0) -> Places:
    """Return {name: indices}: for each tensor of the whole model, the indices that form the narrow model's tensor.

    ``layout``: names and shapes of the whole model's parameters. ``width``: the share of channels that the narrow model
    has, in (0, 1]. Let K be the number of a layer's channels, numbered from 0. The narrow model has ceil(``width`` * K)
    of these channels: channel ``first`` and the channels after it. After channel K - 1 comes channel 0. Indices are
    ascending. Two layers with the same K keep the same channels, because a shortcut connection may add their outputs.
    The narrow model has all inputs of the first layer, and all outputs of the last layer.
    """
    head = head_weight({name: torch.empty(shape, device="meta") for name, shape in layout})
    places, last = dict[str, tuple[torch.Tensor, ...]](), 0
    for name, shape in layout:
        is_last = name.rpartition(".")[0] == head.rpartition(".")[0]
        outputs = torch.arange(shape[0]) if is_last else _channels(shape[0], width, first)
        if len(shape) == 1:
            places[name] = (outputs,)
            continue
        inputs = torch.arange(shape[1])
        if last:  # the first layer keeps all its inputs
            # ``each``: the number of inputs of this layer that one channel of the previous layer provides
            each = 1 if len(shape) > 2 else shape[1] // last
            inputs = (_channels(shape[1] // each, width, first)[:, None] * each + torch.arange(each)).flatten()
        places[name] = (outputs[:, None], inputs[None, :])
        last = shape[0]
    return places


def _channels(count: int, width: float, first: int) -> torch.Tensor:
    return ((first + torch.arange(math.ceil(width * count))) % count).sort().values
