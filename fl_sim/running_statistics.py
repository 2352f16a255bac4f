"""Running statistics: what of a model no gradient moves, and who trains it. BatchNorm layers have some."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_sim.params import check_layout, detached, layout_of
from fl_sim.types import Params


def all_norms_in(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers of ``model`` by name, those among them whose statistics it never trains."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}


def norms_in(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers of ``model`` whose statistics it trains, by name.

    A model that keeps a layer in evaluation mode whatever is asked of it (its own ``train`` does) never trains that
    layer's: they are part of the architecture, as other buffers are.
    """
    if not (norms := all_norms_in(model)):
        return norms
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        return {name: layer for name, layer in norms.items() if layer.training}
    finally:
        for module, mode in modes:
            module.training = mode


def running_in(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the running statistics that ``model`` trains, by name: who writes to them writes to the model."""
    return _buffers_of(norms_in(model))


def fixed_in(model: nn.Module) -> Params:
    """Copy what of a fresh ``model`` nobody trains to the CPU: frozen parameters, and statistics as it keeps them."""
    trained = norms_in(model)
    frozen = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    kept = _buffers_of({name: layer for name, layer in all_norms_in(model).items() if name not in trained})
    return detached({**frozen, **{name: value.to(torch.float32) for name, value in kept.items()}}.items())


def _buffers_of(norms: Mapping[str, _BatchNorm]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}".removeprefix("."): buffer
        for name, layer in norms.items()
        for key, buffer in layer.named_buffers(recurse=False)
    }


def statistics_of(model: nn.Module) -> Params:
    """Copy the running statistics of ``model`` to the CPU, all as float32.

    The number of batches, which only a BatchNorm with ``momentum=None`` looks at, is exact up to 2^24.
    """
    return {name: value.detach().to("cpu", torch.float32, copy=True) for name, value in running_in(model).items()}


def load_statistics(model: nn.Module, statistics: Params) -> None:
    """Write ``statistics`` over those of ``model``, a mean number of batches rounded; without any, start anew.

    Raises ValueError where they are not the model's.
    """
    if not statistics:
        for layer in norms_in(model).values():
            layer.reset_running_stats()
        return
    running = running_in(model)
    check_layout("the running statistics", statistics, layout_of(running))
    for name, buffer in running.items():
        value = statistics[name]
        buffer.copy_(value if buffer.is_floating_point() else value.round())
